"""What an interrupted step leaves behind is forgotten: rows of the table, one by one.

All of them on real models: capture/test_restore.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state, rerun_state_machine, timers

from deadpool_megatron.hooks import interrupt_cleanup
from deadpool_megatron.hooks.interrupt_cleanup import InterruptCleanup, forget_frames


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
    monkeypatch.setattr(interrupt_cleanup, "model_config", lambda loop: found)
    monkeypatch.setattr(
        parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: None
    )
    return found


def made(loop: Loop) -> InterruptCleanup:
    return InterruptCleanup(loop)  # type: ignore[arg-type]


def test_the_schedules_functions_are_put_back(config: SimpleNamespace, loop: Loop) -> None:
    left = made(loop)
    config.no_sync_func = None
    interrupt_cleanup.schedule(left)
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
    interrupt_cleanup.timers(left)
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
    interrupt_cleanup.rerun(left)
    assert machine.get_mode() is mode
    assert machine.should_run_forward_backward(None)


# Of Megatron's bucket groups, as they are before the first step.
FRESH = {
    "grad_reduce_handle": None,
    "grad_reduce_finished": False,
    "param_gather_handle": None,
    "param_gather_dispatched": False,
    "per_param_grad_ready_counts": {},
    "golden_per_param_grad_ready_counts": {},
    "is_first_batch": True,
    "is_last_microbatch": True,
}


def test_no_bucket_group_remembers_the_step(loop: Loop) -> None:
    """A partial count would be taken for the golden one, a handle waited for, a gather left out."""
    groups = [SimpleNamespace(**dict.fromkeys(FRESH, "of the step")) for _ in range(3)]
    chunk = SimpleNamespace(bucket_groups=groups[:1], expert_parallel_bucket_groups=groups[1:2])
    loop.inner.per_model_bucket_groups = {0: groups[2:]}
    left = made(loop)
    loop.model_chunks = [chunk]
    interrupt_cleanup.buckets(left)
    assert [vars(group) for group in groups] == [FRESH] * 3


def test_no_gradient_stays_and_the_next_one_is_reduced_once(loop: Loop) -> None:
    told: list[str] = []
    left = made(loop)
    chunk = SimpleNamespace(force_all_reduce=True, zero_grad_buffer=lambda: told.append("buffer"))
    loop.model_chunks = [chunk]
    loop.optimizer.zero_grad = lambda: told.append("parameters")
    interrupt_cleanup.gradients(left)
    assert (chunk.force_all_reduce, told) == (False, ["buffer", "parameters"])


def test_the_next_step_begins_at_the_first_stage_with_no_gathered_activations(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, gathered = list[int](), {("mpu", torch.float32): torch.zeros(2)}
    monkeypatch.setattr(parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(
        parallel_state, "set_virtual_pipeline_model_parallel_rank", lambda rank: ranks.append(rank)
    )
    memory = SimpleNamespace(buffer=gathered)
    monkeypatch.setattr(parallel_state, "get_global_memory_buffer", lambda: memory)
    left = made(loop)
    interrupt_cleanup.virtual_stage(left)
    interrupt_cleanup.gather_buffers(left)
    assert (ranks, gathered) == ([0], {})


def test_the_frames_of_all_that_led_to_an_error_are_dropped() -> None:
    """Of its cause and of its context, which need not be the same."""

    def raised(text: str) -> Exception:
        try:
            raise ValueError(text)
        except ValueError as error:
            return error

    error, cause, context, part = (raised(text) for text in ("one", "cause", "context", "part"))
    error.__cause__, error.__context__ = cause, ExceptionGroup("several", [part])
    error.__context__.__context__ = context
    forget_frames(error)
    assert not [one for one in (error, cause, context, part) if one.__traceback__ is not None]


def test_all_ask_again_which_groups_of_norms_there_are(loop: Loop) -> None:
    """Megatron-core 0.19 asks all ranks in the first step: a newcomer, but no survivor."""
    optimizers = (loop.optimizer, loop.inner)
    left = made(loop)
    interrupt_cleanup.groups_of_norms(left)
    assert not any(hasattr(optimizer, "_has_grad_norm_group_cache") for optimizer in optimizers)
    for optimizer in optimizers:
        optimizer._has_grad_norm_group_cache = {"mtp": False}
    interrupt_cleanup.groups_of_norms(left)
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
    left, row = made(Loop(*chunks)), interrupt_cleanup.gathers_ahead
    row(left)
    assert chunks[0].remove_forward_pre_hook_handles == {"module": 1}
    chunks[0].remove_forward_pre_hook_handles = {}
    row(left)
    assert chunks[0].remove_forward_pre_hook_handles == {"module": 2}
    assert chunks[1].remove_forward_pre_hook_handles == {}


def test_an_evaluation_leaves_no_module_in_its_mode() -> None:
    chunk = torch.nn.Sequential(torch.nn.Dropout())
    left = made(Loop(chunk))
    chunk.eval()
    interrupt_cleanup.training_mode(left)
    assert chunk[0].training


def test_a_teacher_that_was_built_in_evaluation_mode_stays_in_it() -> None:
    """With dropout, it would teach something else than in a run without protection."""
    teacher = torch.nn.Sequential(torch.nn.Dropout())
    chunk = torch.nn.Sequential(torch.nn.Dropout(), teacher.eval())
    left = made(Loop(chunk))
    chunk.eval()
    interrupt_cleanup.training_mode(left)
    assert [module.training for module in chunk.modules()] == [True, True, False, False]
