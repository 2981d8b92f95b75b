"""A run as metrics: from its story, and from what its coordinator says right now.

Names follow Prometheus' conventions: base units, ``_total`` for counters. Labels are few: kinds,
phases, uses, states, and the node where memory is meant. What is counted is there from the start: a
series that begins at 1 has no increase that a server could see. Pure but for the classes of
``prometheus_client``.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from deadpool_megatron.events import DAMAGE, Kind
from deadpool_megatron.observe.story import RECENT_STEPS, Story, decimal

#: upper bounds of the histogram of recoveries, in seconds
RECOVERY_BUCKETS = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)


def metrics(
    story: Story, about: Mapping[str, str], status: Mapping[str, Any] | None, now: float
) -> Iterator[Metric]:
    """Yield all metrics of a run. ``about``: labels; ``status``: what ``deadpool status --json``
    says, None if nobody answers; ``now``: wall clock."""
    run = GaugeMetricFamily("deadpool_run_info", "The run.", labels=list(about))
    run.add_metric(list(about.values()), 1)
    yield run
    yield _gauge("up", "Whether the coordinator answers.", int(status is not None))
    # Where nobody answers, nobody knows what nodes do since the newest event.
    yield from _gauges(story, None if status is None else now)
    yield from _counters(story)
    if status is not None:
        with contextlib.suppress(*DAMAGE):  # of a coordinator of another version
            yield from list(_of_status(status))


def _gauges(story: Story, now: float | None) -> Iterator[Metric]:
    pace, newest, saved = story.step_seconds(RECENT_STEPS), story.steps.newest(1), story.durable
    since, at, goodput = story.started_at, story.last_step_at, story.account.goodput(now)
    known: list[tuple[str, str, float | None]] = [
        ("coordinator_term", "Term of the coordinator.", story.term),
        ("exit_status", "Exit status of the run that has ended.", story.exit_status),
        ("iteration", "The newest finished iteration.", story.last_iteration),
        ("epoch", "The newest epoch.", story.epoch),
        ("start_timestamp_seconds", "When the run was started, the last time.", since),
        ("last_step_timestamp_seconds", "When the newest iteration was finished.", at),
        (
            "goodput_ratio",
            "Part of the time of nodes with roles in which they trained on.",
            goodput,
        ),
        *(("loss", "Loss of the newest finished iteration.", decimal(s.loss)) for s in newest),
        *(("checkpoint_iteration", "The newest durable one.", e.iteration) for e in saved[-1:]),
    ]
    if pace:
        text = f"Median time of the last {RECENT_STEPS} iterations."
        known.append(("step_seconds", text, statistics.median(pace)))
    for name, text, value in known:
        if value is not None:
            yield _gauge(name, text, value)


def _counters(story: Story) -> Iterator[Metric]:
    text = "From a failure to the next finished iteration."
    seconds = HistogramMetricFamily("deadpool_recovery_seconds", text, labels=["kind"])
    for kind, found in sorted(story.recovered.items()):
        counts = [(str(b), float(sum(s <= b for s in found))) for b in RECOVERY_BUCKETS]
        seconds.add_metric([kind], [*counts, ("+Inf", float(len(found)))], sum(found))
    counted = {kind: len(found) for kind, found in sorted(story.recovered.items())}
    yield _by(CounterMetricFamily, "recoveries", "Recoveries by kind of failure.", "kind", counted)
    yield seconds
    phases = dict(sorted(story.phase_seconds.items()))
    yield _by(
        CounterMetricFamily,
        "recovery_phase_seconds",
        "Seconds of recoveries by phase.",
        "phase",
        phases,
    )
    text = "Iterations computed again."
    yield _counter("steps_recomputed", text, story.steps_recomputed)
    text = "Seconds of all roles at the commit gate."
    yield _counter("gate_wait_seconds", text, story.gate_seconds)
    shipped = story.bytes_by_kind.get(Kind.COMMITTED, 0)
    yield _counter("shipped_bytes", "Bytes shipped to protect state.", shipped)
    uses = {use.value: spent for use, spent in story.account.seconds.items()}
    text = "Seconds of all nodes by what they went into."
    yield _by(CounterMetricFamily, "node_time_seconds", text, "use", uses)


def _of_status(status: Mapping[str, Any]) -> Iterator[Metric]:
    nodes, aside = status["nodes"], {str(node) for node in status["aside"]}
    states = {"training": 0, "spare": 0, "aside": 0}
    for node, known in nodes.items():
        states["aside" if node in aside else "spare" if known["spare"] else "training"] += 1
    memory = {node: known["vault"].get("bytes") for node, known in nodes.items()}
    yield _by(GaugeMetricFamily, "nodes", "Nodes by state.", "state", states)
    yield _gauge("roles", "Roles, each of one process.", len(status["roles"]))
    yield _by(
        GaugeMetricFamily, "memory_bytes", "Bytes of generations in shared memory.", "node", memory
    )
    yield _by(GaugeMetricFamily, "phase", "What the run does.", "phase", {status["phase"]: 1})
    text = "Roles with fewer copies than wanted."
    yield _gauge("exposed_roles", text, len(status["fewer_copies"]))
    text = "Most iterations that a failure would cost."
    yield _gauge("rpo_iterations", text, status["rpo"]["most_lost"])
    yield _counter("refusals", "Connections and messages refused.", status["refusals"])
    yield _gauge("slow_nodes", "Nodes much slower than their peers.", len(status["slow"]))


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"deadpool_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"deadpool_{name}", text, value=value)


def _by(
    family: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    text: str,
    label: str,
    values: Mapping[str, float | None],
) -> Metric:
    found = family(f"deadpool_{name}", text, labels=[label])
    for key, value in values.items():
        if value is not None:
            found.add_metric([key], value)
    return found
