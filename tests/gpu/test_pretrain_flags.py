"""The flags that the proof kit gives pretrain_gpt.py on a GPU."""

import importlib
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from deadpool_megatron.support import flags
from deadpool_megatron.support.findings import judge

KIT = Path(__file__).parents[2] / "scripts" / "gpu"
FUSION = "--no-gradient-accumulation-fusion"
PLAIN = (KIT.parents[1] / "configs" / "megatron-lm" / "gpu-plain.args").read_text().split()


@pytest.mark.parametrize(
    ("installed", "wanted"),
    [
        ((), PLAIN),
        (("fused_weight_gradient_mlp_cuda",), PLAIN),
        (("transformer_engine",), [FUSION]),
        (("transformer_engine", "fused_weight_gradient_mlp_cuda"), []),
    ],
)
def test_pretrain_flags_follow_installed_packages(monkeypatch, installed, wanted):
    monkeypatch.syspath_prepend(KIT)
    trainings = importlib.import_module("proof.trainings")
    monkeypatch.setattr(trainings, "find_spec", lambda name: name if name in installed else None)
    given: list[str] = []
    compare = "lose_and_compare"
    monkeypatch.setattr(trainings, compare, lambda task, kind, program: given.extend(program))
    task = SimpleNamespace(is_on_gpu=True, checkout=Path("/m"), size=SimpleNamespace(iterations=4))
    trainings.megatron_lm(task)
    before, after = given.index("--bf16"), given.index("--deadpool")
    assert given[before + 1 : after] == wanted


def test_rows_try_each_flag_that_is_taken_by_name():
    rows = tomllib.loads(Path(__file__).with_name("read_rows.toml").read_text())
    assert rows.keys() == {row.name for row in flags.READ}
    for name, row in rows.items():
        assert row.keys() & {"model", "optimizer", "words"}
        if "words" in row:
            found = judge((row.get("script", "pretrain_gpt.py"), *row["words"].split()))
            refused = [flag.name for flag in found if flag.level is not flags.Level.ACCEPTED]
            assert refused == [name]
