"""Part rows of the proof kit: flags that are taken by name only, for they need a GPU or a package.

First Megatron's and Transformer Engine's own classes with tensors of the device, in the model of
the embedded trainer: a step is interrupted in the middle of its forward passes, and of its backward
passes; what it left is forgotten, the state put back, and the next steps must give the same bits.
Then whole jobs that lose a node: the trainer with such a model, and pretrain_gpt.py with each flag,
where the kit was given a checkout. What lacks a package, or a second GPU, is left out by its name.

As a program (``-m tests.gpu.read_rows ROW ARGUMENTS``) it is the trainer with the model of a row.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from proof import trainings
from proof.result import Task

_TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1"
    " --global-batch-size 4 --train-iters 8 --lr 1e-2 --min-lr 1e-4 --lr-decay-style cosine"
    " --lr-warmup-iters 2 --seed 7 --bf16 --use-distributed-optimizer"
)
_STEPS = 2
#: what the two runs of a whole job take at the least
_JOB_SECONDS = {True: 45.0, False: 10.0}
_ENGINE = "transformer_engine"
_LINKED = "GPUs that are linked, one for each rank"


@dataclass(frozen=True)
class Row:
    """A flag. ``needs``: a package, or in words what one GPU is not. ``model``, ``optimizer``: what
    it sets in Megatron's configs; ``words``: how pretrain_gpt.py is told, empty where it is not;
    ``probe``: something else that is tried, and answers whether the bits were the same."""

    needs: str = ""
    model: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    words: str = ""
    probe: Callable[[Task], bool] | None = None
    is_rehearsed: bool = False


def delayed_gradients(task: Task) -> bool:
    """A backward pass whose weights nobody came to, and then a whole one."""
    import torch
    from transformer_engine.pytorch import Linear

    from deadpool_megatron.hooks import interrupt_cleanup

    layer = Linear(64, 64, bias=False, delay_wgrad_compute=True, device=task.device.value)
    first, second = (torch.randn(32, 64, device=task.device.value) for _ in range(2))
    for inputs in (first, second):
        layer(inputs).square().sum().backward()
        layer.backward_dw()
    wanted = layer.weight.grad.clone()
    layer(first).square().sum().backward()
    left: Any = types.SimpleNamespace(modules=layer.modules)
    interrupt_cleanup.delayed_gradients(left)
    layer(second).square().sum().backward()
    layer.backward_dw()
    return bool(torch.equal(layer.weight.grad, wanted))


def user_buffers(task: Task) -> bool:
    """Made three times, in groups of one rank."""
    import torch.distributed as dist
    from transformer_engine.pytorch.module import base

    from deadpool_megatron.hooks.pretraining.user_buffers import UserBuffers

    def make() -> None:
        base.initialize_ub([256, 64], 1, bootstrap_backend="nccl")

    initialize = types.SimpleNamespace(_initialize_tp_communicators=make)
    args = types.SimpleNamespace(tensor_model_parallel_size=1)
    package: Any = types.SimpleNamespace(get_args=lambda: args, initialize=initialize)
    sys.modules["megatron.training"] = package
    buffers = UserBuffers()
    with buffers.put_off():
        initialize._initialize_tp_communicators()
    groups = len(dist.distributed_c10d._world.pg_map)
    for _ in range(3):
        buffers.renew()
        task.expect(bool(base._ub_communicators), "there are no user buffers")
    return len(dist.distributed_c10d._world.pg_map) == groups


_FINE = {"offload_modules": ["core_attn", "attn_proj", "mlp_norm"], "min_offloaded_tensor_size": 1}
_HALF = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
ROWS = {
    "fine-grained-activation-offloading": Row(
        model={"fine_grained_activation_offloading": True, **_FINE}, is_rehearsed=True
    ),
    "optimizer-cpu-offload": Row(optimizer=_HALF),
    "cpu-offloading-num-layers": Row(
        _ENGINE,
        {"cpu_offloading": True, "cpu_offloading_num_layers": 1},
        words="--cpu-offloading-num-layers 1 --pipeline-model-parallel-size 1",
    ),
    "log-straggler": Row(words="--log-straggler"),
    "delay-wgrad-compute": Row(_ENGINE, probe=delayed_gradients),
    "tp-comm-overlap": Row(_ENGINE, probe=user_buffers),
    "cuda-graph-impl=transformer_engine": Row(
        _ENGINE,
        words="--cuda-graph-impl transformer_engine --cuda-graph-warmup-steps 1 --te-rng-tracker",
    ),
    "defer-embedding-wgrad-compute": Row(
        "fused_weight_gradient_mlp_cuda",
        words="--defer-embedding-wgrad-compute --untie-embeddings-and-output-weights",
    ),
    "optimizer": Row("emerging_optimizers", words="--optimizer dist_muon"),
    "hybrid-layer-pattern": Row("mamba_ssm"),
    "moe-token-dispatcher-type=flex": Row(_LINKED),
}


def look(task: Task) -> None:
    """Each row by itself, then whole jobs for as long as there is time."""
    _without_peers(task)
    there = [name for name, row in ROWS.items() if _lacks(task, row, name) == ""]
    for name in there:
        row = ROWS[name]
        if row.probe or row.model or row.optimizer:
            try:
                task.facts[name] = "same bits" if _is_exact(task, row) else "other bits"
            except Exception as error:
                task.facts[name] = f"raised {type(error).__name__}: {error}"
            task.expect(task.facts[name] == "same bits", f"{name}: {task.facts[name]}")
            task.save()
    _in_a_job(task, "fine-grained-activation-offloading", _trainer)
    for name in there if task.checkout else ():
        if ROWS[name].words:
            _in_a_job(task, name, _pretrain_gpt)


def _lacks(task: Task, row: Row, name: str) -> str:
    """Why a row is left out; empty where it is not."""
    why = ""
    if row.needs and (" " in row.needs or find_spec(row.needs) is None):
        why = f"left out: it needs {row.needs}"
    elif not (task.is_on_gpu or row.is_rehearsed):
        why = "left out: it needs a GPU"
    if why:
        task.facts[name] = why
    return why


def _in_a_job(task: Task, name: str, run: Callable[[Task, str], None]) -> None:
    part = f"{task.part}-{run.__name__.strip('_')}-{name.partition('=')[0]}"
    one = dataclasses.replace(task, part=part, facts={}, problems=[], findings=[])
    if task.left_seconds < _JOB_SECONDS[task.is_on_gpu]:
        task.facts[part] = "left out: there was no time left"
        return
    try:
        run(one, name)
    finally:
        task.facts[part] = one.facts
        task.problems += [f"{name}: {problem}" for problem in one.problems]
        task.findings += [f"{name}: {finding}" for finding in one.findings]
        task.save()


def _trainer(task: Task, name: str) -> None:
    program = ["-m", "tests.gpu.read_rows", name, *trainings.model(task, {"--hidden-size": "128"})]
    trainings._strike(task, task.device.communicator, [*program, "--train-iters", "6"])


def _pretrain_gpt(task: Task, name: str) -> None:
    trainings.megatron_lm(task, *ROWS[name].words.split(), "--deadpool-allow", name)


def _without_peers(task: Task) -> None:
    """A world of one rank, as far as torch can tell."""
    import os

    import torch.distributed as dist

    from deadpool_megatron.platform import select_platform

    select_platform().install()
    from deadpool_megatron.comms import Communicators
    from deadpool_megatron.hooks.session import take_device

    take_device(task.device.communicator if task.is_on_gpu else "auto", 0)
    os.environ.update(RANK="0", WORLD_SIZE="1")
    Communicators("nccl" if task.is_on_gpu else "gloo").install()
    dist.init_process_group()


@contextlib.contextmanager
def _changed(row: Row) -> Iterator[None]:
    """While the block runs, the trainer builds the model of the row."""
    import torch
    from megatron.core import optimizer
    from megatron.core.extensions import transformer_engine
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload

    from deadpool_megatron.trainer import model

    hybrid, pool = optimizer.HybridDeviceOptimizer, offload.GPUTensorPool

    def of_torch(groups: Any, **given: Any) -> Any:
        """Its Adams do not know a word of Transformer Engine's."""
        return hybrid(groups, **{k: v for k, v in given.items() if k != "bias_correction"})

    changes: list[tuple[Any, str, Any]] = [
        (model, "TransformerConfig", functools.partial(model.TransformerConfig, **row.model)),
        (model, "OptimizerConfig", functools.partial(model.OptimizerConfig, **row.optimizer)),
    ]
    if find_spec(_ENGINE) is None:
        # A flag of its modules, which are not there.
        flag = types.SimpleNamespace(CPUOffloadEnabled=False)
        changes += [(transformer_engine, "cpu_offload", flag)]
        changes += [(optimizer, "HybridDeviceOptimizer", of_torch)]
    if not torch.cuda.is_available():
        plain = lambda device="cuda", pin_memory=False: pool(device)  # noqa: E731
        changes += [(offload, "GPUTensorPool", plain)]
    with contextlib.ExitStack() as stack:
        for holder, name, value in changes:
            old = getattr(holder, name, None)
            stack.callback(setattr, holder, name, old)
            setattr(holder, name, value)
        yield


class Interrupted(Exception):
    """A step is left by it."""


def _is_exact(task: Task, row: Row) -> bool:
    """Whether steps give the same bits again, after steps that were interrupted."""
    if row.probe:
        return row.probe(task)
    from deadpool_megatron.hooks import dimensions
    from deadpool_megatron.hooks.capture import megatron_extras as extras
    from deadpool_megatron.hooks.capture.identity import state_digests
    from deadpool_megatron.hooks.capture.optimizer import ShardState
    from deadpool_megatron.hooks.interrupt_cleanup import InterruptCleanup, forget_frames
    from deadpool_megatron.state.extras import decode, encode
    from deadpool_megatron.trainer.config import parse_args
    from deadpool_megatron.trainer.training import TrainingLoop

    with _changed(row):
        loop = TrainingLoop(parse_args(_TINY.split()), lambda kind, facts: None)
        parts, cleanup = ShardState(loop.optimizer).parts, InterruptCleanup(loop)
        for _ in range(_STEPS):
            loop.train_step()
        kept = [[tensor.clone() for tensor in part.tensors] for part in parts]
        others = encode(extras.capture(loop))

        def train_again() -> Mapping[str, str]:
            cleanup.forget()
            for part, tensors in zip(parts, kept, strict=True):
                for tensor, value in zip(part.tensors, tensors, strict=True):
                    tensor.copy_(value)
            values = decode(others)
            extras.restore(loop, values)
            dimensions.rebuild_from_peers(loop)
            loop.reset_after_interrupt()
            extras.restore_last(values)
            for _ in range(_STEPS):
                loop.train_step()
            loop.synchronize_parameters()
            return state_digests(loop)

        wanted = train_again()
        for passes in ("forward", "full_backward"):
            try:
                with _interrupted(loop, passes):
                    loop.train_step()
            except Interrupted as error:
                forget_frames(error)
                if train_again() != wanted:
                    return False
            else:
                raise AssertionError(f"no {passes} pass was interrupted")
    return True


@contextlib.contextmanager
def _interrupted(loop: Any, passes: str) -> Iterator[None]:
    """The second micro-batch does not get through the last layer."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    seen: list[object] = []

    def interrupt(*_: object) -> None:
        seen.append(None)
        if len(seen) == 2:
            raise Interrupted

    layers = [one for one in loop.models[0].modules() if isinstance(one, TransformerLayer)]
    handle = getattr(layers[-1], f"register_{passes}_pre_hook")(interrupt)
    try:
        yield
    finally:
        handle.remove()


if __name__ == "__main__":
    from deadpool_megatron.platform import select_platform
    from deadpool_megatron.trainer.__main__ import main

    select_platform().install()
    with _changed(ROWS[sys.argv[1]]):
        sys.exit(main(sys.argv[2:]))
