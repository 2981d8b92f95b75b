"""Parts trainer and pretrain: whole jobs that lose a node, and the same job undisturbed.

Each node is an agent of its own, as on a cluster, so that each has a host identity of its own and
several may share a GPU. The job itself verifies the restored state: each part against its checksum,
and hashes of peers against each other; a replayed step with other numbers ends the job.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from proof.device import Device
from proof.result import ROOT, Task, read_json

_END_SECONDS = 2.0
#: time that a job and the same job undisturbed need
_MIN_SECONDS = {Device.CUDA: 45.0, Device.CPU: 10.0}
_HASHED = ("--deadpool-set", "hash-interval=1")

_MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1"
    " --global-batch-size 8 --lr 1e-2 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2"
    " --seed 11 --log-interval 1 --use-distributed-optimizer"
)
_LARGER = {"--hidden-size": "512", "--num-attention-heads": "8", "--lr": "1e-3"}


def model(task: Task, sizes: Mapping[str, str]) -> list[str]:
    """Return arguments of the trainer; the sizes apply on a GPU."""
    arguments = _MODEL.split()
    if task.is_on_gpu:
        for flag, value in sizes.items():
            arguments[arguments.index(flag) + 1] = value
        arguments.append("--bf16")
    return arguments


def embedded_program(task: Task, module: str = "deadpool_megatron.trainer") -> list[str]:
    """Return the embedded trainer, data parallel, or a module with its arguments."""
    return ["-m", module, *model(task, _LARGER), "--train-iters", str(task.size.iterations)]


def embedded(task: Task) -> None:
    """Run part trainer: data parallel 2 loses role 1, the same undisturbed, a pipeline loses 0."""
    program = embedded_program(task)
    lose_and_compare(task, task.device.communicator, program)
    pipeline = [*program, "--pipeline-model-parallel-size", "2"]
    job = Job(task.device, task.device.communicator, 4 if task.is_on_gpu else 2, pipeline)
    take(task, "pipeline", job, [fault(0)])


def megatron_lm(task: Task, script: str = "pretrain_gpt.py", *more: str) -> None:
    """Run part pretrain, with ``more`` flags and those that the installed packages need."""
    assert task.checkout is not None
    folder = ROOT / "configs" / "megatron-lm"
    shared = (folder / "small.args").read_text().split() + ["--bf16"] * task.is_on_gpu
    plain = (folder / ("gpu-plain.args" if task.is_on_gpu else "cpu.args")).read_text().split()
    if task.is_on_gpu and find_spec("transformer_engine") is not None:
        # The output layer, which is Megatron's own, still wants Apex to fuse.
        fuses = find_spec("fused_weight_gradient_mlp_cuda") is not None
        plain = [] if fuses else ["--no-gradient-accumulation-fusion"]
    program = [str(task.checkout / script), *shared, *plain, "--deadpool"]
    program += ["--train-iters", str(task.size.iterations), "--lr-warmup-iters", "2", *more]
    lose_and_compare(task, "nccl" if task.is_on_gpu else "gloo", program)


def lose_and_compare(task: Task, communicator: str, program: Sequence[str]) -> None:
    """Run a job with a loss, then without, and compare the states at the end."""
    from deadpool_megatron.cli.compare import compare_results
    from deadpool_megatron.cli.run_result import ResultError, read_result

    job = Job(task.device, communicator, 2, program)
    struck = take(task, "struck", job, [fault(1)])
    whole = take(task, "whole", job)
    try:
        comparison = compare_results(read_result(whole), read_result(struck))
    except ResultError as error:
        task.problems.append(str(error))
        return
    task.facts["bit-identical to the undisturbed run"] = comparison.identical
    same = "the same bits as" if comparison.identical else "other bits than"
    task.findings.append(f"struck: {same} the undisturbed run at its end")
    task.facts["first differences"] = [str(difference) for difference in comparison.differences[:4]]
    if not task.is_on_gpu:
        # On a CPU sums have a fixed order; on a GPU kernels and NCCL may choose another.
        task.expect(comparison.identical, "not bit-identical to the undisturbed run")


def run_extra(task: Task, name: str, run: Callable[..., None], *given: Any) -> None:
    """Run a further job of a part, with facts of its own, if there is time for it."""
    part = replace(task, part=f"{task.part}-{name.partition('=')[0]}")
    part = replace(part, facts={}, problems=[], findings=[])
    if task.left_seconds < _MIN_SECONDS[task.device]:
        task.facts[part.part] = "left out: there was no time left"
        return
    try:
        run(part, *given)
    finally:
        task.facts[part.part] = part.facts
        task.problems += [f"{name}: {text}" for text in part.problems]
        task.findings += [f"{name}: {text}" for text in part.findings]
        task.save()


def take(
    task: Task,
    name: str,
    job: Job,
    faults: Sequence[Mapping[str, Any]] = (),
    losses: int | None = None,
    spares: int | None = None,
    settings: Sequence[str] = (),
) -> Path:
    """Run one job, and note its events up to its end or that of the part. ``losses``: the number of
    recoveries (default: one for each fault); ``spares``: one for each lost node."""
    directory = task.folder / f"{task.part}-{name}"
    wanted = len(faults) if losses is None else losses
    nodes = sum(each["target"] == "node" for each in faults)
    try:
        job.run(directory, nodes if spares is None else spares, faults, (*_HASHED, *settings))
    finally:
        facts = task.facts[name] = _facts(directory)
        task.save()
    status, recoveries = facts["exit_status"], facts["recoveries"]
    task.expect(status == 0, f"{name}: status {status}, {facts['reason']}")
    task.expect(len(recoveries) == wanted, f"{name}: {len(recoveries)} recoveries of {wanted}")
    for recovery in recoveries:
        equal = "hashes of the state were equal" if status == 0 else f"status {status}"
        task.findings.append(f"{name}: a recovery in {recovery['seconds'] or 0:.1f} s, {equal}")
    task.save()
    return directory


def _facts(directory: Path) -> dict[str, Any]:
    """Return the outcome and the recoveries of a job, which may not be over."""
    from deadpool_megatron.cluster.run_directory.directory import RunDirectory
    from deadpool_megatron.events import Kind, read_events

    events = []
    with suppress(OSError):
        events = list(read_events(RunDirectory(directory).events))
    end = read_json(RunDirectory(directory).final)
    return {
        "exit_status": end.get("exit_status"),
        "reason": end.get("reason", "not at its end"),
        "iterations": max((e.iteration or 0 for e in events if e.kind is Kind.STEP), default=0),
        "recoveries": [dict(e.data) for e in events if e.kind is Kind.RECOVERED],
        "lost processes": [
            {"role": e.role, **e.data} for e in events if e.kind is Kind.MEMBER_LOST
        ],
    }


def fault(
    role: int, iteration: int = 3, target: str = "node", point: str = "forward", **more: object
) -> dict[str, Any]:
    """Return a fault at a point that the embedded trainer and pretrain_gpt.py both have."""
    match = {"role": role, "iteration": iteration}
    about = {"id": f"{point}-{iteration}", "point": point, "match": match, "target": target}
    return {**about, "signal": "KILL", **more}


@dataclass(frozen=True)
class Job:
    """A training whose agents are started without the launcher."""

    device: Device
    communicator: str
    nodes: int
    program: Sequence[str]

    def run(
        self, directory: Path, spares: int, faults: Sequence[object], settings: Sequence[str]
    ) -> None:
        """Run it to its end, or to that of the part."""
        from deadpool_megatron.failpoints import ENVIRONMENT_NAME

        plan = directory.with_suffix(".faults")
        plan.write_text(json.dumps(faults))
        shared = {**os.environ, ENVIRONMENT_NAME: str(plan)}
        agents = []
        for node in range(self.nodes + spares):
            command = [
                *(sys.executable, "-m", "deadpool_megatron", "agent", "--run-dir", str(directory)),
                *("--node-id", str(node), "--host", "127.0.0.1", "--nodes", str(self.nodes)),
                *("--spares", str(spares), "--nproc-per-node", "1"),
                *("--deadpool-communicator", self.communicator),
                *(*settings, "--", *self.program),
            ]
            environment = shared | self.device.environment(node)
            with open(directory.with_suffix(f".node{node}.log"), "wb") as log:
                agents.append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=ROOT)
                )
        try:
            for agent in agents:
                agent.wait()
        finally:
            for agent in agents:
                agent.terminate()
            for agent in agents:
                # An agent that does not end is killed with the part.
                with suppress(subprocess.TimeoutExpired):
                    agent.wait(_END_SECONDS / len(agents))
