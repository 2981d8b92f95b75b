"""What an interrupted step leaves behind is forgotten: rows of the table, one by one.

All of them on real models: generations/test_restore.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state, rerun_state_machine, timers

from deadpool_megatron.hooks import leftovers
from deadpool_megatron.hooks.leftovers import TABLE, Leftovers


class Loop:
    """A loop of given chunks, whose optimizer has the timers, too."""

    def __init__(self, *chunks: Any) -> None:
        self.model_chunks = list(chunks)
        self.inner = SimpleNamespace(config=SimpleNamespace(timers=None))
        self.optimizer = SimpleNamespace(chained_optimizers=[self.inner], zero_grad=lambda: None)


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture(autouse=True)
def config(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = SimpleNamespace(
        no_sync_func="no_sync", grad_sync_func="grad", param_sync_func="param", timers=None
    )
    monkeypatch.setattr(leftovers, "model_config", lambda loop: found)
    monkeypatch.setattr(
        parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: None
    )
    return found


def made(loop: Loop) -> Leftovers:
    return Leftovers(loop)  # type: ignore[arg-type]


def forget(left: Leftovers, what: str) -> None:
    (row,) = (row for row in TABLE if row.what == what)
    row.forget(left)


def test_the_schedules_functions_are_put_back(config: SimpleNamespace, loop: Loop) -> None:
    left = made(loop)
    config.no_sync_func = None
    forget(left, "functions of the schedule")
    assert config.no_sync_func == "no_sync"


@pytest.mark.parametrize("in_evaluation", [False, True])
def test_timers_can_be_started_again(
    config: SimpleNamespace, loop: Loop, in_evaluation: bool
) -> None:
    """An evaluation of Megatron-LM takes them out of the config of the model."""
    found = config.timers = loop.inner.config.timers = timers.Timers(2, "max")
    left = made(loop)
    found("forward-backward", log_level=1).start()
    with pytest.raises(AssertionError, match="already been started"):
        found("forward-backward").start()
    if in_evaluation:
        config.timers = None
    forget(left, "started timers")
    found("forward-backward").start()


@pytest.mark.parametrize("mode", rerun_state_machine.RerunMode)
def test_the_rerun_machine_runs_the_interrupted_step_again(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, mode: rerun_state_machine.RerunMode
) -> None:
    """Otherwise it takes the first question for the end of a run: an update without gradients."""
    monkeypatch.setattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", None)
    rerun_state_machine.initialize_rerun_state_machine(mode=mode)
    machine = rerun_state_machine.get_rerun_state_machine()
    monkeypatch.setattr(machine, "_save_state", lambda: None)
    left = made(loop)
    assert machine.should_run_forward_backward(None)
    machine.set_mode(rerun_state_machine.RerunMode.DISABLED)  # as for an evaluation
    forget(left, "a run in the middle, and the mode of an evaluation")
    assert machine.get_mode() is mode
    assert machine.should_run_forward_backward(None)


def test_all_ask_again_which_groups_of_norms_there_are(loop: Loop) -> None:
    """Megatron-core 0.19 asks all ranks in the first step: a newcomer, but no survivor."""
    optimizers = (loop.optimizer, loop.inner)
    left = made(loop)
    forget(left, "which groups of gradient norms there are")
    assert not any(hasattr(optimizer, "_has_grad_norm_group_cache") for optimizer in optimizers)
    for optimizer in optimizers:
        optimizer._has_grad_norm_group_cache = {"mtp": False}
    forget(left, "which groups of gradient norms there are")
    assert [optimizer._has_grad_norm_group_cache for optimizer in optimizers] == [None, None]


def test_forward_hooks_that_a_segment_took_off_are_put_on_again() -> None:
    class Chunk:
        """Plays DistributedDataParallel with overlapped gathers."""

        def __init__(self, gathers_ahead: bool) -> None:
            self.remove_forward_pre_hook_handles = {"module": 1} if gathers_ahead else {}

        def modules(self) -> list[torch.nn.Module]:
            return []

        def enable_forward_pre_hook(self) -> None:
            assert not self.remove_forward_pre_hook_handles
            self.remove_forward_pre_hook_handles = {"module": 2}

    chunks = [Chunk(True), Chunk(False)]
    left, row = made(Loop(*chunks)), "gathers ahead of the forward pass"
    forget(left, row)
    assert chunks[0].remove_forward_pre_hook_handles == {"module": 1}
    chunks[0].remove_forward_pre_hook_handles = {}
    forget(left, row)
    assert chunks[0].remove_forward_pre_hook_handles == {"module": 2}
    assert chunks[1].remove_forward_pre_hook_handles == {}


def test_an_evaluation_leaves_no_module_in_its_mode() -> None:
    chunk = torch.nn.Sequential(torch.nn.Dropout())
    left = made(Loop(chunk))
    chunk.eval()
    forget(left, "evaluation mode")
    assert chunk[0].training


def test_a_teacher_that_was_built_in_evaluation_mode_stays_in_it() -> None:
    """With dropout, it would teach something else than in a run without protection."""
    teacher = torch.nn.Sequential(torch.nn.Dropout())
    chunk = torch.nn.Sequential(torch.nn.Dropout(), teacher.eval())
    left = made(Loop(chunk))
    chunk.eval()
    forget(left, "evaluation mode")
    assert [module.training for module in chunk.modules()] == [True, True, False, False]
