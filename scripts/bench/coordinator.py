"""The load of a single coordinator: the real process, with thousands of simulated agents.

    .venv/bin/python scripts/bench/coordinator.py [--agents N ...] [--seconds N] [--json FILE]

For each size: all agents join and start 8 members each, and beat for a while. Then the run gets the
journal of a long life (10,000 epochs, 2,000,000 events, thousands of lost nodes), with which the
rest happens: a node dies and a spare takes its roles; the coordinator is stopped until all agents
open second connections; it is killed, and its standby takes over. Meanwhile a standby of each node
reads the journal. The agents share this process and cost it more than they cost the coordinator, so
CPU time is reported as well as times by the wall clock.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common.machine import machine_facts, write_facts
from common.termination import orderly_termination
from control_plane import long_life
from control_plane.agents import Cluster
from control_plane.moments import until
from control_plane.service import Service

from deadpool_megatron.cluster.link.message_limits import contact_seconds
from deadpool_megatron.events import Kind, term_file
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire.auth import load_secret

NPROC_PER_NODE = 8
_SPARE_SHARE = 64  # nodes for each spare
_LIMIT_SECONDS = 300.0
_STEP_SECONDS = 1.0
# A run of the size and pace for which there is a limit on what it writes.
_EVENT_ROLES = 512
_EVENT_STEP_SECONDS = 8.0
_DAY_SECONDS = 86400.0
_MOSTLY = 0.98
# Other than a connection for each agent: files of the coordinator, of this process, a margin.
_OTHER_FILES = 256


@dataclass
class Found:
    """The result of a size, with the figures of :data:`MEANINGS`. ``blocks``: by phase."""

    figures: dict[str, float] = field(default_factory=dict)
    blocks: dict[str, dict[str, Any]] = field(default_factory=dict)


MEANINGS = {
    "start_seconds": "until epoch 1 is open",
    "start_cpu_seconds": "of the coordinator",
    "beats_per_second": "all agents together, a step is reported each second",
    "beat_cpu_share": "CPU seconds of the coordinator per second meanwhile",
    "beat_cpu_microseconds_per_beat": "",
    "standby_looks_per_second": "into the journal, by the standbys of all nodes",
    "standby_look_microseconds": "CPU time of one look, in a run that has grown old",
    "event_bytes_per_hour": "512 roles, 8 s steps, every role waits at every gate",
    "event_bytes_per_day": "",
    "loss_to_decision_seconds": "from the end of a node's connection to the durable record",
    "loss_to_decision_cpu_seconds": "of the coordinator, beats included",
    "loss_to_decision_simulator_cpu_seconds": "of this process, which plays all agents",
    "decision_to_informed_seconds": "from there until the last agent has taken the record",
    "decision_to_informed_cpu_seconds": "of the coordinator",
    "informed_to_open_seconds": "until every role was counted as restored",
    "told_bytes_per_agent": "from the loss until all are informed",
    "stall_seconds": "for which the coordinator was stopped",
    "stall_second_connections": "opened by agents meanwhile and after it",
    "stall_to_quiet_seconds": "from its end until the agents are in touch again",
    "stall_cpu_seconds": "of the coordinator until then",
    "takeover_seconds": "from SIGKILL until the next coordinator welcomes an agent",
    "takeover_to_decision_seconds": "until all agents are back, and it can decide",
    "takeover_to_steps_seconds": "until it has taken new steps",
    "takeover_cpu_seconds": "of the next coordinator until then, its time as a standby included",
    "memory_peak_bytes": "the most that was resident in either",
}


class Bench:
    """One size, from the first coordinator to the last."""

    def __init__(self, size: int, seconds: float, directory: Path) -> None:
        self._size, self._seconds = size, seconds
        spares = max(2, size // _SPARE_SHARE)
        # Long limits: this process answers for all agents, on cores that it shares.
        settings = Settings(start_seconds=_LIMIT_SECONDS, connect_seconds=60, rejoin_seconds=120)
        nodes = size - spares
        self._service = Service(directory, nodes, spares, NPROC_PER_NODE, settings)
        secret, run_id = load_secret(directory), self._service.run.read_run().run_id
        shape = (nodes, spares, NPROC_PER_NODE)
        self._cluster = Cluster(directory, secret, run_id, settings, shape)
        self._standbys = long_life.Standbys(self._service.run.journal, size, settings)
        self._step_seconds = _STEP_SECONDS
        self._found = Found()
        self._note(agents=size, roles=self._cluster.world_size)

    async def run(self) -> Found:
        """Run all phases."""
        self._standbys.start()
        stepping = asyncio.create_task(self._step())
        try:
            await self._start()
            await self._beats()
            if self._cluster.world_size <= _EVENT_ROLES:
                await self._events()
            epoch = await self._grow_old()
            await self._lose_a_node(epoch)
            await self._stall()
            await self._take_over()
        finally:
            stepping.cancel()
            self._standbys.close()
            for agent in self._cluster.agents:
                agent.kill()
            self._service.close()
        return self._found

    def _note(self, **figures: float) -> None:
        self._found.figures |= figures

    def _note_block(self, phase: str, since: float, until: float | None = None) -> None:
        self._found.blocks[phase] = asdict(self._service.block(since, until))

    async def _until(self, ready: Callable[[], object], condition: str) -> None:
        began = time.monotonic()

        def checked() -> object:
            self._service.check()
            return ready()

        await until(condition, checked, _LIMIT_SECONDS)
        print(f"  {condition}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)

    async def _settle(self) -> None:
        """Wait until the queues are empty."""
        await asyncio.sleep(min(2.0, self._seconds))
        await self._until(self._in_touch, "in touch")

    def _in_touch(self) -> bool:
        """Return whether nearly all agents have contact; on a busy machine a few never have."""
        alive = [agent.in_touch for agent in self._cluster.agents if agent.alive]
        return sum(alive) >= _MOSTLY * len(alive)

    async def _step(self) -> None:
        """Report steps of one role, as training would."""
        cluster = self._cluster
        while True:
            await asyncio.sleep(self._step_seconds)
            if cluster.record is not None:
                cluster.iteration += 1
                cluster.agents[0].step(cluster.iteration)
                if self._step_seconds == _EVENT_STEP_SECONDS:
                    for agent in cluster.agents:
                        agent.report_routine(cluster.iteration)

    async def _start(self) -> None:
        service, began, at = self._service, time.monotonic(), time.time()
        service.start()
        await self._until(lambda: service.run.coordinator.exists(), "the coordinator")
        for agent in self._cluster.agents:
            agent.start()
        await self._until(lambda: service.at(Kind.EPOCH_OPENED, 1), "epoch 1")
        self._note(start_seconds=time.monotonic() - began, start_cpu_seconds=service.cpu_seconds())
        self._note_block("start", at)

    async def _beats(self) -> None:
        await self._settle()
        cluster, at = self._cluster, time.time()
        before, beats, began = self._service.cpu_seconds(), cluster.beats, time.monotonic()
        await asyncio.sleep(self._seconds)
        seconds = time.monotonic() - began
        share = (self._service.cpu_seconds() - before) / seconds
        rate = (cluster.beats - beats) / seconds
        self._note(
            beats_per_second=rate,
            beat_cpu_share=share,
            beat_cpu_microseconds_per_beat=1e6 * share / rate,
        )
        self._note_block("beats", at)

    async def _events(self) -> None:
        """Count the events of whole steps and of whole periods of joint reports."""
        self._step_seconds, seconds = _EVENT_STEP_SECONDS, 16 * self._seconds
        before = self._service.event_bytes()
        await asyncio.sleep(seconds)
        nbytes = self._service.event_bytes() - before
        # Fewer nodes than the full size, in proportion.
        a_day = nbytes / seconds * _DAY_SECONDS * _EVENT_ROLES / self._cluster.world_size
        self._note(event_bytes_per_hour=a_day / 24, event_bytes_per_day=a_day)
        self._step_seconds = _STEP_SECONDS

    async def _grow_old(self) -> int:
        """Age the journal without a coordinator; all agents join the next coordinator."""
        service, run = self._service, self._service.run
        self._standbys.lost = True
        service.end()
        epoch = await asyncio.to_thread(long_life.age, run.journal, run.events)
        service.pass_over(term_file(run.events, 1, 2))
        at = time.time()
        service.start()
        await self._until(lambda: service.at(Kind.EPOCH_OPENED, epoch), f"epoch {epoch} continues")
        self._note_block("takeover with a record that is news", at)
        self._standbys.lost = False
        service.await_next()
        await self._settle()
        standbys = self._standbys
        count, cpu, began = standbys.count, standbys.cpu_seconds, time.monotonic()
        await asyncio.sleep(self._seconds)
        looks = standbys.count - count
        self._note(
            standby_looks_per_second=looks / (time.monotonic() - began),
            standby_look_microseconds=1e6 * (standbys.cpu_seconds - cpu) / looks,
        )
        return epoch

    async def _lose_a_node(self, epoch: int) -> None:
        service, cluster = self._service, self._cluster
        await cluster.prepare()
        await self._settle()
        before, own, received = service.cpu_seconds(), time.process_time(), cluster.received_bytes
        killed_at = time.time()
        cluster.agents[3].kill()
        await self._until(lambda: service.is_decided(epoch + 1), "the decision")
        decided, own = service.cpu_seconds(), time.process_time() - own
        others = self._size - 1
        count = cluster.moments.count
        await self._until(lambda: count("record", epoch + 1) >= others, "the next record")
        all_cpu, informed = service.cpu_seconds(), cluster.moments.last("record", epoch + 1)
        received_each = (cluster.received_bytes - received) / others
        await self._until(lambda: service.at(Kind.EPOCH_OPENED, epoch + 1), "the next epoch")
        open_at = service.at(Kind.EPOCH_OPENED, epoch + 1)
        assert open_at is not None
        self._note(
            loss_to_decision_seconds=service.decided_at(epoch + 1) - killed_at,
            loss_to_decision_cpu_seconds=decided - before,
            loss_to_decision_simulator_cpu_seconds=own,
            decision_to_informed_seconds=informed - service.decided_at(epoch + 1),
            decision_to_informed_cpu_seconds=all_cpu - decided,
            informed_to_open_seconds=open_at - informed,
            told_bytes_per_agent=received_each,
            memory_peak_bytes=service.memory_peak_bytes(),
        )
        self._note_block("loss of a node", killed_at)

    async def _stall(self) -> None:
        """Stop the coordinator for longer than agents trust a silent connection, and less than
        until they fence themselves."""
        await self._settle()
        service, cluster = self._service, self._cluster
        beat = cluster.agents[0].beat_seconds
        stall = 1.5 * contact_seconds(beat, cluster.settings) + beat
        before, cpu = cluster.second_connections, service.cpu_seconds()
        service.send(signal.SIGSTOP)
        await asyncio.sleep(stall)
        service.send(signal.SIGCONT)
        at, began = time.time(), time.monotonic()
        await self._until(self._in_touch, "in touch again")
        self._note(
            stall_seconds=stall,
            stall_to_quiet_seconds=time.monotonic() - began,
            stall_cpu_seconds=service.cpu_seconds() - cpu,
        )
        await self._settle()
        self._note(stall_second_connections=cluster.second_connections - before)
        self._note_block("second connections", at)

    async def _take_over(self) -> None:
        service, cluster = self._service, self._cluster
        term, backs = cluster.term, len(service.all_back_at)
        killed_at = service.end()
        self._standbys.lost = True

        def is_back() -> bool:
            service.at(Kind.EPOCH_OPENED, 0)
            return len(service.all_back_at) > backs

        await self._until(is_back, "all agents back")
        # It leaves the epoch open: training continues.
        caught_up = cluster.iteration + 2
        await self._until(
            lambda: cluster.agents[0].acknowledged_step >= caught_up, "steps taken again"
        )
        self._note(
            takeover_seconds=cluster.moments.first("welcome", term + 1) - killed_at,
            takeover_to_decision_seconds=service.all_back_at[-1] - killed_at,
            takeover_to_steps_seconds=time.time() - killed_at,
            takeover_cpu_seconds=service.cpu_seconds(),
            memory_peak_bytes=max(
                self._found.figures["memory_peak_bytes"], service.memory_peak_bytes()
            ),
        )
        self._note_block("takeover", killed_at)


def allow_files(agents: int) -> str:
    """Raise the limit of open files as far as needed. Returns the reason if it cannot be raised."""
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


def show(results: list[Found]) -> None:
    """Print a table: a line for each figure, a column for each size."""
    for name in ("agents", "roles", *MEANINGS):
        values = "".join(f"{result.figures.get(name, float('nan')):>12.4g}" for result in results)
        print(f"{name:<40}{values}  {MEANINGS.get(name, '')}")
    for result in results:
        for phase, block in result.blocks.items():
            print(f"{result.figures['agents']} agents, {phase}: {block}")


@orderly_termination()
def main() -> int:
    """See the module text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = (66, 256, 1024, 4096)
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
    results: list[Found] = []
    for size in args.agents:
        with tempfile.TemporaryDirectory(prefix="deadpool-bench-") as directory:
            print(f"{size} agents ...", file=sys.stderr, flush=True)
            results.append(asyncio.run(Bench(size, args.seconds, Path(directory) / "run").run()))
    show(results)
    if args.json is not None:
        sizes = [{**result.figures, "blocks": result.blocks} for result in results]
        write_facts(args.json, {**facts, "meanings": MEANINGS, "sizes": sizes})
    return 0


if __name__ == "__main__":
    sys.exit(main())
