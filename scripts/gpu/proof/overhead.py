"""Part overhead: steps of a whole training with protection and without, in turns.

Without it the same job runs with a cadence that is never due again: both sides have the same seam,
and differ in what is captured, kept and sent. One role on a single GPU, so that NCCL between ranks
that share it is not what is measured; a role each on two GPUs or more, which send copies.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

from proof.device import Device, Size
from proof.result import Findings
from proof.trainings import Job

_WARM_UP = 5
_MOST_ROUNDS = 2
_NEVER = 1000  # iterations; the longest cadence that there is

_COMMON = (
    "--lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 2 --seed 11 --log-interval 1"
    " --use-distributed-optimizer"
)
_SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1"
    " --global-batch-size 8"
)
# As many layers as there is memory for: 16 of them, 0.8 billion parameters, are most of a GPU of
# 40 GB with what a step needs, and 40 GB of slots and copies.
_LARGE = (
    "--hidden-size 2048 --num-attention-heads 16 --seq-length 2048"
    " --micro-batch-size 2 --global-batch-size 32 --bf16"
)
_LAYER_BYTES = 5 << 29
_LEAST_LAYERS = 4


class Side(StrEnum):
    """What the facts call the two."""

    PLAIN = "plain"
    PROTECTED = "protected"

    @property
    def cadence(self) -> int:
        """Iterations between two generations."""
        return 1 if self is Side.PROTECTED else _NEVER


def _layers() -> int:
    """What fits into the first GPU and into shared memory."""
    import torch

    on_device, _ = torch.cuda.mem_get_info(0)
    on_host = shutil.disk_usage("/dev/shm").free
    return max(_LEAST_LAYERS, min(on_device, on_host) // _LAYER_BYTES)


def measure(device: Device, size: Size, _checkout: Path | None, out: Path) -> Findings:
    """A B A B."""
    nodes = _nodes(device)
    sizes = f"{_LARGE} --num-layers {_layers()}" if device is Device.CUDA else _SMALL
    words = f"{sizes} {_COMMON}".split()
    program = ["-m", "deadpool_megatron.trainer", *words, "--train-iters", str(size.iterations)]
    job = Job(device, device.communicator, nodes, program)
    scheme = "local" if nodes == 1 else "buddy"
    found = Findings(facts={"nodes": nodes, "protection": scheme, "model": words})
    runs: dict[Side, list[dict[str, Any]]] = {side: [] for side in Side}
    base = out / f"overhead-{device}-{time.strftime('%H%M%S')}"
    for number in range(min(size.rounds, _MOST_ROUNDS)):
        for side, known in runs.items():
            directory = base.with_name(f"{base.name}-{side}-{number}")
            settings = ("--deadpool-cadence", str(side.cadence), "--deadpool-protection", scheme)
            try:
                job.run(directory, 0, [], settings)
                known.append(_read(directory))
            except (OSError, TimeoutError, ValueError) as error:
                found.problems.append(f"{side}: {error}, see {directory}.node0.log")
                return found
    for side, known in runs.items():
        ended = min(run["iterations"] for run in known)
        found.expect(ended == size.iterations, f"{side}: {ended} steps, not {size.iterations}")
        steps = [seconds for run in known for seconds in run["step_seconds"]]
        found.facts[side] = {"mean": statistics.fmean(steps), "runs": known}
    found.facts["ratio"] = found.facts[Side.PROTECTED]["mean"] / found.facts[Side.PLAIN]["mean"]
    least = min(run["committed"] for run in runs[Side.PROTECTED])
    wanted = nodes * size.iterations
    found.expect(least >= wanted, f"{least} generations were committed, not {wanted} or more")
    return found


def _nodes(device: Device) -> int:
    from deadpool_megatron.preflight.gpus import visible_gpus

    if device is Device.CPU:
        return 2
    return min(2, len(visible_gpus(os.environ)))


def _read(directory: Path) -> dict[str, Any]:
    """One run: the time from each step to the next, and what its protection did meanwhile."""
    from deadpool_megatron.cluster.run_directory.directory import RunDirectory
    from deadpool_megatron.events import Kind, read_events

    steps: dict[int, float] = {}
    committed = 0
    waits: dict[tuple[int | None, int | None], float] = {}
    shipped = 0
    for event in read_events(RunDirectory(directory).events):
        match event.kind:
            case Kind.STEP:
                steps[event.iteration or 0] = event.monotonic_seconds
            case Kind.COMMITTED:  # of several generations and roles
                committed += int(event.data["reports"])
                shipped += int(event.data.get("bytes", 0))
            case Kind.GATE_WAIT:
                waits[event.role, event.iteration] = float(event.data["seconds"])
    if len(steps) <= _WARM_UP + 1:
        raise ValueError(f"it ended after {len(steps)} steps")
    ends = [seconds for _, seconds in sorted(steps.items())][_WARM_UP:]
    return {
        "step_seconds": [later - sooner for sooner, later in pairwise(ends)],
        "iterations": len(steps),
        "committed": committed,
        "shipped_bytes": shipped,
        "gate_waits": len(waits),
        "gate_seconds": sum(waits.values()),
    }
