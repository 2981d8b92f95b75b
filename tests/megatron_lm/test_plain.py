"""Neither protection nor the patches alone change anything; a script that cannot run ends with a
line."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.harness.jobs import Program, undisturbed
from tests.megatron_lm.harness.checkout import needs_megatron_lm
from tests.megatron_lm.harness.runs import BASE, copy_tree, gpt, stock, tree

pytestmark = [pytest.mark.megatron_lm, pytest.mark.slow, needs_megatron_lm]


@pytest.mark.full(every_time=True)
def test_protected_equals_stock_and_patches_are_inert(tmp_path, patched):
    wanted = stock(tmp_path / "stock", tree())
    steps = undisturbed(gpt(**BASE)).final["steps"]
    assert wanted[-1].losses == {str(step["iteration"]): step["loss"] for step in steps}
    assert wanted[-1].norms == {str(step["iteration"]): step["grad_norm"] for step in steps}
    inert = stock(tmp_path / "inert", patched)
    for one, other in zip(wanted, inert, strict=True):
        assert (one.losses, one.norms, one.state) == (other.losses, other.norms, other.state)


def refused(folder: Path, program: Program) -> str:
    """Return the line with which ``deadpool run`` ends, without warnings of torch and others."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "deadpool_megatron", "run", "--quiet", "--nodes", "2"),
            *("--nproc-per-node", "1", "--run-dir", str(folder / "run"), "--", *program.command),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    (line,) = [each for each in done.stderr.splitlines() if each.startswith("deadpool")]
    return line


def test_flag_that_cannot_be_protected(tmp_path):
    assert "--optimizer other than adam" in refused(tmp_path, gpt(optimizer="soap"))


@pytest.mark.full
def test_folder_that_is_no_checkout(tmp_path):
    (tmp_path / "pretrain_gpt.py").touch()
    assert "not a Megatron-LM checkout" in refused(tmp_path, gpt(within=tmp_path))


@pytest.mark.full
def test_tree_that_is_patched_by_half(tmp_path, patched, monkeypatch):
    half = tmp_path / "half"
    copy_tree(half)
    file = Path("megatron/training/checkpointing.py")
    (half / file).write_bytes((patched / file).read_bytes())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    line = refused(tmp_path, gpt(within=half))
    assert "is patched in part" in line
    assert "deadpool patch apply" in line
    assert "megatron.training.training" in line
    assert "megatron.training.checkpointing" not in line
