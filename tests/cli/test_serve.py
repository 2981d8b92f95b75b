"""The page of a run: in a real browser while a node is lost, closed to whoever has no token, and of
a server that no connection holds for ever."""

import json
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.client import HTTPMessage
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from deadpool_megatron.cli import http_server, serve
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.observe.view import view
from tests.cli.start.refused import old_run
from tests.cluster.runs import Run, environment, send
from tests.common.browser import CHROMIUM, Browser
from tests.common.synthetic_run import events_of, status_of
from tests.common.wait import wait_for

# As random ones may be: nothing that a program could use as a name.
TOKEN = "0-to_ken-"


@contextmanager
def served(state: dict[str, Any], token: str = TOKEN) -> Iterator[str]:
    """The address of a page, without its token."""
    made = SimpleNamespace(answer=json.dumps(state).encode)
    server = serve.make_server(made, "127.0.0.1", 0, token)  # type: ignore[arg-type]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def get(address: str) -> tuple[int, bytes, HTTPMessage]:
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


def test_nothing_is_answered_without_the_token():
    with served({}) as address:
        for path in ("/", "/state", "/page.js", "/page.css", "/?token=other", "/state?token="):
            status, body, _ = get(address + path)
            assert (status, body) == (403, b"the token is missing\n"), path
        assert get(f"{address}/state?token={TOKEN}")[:2] == (200, b"{}")
        assert get(f"{address}/../serve.py?token={TOKEN}")[0] == 404
        with pytest.raises(urllib.error.HTTPError, match="501"):
            urllib.request.urlopen(f"{address}/state?token={TOKEN}", data=b"x", timeout=10)


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_serve_prints_a_usable_address_and_warns_of_clear_text(
    host, warned, tmp_path, carry_out, monkeypatch
):
    server = Mock(server_port=1, serve_forever=Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(serve, "make_server", lambda *_: server)
    status, out, errors = carry_out("serve", old_run(tmp_path).path, "--listen", f"{host}:1")
    assert (status, "//0.0.0.0" in out, bool(errors)) == (0, False, warned)


def test_the_page_loads_nothing_from_elsewhere():
    with served({}) as address:
        for path in ("/", "/page.js", "/page.css"):
            status, body, headers = get(f"{address}{path}?token={TOKEN}")
            assert status == 200
            assert "default-src 'none'" in headers["Content-Security-Policy"]
            found = re.findall(r"https?://[^\s\"']+", body.decode())
            assert set(found) <= {"http://www.w3.org/2000/svg"}, "a name, never loaded"


def drawn(
    page: serve.RunPage, status: dict[str, Any] | None, now: float, left: str = ""
) -> dict[str, Any]:
    return page.to_dict(view(page.story, status, "R", now, remaining=left))


def page_of(*losses: str, run: str = "run") -> serve.RunPage:
    page = serve.RunPage(run, serve.RunDirectory(Path("R")))
    page.take(Event(Kind.RUN_STARTED, data={"spares": 2}, wall_seconds=0.5))
    for k, loss in enumerate(losses, 1):
        values = {"loss": loss, "samples": 8 * k}
        page.take(Event(Kind.STEP, iteration=k, wall_seconds=float(k), data=values))
    return page


def test_the_state_of_a_large_run():
    """Two thousand iterations of 512 roles on 64 nodes; a loss that is no number can be told."""
    page = page_of(*(float(k).hex() for k in range(1, 2000)), "nan")
    told = json.dumps(drawn(page, status_of(64, 512, 2001.0), 2001.0), allow_nan=False)
    found = json.loads(told)
    assert len(found["loss"]) <= 402
    assert (found["loss"][0], found["loss"][-1]) == ([1, 1.0, 1.0], [2000, None, 2000.0])
    assert len(told) < 200_000


LOST = Event(Kind.NODE_LOST, 1, 9, data={"cause": "connection closed"}, wall_seconds=3.5)
CLOSED = Event(
    Kind.EPOCH_CLOSED, 1, data={"kind": "node-lost", "cause": "node 9"}, wall_seconds=3.6
)


def states() -> dict[str, dict[str, Any]]:
    """States of small and large runs, from the start to the end, with all that can be shown."""
    began = time.time() - 100.0
    long = "no more than three nodes of failure domain rack-07 may be lost at once, " * 3
    found = {"start": drawn(page_of(), None, began)}
    for name, nodes, roles in (("8", 4, 8), ("512", 64, 512)):
        page, status = page_of(run=f"run-of-{roles}-roles"), status_of(nodes, roles, began + 99)
        told = list(events_of(60, 40, 0.0, began=began))
        for event in told[:-1]:
            page.take(event)
        page.take(replace(LOST, data={"cause": long}, wall_seconds=began + 60))
        for kind in (Kind.DRAIN, Kind.NODE_LOST):
            page.take(Event(kind, 1, 10, data={"cause": long}, wall_seconds=began + 60))
        status["nodes"][str(nodes)]["use"] = "quarantined"
        status |= {"slow": {"1": {"seconds": 0.31, "peer_seconds": 0.1}}}
        status["nodes"]["2"] |= {"standing": "weak", "reasons": [long]}
        status["roles"]["2"]["waiting"], status["roles"]["4"]["section"] = [1, 2, 3], "save"
        found[f"running-{name}"] = drawn(page, status, began + 99)
        page.take(replace(CLOSED, data={**CLOSED.data, "cause": long}, wall_seconds=began + 61))
        status |= {"phase": "closing", "failing": {"kind": "node-lost", "cause": long}}
        found[f"recovering-{name}"] = drawn(page, status, began + 99)
        page.take(told[-1])
        found[f"over-{name}"] = drawn(page, None, began + 99)
    return found


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("no browser: scripts/system-packages.sh")
    with Browser(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.mark.slow
def test_nothing_sticks_out_at_any_width(browser):
    for name, state in states().items():
        with served(state) as address:
            browser.open(f"{address}/?token={TOKEN}")
            for width in (390, 1280, 1920):
                browser.resize(width)
                assert browser.overflow() == [], (name, width)


@pytest.mark.slow
def test_trouble_comes_first_and_the_pointer_finds_an_iteration(browser):
    with served(states()["running-512"]) as address:
        browser.resize(1280)
        browser.open(f"{address}/?token={TOKEN}")
        cards = browser.value("[...document.querySelectorAll('.node')].map((one) => one.className)")
        assert len(cards) == 69
        assert "lost" in cards[-1], "a node that has left as it was asked to"
        assert browser.value("document.getElementById('zone').textContent"), "whose clock it is"
        shown = [("lost" in one, "trouble" in one) for one in cards[:7]]
        assert shown == [*[(True, True)] * 2, *[(False, True)] * 4, (False, False)]
        left, width, y = browser.value(
            "(({ left, width, top }) => [left, width, top + 50])"
            "(document.getElementById('loss').getBoundingClientRect())"
        )
        assert "at iteration 60," in browser.text()
        browser.point(left + 48 + (width - 60) * 29 / 59, y)
        wait_for("the iteration", lambda: "at iteration 30," in browser.text())


@pytest.mark.slow
def test_texts_of_a_run_are_no_markup(browser):
    bad = "<script>document.title = 'taken'</script>"
    state = page_of("0x1p+1", "0x1p+1", run=bad)
    state.take(Event(Kind.TRAINING, data={"iterations": 100}))
    state.take(Event(Kind.EPOCH_CLOSED, data={"cause": bad, "kind": "node-lost"}))
    shown = drawn(state, status_of(2, 4, 1.0), 1.0)
    with served(shown) as address:
        browser.open(f"{address}/?token={TOKEN}")
        assert f"[node-lost]: {bad}" in browser.text()
        assert "iteration of 100" in browser.text()
        for name, number in ((".role", 4), (".node.spare", 2), (".exposed", 1), ("script", 2)):
            assert browser.value(f"document.querySelectorAll('{name}').length") == number, name
        assert browser.value("document.title").endswith(bad)


@pytest.mark.full
@pytest.mark.slow
def test_a_browser_sees_a_run_lose_a_node(tmp_path, browser):
    told = tmp_path / "told"
    options = ("--deadpool-on-event", f'echo "$DEADPOOL_EVENT_KIND" >> {told}')
    with Run(tmp_path / "r", nodes=2, nproc=2, options=options) as run:
        run.wait_iteration(3)
        command = [sys.executable, "-m", "deadpool_megatron", "serve", str(run.run.path)]
        serving = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
        try:
            assert serving.stdout is not None
            browser.open(serving.stdout.readline().strip())
            send(run.listing(0)["agent"])
            run.wait_event(Kind.RECOVERED)
            for text in ("Running", "node 0, failed", "recovered in", "node 2\n", "Last failure"):
                wait_for(text, lambda text=text: text in browser.text())  # type: ignore[misc]
            assert browser.value("document.querySelectorAll('.role').length") == 4
            assert browser.overflow() == []
            run.finish()
            wait_for("the end", lambda: "exit status 0: finished" in browser.text())
        finally:
            serving.terminate()
            serving.communicate()
    assert told.read_text().split() == ["epoch-closed", "recovered", "run-ended"]


def test_bad_addresses_and_readers_that_go_away_leave_nothing_on_the_terminal(capfd):
    def requests() -> list[str]:
        return [one.name for one in threading.enumerate() if "process_request" in one.name]

    with served({"text": "x" * (16 << 20)}) as address:
        host, _, port = address.removeprefix("http://").partition(":")
        for target in ("http://[", "//[?token=x", "/state?token=" + "%ff" * 9):
            with socket.create_connection((host, int(port)), 10) as client:
                client.sendall(f"GET {target} HTTP/1.0\r\n\r\n".encode())
                assert client.makefile("rb").readline().split()[1] in (b"400", b"403")
        with socket.create_connection((host, int(port)), 10) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(f"GET /state?token={TOKEN} HTTP/1.0\r\n\r\n".encode())
            assert client.recv(1)
        wait_for("the thread of the request to end", lambda: not requests())
        first, *others = (socket.create_connection((host, int(port)), 10) for _ in range(40))
        assert first.recv(1) == b"", "it has asked nothing, and there are many"
        assert get(f"{address}/state?token={TOKEN}")[0] == 200
        for one in (first, *others):
            one.close()
    assert capfd.readouterr().err == ""


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(204)
        self.end_headers()


def test_requests_that_never_end_take_neither_its_threads_nor_its_answers():
    server = http_server.LimitedServer("127.0.0.1", 0, Answers)
    before = threading.active_count()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with ExitStack() as stack:
        stack.callback(server.server_close)
        stack.callback(server.shutdown)
        for _ in range(3 * http_server.MAX_REQUESTS):
            one = stack.enter_context(socket.create_connection(server.server_address[:2]))
            one.sendall(b"GET / HTTP/1.0\r\n")
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}", timeout=10) as answer:
            assert answer.status == 204
        most = before + 1 + http_server.MAX_REQUESTS
        wait_for("threads to end", lambda: threading.active_count() <= most)
