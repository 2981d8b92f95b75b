"""Whoever is to be told of a run is told, and nobody waits for those who cannot be."""

import http.server
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from deadpool_megatron.events import Event, Kind
from deadpool_megatron.observe import notify
from tests.common.wait import wait_for

CLOSED = Event(Kind.EPOCH_CLOSED, 1, data={"kind": "node-lost", "cause": "node 3: gone"})
OPENED = Event(Kind.EPOCH_OPENED, 2, data={"phases": {}})
WAITS = Event(Kind.WAITING_FOR_SPARE, 1, data={"text": "roles [1] wait", "limit_seconds": 9.0})
RECOVERED = Event(
    Kind.RECOVERED,
    2,
    data={"kind": "node-lost", "cause": "node 3: gone", "seconds": 1.25, "steps_recomputed": 1},
)
ENDED = Event(Kind.RUN_ENDED, 2, data={"exit_status": 75, "reason": "no spare\x1b]0;x", "kind": ""})
PLANNED = Event(Kind.EPOCH_CLOSED, 1, data={"kind": "planned", "cause": "drain of node 1"})


class Server(http.server.ThreadingHTTPServer):
    """Notes what it is told; answers with ``status``, once ``may_answer`` is set."""

    daemon_threads = True
    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.notices: list[dict[str, Any]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.notices.append(json.loads(body))
        self.server.may_answer.wait()
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving() -> Iterator[tuple[Server, str]]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{server.server_port}/hooks/s3cret"
    finally:
        server.may_answer.set()
        server.shutdown()
        server.server_close()
        thread.join()


def flush(notices: notify.Notices) -> None:
    notices.flush(time.monotonic() + 30.0)


def test_notices_report_a_failure_its_end_a_wait_and_the_end_of_the_run(tmp_path, monkeypatch):
    """The URL may stand in a file; the command gets no secret, and no terminal a control code."""
    warned: list[str] = []
    file, address = tmp_path / "output", tmp_path / "address"
    monkeypatch.setenv("DEADPOOL_SECRET", "0" * 32)
    command = (
        f'[ -z "$DEADPOOL_SECRET" ] && echo "$DEADPOOL_EVENT_KIND $DEADPOOL_EVENT_TEXT" >> {file};'
    )
    command += f" (cat; echo) >> {file}.json"
    damaged = Event(Kind.RECOVERED, 1, data={"seconds": "x"})
    with serving() as (server, url):
        address.write_text(f"{url}\n")
        notices = notify.Notices("r1", f"@{address}", command, warned.append)
        for event in (PLANNED, CLOSED, OPENED, damaged, WAITS, RECOVERED, ENDED):
            notices.note(event)
        flush(notices)
    assert [notice["event"] for notice in server.notices] == [
        event.to_dict() for event in (CLOSED, WAITS, RECOVERED, ENDED)
    ]
    texts = [notice["text"] for notice in server.notices]
    assert all(text.startswith("r1: ") and text.isprintable() for text in texts)
    kinds = [line.split()[0] for line in file.read_text().splitlines()]
    assert kinds == ["epoch-closed", "waiting-for-spare", "recovered", "run-ended"]
    given = [json.loads(line) for line in (tmp_path / "output.json").read_text().splitlines()]
    assert given == server.notices
    assert warned == []


def test_notices_to_a_failing_server_warn_once_without_the_secret(monkeypatch):
    monkeypatch.setattr(notify, "_POST_SECONDS", 0.2)
    warned: list[str] = []
    with serving() as (server, url):
        notices = notify.Notices("r1", url, "", warned.append)
        server.may_answer.clear()  # it hangs
        for _ in range(1000):
            notices.note(CLOSED)
        wait_for("the warning", lambda: warned)
        server.may_answer.set()
        for status in (500, 200, 500):
            server.status = status
            flush(notices)
            notices.note(ENDED)
        flush(notices)
        assert len(server.notices) <= notify.MAX_WAITING + 5, "the queue is bounded"
    assert len(warned) == 2, "it worked in between"
    assert "500" in warned[1]
    assert "s3cret" not in "".join(warned)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("exec sleep 1000", "within 0.2 s"),
        ("/no/such/thing", "status 127"),
        ("echo no network; exit 3", "status 3: no network"),
    ],
)
def test_notices_warn_of_missing_servers_and_failing_commands(monkeypatch, command, reason):
    monkeypatch.setattr(notify, "_COMMAND_SECONDS", 0.2)
    warned: list[str] = []
    notices = notify.Notices("r1", "http://127.0.0.1:1/", command, warned.append)
    for event in (CLOSED, ENDED):
        notices.note(event)
    flush(notices)
    assert len(warned) == 2, "one line for each of the two"
    assert any(reason in line for line in warned)
    assert any("Connection refused" in line for line in warned)
