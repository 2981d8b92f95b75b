"""Parts trainer and pretrain: whole jobs that lose a node, and the same job undisturbed.

Each node is an agent of its own, as on a cluster, so that each has a host identity of its own and
several may share a GPU. What is restored is verified by the job itself: each part against its
checksum, and hashes of peers against each other; a replayed step with other numbers ends it.
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
#: what a job and the same undisturbed take
_MIN_SECONDS = {Device.CUDA: 45.0, Device.CPU: 10.0}
_HASHED = ("--deadpool-set", "hash-interval=1")
#: the iteration in which a node is lost
_LOSS_AT = 3

_MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1"
    " --global-batch-size 8 --lr 1e-2 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2"
    " --seed 11 --log-interval 1 --use-distributed-optimizer"
)
_LARGER = {"--hidden-size": "512", "--num-attention-heads": "8", "--lr": "1e-3"}


def model(task: Task, sizes: Mapping[str, str]) -> list[str]:
    """Arguments of the trainer; these sizes are those on a GPU."""
    words = _MODEL.split()
    if task.is_on_gpu:
        for flag, value in sizes.items():
            words[words.index(flag) + 1] = value
        words.append("--bf16")
    return words


def embedded(task: Task) -> None:
    """Part trainer: data parallel 2 loses role 1; the same undisturbed; a pipeline loses role 0."""
    program = ["-m", "deadpool_megatron.trainer", *model(task, _LARGER)]
    program += ["--train-iters", str(task.size.iterations)]
    strike(task, task.device.communicator, program)
    pipeline = [*program, "--pipeline-model-parallel-size", "2"]
    nodes = 4 if task.is_on_gpu else 2
    _take(task, "pipeline", Job(task.device, task.device.communicator, nodes, pipeline), 0)


def megatron_lm(task: Task, script: str = "pretrain_gpt.py", *more: str) -> None:
    """Part pretrain, with the flags that what is installed asks for, and ``more``."""
    assert task.checkout is not None
    folder = ROOT / "configs" / "megatron-lm"
    words = (folder / "small.args").read_text().split() + ["--bf16"] * task.is_on_gpu
    plain = (folder / ("gpu-plain.args" if task.is_on_gpu else "cpu.args")).read_text().split()
    if task.is_on_gpu and find_spec("transformer_engine") is not None:
        # The output layer, which is Megatron's own, still wants Apex to fuse.
        fuses = find_spec("fused_weight_gradient_mlp_cuda") is not None
        plain = [] if fuses else ["--no-gradient-accumulation-fusion"]
    program = [str(task.checkout / script), *words, *plain, "--deadpool"]
    program += ["--train-iters", str(task.size.iterations), "--lr-warmup-iters", "2", *more]
    strike(task, "nccl" if task.is_on_gpu else "gloo", program)


def strike(task: Task, communicator: str, program: Sequence[str]) -> None:
    """First with a loss, then without; the states at the end are compared."""
    from deadpool_megatron.cli.compare import compare_results
    from deadpool_megatron.cli.run_result import ResultError, read_result

    job = Job(task.device, communicator, 2, program)
    struck = _take(task, "struck", job, 1)
    whole = _take(task, "whole", job)
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
        # There sums have one order; on a GPU kernels and NCCL may choose another one.
        task.expect(comparison.identical, "not bit-identical to the undisturbed run")


def beside(task: Task, name: str, run: Callable[..., None], *given: Any) -> None:
    """A further job of a part, with facts of its own; if there is time for it."""
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


def _take(task: Task, name: str, job: Job, *lost: int) -> Path:
    """One job, and what it has told by its end, or by ours."""
    directory = task.folder / f"{task.part}-{name}"
    try:
        job.run(directory, len(lost), [_fault(role) for role in lost], _HASHED)
    finally:
        facts = task.facts[name] = {"lost roles": lost, **_told(directory)}
        task.save()
    status, recoveries = facts["exit_status"], facts["recoveries"]
    task.expect(status == 0, f"{name}: status {status}, {facts['reason']}")
    problem = f"{name}: {len(recoveries)} recoveries of {len(lost)} losses"
    task.expect(len(recoveries) == len(lost), problem)
    for recovery in recoveries:
        equal = "hashes of the state were equal" if status == 0 else f"status {status}"
        task.findings.append(f"{name}: a recovery in {recovery['seconds'] or 0:.1f} s, {equal}")
    task.save()
    return directory


def _told(directory: Path) -> dict[str, Any]:
    """What the events of a job say, be it over or not."""
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
    }


def _fault(role: int) -> dict[str, object]:
    # The embedded trainer and pretrain_gpt.py both have this point.
    where = {"point": "forward", "match": {"role": role, "iteration": _LOSS_AT}}
    return {"id": f"role-{role}", **where, "action": "signal", "target": "node", "signal": "KILL"}


@dataclass(frozen=True)
class Job:
    """The same training, with agents that are started by hand."""

    device: Device
    communicator: str
    nodes: int
    program: Sequence[str]

    def run(
        self, directory: Path, spares: int, faults: Sequence[object], settings: Sequence[str]
    ) -> None:
        """To its end, or to that of the part."""
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
                # Who does not end is ended with the part.
                with suppress(subprocess.TimeoutExpired):
                    agent.wait(_END_SECONDS / len(agents))
