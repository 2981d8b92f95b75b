"""A run as metrics: from its events, and from what its coordinator says right now.

Names follow Prometheus' conventions: base units, ``_total`` for counters. Labels are few: kinds,
phases, uses, states, and the node where memory is meant. Pure but for the classes of
``prometheus_client``.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from deadpool_megatron.cluster.coordinator.reporting.accounting import Account
from deadpool_megatron.cluster.failures import FailureKind
from deadpool_megatron.cluster.machine.state.recoveries import PHASES
from deadpool_megatron.events import DAMAGE, Event, Kind

#: upper bounds of the histogram of recoveries, in seconds
RECOVERY_BUCKETS = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
# The pace of training is that of so many steps.
_STEPS = 50


class Samples:
    """Feed it with events in their order, then ask for :meth:`metrics`. Not thread-safe."""

    def __init__(self, run_id: str, version: str) -> None:
        self._about = (run_id, version)
        self.account = Account()
        self._iteration = 0
        self._epoch = 0
        self._term = 1
        self._loss: float | None = None
        self._started_at: float | None = None
        self._last_step_at: float | None = None
        self._pace_since: float | None = None
        self._steps: deque[float] = deque(maxlen=_STEPS)
        # There from the start: a series that begins at 1 has no increase that a server could see.
        self._recoveries: dict[str, list[float]] = {str(kind): [] for kind in FailureKind}
        self._phases: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._recomputed = 0
        self._gate_seconds = 0.0
        self._shipped = 0
        self._checkpoint: int | None = None
        self._ended: int | None = None

    def add(self, event: Event) -> None:
        """Take in one event. Raises LookupError, TypeError or ValueError for a damaged one."""
        self.account.add(event)
        self._epoch = max(self._epoch, event.epoch)
        data = event.data
        match event.kind:
            case Kind.RUN_STARTED:
                self._started_at = event.wall_seconds
            case Kind.NODE_JOINED if self._ended is not None:
                # The run goes on from what it had saved.
                self._started_at, self._ended = event.wall_seconds, None
            case Kind.STEP if event.iteration is not None:
                self._add_step(event)
            case Kind.EPOCH_CLOSED:
                self._pace_since = None  # what lies between is no step
                if data.get("kind") == FailureKind.RESTART:
                    self._started_at = event.wall_seconds
            case Kind.EPOCH_DECIDED if "forgotten_from" in data:
                self._iteration = min(self._iteration, int(data["forgotten_from"]) - 1)
            case Kind.RECOVERED:
                kind = str(data.get("kind", "")) or "unknown"
                self._recoveries.setdefault(kind, []).append(float(data.get("seconds") or 0.0))
                self._recomputed += int(data.get("steps_recomputed") or 0)
                for phase, seconds in data.get("phases", {}).items():
                    self._phases[str(phase)] = self._phases.get(str(phase), 0.0) + float(seconds)
            case Kind.COMMITTED:
                self._shipped += int(data.get("bytes", 0))
            case Kind.GATE_WAIT if data.get("over"):
                self._gate_seconds += float(data.get("seconds", 0.0))
            case Kind.DURABLE:
                self._checkpoint = event.iteration
            case Kind.COORDINATOR:
                self._term = int(data.get("term", 1))
            case Kind.RUN_ENDED:
                self._ended = int(data["exit_status"])
            case _:
                pass

    def _add_step(self, event: Event) -> None:
        if self._pace_since is not None and event.wall_seconds > self._pace_since:
            self._steps.append(event.wall_seconds - self._pace_since)
        self._last_step_at = self._pace_since = event.wall_seconds
        self._iteration = max(self._iteration, event.iteration or 0)
        loss = event.data.get("loss")
        self._loss = None if loss is None else float.fromhex(loss)

    def metrics(self, status: Mapping[str, Any] | None, now: float) -> Iterator[Metric]:
        """Yield all metrics. ``status``: what ``deadpool status --json`` says, None if nobody
        answers; ``now``: wall clock."""
        yield _gauge("run_info", "The run.", 1, run=self._about[0], version=self._about[1])
        yield _gauge("up", "Whether the coordinator answers.", int(status is not None))
        yield _gauge("coordinator_term", "Term of the coordinator.", self._term)
        if self._ended is not None:
            yield _gauge("exit_status", "Exit status of the run that has ended.", self._ended)
        yield _gauge("iteration", "The newest finished iteration.", self._iteration)
        yield _gauge("epoch", "The newest epoch.", self._epoch)
        if self._loss is not None:
            yield _gauge("loss", "Loss of the newest finished iteration.", self._loss)
        if self._started_at is not None:
            text = "When the run was started, the last time."
            yield _gauge("start_timestamp_seconds", text, self._started_at)
        if self._last_step_at is not None:
            text = "When the newest iteration was finished."
            yield _gauge("last_step_timestamp_seconds", text, self._last_step_at)
        if self._steps:
            text = f"Median time of the last {_STEPS} iterations."
            yield _gauge("step_seconds", text, statistics.median(self._steps))
        if self._checkpoint is not None:
            yield _gauge("checkpoint_iteration", "The newest durable one.", self._checkpoint)
        yield from self._counters()
        # Where nobody answers, nobody knows what nodes do since the newest event.
        yield from self._times(None if status is None else now)
        if status is not None:
            with contextlib.suppress(*DAMAGE):  # of a coordinator of another version
                yield from list(_of_status(status))

    def _counters(self) -> Iterator[Metric]:
        text = "Recoveries by kind of failure."
        recoveries = CounterMetricFamily("deadpool_recoveries", text, labels=["kind"])
        text = "From a failure to the next finished iteration."
        seconds = HistogramMetricFamily("deadpool_recovery_seconds", text, labels=["kind"])
        for kind, found in sorted(self._recoveries.items()):
            recoveries.add_metric([kind], len(found))
            counts = [(str(b), float(sum(s <= b for s in found))) for b in RECOVERY_BUCKETS]
            seconds.add_metric([kind], [*counts, ("+Inf", float(len(found)))], sum(found))
        yield recoveries
        yield seconds
        text = "Seconds of recoveries by phase."
        phases = CounterMetricFamily("deadpool_recovery_phase_seconds", text, labels=["phase"])
        for phase, spent in sorted(self._phases.items()):
            phases.add_metric([phase], spent)
        yield phases
        yield _counter("steps_recomputed", "Iterations computed again.", self._recomputed)
        text = "Seconds of all roles at the commit gate."
        yield _counter("gate_wait_seconds", text, self._gate_seconds)
        yield _counter("shipped_bytes", "Bytes shipped to protect state.", self._shipped)

    def _times(self, now: float | None) -> Iterator[Metric]:
        text = "Seconds of all nodes by what they went into."
        times = CounterMetricFamily("deadpool_node_time_seconds", text, labels=["use"])
        for use, spent in self.account.settled().items():
            times.add_metric([use.value], spent)
        yield times
        goodput = self.account.goodput(now)
        if goodput is not None:
            text = "Part of the time of nodes with roles in which they trained on."
            yield _gauge("goodput_ratio", text, goodput)


def _of_status(status: Mapping[str, Any]) -> Iterator[Metric]:
    nodes, aside = status["nodes"], {str(node) for node in status["aside"]}
    states: Counter[str] = Counter({"training": 0, "spare": 0, "aside": 0})
    text = "Bytes of generations in shared memory."
    memory = GaugeMetricFamily("deadpool_memory_bytes", text, labels=["node"])
    for node, known in nodes.items():
        states["aside" if node in aside else "spare" if known["spare"] else "training"] += 1
        if "bytes" in known["vault"]:
            memory.add_metric([node], known["vault"]["bytes"])
    yield _family("nodes", "Nodes by state.", "state", states)
    yield _gauge("roles", "Roles, each of one process.", len(status["roles"]))
    yield memory
    yield _family("phase", "What the run does.", "phase", {status["phase"]: 1})
    text = "Roles with fewer copies than wanted."
    yield _gauge("exposed_roles", text, len(status["fewer_copies"]))
    text = "Most iterations that a failure would cost."
    yield _gauge("rpo_iterations", text, status["rpo"]["most_lost"])
    yield _counter("refusals", "Connections and messages refused.", status["refusals"])
    yield _gauge("slow_nodes", "Nodes much slower than their peers.", len(status["slow"]))


def _gauge(name: str, text: str, value: float, **labels: str) -> GaugeMetricFamily:
    found = GaugeMetricFamily(f"deadpool_{name}", text, labels=list(labels))
    found.add_metric(list(labels.values()), value)
    return found


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"deadpool_{name}", text, value=value)


def _family(name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    found = GaugeMetricFamily(f"deadpool_{name}", text, labels=[label])
    for key, value in values.items():
        found.add_metric([key], value)
    return found
