"""Part rows of the proof kit: flags that are taken by name only, for they need a GPU or a package.

First Megatron's and Transformer Engine's own classes with tensors of the device, in the model of
the embedded trainer: a step is interrupted in the middle of its forward passes, and of its backward
passes; its remains are dropped, the state put back, and the next steps must give the same bits.
Then whole jobs that lose a node: the trainer with such a model, and pretrain_gpt.py with each flag,
where the kit was given a checkout. A row that lacks a package or a second GPU is reported as such.

As a program (``-m read_rows ROW ARGUMENTS``) it is the trainer with the model of a row.
"""

import contextlib
import functools
import itertools
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from proof import trainings
from proof.device import take_world
from proof.result import Task, first_line

_ENGINE, _FINE = "transformer_engine", "fine-grained-activation-offloading"
_LINKED = "GPUs that are linked, one for each rank"


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
_NOTHING = {"needs": "", "model": {}, "optimizer": {}, "script": "pretrain_gpt.py", "words": ""}
ROWS = {name: SimpleNamespace(**_NOTHING | row) for name, row in _TABLE.items()}


def check(task: Task) -> None:
    """Check each row by itself, then run whole jobs while there is time."""
    import torch

    take_world(task.device)
    there = ["", *(["a GPU"] * task.is_on_gpu), *([_LINKED] * (torch.cuda.device_count() > 2))]
    for name, row in ROWS.items():
        if row.needs not in there and (" " in row.needs or not find_spec(row.needs)):
            task.facts[name] = f"left out: it needs {row.needs}"
        elif row.model or row.optimizer:
            try:
                task.facts[name] = "same bits" if _is_exact(task, row) else "other bits"
            except Exception as error:
                task.facts[name] = first_line(error)
            task.expect(task.facts[name] == "same bits", f"{name}: {task.facts[name]}")
            task.save()
    size = trainings.model(task, {"--hidden-size": "128"})
    program = ["-m", "read_rows", _FINE, *size, "--train-iters", "6"]
    compare = trainings.lose_and_compare
    trainings.run_extra(task, _FINE, compare, task.device.communicator, program)
    for name, row in ROWS.items():
        if task.checkout and row.words and "left out" not in task.facts.get(name, ""):
            more = (*row.words.split(), "--deadpool-allow", name)
            trainings.run_extra(task, name, trainings.megatron_lm, row.script, *more)


@contextlib.contextmanager
def _changed(row: Any) -> Iterator[None]:
    """While the block runs, the trainer builds the model of the row."""
    import torch
    from megatron.core import optimizer
    from megatron.core.extensions import transformer_engine as engine
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload

    from deadpool_megatron.trainer import megatron_api

    hybrid, pool = optimizer.HybridDeviceOptimizer, offload.GPUTensorPool

    def of_torch(groups: Any, **given: Any) -> Any:
        """Build torch's Adams, which lack an argument of Transformer Engine's."""
        return hybrid(groups, **{k: v for k, v in given.items() if k != "bias_correction"})

    with contextlib.ExitStack() as stack:

        def change(*patched: Any) -> None:
            stack.enter_context(patch.object(*patched, create=True))

        for name, fields in (("TransformerConfig", row.model), ("OptimizerConfig", row.optimizer)):
            change(megatron_api, name, functools.partial(getattr(megatron_api, name), **fields))
        if find_spec(_ENGINE) is None:  # nor the modules whose flag that is
            change(engine, "cpu_offload", SimpleNamespace(CPUOffloadEnabled=False))
            change(optimizer, "HybridDeviceOptimizer", of_torch)
        if not torch.cuda.is_available():
            change(offload, "GPUTensorPool", lambda device, **_: pool(device))
        yield


def _is_exact(task: Task, row: Any) -> bool:
    """True if steps give the same bits again, after steps that were interrupted."""
    from going_back import GoingBack
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from deadpool_megatron.member.session import forget_frames
    from deadpool_megatron.trainer import config, gpt_loop

    def interrupt(*_: object) -> None:
        if next(calls) == 2:
            raise InterruptedError

    with _changed(row):
        given = config.parse_args([*trainings.model(task, {}), "--train-iters", "8"])
        loop = gpt_loop.TrainingLoop(given, lambda kind, facts: None)
        going = GoingBack(loop, 2)
        going.back()
        wanted = going.train()
        last = [m for m in loop.models[0].modules() if isinstance(m, TransformerLayer)][-1]
        for hook in (last.register_forward_pre_hook, last.register_full_backward_pre_hook):
            calls, handle = itertools.count(1), hook(interrupt)
            try:
                loop.train_step()
                raise AssertionError("no step was interrupted")
            except InterruptedError as error:
                forget_frames(error)
            handle.remove()
            going.back()
            if going.train() != wanted:
                return False
    return True


if __name__ == "__main__":
    from deadpool_megatron.megatron import stand_ins
    from deadpool_megatron.trainer.__main__ import main

    stand_ins.install()
    with _changed(ROWS[sys.argv[1]]):
        sys.exit(main(sys.argv[2:]))
