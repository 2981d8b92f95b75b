"""A run on hosts of its own: one ``deadpool agent`` each, on a run directory that all share."""

from __future__ import annotations

import itertools
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deadpool_megatron.cluster.journal.journal import Journal
from deadpool_megatron.cluster.journal.terms import Term, newest_term
from deadpool_megatron.cluster.run_directory.directory import read_json
from deadpool_megatron.events import Event, Kind, read_events
from tests.cluster.runs import ObservedRun
from tests.common.finished_run import read_final
from tests.common.wait import wait_for
from tests.netns.lab.hosts import Host, Hosts

COUNTING_MEMBER = str(Path(__file__).parents[2] / "cluster" / "counting_member.py")
_ROOT = Path(__file__).parents[3]
# Deadlines are for hangs only: no test waits this long to pass.
MAX_WAIT_SECONDS = 90.0
# Notes a row ``fault | what happened`` for the end of the session.
Measured = Callable[[str, str], None]


@dataclass(frozen=True)
class Job:
    """The run of a cluster. ``command``: after the ``--``, ``settings``: flags before it."""

    command: tuple[str, ...]
    nodes: int
    spares: int
    settings: tuple[str, ...] = ()
    preload: str | None = None


class Obituary:
    """The end of a process, which the kernel reports at once, with its time."""

    def __init__(self, pid: int) -> None:
        self.wall_seconds: float | None = None
        self._handle = os.pidfd_open(pid)
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        select.select([self._handle], [], [], MAX_WAIT_SECONDS)
        self.wall_seconds = time.time()
        os.close(self._handle)


class Cluster(ObservedRun):
    """A context manager; the hosts end the processes. Node i is started on host i."""

    def __init__(
        self,
        hosts: Hosts,
        directory: Path,
        job: Job,
        faults: Sequence[dict[str, Any]] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.hosts = hosts
        super().__init__(directory, job.nodes, faults)
        self.job = job
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self._environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("DEADPOOL_") or name == "DEADPOOL_TEST_SESSION"
        }
        self._environment |= {"PYTHONPATH": str(_ROOT), **(environment or {}), **self.extra}

    def __enter__(self) -> Cluster:
        for node in range(self.job.nodes + self.job.spares):
            self.start(node)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.show()

    def start(self, node: int, *flags: str) -> None:
        """Start the agent of a node on its host."""
        job, host = self.job, self.hosts[node]
        size = ("--nodes", str(job.nodes), "--spares", str(job.spares), "--nproc-per-node", "1")
        preload = () if job.preload is None else ("--preload", job.preload)
        self.agents[node] = host.start(
            [
                *(sys.executable, "-m", "deadpool_megatron", "agent"),
                *("--run-dir", str(self.run.path), "--node-id", str(node), "--host", host.address),
                *(*size, *preload, *flags, *job.settings, "--", *job.command),
            ],
            self._output(node),
            self._environment,
        )

    def _output(self, node: int) -> Path:
        return self.run.path.with_name(f"{self.run.path.name}-agent{node}.out")

    def output(self, node: int) -> str:
        """Return the output of a node's agent."""
        return self._output(node).read_text(errors="replace")

    def show(self) -> None:
        """Print what a failed test needs to be understood."""
        self.print_facts(self.run.path.parent.glob(f"{self.run.path.name}-agent*.out"))

    # The state so far.

    def events(self, *kinds: Kind) -> list[Event]:
        """Events of all coordinators, by time."""
        found = sorted(read_events(self.run.events), key=lambda event: event.wall_seconds)
        return [event for event in found if not kinds or event.kind in kinds]

    def happened(self, kind: Kind, since: float) -> list[Event]:
        """Events of a kind after a moment of the wall clock."""
        return [event for event in self.events(kind) if event.wall_seconds >= since]

    def longest_pause(self, since: float) -> float:
        """Longest time between two finished iterations from about a moment on, in seconds."""
        times = [e.wall_seconds for e in self.events(Kind.STEP) if e.wall_seconds > since - 1]
        return max(later - earlier for earlier, later in itertools.pairwise(times))

    def epoch(self) -> int:
        """Number of the newest record."""
        return max((e.epoch for e in self.events(Kind.EPOCH_OPENED)), default=0)

    def term(self) -> Term:
        """Return the current coordinator, by the journal."""
        found = newest_term(Journal(self.run.journal))
        assert found is not None, "nobody has coordinated yet"
        return found

    def coordinator_host(self) -> Host:
        """Where the newest coordinator runs."""
        (host,) = [host for host in self.hosts if host.name == self.term().hostname]
        return host

    def coordinator_pid(self) -> int:
        """Its process number here."""
        return self.coordinator_host().processes()[self.term().pid]

    def members(self, node: int) -> list[int]:
        """Process numbers here of a node's members."""
        inside = self.hosts[node].processes()
        listing = read_json(self.run.node(node))
        return [inside[int(pid)] for pid in listing["members"].values()]

    def members_of_all(self) -> list[int]:
        """Those of all nodes that train."""
        return [pid for node in range(self.job.nodes) for pid in self.members(node)]

    def lost_in_time(self, node: int, fault: Callable[[], None]) -> tuple[float, str]:
        """A fault comes over a node: its member has ended before others are to play its role.

        Returns when it came, and what was measured.
        """
        (member,) = [Obituary(pid) for pid in self.members(node)]
        fault()
        began = time.time()
        # Another node, which was off before, may be given up now, too.
        lost = self.wait_for(
            f"the loss of node {node}",
            lambda: next((e for e in self.happened(Kind.NODE_LOST, began) if e.node == node), None),
        )
        decided = self.wait_event(Kind.EPOCH_DECIDED, since=began)
        assert member.wall_seconds is not None, "its member still runs"
        assert member.wall_seconds < lost.wall_seconds < decided.wall_seconds
        opened = self.wait_event(Kind.EPOCH_OPENED, since=decided.wall_seconds)
        return began, (
            f"members dead after {member.wall_seconds - began:.1f} s, taken for lost after"
            f" {lost.wall_seconds - began:.1f} s, training after"
            f" {opened.wall_seconds - began:.1f} s"
        )

    def comes_back(self, mend: Callable[[], None]) -> tuple[Event, str]:
        """A node that was lost joins again once its fault is mended; and what was measured."""
        mend()
        mended = time.time()
        joined = self.wait_event(Kind.NODE_JOINED, since=mended)
        return joined, f"; a spare again {joined.wall_seconds - mended:.1f} s after the mend"

    # Waiting.

    def wait_for(self, condition: str, ready: Callable[[], Any]) -> Any:
        """Poll until ``ready()`` is true; fail when the patience is over or the run is."""

        def over() -> str:
            if self.run.final.exists():
                return "the run ended"
            return "" if any(a.poll() is None for a in self.agents.values()) else "no agent is left"

        return wait_for(condition, ready, MAX_WAIT_SECONDS, over)

    def wait_progress(self, steps: int = 1) -> int:
        """Wait until this number of further iterations was reported; return the newest."""
        wanted = self.newest_iteration() + steps
        self.wait_iteration(wanted)
        return self.newest_iteration()

    def wait_event(self, kind: Kind, since: float = 0.0, count: int = 1) -> Event:
        """Until the ``count``-th event of a kind after a moment of the wall clock."""
        found = self.wait_for(
            f"{count} x {kind}",
            lambda: (events := self.happened(kind, since))[count - 1 :] and events,
        )
        return found[count - 1]

    def wait_term(self, number: int) -> Event:
        """Wait until the coordinator of this term or a later term reports that it coordinates."""
        found: list[Event] = self.wait_for(
            f"a coordinator of term {number}",
            lambda: [e for e in self.events(Kind.COORDINATOR) if e.data["term"] >= number],
        )
        return found[0]

    def wait_end(self) -> dict[str, Any]:
        """Until the run is over, every agent has ended and no host has anything of it left."""
        wait_for("the end of the run", self.run.final.exists, MAX_WAIT_SECONDS)
        wait_for("what is left of it to go", lambda: not self._left(), MAX_WAIT_SECONDS)
        return read_final(self.run.path)

    def _left(self) -> list[str]:
        """Return the processes on the hosts other than the two that make a host."""
        return [
            f"{host.name}: {' '.join(names)}"
            for host in self.hosts
            if host.is_on and len(names := host.running()) > 2
        ]

    def wait_over(self) -> None:
        self.wait_end()


@contextmanager
def counting(
    directory: Path, settings: tuple[str, ...] = (), nodes: int = 2, spares: int = 2
) -> Iterator[Cluster]:
    """Counting members that have begun, on nodes all of which have joined."""
    job = Job((COUNTING_MEMBER, "--step-seconds", "0.05"), nodes, spares, settings, "")
    with (
        Hosts(nodes + spares, directory) as hosts,
        Cluster(hosts, directory / "run", job) as cluster,
    ):
        cluster.wait_progress(5)
        # A spare that joined late is in no record yet, so its loss would not be noticed.
        cluster.wait_event(Kind.NODE_JOINED, count=nodes + spares)
        yield cluster
