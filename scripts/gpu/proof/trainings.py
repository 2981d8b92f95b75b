"""Parts trainer and pretrain: whole jobs that lose role 0's node, one in the middle, the last.

Each node is an agent of its own, as on a cluster, so that each has a host identity of its own and
several may share a GPU. What is restored is verified by the job itself: each part against its
checksum, and hashes of peers against each other; a replayed step with other numbers ends it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from proof.device import Device, Size
from proof.result import ROOT, Findings

_JOB_SECONDS = 190.0
_END_SECONDS = 20.0
_HASHED = ("--deadpool-hash-interval", "1")

_MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1"
    " --global-batch-size 8 --lr 1e-2 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2"
    " --seed 11 --log-interval 1 --use-distributed-optimizer --pipeline-model-parallel-size 2"
)
_LARGER = {"--num-layers": "8", "--hidden-size": "1024", "--num-attention-heads": "16"}


def embedded(device: Device, size: Size, _checkout: Path | None, out: Path) -> Findings:
    """Part trainer."""
    words = _MODEL.split()
    if device is Device.CUDA:
        for flag, value in _LARGER.items():
            words[words.index(flag) + 1] = value
        words.append("--bf16")
    program = ["-m", "deadpool_megatron.trainer", *words, "--train-iters", str(size.iterations)]
    found = _strike(device, program, device.communicator, out / f"trainer-{device}")
    _audit(device, program, out / f"trainer-{device}", found)
    return found


def megatron_lm(device: Device, size: Size, checkout: Path | None, out: Path) -> Findings:
    """Part pretrain; where no checkout was given that is what was found."""
    if checkout is None:
        return Findings(not_run="no checkout of Megatron-LM was given (--megatron-lm)")
    folder = ROOT / "configs" / "megatron-lm"
    words = (folder / "small.args").read_text().split()
    words += ["--bf16"] if device is Device.CUDA else (folder / "cpu.args").read_text().split()
    program = [str(checkout / "pretrain_gpt.py"), *words]
    program += ["--train-iters", str(size.iterations), "--lr-warmup-iters", "2", "--deadpool"]
    communicator = "nccl" if device is Device.CUDA else "gloo"
    return _strike(device, program, communicator, out / f"pretrain-{device}")


def _strike(device: Device, program: Sequence[str], communicator: str, base: Path) -> Findings:
    from deadpool_megatron.cli.show.compare import compare_results
    from deadpool_megatron.cli.show.run_result import ResultError, read_result

    found = Findings()
    nodes = 4 if device is Device.CUDA else 2
    victims = sorted({0, nodes // 2, nodes - 1})
    moments = {role: 3 + number * 2 for number, role in enumerate(victims)}
    stamp = time.strftime("%H%M%S")
    whole = base.with_name(f"{base.name}-{stamp}-whole")
    struck = base.with_name(f"{base.name}-{stamp}-struck")
    job = Job(device, communicator, nodes, program)
    found.facts = {"nodes": nodes, "lost roles": victims, "runs": [str(whole), str(struck)]}
    try:
        job.run(whole, 0, [], _HASHED)
        faults = [_fault(role, at) for role, at in moments.items()]
        job.run(struck, len(victims), faults, _HASHED)
        undisturbed, result = read_result(whole), read_result(struck)
        comparison = compare_results(undisturbed, result)
    except (ResultError, TimeoutError, subprocess.SubprocessError) as error:
        found.problems.append(str(error))
        return found
    for name, one in (("whole", undisturbed), ("struck", result)):
        found.expect(one.exit_status == 0, f"{name} run: {one.exit_status}, {one.reason}")
    lost = len(result.recoveries)
    found.expect(lost == len(victims), f"{lost} recoveries of {len(victims)} losses")
    found.facts["recoveries"] = [
        {
            "cause": one.cause,
            "seconds": one.seconds,
            "phases": dict(one.phases),
            "steps recomputed": one.steps_recomputed,
        }
        for one in result.recoveries
    ]
    found.facts["bit-identical to the undisturbed run"] = comparison.identical
    found.facts["first differences"] = [str(one) for one in comparison.differences[:4]]
    if device is Device.CPU:
        # There sums have one order; on a GPU kernels and NCCL may choose another one.
        found.expect(comparison.identical, "not bit-identical to the undisturbed run")
    return found


def _audit(device: Device, program: Sequence[str], base: Path, found: Findings) -> None:
    """Do peers compute the same bytes? On a GPU nobody has seen it: a finding, no condition."""
    from deadpool_megatron.cluster.run_directory.directory import RunDirectory
    from deadpool_megatron.events import Kind, read_events

    directory = base.with_name(f"{base.name}-{time.strftime('%H%M%S')}-audited")
    job = Job(device, device.communicator, 4, program)
    try:
        job.run(directory, 0, [], (*_HASHED, "--deadpool-audit-interval", "2"))
    except TimeoutError as error:
        found.problems.append(str(error))
        return
    events = list(read_events(RunDirectory(directory).events))
    audited = [event for event in events if event.kind is Kind.AUDITED]
    failed = [dict(event.data) for event in events if event.kind is Kind.AUDIT_FAILED]
    texts = [str(event.data["text"]) for event in events if event.kind is Kind.LOG]
    found.facts["audit"] = {
        "run": str(directory),
        "iterations without a find": len(audited),
        "seconds": [event.data["seconds"] for event in audited],
        "finds": failed,
        "left out": [text for text in texts if "audits do not" in text],
    }
    found.expect(bool(audited or failed), f"{directory}: nothing was audited")
    if device is Device.CPU:
        found.expect(not failed, "peers computed other numbers")


def _fault(role: int, iteration: int) -> dict[str, object]:
    return {
        "id": f"role-{role}",
        "point": "forward",  # the embedded trainer and pretrain_gpt.py both have it
        "match": {"role": role, "iteration": iteration},
        "action": "signal",
        "target": "node",
        "signal": "KILL",
    }


class Job:
    """The same training, with agents that are started by hand."""

    def __init__(
        self, device: Device, communicator: str, nodes: int, program: Sequence[str]
    ) -> None:
        self._device = device
        self._communicator = communicator
        self._nodes = nodes
        self._program = program

    def run(
        self,
        directory: Path,
        spares: int,
        faults: Sequence[object],
        settings: Sequence[str] = (),
    ) -> None:
        """To its end. Raises TimeoutError if it has none in time."""
        from deadpool_megatron.failpoints import ENVIRONMENT_NAME

        plan = directory.with_suffix(".faults")
        plan.write_text(json.dumps(faults))
        shared = {**os.environ, ENVIRONMENT_NAME: str(plan) if faults else ""}
        agents = []
        for node in range(self._nodes + spares):
            command = [
                *(sys.executable, "-m", "deadpool_megatron", "agent", "--run-dir", str(directory)),
                *("--node-id", str(node), "--host", "127.0.0.1", "--nodes", str(self._nodes)),
                *("--spares", str(spares), "--nproc-per-node", "1"),
                *("--deadpool-communicator", self._communicator),
                *(*settings, "--", *self._program),
            ]
            environment = shared | self._device.environment(node)
            with open(directory.with_suffix(f".node{node}.log"), "wb") as log:
                agents.append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=ROOT)
                )
        self._await_end(directory, agents)

    def _await_end(self, directory: Path, agents: Sequence[subprocess.Popen[bytes]]) -> None:
        until = time.monotonic() + _JOB_SECONDS
        try:
            for agent in agents:
                agent.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired as late:
            raise TimeoutError(f"{directory}: no end after {_JOB_SECONDS:g} s") from late
        finally:
            for agent in agents:
                agent.terminate()
            until = time.monotonic() + _END_SECONDS
            for agent in agents:
                try:
                    agent.wait(max(0.1, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    agent.kill()
                    agent.wait()
