"""Exports metrics of a run: iterations, recoveries by kind and phase, node time by use, goodput,
unprotected roles. It reads the events of the run and asks the coordinator, as `deadpool status`
does; the run does not wait for it. It works on any node that sees the run directory. Without
--listen and --textfile it prints the metrics once.

examples:
  deadpool metrics runs/first
  deadpool metrics runs/first --listen 127.0.0.1:9478     for a Prometheus server
  deadpool metrics runs/first --textfile /var/lib/node_exporter/deadpool.prom

configs/ has a dashboard for Grafana and rules for alerts. Exit status: 0 printed, or the run is
over; 2 bad arguments; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deadpool_megatron
from deadpool_megatron.cli import common
from deadpool_megatron.cli.common import CommandError, StatusPoller
from deadpool_megatron.cli.http_server import LimitedServer
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import DAMAGE, EventTail, Kind
from deadpool_megatron.failures import FailureKind
from deadpool_megatron.layout.records import NodeUse
from deadpool_megatron.observe.steps import decimal
from deadpool_megatron.observe.story import PHASES, RECENT_STEPS, Story
from deadpool_megatron.observe.view import State, View

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_INTERVAL_SECONDS = 5.0
# The metrics remain available for this time after the end of the run.
_LINGER_SECONDS = 60.0
# Suffix of the name of a gauge that is a point in time (wall clock, seconds).
_TIME = "_timestamp_seconds"
#: upper bounds of the histogram of recoveries, in seconds
RECOVERY_BUCKETS = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    common.add_run_directory(parser)
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--listen", metavar="ADDR:PORT", help="answer GET /metrics there")
    text = "rewrite the file every few seconds"
    target.add_argument("--textfile", type=Path, metavar="FILE.prom", help=text)


class RunCollector:
    """The metrics of a run, as a collector of ``prometheus_client``. Thread-safe, as a server may
    scrape from several threads.
    """

    def __init__(self, run: RunDirectory) -> None:
        """Raises RunDirectoryError if there is no run."""
        self._run, self._poller, self._tail = run, StatusPoller(run), EventTail(run.events)
        info = run.read_run(only_to_show=True)
        self._run_labels = {"run": info.run_id, "version": deadpool_megatron.__version__}
        self._story = Story(RECENT_STEPS + 1)
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics as of now."""
        with self._lock:
            self._tail.feed(self._story.take)
            yield from metrics(self._poller.view(self._story), self._run_labels)

    def is_over(self) -> bool:
        """Return whether the run has a result."""
        return self._run.final.exists()


def run(args: argparse.Namespace) -> int:
    """Carry out ``deadpool metrics``. Raises CommandError."""
    try:
        import prometheus_client
    except ImportError:
        raise CommandError("it needs prometheus-client: pip install prometheus-client") from None
    collector = RunCollector(RunDirectory(args.run_dir))
    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    registry.register(collector)
    try:
        if args.listen is not None:
            host, port = common.listen_address(args.listen)
            handler = prometheus_client.MetricsHandler.factory(registry)
            server = LimitedServer(host, port, handler)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            print(f"http://{common.url_host(host)}:{server.server_port}/metrics", flush=True)
            _repeat(collector, lambda: None)
        elif args.textfile is not None:
            write = prometheus_client.write_to_textfile
            _repeat(collector, lambda: write(str(args.textfile), registry))
        else:
            print(prometheus_client.generate_latest(registry).decode(), end="")
    except OSError as error:
        target = args.listen or args.textfile or args.run_dir
        raise CommandError(f"{target}: {error.strerror or error}") from error
    return 0


def _repeat(collector: RunCollector, write: Callable[[], None]) -> None:
    """Call ``write`` every few seconds until some time after the end of the run. Raises OSError if
    the first call fails; later errors are printed, equal errors in a row once.
    """
    write()
    last_error = ""
    ended: float | None = None
    while ended is None or time.monotonic() - ended < _LINGER_SECONDS:
        if ended is None and collector.is_over():
            ended = time.monotonic()
        try:
            write()
        except OSError as error:
            if str(error) != last_error:
                last_error = str(error)
                print(f"deadpool metrics: {error}; it is tried again", file=sys.stderr, flush=True)
        time.sleep(_INTERVAL_SECONDS)


def metrics(view: View, run_labels: Mapping[str, str]) -> Iterator[Metric]:
    """Yield all metrics of a run. ``run_labels``: the labels of ``deadpool_run_info``.

    Names follow Prometheus' conventions: base units, ``_total`` for counters. There are few labels:
    kinds, phases, uses, states, and for memory the node. Counters exist from the start, as a server
    sees no increase in a series that begins at 1.
    """
    run = _core().GaugeMetricFamily("deadpool_run_info", "The run.", labels=list(run_labels))
    run.add_metric(list(run_labels.values()), 1)
    yield run
    yield _gauge("up", "Whether the coordinator answers.", int(view.status is not None))
    states = {str(state): int(state is view.state) for state in State}
    text = "1 for the state of the run, as all views show it."
    yield _family("Gauge", "state", text, "state", states)
    yield from _gauges(view)
    yield from _counters(view)
    if view.status is not None:
        with contextlib.suppress(*DAMAGE):  # the coordinator may have another version
            yield from list(_status_metrics(view, view.status))


def _gauges(view: View) -> Iterator[Metric]:
    story, ago = view.story, view.step_seconds_ago
    newest, saved = story.steps.newest(1), story.kept[Kind.DURABLE]
    started_at, goodput = story.started_at, story.goodput(view.until)
    last_at = None if ago is None else view.now + view.skew - ago  # by the clock of this host
    failures, ended = [each for each in story.failures if not each.planned], story.ended
    text = "Share of the time of nodes with roles that was spent on training."
    rpo = "Most iterations that a failure would cost; +Inf: perhaps all since the last checkpoint."
    exposed = None if view.exposed is None else len(view.exposed)
    gauges: list[tuple[str, str, float | None]] = [
        ("coordinator_term", "Term of the coordinator.", story.term),
        ("exit_status", "Exit status of the run that has ended.", view.final.get("exit_status")),
        ("iteration", "The newest finished iteration.", view.iteration),
        ("exposed_roles", "Roles with fewer copies than wanted.", exposed),
        ("rpo_iterations", rpo, view.max_lost),
        ("epoch", "The newest epoch.", story.epoch),
        (f"start{_TIME}", "When the run was started, the last time.", started_at),
        (f"last_iteration{_TIME}", "When the newest iteration was finished.", last_at),
        (f"last_step{_TIME}", f"Former name of deadpool_last_iteration{_TIME}.", last_at),
        ("goodput_ratio", text, goodput),
        *(("loss", "Loss of the newest finished iteration.", decimal(s.loss)) for s in newest),
        *(("checkpoint_iteration", "The newest durable one.", e.iteration) for e in saved[-1:]),
        *((f"checkpoint{_TIME}", "When it was written.", e.wall_seconds) for e in saved[-1:]),
        *((f"last_failure{_TIME}", "Start of the newest failure.", f.began) for f in failures[-1:]),
        ("iteration_seconds", f"Median time of the last {RECENT_STEPS} iterations.", story.pace()),
        ("step_seconds", "Former name of deadpool_iteration_seconds.", story.pace()),
        (f"end{_TIME}", "When the run ended.", ended.wall_seconds if ended else None),
    ]
    for name, text, value in gauges:
        if value is not None:
            yield _gauge(name, text, value)


def _counters(view: View) -> Iterator[Metric]:
    story = view.story
    text = "From a failure to the next finished iteration."
    seconds = _core().HistogramMetricFamily("deadpool_recovery_seconds", text, labels=["kind"])
    recoveries = [failure for failure in story.failures if failure.is_over]
    times_by_kind: dict[str, list[float]] = {kind: [] for kind in FailureKind}
    phases = dict.fromkeys(PHASES, 0.0)
    for failure in recoveries:
        times_by_kind.setdefault(failure.kind or "unknown", []).append(failure.seconds or 0.0)
        for phase, spent in failure.phases.items():
            phases[phase] = phases.get(phase, 0.0) + spent
    for kind, times in sorted(times_by_kind.items()):
        counts = [(str(b), float(sum(s <= b for s in times))) for b in RECOVERY_BUCKETS]
        seconds.add_metric([kind], [*counts, ("+Inf", float(len(times)))], sum(times))
    kinds = [failure.kind for failure in story.all_failures if not failure.planned]
    failed = {kind: float(kinds.count(kind)) for kind in sorted({*times_by_kind, *kinds})}
    text = "Failures by kind, with those that ended the run."
    yield _family("Counter", "failures", text, "kind", failed)
    recovered = {kind: len(times) for kind, times in sorted(times_by_kind.items())}
    yield _family("Counter", "recoveries", "Recoveries by kind of failure.", "kind", recovered)
    yield seconds
    text = "Seconds of recoveries by phase."
    yield _family("Counter", "recovery_phase_seconds", text, "phase", dict(sorted(phases.items())))
    recomputed = sum(failure.steps_recomputed or 0 for failure in recoveries)
    yield _counter("iterations_recomputed", "Iterations computed again.", recomputed)
    text = "Former name of deadpool_iterations_recomputed_total."
    yield _counter("steps_recomputed", text, recomputed)
    text = "Seconds of all roles at the commit gate."
    yield _counter("gate_wait_seconds", text, story.gate_seconds)
    shipped = story.bytes_by_kind.get(Kind.COMMITTED, 0)
    yield _counter("shipped_bytes", "Bytes shipped to protect state.", shipped)
    uses = {use.value: spent for use, spent in story.account.settled(view.until).items()}
    text = "Seconds of all nodes by what they went into."
    yield _family("Counter", "node_time_seconds", text, "use", uses)


def _status_metrics(view: View, status: Mapping[str, Any]) -> Iterator[Metric]:
    nodes = status["nodes"]
    states = dict.fromkeys(map(str, NodeUse), 0)
    for facts in nodes.values():
        states[facts["use"]] += 1
    memory = {node: facts["vault"].get("bytes") for node, facts in nodes.items()}
    yield _family("Gauge", "nodes", "Nodes by state.", "state", states)
    yield _gauge("roles", "Roles, each of one process.", len(status["roles"]))
    for replicas in status["model_replicas"][:1]:
        yield _gauge("model_replicas", "Data-parallel replicas of the model that train.", replicas)
    yield _family("Gauge", "memory_bytes", "Bytes of generations in shared memory.", "node", memory)
    yield _family("Gauge", "phase", "The state of the run.", "phase", {status["phase"]: 1})
    text = "Events that cannot be written to the run directory, and wait in memory."
    yield _gauge("events_waiting", text, view.events_waiting)
    yield _counter("refusals", "Connections and messages refused.", view.refusals)
    yield _gauge("slow_nodes", "Nodes much slower than their peers.", len(status["slow"]))


def _gauge(name: str, text: str, value: float) -> Any:
    return _core().GaugeMetricFamily(f"deadpool_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Any:
    return _core().CounterMetricFamily(f"deadpool_{name}", text, value=value)


def _family(kind: str, name: str, text: str, label: str, values: Mapping[str, float | None]) -> Any:
    family = getattr(_core(), f"{kind}MetricFamily")(f"deadpool_{name}", text, labels=[label])
    for key, value in values.items():
        if value is not None:
            family.add_metric([key], value)
    return family


def _core() -> Any:
    """Return the module with the classes of metrics. It is imported on use, as it is optional."""
    return importlib.import_module("prometheus_client.core")
