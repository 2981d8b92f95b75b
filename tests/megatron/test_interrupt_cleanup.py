"""Remains of an interrupted step are forgotten: each row of the table.

tests/member/test_restore.py has all of them on real models.
"""

import inspect
import queue
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state, rerun_state_machine, timers
from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload
from megatron.core.transformer import transformer_block
from megatron.core.transformer.moe import fused_a2a, shared_experts

from deadpool_megatron.megatron import interrupt_cleanup
from deadpool_megatron.megatron.interrupt_cleanup import InterruptCleanup
from deadpool_megatron.member.session import forget_frames


class Loop:
    """A loop of given chunks, whose optimizer has the timers, too."""

    def __init__(self, *chunks: Any) -> None:
        self.model_chunks = list(chunks)
        self.inner = SimpleNamespace(config=SimpleNamespace(timers=None))
        self.optimizer = SimpleNamespace(chained_optimizers=[self.inner], zero_grad=lambda: None)


@pytest.fixture
def loop():
    return Loop()


@pytest.fixture(autouse=True)
def config(monkeypatch):
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


def test_schedules_functions_are_put_back(config, loop):
    left = made(loop)
    config.no_sync_func = None
    interrupt_cleanup.schedule(left)
    assert config.no_sync_func == "no_sync"


@pytest.mark.parametrize("in_evaluation", [False, True])
def test_timers_can_be_started_again(config, loop, in_evaluation):
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
def test_rerun_machine_runs_the_interrupted_step_again(loop, monkeypatch, mode):
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


def test_bucket_groups_forget_the_step(loop):
    """A partial count would be taken for the whole, a handle waited for, a gather left out."""
    groups = [SimpleNamespace(**dict.fromkeys(FRESH, "of the step")) for _ in range(3)]
    chunk = SimpleNamespace(bucket_groups=groups[:1], expert_parallel_bucket_groups=groups[1:2])
    loop.inner.per_model_bucket_groups = {0: groups[2:]}
    left = made(loop)
    loop.model_chunks = [chunk]
    interrupt_cleanup.buckets(left)
    assert [vars(group) for group in groups] == [FRESH] * 3


def test_gradients_are_dropped_and_the_next_are_reduced_once(loop):
    calls: list[str] = []
    left = made(loop)
    chunk = SimpleNamespace(force_all_reduce=True, zero_grad_buffer=lambda: calls.append("buffer"))
    loop.model_chunks = [chunk]
    loop.optimizer.zero_grad = lambda: calls.append("parameters")
    interrupt_cleanup.gradients(left)
    assert (chunk.force_all_reduce, calls) == (False, ["buffer", "parameters"])


def test_next_step_begins_at_the_first_stage_with_no_gathered_activations(loop, monkeypatch):
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


def test_frames_of_an_error_and_its_causes_are_dropped():
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
    assert not any(each.__traceback__ for each in (error, cause, context, part))


def test_groups_of_norms_are_gathered_again_by_all(loop):
    """Megatron-core 0.19 asks all ranks in the first step: a newcomer, but no survivor."""
    optimizers = (loop.optimizer, loop.inner)
    left = made(loop)
    interrupt_cleanup.groups_of_norms(left)
    name = "_has_grad_norm_group_cache"
    assert not any(hasattr(optimizer, name) for optimizer in optimizers)
    for optimizer in optimizers:
        setattr(optimizer, name, {"mtp": False})
    interrupt_cleanup.groups_of_norms(left)
    assert [getattr(optimizer, name) for optimizer in optimizers] == [None, None]


def test_forward_hooks_that_a_segment_took_off_are_put_on_again():
    class Chunk:
        """Stands in for DistributedDataParallel with overlapped gathers."""

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


def test_modules_leave_the_evaluation_mode():
    chunk = torch.nn.Sequential(torch.nn.Dropout())
    left = made(Loop(chunk))
    chunk.eval()
    interrupt_cleanup.training_mode(left)
    assert chunk[0].training


def test_teacher_built_in_evaluation_mode_stays_in_it():
    """With dropout, it would teach something else than in a run without protection."""
    teacher = torch.nn.Sequential(torch.nn.Dropout())
    chunk = torch.nn.Sequential(torch.nn.Dropout(), teacher.eval())
    left = made(Loop(chunk))
    chunk.eval()
    interrupt_cleanup.training_mode(left)
    assert [module.training for module in chunk.modules()] == [True, True, False, False]


class Module(torch.nn.Module):
    """One with these attributes."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def test_overlapped_pass_of_shared_experts_begins_again(loop):
    """On the real class, whose parts may only be called in their order."""
    experts = shared_experts.SharedExpertMLP.__new__(shared_experts.SharedExpertMLP)
    torch.nn.Module.__init__(experts)
    experts.config = SimpleNamespace(moe_shared_expert_overlap=True, sequence_parallel=False)
    experts.use_shared_expert_gate, experts.tp_group = False, SimpleNamespace(size=lambda: 1)
    experts.stream = torch.cuda.Stream()
    experts.cached_fc1_input = experts.cached_fc2_input = None
    experts.cached_fc2_output = experts.cached_output = None
    # Megatron 0.16 and 0.17 have no state, and look at none.
    states = getattr(shared_experts, "SharedExpertState", Enum("States", "IDLE BEGUN"))
    experts._overlap_state = states.IDLE
    left = made(loop)
    loop.model_chunks = [experts]
    tokens = torch.ones(2, requires_grad=True)
    for _ in range(2):
        experts.pre_forward_comm(tokens + 1)
        assert experts.cached_fc1_input is not None
        experts.cached_fc2_input = experts.cached_fc2_output = experts.cached_output = tokens
        vars(experts)["_overlap_state"] = list(states)[1]
        interrupt_cleanup.shared_experts(left)
        assert experts._overlap_state is states.IDLE
        cached = [value for name, value in vars(experts).items() if name.startswith("cached_")]
        assert cached == [None] * 4


def test_no_gradient_waits_for_a_weight(loop):
    """Weights of the output layer, and of Transformer Engine's modules, with a queue or without."""
    waiting: queue.Queue[str] = queue.Queue()
    waiting.put("activation and gradient")
    activations, gradients = ["activation"], ["gradient", "gradient"]
    last = Module(embedding_activation_buffer=activations, grad_output_buffer=gradients)
    other = Module(embedding_activation_buffer=None, grad_output_buffer=None)
    layers = [Module(wgrad_store=SimpleNamespace(context=each)) for each in (waiting, None)]
    left = made(loop)
    loop.model_chunks = [last, other, *layers]
    interrupt_cleanup.embedding_gradients(left)
    interrupt_cleanup.delayed_gradients(left)
    # The same lists: the layer and the model share them.
    assert (activations, gradients, waiting.qsize()) == ([], [], 0)


def test_offloaded_activations_have_a_new_manager(loop, monkeypatch):
    """The real manager, in a step that stood in a micro-batch."""
    monkeypatch.setattr(offload.PipelineOffloadManager, "OFFLOAD_MGR", None)

    def waiting() -> Any:
        return offload.PipelineOffloadManager.get_instance()._queue

    waiting().append("chunk")
    interrupt_cleanup.offloaded_activations(made(loop))
    assert not waiting()


@pytest.mark.parametrize("options", [6, 7])
def test_offloaded_layers_are_counted_from_the_first(loop, monkeypatch, options):
    """With as many options as the function of a version takes."""
    given = dict(zip(interrupt_cleanup.OFFLOADING, (True, 2, 8, True, False, 4, 5), strict=True))

    def six(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> tuple[Any, str]:
        return (a, b, c, d, e, f), "commit"

    def seven(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any) -> tuple[Any, str]:
        return (a, b, c, d, e, f, g), "commit"

    monkeypatch.setattr(transformer_block, "get_cpu_offload_context", {6: six, 7: seven}[options])
    blocks = [
        transformer_block.TransformerBlock.__new__(transformer_block.TransformerBlock)
        for _ in range(2)
    ]
    for block, on in zip(blocks, (True, False), strict=True):
        torch.nn.Module.__init__(block)
        block.config = SimpleNamespace(**{**given, "cpu_offloading": on})
        block.offload_context = block.group_prefetch_offload_commit_async = "of the step"
    left = made(loop)
    loop.model_chunks = blocks
    interrupt_cleanup.offloaded_layers(left)
    first, other = blocks
    assert first.offload_context == first.config._cpu_offloading_context
    assert first.offload_context == tuple(given.values())[:options]
    assert first.group_prefetch_offload_commit_async == "commit"
    assert other.offload_context == "of the step"


def test_buffers_that_peers_write_into_are_dropped(loop, monkeypatch):
    names = ("_buffer", "_hybrid_ep_buffer")
    for name in names:
        monkeypatch.setattr(fused_a2a, name, "of peers that are gone")
    interrupt_cleanup.expert_buffers(made(loop))
    assert [getattr(fused_a2a, name) for name in names] == [None, None]


def test_captured_graphs_are_dropped(loop):
    """Graphs of Transformer Engine 2.10 and later return their memory when they are reset."""
    calls: list[str] = []
    new, old = SimpleNamespace(reset=lambda: calls.append("reset")), SimpleNamespace()
    layer = Module(cuda_graphs=[new, old], cuda_graph_manual_hooks=["gather"])
    left = made(loop)
    loop.model_chunks = [Module(), layer]
    interrupt_cleanup.captured_graphs(left)
    assert (layer.cuda_graphs, layer.cuda_graph_manual_hooks, calls) == ([], [], ["reset"])


def test_each_row_is_in_the_table():
    """Remains without a row would stay."""
    rows = [
        function
        for _, function in inspect.getmembers(interrupt_cleanup, inspect.isfunction)
        if [*function.__annotations__.values()] == ["InterruptCleanup", "None"]
    ]
    assert {*rows} == {*interrupt_cleanup.TABLE}
    assert len(rows) == len(interrupt_cleanup.TABLE), "each of them once"
