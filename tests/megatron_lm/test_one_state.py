"""A run continues from its state, entry by entry: after a fall-back to a checkpoint, after --load,
and after --resume from a checkpoint or an export.

State that Megatron's formats do not hold is stored with a checkpoint; each layout has other kinds.
The hash of the whole state is compared after every iteration, the extras by name at the last.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from deadpool_megatron.state import extras
from deadpool_megatron.vault.disk import extras_file
from tests.faults.harness import jobs
from tests.megatron_lm.harness.arguments import MOE
from tests.megatron_lm.harness.checkout import LOADS
from tests.megatron_lm.harness.runs import PP2_DP2, assert_printed, gpt, held_tree
from tests.megatron_lm.test_saves import FP16, SAVES, fallen, fallen_back_to

pytestmark = [pytest.mark.megatron_lm, pytest.mark.slow, pytest.mark.full, LOADS]
# The router draws from the generator that differs between ranks of experts.
EXPERTS: dict[str, object] = {
    **MOE,
    "moe_router_force_load_balancing": True,
    "disable_bias_linear": True,
}
RATES: dict[str, object] = {"untie_embeddings_and_output_weights": True, "decoupled_lr": 5e-4}
# With two nodes that hold each other's copies.
LAYOUTS: dict[str, tuple[dict[str, object], list[int]]] = {
    "experts": ({**PP2_DP2, **EXPERTS}, [1, 0]),
    "experts-fp16": ({**FP16, **EXPERTS, "sequence_parallel": True}, [2, 0]),
    "virtual-stages": ({**PP2_DP2, **RATES, "num_layers_per_virtual_pipeline_stage": 1}, [1, 0]),
    "whole-fp16": ({**FP16, "hysteresis": 3}, [2, 0]),
    "asynchronous": ({**PP2_DP2, **EXPERTS, "async_save": True}, [1, 0]),
    "older": ({**PP2_DP2, **EXPERTS, "ckpt_format": "torch"}, [1, 0]),
}
LOG: dict[str, object] = {"log_interval": 4, "split": "90,5,5", "eval_interval": 2, "eval_iters": 1}


# Each shard is in two roles, and in their copies: nothing less than all four nodes loses it.
STARTED: dict[str, dict[str, object]] = {
    "instances": {
        "bf16": True,
        "use_distributed_optimizer": True,
        "num_distributed_optimizer_instances": 2,
        "attention_dropout": 0.2,
    }
}


def flags_of(layout: str) -> dict[str, object]:
    return {**SAVES, **LOG, **(STARTED.get(layout) or LAYOUTS[layout][0])}


def entries(outcome: jobs.Outcome, saves: Path) -> dict[str, object]:
    """Return every extra of the last checkpoint, by role and name."""
    roles = len(outcome.final["roles"])
    found: dict[str, object] = {}
    for role in range(roles):
        encoded = extras_file.read(saves / "iter_0000009", role, roles)
        assert encoded is not None, outcome.story()
        found |= dict(_flat(f"{role}", extras.decode(encoded)))
    return found


def _flat(name: str, value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{name}/{key}", item)
    elif name.endswith("newest/kept") and value:
        yield from _flat(name, extras.decode(value))
    else:
        yield name, value.tolist() if isinstance(value, Tensor) else value


def other(found: Mapping[str, object], wanted: Mapping[str, object]) -> set[str]:
    """Names of the entries that differ."""
    names = found.keys() | wanted.keys()
    return {name for name in names if found.get(name) != wanted.get(name)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fall_back_restores_the_state(tmp_path, layout):
    program = gpt(**flags_of(layout))
    wanted = jobs.undisturbed(program)
    outcome = fallen(tmp_path, program, LAYOUTS[layout][1], wanted)
    assert fallen_back_to(outcome) == 6
    assert_printed(outcome, wanted)
    saved = entries(outcome, outcome.directory / "saves")
    assert other(saved, entries(wanted, wanted.directory / "saves")) == set()


def test_fall_back_to_an_export_restores_the_state(tmp_path, monkeypatch):
    """Between two lines of the log. It is whole once the next iteration is sealed."""
    flags = flags_of("experts")
    wanted = jobs.undisturbed(gpt(**flags))
    monkeypatch.setenv("DEADPOOL_TEST_HOLD", f"9={tmp_path}/run/exports/iter_0000007")
    held = gpt(within=held_tree(tmp_path / "tree").parent, **flags)
    outcome = fallen(tmp_path, held, [1, 0], wanted, "--deadpool-persist-interval 7", at=9)
    assert fallen_back_to(outcome) == 7
    assert_printed(outcome, wanted)
    saved = entries(outcome, outcome.directory / "saves")
    assert other(saved, entries(wanted, wanted.directory / "saves")) == set()


@pytest.mark.parametrize("layout", [*LAYOUTS, *STARTED])
def test_start_from_a_checkpoint_restores_the_state(tmp_path, layout):
    flags = flags_of(layout)
    wanted = jobs.undisturbed(gpt(**flags))
    states = entries(wanted, wanted.directory / "saves")
    flags["save"] = tmp_path / "saves"
    first = jobs.run_program(tmp_path / "first", gpt(**flags, exit_interval=6))
    assert first.status == 75, first.story()
    # A process that is lost before the first generation of its own is in no checkpoint's state.
    faults = [jobs.dies("lost", "step.begin", 1, 7, target="self")]
    resume = ["--resume", str(first.directory)]
    resumed = jobs.run_program(tmp_path / "resumed", gpt(**flags), faults, arguments=resume)
    jobs.assert_unnoticed(resumed, wanted, faults, after=6)
    assert_printed(resumed, wanted, after=6)
    assert other(entries(resumed, tmp_path / "saves"), states) == set()
    (tmp_path / "saves" / "latest_checkpointed_iteration.txt").write_text("6")
    loaded = jobs.run_program(tmp_path / "loaded", gpt(**{**flags, "load": tmp_path / "saves"}))
    jobs.assert_unnoticed(loaded, wanted, [], after=6)
    # A run of its own: it counts what it logs from its own start.
    own = ("first_iteration", "newest/kept/sums", "newest/kept/loss_sums")
    found = other(entries(loaded, tmp_path / "saves"), states)
    assert {name for name in found if not any(part in name for part in own)} == set()


def test_another_learning_rate_counts_only_where_it_is_asked_for(tmp_path):
    """Megatron by itself would take that of the checkpoint, or find no parameter groups."""
    flags: dict[str, object] = {**PP2_DP2, "save": tmp_path / "saves", "save_interval": 3}
    first = jobs.run_program(tmp_path / "first", gpt(**flags, exit_interval=3))
    assert first.status == 75, first.story()
    flags |= {"lr": 1e-4, "train_iters": 5, "save": tmp_path / "others"}
    resume = ["--resume", str(first.directory)]
    refused = jobs.run_program(tmp_path / "refused", gpt(**flags), arguments=resume)
    assert refused.status == 2, refused.story()
    line = refused.output.splitlines()[-1]
    assert "max_lr is 0.001 in the state and 0.0001 on the command line" in line
    flags["override_opt_param_scheduler"] = True
    lower = jobs.run_program(tmp_path / "lower", gpt(**flags), arguments=resume)
    assert lower.status == 0, lower.story()
    rates = {event.iteration: event.data["learning_rate"] for event in lower.of_kind("step")}
    assert {float.fromhex(rates[number]) for number in (4, 5)} == {1e-4}
    # Without extras, as stock Megatron writes a checkpoint: its error is in the last line.
    for path in (tmp_path / "saves" / "iter_0000003").glob("deadpool-extras-*"):
        path.unlink()
    del flags["override_opt_param_scheduler"]
    unread = jobs.run_program(tmp_path / "unread", gpt(**flags), arguments=resume)
    assert unread.status == 1, unread.story()
    assert "cannot be loaded: " in unread.output.splitlines()[-1]
