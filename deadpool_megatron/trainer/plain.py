"""``python -m deadpool_megatron.trainer.plain``: the same training without fault tolerance.

This program is the reference of tests and benches. It uses stock gloo or NCCL, and takes its rank
from the variables that torchrun sets (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``,
``MASTER_PORT``).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deadpool_megatron.megatron import stand_ins
from deadpool_megatron.trainer.config import (
    BadArgumentsError,
    TrainerConfig,
    build_parser,
    config_from,
)


def train(config: TrainerConfig) -> dict[str, Any]:
    """Train from the start, or from the newest checkpoint of ``--load``, to the end. Collective.

    All ranks return the same facts, such as ``steps`` and ``evaluations`` as emitted, the number of
    ``samples``, and the ``hashes`` of the final states by rank. Raises BadArgumentsError, also if
    the checkpoint is missing.
    """
    from deadpool_megatron.trainer import loop_checkpoint
    from deadpool_megatron.trainer.gpt_loop import TrainingLoop

    start = loop_checkpoint.latest(config.load) if config.load is not None else None
    if config.load is not None and start is None:
        raise BadArgumentsError(f"--load: {config.load} names no checkpoint that is there")
    events: dict[str, list[Mapping[str, Any]]] = {"step": [], "evaluation": [], "log": []}

    def emit(kind: str, facts: Mapping[str, Any]) -> None:
        events.setdefault(kind, []).append(facts)
        if kind == "log":
            print(facts["text"], flush=True)

    loop = TrainingLoop(config, emit)
    if start is not None:
        loop.load_checkpoint(start)
    while not loop.done:
        loop.train_step()
        for segment in loop.segments_after(loop.counters["iteration"]):
            loop.run_segment(segment)
    loop.synchronize_parameters()
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, (loop.state_hash(), events))
    rank_events = next((each for _, each in results if each["step"]), events)
    return {
        "iterations": loop.counters["iteration"],
        "samples": loop.counters["consumed_train_samples"],
        "skipped": loop.counters["skipped_iterations"],
        "steps": rank_events["step"],
        "evaluations": rank_events["evaluation"],
        "hashes": [state_hash for state_hash, _ in results],
    }


def main(argv: Sequence[str]) -> int:
    """Run from the command line; return the exit status, 2 for bad arguments."""
    parser = build_parser("python -m deadpool_megatron.trainer.plain")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the facts of the run here")
    namespace = parser.parse_args(argv)
    try:
        config = config_from(namespace)
        config.check_world_size(int(os.environ["WORLD_SIZE"]))
    except BadArgumentsError as error:
        parser.error(str(error))
    except KeyError as error:
        parser.error(f"{error} is not set: start the ranks with torchrun, or set it yourself")
    torch.set_num_threads(1)
    stand_ins.install()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        facts = train(config)
    except BadArgumentsError as error:
        parser.error(str(error))
    if namespace.out is not None and dist.get_rank() == 0:
        namespace.out.write_text(json.dumps(facts, indent=1))
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Exit without destroying the groups: this sometimes aborts the process, as torch destroys a
    # running thread of gloo.
    os._exit(status)
