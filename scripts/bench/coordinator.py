#!/usr/bin/env python
"""What one coordinator bears: the real process, with thousands of simulated agents.

    .venv/bin/python scripts/bench/coordinator.py [--agents N ...] [--seconds N] [--json FILE]

For each size: all agents join and start 8 members each; they beat for a while; one node dies and a
spare takes its roles; the coordinator is killed and started again. The agents live in this one
process and cost it more than they cost the coordinator, so the coordinator's own CPU time is what
is reported, beside times by the wall clock on a machine that both share.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from measuring import ROOT, machine_facts, write_facts
from simulated import Cluster, until

from deadpool_megatron.cli.show.tail import EventTail
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.events import Kind
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire.auth import create_secret, load_secret

NPROC_PER_NODE = 8
_SPARE_SHARE = 64  # one node of so many is a spare
_LIMIT_SECONDS = 300.0
_STEP_SECONDS = 1.0
# Beside one connection for each agent: the coordinator's own files, this process's, a margin.
_OTHER_FILES = 256
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Measured:
    """One size; seconds by the wall clock unless they say CPU.

    ``beat_cpu_share``: CPU seconds of the coordinator per second while all agents beat and a step
    is reported each second. ``loss_to_decision``: from the end of a node's connection until the
    new record is durable; ``decision_to_sent``: from there until it was handed to the
    connection of the last agent; ``decision_to_informed``: until the last agent has taken it;
    ``informed_to_open``: until every role was counted as restored; the CPU seconds of these are
    those of the coordinator, beats included. ``restart_to_all_back``: from
    the start of the second coordinator, whose interpreter has to load and which waits until the
    sign of life of the first one stands still, until it has welcomed all;
    the epoch stays open, and ``restart_to_steps_taken`` is until it has taken new steps.
    """

    agents: int
    roles: int
    start_seconds: float
    start_cpu_seconds: float
    beats_per_second: float
    beat_cpu_share: float
    beat_cpu_microseconds_per_beat: float
    beat_cpu_share_per_1000_agents: float
    loss_to_decision_seconds: float
    decision_to_sent_seconds: float
    decision_to_informed_seconds: float
    informed_to_open_seconds: float
    loss_to_decision_cpu_seconds: float
    decision_to_informed_cpu_seconds: float
    informed_to_open_cpu_seconds: float
    told_bytes_per_agent: float
    restart_to_all_back_seconds: float
    restart_to_steps_taken_seconds: float
    restart_cpu_seconds: float
    memory_peak_bytes: int


class Service:
    """The coordinator process of one run directory; may be started again."""

    def __init__(self, directory: Path, nodes: int, spares: int) -> None:
        self.run = RunDirectory(directory)
        # This process answers for all agents, on cores that both share: give it time.
        settings = Settings(start_seconds=_LIMIT_SECONDS, connect_seconds=60, rejoin_seconds=120)
        self.run.create(
            RunInfo(
                run_id=secrets.token_hex(4),
                world_size=nodes * NPROC_PER_NODE,
                nodes=nodes,
                spares=spares,
                nproc_per_node=NPROC_PER_NODE,
                command=("-m", "deadpool_megatron.trainer"),
                settings=settings,
                segment_root="",
            )
        )
        create_secret(directory)
        # The standby of a spare, without its agent.
        self._command = (
            *(sys.executable, "-m", "deadpool_megatron", "standby", "--run-dir", str(directory)),
            *("--node-id", str(nodes + spares - 1), "--host", "127.0.0.1", "--port", "0"),
            *("--report-fd", "1"),
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._events = EventTail(self.run.events)
        self._times: dict[tuple[Kind, int], float] = {}

    def start(self) -> None:
        """A new process."""
        with open(self.run.path.with_suffix(".log"), "ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,  # its end would be that of the agent
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd=ROOT,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        # As its agent would say, which was in touch with the coordinator before it.
        self._process.stdin.write(b"found\nlost\n")
        self._process.stdin.flush()

    def end(self, number: int = signal.SIGKILL) -> None:
        """Signal the process, and wait until it has ended."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(_LIMIT_SECONDS)
            self._process = None

    def check(self) -> None:
        """Raises RuntimeError when the process has ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            text = self.run.path.with_suffix(".log").read_text()
            raise RuntimeError(f"the coordinator ended ({self._process.returncode}):\n{text}")

    def cpu_seconds(self) -> float:
        """User and system time of the process so far."""
        fields = self._status("stat").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def memory_peak_bytes(self) -> int:
        """The most that was ever resident."""
        (line,) = (one for one in self._status("status").splitlines() if one.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    def _status(self, name: str) -> str:
        self.check()
        assert self._process is not None
        return Path(f"/proc/{self._process.pid}/{name}").read_text()

    def opened_at(self, epoch: int) -> float | None:
        """When every role was counted as restored, by the wall clock; None: not yet."""
        return self._at(Kind.EPOCH_OPENED, epoch)

    def sent_at(self, epoch: int) -> float | None:
        """When the record was on its way to every agent, by the wall clock; None: not yet."""
        return self._at(Kind.EPOCH_DECIDED, epoch)

    def _at(self, kind: Kind, epoch: int) -> float | None:
        for event in self._events.poll():
            self._times.setdefault((event.kind, event.epoch), event.wall_seconds)
        return self._times.get((kind, epoch))

    def is_decided(self, epoch: int) -> bool:
        """Whether the record is in the journal."""
        return self._record(epoch).exists()

    def decided_at(self, epoch: int) -> float:
        """When the record was linked to its name, by the wall clock."""
        return self._record(epoch).stat().st_ctime

    def _record(self, epoch: int) -> Path:
        return self.run.journal / f"epoch-{epoch:08d}.json"


async def measure(size: int, seconds: float, directory: Path) -> Measured:
    """All of it for one number of nodes."""
    spares = max(2, size // _SPARE_SHARE)
    service = Service(directory, size - spares, spares)
    began = time.monotonic()
    service.start()
    try:
        return await _measure(service, size, spares, seconds, began)
    finally:
        service.end(signal.SIGKILL)


async def _measure(
    service: Service, size: int, spares: int, seconds: float, began: float
) -> Measured:
    settle_seconds = min(2.0, seconds)
    await until("the coordinator", lambda: service.check() or service.run.coordinator.exists(), 60)
    run_id = service.run.read_run().run_id
    secret = load_secret(service.run.path)
    cluster = Cluster(service.run.path, secret, run_id, (size - spares, spares, NPROC_PER_NODE))
    for agent in cluster.agents:
        agent.start()
    stepping = asyncio.create_task(_step(cluster))
    try:
        await _until(lambda: service.opened_at(1), "epoch 1")
        start_seconds, start_cpu = time.monotonic() - began, service.cpu_seconds()

        await asyncio.sleep(settle_seconds)  # what the start left in queues
        before, beats, at = service.cpu_seconds(), cluster.beats, time.monotonic()
        await asyncio.sleep(seconds)
        share = (service.cpu_seconds() - before) / (time.monotonic() - at)
        rate = (cluster.beats - beats) / (time.monotonic() - at)

        before, received, killed_at = service.cpu_seconds(), cluster.bytes_received, time.time()
        cluster.agents[3].kill()
        await _until(lambda: service.is_decided(2), "the decision")
        decided = service.cpu_seconds()
        await _until(lambda: cluster.moments.count("record", 2) == size - 1, "the second record")
        told_all, informed = service.cpu_seconds(), cluster.moments.last("record", 2)
        told = (cluster.bytes_received - received) / (size - 1)
        await _until(lambda: service.opened_at(2), "epoch 2")
        sent_at, open_at = service.sent_at(2), service.opened_at(2)
        assert sent_at is not None
        assert open_at is not None
        opened, memory = service.cpu_seconds(), service.memory_peak_bytes()

        await asyncio.sleep(settle_seconds)
        service.end()
        restarted = time.monotonic()
        service.start()
        await asyncio.sleep(0.1)
        await _until(lambda: all(a.welcomed for a in cluster.agents if a.alive), "all agents back")
        back = time.monotonic() - restarted
        # It leaves the epoch open: training goes on.
        caught_up = cluster.iteration + 2
        await _until(lambda: cluster.agents[0].acknowledged_step >= caught_up, "steps taken again")
        return Measured(
            agents=size,
            roles=cluster.world_size,
            start_seconds=start_seconds,
            start_cpu_seconds=start_cpu,
            beats_per_second=rate,
            beat_cpu_share=share,
            beat_cpu_microseconds_per_beat=1e6 * share / rate,
            beat_cpu_share_per_1000_agents=1000 * share / size,
            loss_to_decision_seconds=service.decided_at(2) - killed_at,
            decision_to_sent_seconds=sent_at - service.decided_at(2),
            decision_to_informed_seconds=informed - service.decided_at(2),
            informed_to_open_seconds=open_at - informed,
            loss_to_decision_cpu_seconds=decided - before,
            decision_to_informed_cpu_seconds=told_all - decided,
            informed_to_open_cpu_seconds=opened - told_all,
            told_bytes_per_agent=told,
            restart_to_all_back_seconds=back,
            restart_to_steps_taken_seconds=time.monotonic() - restarted,
            restart_cpu_seconds=service.cpu_seconds(),
            memory_peak_bytes=max(memory, service.memory_peak_bytes()),
        )
    finally:
        stepping.cancel()
        for agent in cluster.agents:
            agent.kill()


async def _until(ready: Callable[[], object], what: str) -> None:
    began = time.monotonic()
    await until(what, ready, _LIMIT_SECONDS)
    print(f"  {what}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


async def _step(cluster: Cluster) -> None:
    """One role reports a step each second, as training would."""
    while True:
        await asyncio.sleep(_STEP_SECONDS)
        if cluster.record is not None:
            cluster.iteration += 1
            cluster.agents[0].step(cluster.iteration)


def allow_files(agents: int) -> str:
    """Raise the limit of open files as far as needed; answers why it cannot be, or nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = agents + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < wanted:
        return (
            f"{agents} agents need {wanted} open files, the hard limit is {hard}:"
            f" raise it (ulimit -Hn {wanted}) or give a smaller --agents"
        )
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return ""


def show(results: list[Measured]) -> None:
    """A table: one line for each figure, one column for each size."""
    rows = [asdict(one) for one in results]
    for name in rows[0]:
        values = "".join(f"{row[name]:>14.4g}" for row in rows)
        print(f"{name:<34}{values}")


def main() -> int:
    """See the module text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = (64, 256, 1024, 4096)
    parser.add_argument("--agents", type=int, nargs="+", default=sizes, metavar="N")
    parser.add_argument(
        "--seconds", type=float, default=10.0, metavar="N", help="how long beats are measured"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    args = parser.parse_args()
    if min(args.agents) < 8:
        parser.error("--agents: 8 is the smallest cluster with two spares that is of any interest")
    if problem := allow_files(max(args.agents)):
        print(f"coordinator.py: {problem}", file=sys.stderr)
        return 2
    facts = machine_facts()
    results: list[Measured] = []
    for size in args.agents:
        with tempfile.TemporaryDirectory(prefix="deadpool-bench-") as directory:
            print(f"{size} agents ...", file=sys.stderr, flush=True)
            results.append(asyncio.run(measure(size, args.seconds, Path(directory) / "run")))
    show(results)
    if args.json is not None:
        write_facts(args.json, {**facts, "sizes": [asdict(one) for one in results]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
