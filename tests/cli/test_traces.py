"""Recoveries as traces, told to a collector over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from deadpool_megatron import cli
from deadpool_megatron.cluster.run_directory.directory import RunInfo
from deadpool_megatron.events import to_line
from deadpool_megatron.settings import Settings
from tests.common import synthetic_run


class Collector(ThreadingHTTPServer):
    """Takes what is posted, and answers with a status."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.bodies = 200, list[bytes]()
        self.endpoint = f"http://127.0.0.1:{self.server_port}/v1/traces"

    def spans(self) -> list[Span]:
        found = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        resources = [resource for request in found for resource in request.resource_spans]
        assert all("deadpool" in str(each.resource) for each in resources)
        return [span for each in resources for scope in each.scope_spans for span in scope.spans]


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def finished(directory: Path) -> Path:
    """A run that has lost a node in iteration 6."""
    synthetic_run.write_run(directory, iterations=12, strike=6)
    info = RunInfo("0123abcd", 8, 4, 1, 2, ("x.py",), Settings(), "/dev/shm/x")
    (directory / "run.json").write_text(json.dumps(info.to_dict()))
    return directory


def test_a_recovery_is_a_trace(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    run = finished(tmp_path / "run")
    assert cli.main(["traces", str(run), "--endpoint", collector.endpoint]) == 0
    (root,) = (span for span in collector.spans() if span.name == "recovery")
    facts = {each.key: each.value for each in root.attributes}
    assert facts["deadpool.cause"].string_value
    assert facts["deadpool.iteration"].int_value == 5
    parts = [span for span in collector.spans() if span.name != "recovery"]
    assert {span.name for span in parts} == set(synthetic_run.MEMBER_PHASES)
    for span in parts:
        assert span.trace_id == root.trace_id
        assert span.parent_span_id == root.span_id
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= root.end_time_unix_nano


def test_a_collector_that_fails_costs_nothing(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector.status = 400
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collector.endpoint)
    run = finished(tmp_path / "run")
    assert cli.main(["traces", str(run)]) == 0
    assert len(collector.bodies) == 1


def test_a_follower_that_comes_late_tells_the_phases_of_each_recovery(
    collector: Collector, tmp_path: Path
) -> None:
    directory = finished(tmp_path / "run")
    struck = [e for k in (2, 4, 6) for e in synthetic_run.recovery_events(k, 9.0 * k)]
    (directory / "events.jsonl").write_bytes(b"".join(map(to_line, struck)))
    assert cli.main(["traces", str(directory), "--endpoint", collector.endpoint]) == 0
    roots = {span.span_id for span in collector.spans() if span.name == "recovery"}
    assert len(roots) == 3
    restored = [span.parent_span_id for span in collector.spans() if span.name == "restore"]
    assert {root: restored.count(root) for root in roots} == dict.fromkeys(
        roots, synthetic_run.WORLD_SIZE
    )
