"""Sends each recovery of a run to an OpenTelemetry collector when it is over: a trace of its own,
whose root is the time from the loss to the next finished step, with a span for each phase of each
role in it. It reads the events of the run; no part of the run waits for it, and a collector that
does not answer costs nothing but a line here. Ends with the run.

examples:
  OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318 deadpool traces runs/first
  deadpool traces runs/first --endpoint http://collector:4318/v1/traces

Without --endpoint the variables of OpenTelemetry say where to and how (OTEL_...).
Exit status: 0 the run is over; 2 bad arguments; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING, Any

import deadpool_megatron
from deadpool_megatron.cli.common import CommandError, add_run_directory
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import Event, EventTail, Kind
from deadpool_megatron.observe.story import RECENT_STEPS, Interruption, Story

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_LOOK_SECONDS = 1.0
_SECOND = 1e9  # in nanoseconds


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``traces`` to the commands."""
    text = "recoveries as OpenTelemetry traces"
    parser = subparsers.add_parser("traces", help=text, description=__doc__)
    add_run_directory(parser)
    parser.add_argument("--endpoint", metavar="URL", help="where spans are posted (OTLP over HTTP)")


def run(args: argparse.Namespace) -> int:
    """Carry out ``deadpool traces``. Raises CommandError."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise CommandError("it needs more: pip install 'deadpool-megatron[otel]'") from None
    directory = RunDirectory(args.run_dir)
    info = directory.read_run(only_to_show=True)
    # What the variables say goes before: see Resource.create().
    service = {"service.name": "deadpool", "service.version": deadpool_megatron.__version__}
    provider = TracerProvider(resource=Resource.create(service), shutdown_on_exit=False)
    # What waits for the collector: a recovery has a span for each phase of each role, all at once.
    # OpenTelemetry keeps 2048 by itself, and drops what is more.
    os.environ.setdefault("OTEL_BSP_MAX_QUEUE_SIZE", str(1 << 19))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=args.endpoint)))
    try:
        _follow(directory, provider.get_tracer("deadpool_megatron"), info.run_id)
    finally:
        provider.shutdown()
    return 0


def _follow(directory: RunDirectory, tracer: Tracer, run_id: str) -> None:
    story, tail, told = Story(RECENT_STEPS), EventTail(directory.events), 0

    def tell_finished() -> None:
        nonlocal told
        finished = len(story.failures) - (story.current is not None)
        for interruption in story.failures[told:finished]:
            tell(tracer, interruption, run_id)
        told = finished

    def take(event: Event) -> None:
        if event.kind is Kind.EPOCH_CLOSED:
            tell_finished()  # the next failure leaves the parts of the last one out
        story.take(event)

    is_over = False
    while not is_over:
        is_over = directory.final.exists()
        tail.feed(take)
        tell_finished()
        time.sleep(0.0 if is_over else _LOOK_SECONDS)


def tell(tracer: Tracer, interruption: Interruption, run_id: str) -> None:
    """Make the spans of one interruption that is over. Thread-safe."""
    from opentelemetry.trace import set_span_in_context

    assert interruption.ended is not None
    facts = {
        "run": run_id,
        "number": interruption.number,
        "kind": interruption.kind,
        "cause": interruption.cause,
        "planned": interruption.planned,
        "epoch.closed": interruption.closed_epoch,
        "epochs.closed": interruption.closes,
        "iteration": interruption.last_iteration,
        "exposed_seconds": interruption.exposed_seconds,
        "nodes.lost": [loss.node for loss in interruption.losses if loss.node is not None],
        "restored.iteration": interruption.generation and interruption.generation[1],
        "steps_recomputed": interruption.steps_recomputed,
    }
    start = int(interruption.began * _SECOND)
    root = tracer.start_span("recovery", start_time=start, attributes=_named(facts))
    within = set_span_in_context(root)
    for part in interruption.parts:
        place, start = _named({"role": part.role, "node": part.node}), int(part.start * _SECOND)
        span = tracer.start_span(part.phase, context=within, start_time=start, attributes=place)
        span.end(int(part.end * _SECOND))
    root.end(int(interruption.ended * _SECOND))


def _named(facts: dict[str, Any]) -> dict[str, Any]:
    """Return those that are known, as attributes of a span."""
    return {f"deadpool.{name}": value for name, value in facts.items() if value is not None}
