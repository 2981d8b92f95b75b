"""How much load does a single coordinator carry, and how fast does it decide?

The real process, with thousands of simulated agents (8 roles each) over loopback. For each size all
agents join, and beat for a while; a node dies and a spare takes its roles; the coordinator is
killed, and its standby takes over. The agents share this process and cost it more than they cost
the coordinator: read processor time first, the times by the wall clock are upper bounds.

  own_cpu_seconds_*        of the coordinator: until epoch 1 is open; in a second of beats; from a
                           loss to the durable record; from there until the last agent has it; of
                           the next coordinator until it takes new steps, as a standby included
  beats_per_second         of all agents together; a step is reported each second
  start_seconds            until epoch 1 is open
  loss_to_decision_seconds    from the end of a node's connection to the durable record
  decision_to_informed_seconds, informed_to_open_seconds    then until the last agent has taken the
                           record, and until every role was counted as restored
  told_bytes_per_agent     from the loss until all are informed
  takeover_*_seconds       from SIGKILL until the next coordinator welcomes an agent; until all
                           agents are back and it can decide; until it has taken new steps
  event_bytes_per_day      512 roles, 8 s steps, every role waits at every gate (sizes up to that)
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common.figures import row
from common.frame import BenchError, Facts, UsageError, at_least
from control_plane.agents import Cluster, received
from control_plane.service import Service

from deadpool_megatron.cluster.process import posix
from deadpool_megatron.events import Kind
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire.auth import load_secret

MINUTES = 15
ROUNDS = 1
QUICK = ("--agents", "16", "--seconds", "0.5")
NPROC_PER_NODE = 8
_SPARE_SHARE = 64  # nodes for each spare
_LIMIT_SECONDS = 300.0
_STEP_SECONDS = 1.0
# A run of the size and pace for which there is a limit on what it writes.
_EVENT_ROLES = 512
_EVENT_STEP_SECONDS = 8.0
_DAY_SECONDS = 86400.0
_MIN_IN_TOUCH = 0.98


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this case."""
    count, sizes = at_least(8), (66, 256, 1024, 4096)
    parser.add_argument("--agents", type=count, nargs="+", default=sizes, metavar="N")
    seconds = {"type": float, "default": 10.0, "metavar": "N"}
    parser.add_argument("--seconds", help="how long beats are measured", **seconds)


def measure(args: argparse.Namespace, base: Path) -> Facts:
    """Run all sizes, one after the other."""
    if complaint := posix.raise_limit(posix.needed_by_coordinator(max(args.agents))):
        raise UsageError(complaint)
    rows = []
    for size in args.agents:
        found = []
        for _ in range(args.rounds):
            print(f"{size} agents ...", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(dir=base) as directory:
                found.append(asyncio.run(Trial(size, args.seconds, Path(directory) / "run").run()))
        rows.append(
            row("coordinator", {name: [f[name] for f in found] for name in found[0]}, at=size)
        )
    return {"at": "agents", "roles_per_agent": NPROC_PER_NODE, "rows": rows}


class Trial:
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
        self._step_seconds = _STEP_SECONDS
        self._found: dict[str, float] = {}

    async def run(self) -> dict[str, float]:
        """Run all phases; return the figures."""
        stepping = asyncio.create_task(self._step())
        try:
            await self._start()
            await self._beats()
            if self._cluster.world_size <= _EVENT_ROLES:
                await self._events()
            self._service.await_next()
            await self._lose_a_node(1)
            await self._take_over()
        finally:
            stepping.cancel()
            for agent in self._cluster.agents:
                agent.kill()
            self._cluster.listener.close()
            self._service.close()
        first = {name: v for name, v in self._found.items() if name.startswith("own_cpu")}
        return first | self._found

    async def _until(self, ready: Callable[[], object], condition: str) -> None:
        began = time.monotonic()
        while not ready():
            self._service.check()
            if time.monotonic() > began + _LIMIT_SECONDS:
                raise BenchError(f"{self._size} agents: waited for {condition}")
            await asyncio.sleep(0.02)
        print(f"  {condition}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)

    def _news(self) -> Service:
        """Return the service after it has read the newest events."""
        self._service.at(Kind.EPOCH_OPENED, 0)
        return self._service

    async def _settle(self) -> None:
        """Wait until the queues are empty, and nearly all agents have contact: on a busy machine a
        few never have."""
        await asyncio.sleep(min(2.0, self._seconds))
        agents = self._cluster.agents
        enough = _MIN_IN_TOUCH * (self._size - 1)
        await self._until(lambda: sum(a.in_touch for a in agents) >= enough, "in touch")

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
        service, began = self._service, time.monotonic()
        service.start()
        await self._until(lambda: service.run.coordinator.exists(), "the coordinator")
        for agent in self._cluster.agents:
            agent.start()
        await self._until(lambda: service.at(Kind.EPOCH_OPENED, 1), "epoch 1")
        self._found["own_cpu_seconds_start"] = service.cpu_seconds()
        self._found["start_seconds"] = time.monotonic() - began

    async def _beats(self) -> None:
        await self._settle()
        cluster, service = self._cluster, self._service
        before, beats, began = service.cpu_seconds(), cluster.beats, time.monotonic()
        await asyncio.sleep(self._seconds)
        seconds = time.monotonic() - began
        self._found["own_cpu_seconds_second_of_beats"] = (service.cpu_seconds() - before) / seconds
        self._found["beats_per_second"] = (cluster.beats - beats) / seconds

    async def _events(self) -> None:
        """Count the events of whole steps and of whole periods of joint reports."""
        await self._settle()
        self._step_seconds, seconds = _EVENT_STEP_SECONDS, 16 * self._seconds
        before = self._service.event_bytes()
        await asyncio.sleep(seconds)
        # Fewer nodes than the full size, in proportion.
        per_second = (self._service.event_bytes() - before) / seconds
        share = _DAY_SECONDS * _EVENT_ROLES / self._cluster.world_size
        self._found["event_bytes_per_day"] = per_second * share
        self._step_seconds = _STEP_SECONDS

    async def _lose_a_node(self, epoch: int) -> None:
        service, cluster, others = self._service, self._cluster, self._size - 1
        await self._settle()
        cluster.prepare()
        await self._settle()
        before, nbytes, killed_at = service.cpu_seconds(), received["bytes"], time.time()
        cluster.agents[3].kill()
        await self._until(lambda: service.is_decided(epoch + 1), "the decision")
        decided, informed = service.cpu_seconds(), ("record", epoch + 1)
        await self._until(lambda: cluster.counts[informed] >= others, "the next record")
        cpu, nbytes = service.cpu_seconds() - decided, received["bytes"] - nbytes
        await self._until(lambda: service.at(Kind.EPOCH_OPENED, epoch + 1), "the next epoch")
        last, decided_at = cluster.at[informed][1], service.decided_at(epoch + 1)
        self._found |= {
            "own_cpu_seconds_loss_to_decision": decided - before,
            "own_cpu_seconds_decision_to_informed": cpu,
            "loss_to_decision_seconds": decided_at - killed_at,
            "decision_to_informed_seconds": last - decided_at,
            "informed_to_open_seconds": (service.at(Kind.EPOCH_OPENED, epoch + 1) or 0.0) - last,
            "told_bytes_per_agent": nbytes / others,
            "memory_peak_bytes": service.memory_peak_bytes(),
        }

    async def _take_over(self) -> None:
        service, cluster = self._service, self._cluster
        term = max(number for kind, number in cluster.at if kind == "welcome")
        backs, killed_at = len(service.all_back_at), service.end()

        await self._until(lambda: len(self._news().all_back_at) > backs, "all agents back")
        # It leaves the epoch open: training continues.
        caught_up = cluster.iteration + 2
        await self._until(lambda: self._news().newest_step >= caught_up, "steps taken again")
        self._found |= {
            "own_cpu_seconds_takeover": service.cpu_seconds(),
            "takeover_seconds": cluster.at["welcome", term + 1][0] - killed_at,
            "takeover_to_decision_seconds": service.all_back_at[-1] - killed_at,
            "takeover_to_steps_seconds": time.time() - killed_at,
        }
