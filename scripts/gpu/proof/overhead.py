"""Part overhead: steps of a whole training with protection and without, in turns.

Without it the same job runs with a cadence that is never due again: both sides have the same seam,
and differ in what is captured, kept and sent. One role on a single GPU, so that NCCL between ranks
that share it is not what is measured; a role each on two GPUs or more, which send copies.
"""

from __future__ import annotations

import os
import shutil
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from proof.result import Task
from proof.trainings import Job, model

_WARM_UP = 5

# 0.4 billion parameters: some tenths of a second a step, 5 GB of state and 20 GB of slots. With
# little shared memory it has fewer layers.
_LARGE = {"--hidden-size": "2048", "--num-attention-heads": "16", "--seq-length": "2048"}
_LARGE |= {"--lr": "1e-4", "--min-lr": "1e-5"}
_MAX_LAYERS, _LAYER_BYTES = 8, 5 << 29
#: iterations between two generations; a thousand is the longest cadence that there is
_CADENCES = {"plain": 1000, "protected": 1}


def measure(task: Task) -> None:
    """Run the side without protection, then the protected side."""
    from deadpool_megatron.preflight.host import visible_gpus

    nodes = min(2, len(visible_gpus(os.environ))) if task.is_on_gpu else 2
    scheme = "local" if nodes == 1 else "buddy"
    capacity = shutil.disk_usage("/dev/shm").free // (_LAYER_BYTES * nodes)
    layers = {"--num-layers": str(max(1, min(_MAX_LAYERS, capacity)))}
    arguments = model(task, _LARGE | layers)
    iterations = task.size.iterations
    program = ["-m", "deadpool_megatron.trainer", *arguments, "--train-iters", str(iterations)]
    job = Job(task.device, task.device.communicator, nodes, program)
    task.facts |= {"nodes": nodes, "protection": scheme, "model": arguments}
    for side, cadence in _CADENCES.items():
        directory = task.folder / f"overhead-{side}"
        settings = ("--deadpool-cadence", str(cadence), "--deadpool-protection", scheme)
        job.run(directory, 0, [], settings)
        run = task.facts[side] = _read(directory)
        task.expect(run["iterations"] == iterations, f"{side}: {run['iterations']} steps")
        task.save()
    plain, protected = (task.facts[side] for side in _CADENCES)
    ratio = task.facts["ratio"] = protected["mean_step_seconds"] / plain["mean_step_seconds"]
    task.findings.append(f"steps with protection take {ratio:.3f} times as long")
    found, wanted = protected["committed"], nodes * iterations
    task.expect(found >= wanted, f"{found} generations were committed, not {wanted} or more")


def _read(directory: Path) -> dict[str, Any]:
    """Return the step times of one run, and what its protection committed and sent."""
    from deadpool_megatron.cluster.run_directory.directory import RunDirectory
    from deadpool_megatron.events import Kind, read_events

    events = list(read_events(RunDirectory(directory).events))
    steps = {e.iteration or 0: e.monotonic_seconds for e in events if e.kind is Kind.STEP}
    # Each event covers several generations and roles.
    committed = [event.data for event in events if event.kind is Kind.COMMITTED]
    if len(steps) <= _WARM_UP + 1:
        raise ValueError(f"it ended after {len(steps)} steps")
    ends = [seconds for _, seconds in sorted(steps.items())][_WARM_UP:]
    seconds = [later - sooner for sooner, later in pairwise(ends)]
    return {
        "mean_step_seconds": statistics.fmean(seconds),
        "step_seconds": seconds,
        "iterations": len(steps),
        "committed": sum(int(data["reports"]) for data in committed),
        "shipped_bytes": sum(int(data.get("bytes", 0)) for data in committed),
    }
