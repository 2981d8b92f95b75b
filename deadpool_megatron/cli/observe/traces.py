"""``deadpool traces DIR``: each recovery of a run as a trace, for an OpenTelemetry collector."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from typing import TYPE_CHECKING

import deadpool_megatron
from deadpool_megatron.cli.common import CommandError, add_run_directory, raw
from deadpool_megatron.cli.show.story import Interruption, Story
from deadpool_megatron.cli.show.tail import EventTail
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import DAMAGE, Kind

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer
    from opentelemetry.util.types import AttributeValue

_DESCRIPTION = """\
Sends each recovery of a run to an OpenTelemetry collector when it is over: a trace of its own,
whose root is the time from the loss to the next finished step, with a span for each phase of each
role in it. It reads the events of the run; no part of the run waits for it, and a collector that
does not answer costs nothing but a line here. Ends with the run.
"""
_EXAMPLES = """\
examples:
  OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318 deadpool traces runs/first
  deadpool traces runs/first --endpoint http://collector:4318/v1/traces

Without --endpoint the variables of OpenTelemetry say where to and how (OTEL_EXPORTER_OTLP_ENDPOINT,
OTEL_EXPORTER_OTLP_HEADERS, OTEL_RESOURCE_ATTRIBUTES, ...).
Exit status: 0 the run is over; 2 bad arguments; 130 interrupted.
"""
_LOOK_SECONDS = 1.0
_NANOSECONDS = 1e9
# What waits for the collector: a recovery has a span for each phase of each role, all at once.
# OpenTelemetry keeps 2048 by itself, and drops what is more.
_MOST_SPANS = 1 << 19


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``traces`` to the commands."""
    parser = raw(
        subparsers.add_parser(
            "traces",
            help="recoveries as traces, for OpenTelemetry",
            description=_DESCRIPTION,
            epilog=_EXAMPLES,
        )
    )
    add_run_directory(parser)
    parser.add_argument("--endpoint", metavar="URL", help="where spans are posted (OTLP over HTTP)")


def run(args: argparse.Namespace) -> int:
    """Carry out ``deadpool traces``. Raises CommandError."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.environment_variables import OTEL_BSP_MAX_QUEUE_SIZE
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        advice = "pip install 'deadpool-megatron[otel]'"
        raise CommandError(f"it needs OpenTelemetry: {advice}") from None
    directory = RunDirectory(args.run_dir)
    info = directory.read_run(only_to_show=True)
    # What the variables say goes before: see Resource.create().
    resource = Resource.create(
        {"service.name": "deadpool", "service.version": deadpool_megatron.__version__}
    )
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=args.endpoint)
    most = None if OTEL_BSP_MAX_QUEUE_SIZE in os.environ else _MOST_SPANS
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=most))
    try:
        _follow(directory, provider.get_tracer("deadpool_megatron"), info.run_id)
    finally:
        provider.shutdown()
    return 0


def _follow(directory: RunDirectory, tracer: Tracer, run_id: str) -> None:
    story, tail, told = Story(), EventTail(directory.events), 0

    def tell_finished() -> None:
        nonlocal told
        finished = len(story.failures) - (story.current is not None)
        for interruption in story.failures[told:finished]:
            tell(tracer, interruption, run_id)
        told = max(told, finished)

    while True:
        is_over = directory.final.exists()
        while events := tail.poll():
            for event in events:
                if event.kind is Kind.EPOCH_CLOSED:
                    tell_finished()  # the next failure leaves the parts of the last one out
                # A damaged event costs itself alone.
                with contextlib.suppress(*DAMAGE):
                    story.add(event)
        tell_finished()
        if is_over:
            return
        time.sleep(_LOOK_SECONDS)


def tell(tracer: Tracer, interruption: Interruption, run_id: str) -> None:
    """Make the spans of one interruption that is over. Thread-safe."""
    assert interruption.ended is not None
    attributes: dict[str, AttributeValue] = {
        "deadpool.run": run_id,
        "deadpool.number": interruption.number,
        "deadpool.kind": interruption.kind,
        "deadpool.cause": interruption.cause,
        "deadpool.planned": interruption.planned,
        "deadpool.epoch.closed": interruption.closed_epoch,
        "deadpool.epochs.closed": interruption.closes,
        "deadpool.iteration": interruption.last_iteration,
        "deadpool.exposed_seconds": interruption.exposure,
        "deadpool.nodes.lost": [loss.node for loss in interruption.losses if loss.node is not None],
    }
    if interruption.generation is not None:
        attributes["deadpool.restored.iteration"] = interruption.generation[1]
    if interruption.recovery is not None:
        attributes["deadpool.steps_recomputed"] = interruption.recovery.steps_recomputed
    root = tracer.start_span(
        "recovery", start_time=_nanoseconds(interruption.began), attributes=attributes
    )
    from opentelemetry.trace import set_span_in_context

    within = set_span_in_context(root)
    for part in interruption.parts:
        place = {"deadpool.role": part.role, "deadpool.node": part.node}
        tracer.start_span(
            part.phase,
            context=within,
            start_time=_nanoseconds(part.start),
            attributes={name: number for name, number in place.items() if number is not None},
        ).end(_nanoseconds(part.end))
    root.end(_nanoseconds(interruption.ended))


def _nanoseconds(wall_seconds: float) -> int:
    return int(wall_seconds * _NANOSECONDS)
