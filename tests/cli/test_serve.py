"""The page of a run: in a real browser while a node is lost, and closed to whoever has no token."""

from __future__ import annotations

import html
import json
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPMessage
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.cli import serve
from deadpool_megatron.events import Event, Kind
from tests.cluster.running import Run, environment, send
from tests.common.waiting import wait_for

CHROMIUM = shutil.which("chromium")
# As random ones may be: nothing that a program could use as a name.
TOKEN = "0-to_ken-"
#: what keeps a browser from looking for the world outside
_ALONE = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--virtual-time-budget=5000",
)


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


def shown_in_browser(address: str, place: Path, *texts: str) -> str:
    """The page as its program has drawn it, with all of these texts: on a busy machine the browser
    may have looked before the first answer.
    """
    assert CHROMIUM is not None
    command = [CHROMIUM, *_ALONE, f"--user-data-dir={place / 'profile'}", "--dump-dom"]
    shown = ""

    def is_drawn() -> bool:
        nonlocal shown
        done = subprocess.run([*command, address], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        shown = done.stdout
        return all(text in shown for text in texts)

    wait_for(f"{texts} on the page", is_drawn)
    return shown


def test_nothing_is_answered_without_the_token() -> None:
    with served({}) as address:
        for path in ("/", "/state", "/page.js", "/page.css", "/?token=other", "/state?token="):
            status, body, _ = get(address + path)
            assert (status, body) == (403, b"the token is missing\n"), path
        assert get(f"{address}/state?token={TOKEN}")[:2] == (200, b"{}")
        assert get(f"{address}/../serve.py?token={TOKEN}")[0] == 404
        with pytest.raises(urllib.error.HTTPError, match="501"):
            urllib.request.urlopen(f"{address}/state?token={TOKEN}", data=b"x", timeout=10)


def test_the_page_loads_nothing_from_elsewhere() -> None:
    with served({}) as address:
        for path in ("/", "/page.js", "/page.css"):
            status, body, headers = get(f"{address}{path}?token={TOKEN}")
            assert status == 200
            assert "default-src 'none'" in headers["Content-Security-Policy"]
            found = re.findall(r"https?://[^\s\"']+", body.decode())
            assert set(found) <= {"http://www.w3.org/2000/svg"}, "a name, never loaded"


def status_of(nodes: int, roles: int) -> dict[str, Any]:
    per_node = roles // nodes
    seats = {str(r): [r // per_node, r % per_node, 0] for r in range(roles)}
    return {
        "phase": "running",
        "waiting_for": "",
        "rpo": {"most_lost": 1},
        "failing": {},
        "aside": [],
        "slow": {},
        "fewer_copies": [3],
        "roles": {
            role: {"seat": seat, "section": "step", "iteration": 7, "waiting": None}
            for role, seat in seats.items()
        },
        "nodes": {
            str(node): {
                "host": f"b{node}",
                "spare": node >= nodes,
                "standing": "good",
                "reasons": [],
                "restarts": 0,
                "vault": {"bytes": 10**9},
            }
            for node in range(nodes + 2)
        },
    }


def page_of(*losses: str, run: str = "run") -> serve.WatchedPage:
    page = serve.WatchedPage(run, None, None)  # type: ignore[arg-type]
    for k, loss in enumerate(losses, 1):
        values = {"loss": loss, "samples": 8 * k}
        page.take(Event(Kind.STEP, iteration=k, wall_seconds=float(k), data=values))
    return page


def test_the_state_of_a_large_run() -> None:
    """Two thousand iterations of 512 roles on 64 nodes; a loss that is no number can be told."""
    page = page_of(*(float(k).hex() for k in range(1, 2000)), "nan")
    told = json.dumps(page.to_dict(status_of(64, 512), 2001.0), allow_nan=False)
    found = json.loads(told)
    assert len(found["loss"]) <= 402
    assert (found["loss"][0], found["loss"][-1]) == ([1, 1.0], [2000, None])
    assert len(told) < 200_000


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: scripts/system-packages.sh")
def test_texts_of_a_run_are_no_markup(tmp_path: Path) -> None:
    bad = "<script>document.title = 'taken'</script>"
    state = page_of("0x1p+1", "0x1p+1", run=bad)
    state.take(Event(Kind.TRAINING, data={"iterations": 100}))
    state.take(Event(Kind.EPOCH_CLOSED, data={"cause": bad, "kind": "node-lost"}))
    with served(state.to_dict(status_of(2, 4), 1.0)) as address:
        escaped = f"a node was lost: {html.escape(bad, quote=False)}"
        shown = shown_in_browser(f"{address}/?token={TOKEN}", tmp_path, escaped)
    assert "<b>2</b><span>iteration of 100</span>" in shown
    assert len(re.findall('class="role[ "]', shown)) == 4
    assert len(re.findall('class="node spare"', shown)) == 2
    assert len(re.findall('class="[^"]*exposed"', shown)) == 1
    assert bad not in shown
    assert "<title>taken" not in shown


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: scripts/system-packages.sh")
def test_a_browser_sees_a_run_lose_a_node(tmp_path: Path) -> None:
    told = tmp_path / "told"
    options = ("--deadpool-on-event", f'echo "$DEADPOOL_EVENT_KIND" >> {told}')
    with Run(tmp_path / "r", nodes=2, nproc=2, options=options) as run:
        run.wait_iteration(3)
        command = [sys.executable, "-m", "deadpool_megatron", "serve", str(run.run.path)]
        serving = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
        try:
            assert serving.stdout is not None
            address = serving.stdout.readline().strip()
            send(run.listing(0)["agent"])
            run.wait_event(Kind.RECOVERED)
            texts = (">running<", "a node was lost: node 0", "recovered in", ">node 2<")
            shown = shown_in_browser(address, tmp_path, *texts)
            assert ">node 0<" not in shown
            assert len(re.findall('class="role[ "]', shown)) == 4
            run.finish()
            state = address.replace("/?", "/state?")
            wait_for("the end", lambda: json.loads(get(state)[1])["ended"])
            shown_in_browser(address, tmp_path, "ended with status 0")
        finally:
            serving.terminate()
            serving.communicate()
    assert told.read_text().split() == ["epoch-closed", "recovered", "run-ended"]


def test_bad_addresses_and_readers_that_go_away_leave_nothing_on_the_terminal(
    capfd: pytest.CaptureFixture[str],
) -> None:
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
    assert capfd.readouterr().err == ""
