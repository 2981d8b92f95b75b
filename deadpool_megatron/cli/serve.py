"""Shows a run on one page: whether all is well, iteration and loss, nodes and roles, each recovery
with its phases, node time by use, protection and requests. The page is read-only and loads nothing
from other servers. The first line printed is its address, with a token.

examples:
  deadpool serve runs/first
  ssh -L 8800:127.0.0.1:8800 node7      then: deadpool serve runs/first --listen 127.0.0.1:8800

exit status: 0 interrupted, 2 bad arguments
"""

from __future__ import annotations

import argparse
import hmac
import json
import math
import secrets
import socket
import sys
import threading
import time
from collections import deque
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from deadpool_megatron import observe
from deadpool_megatron.cli import common
from deadpool_megatron.cli.http_server import LimitedServer
from deadpool_megatron.cli.run_result import failure_to_dict
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import Event, EventTail
from deadpool_megatron.layout.records import NodeUse
from deadpool_megatron.observe.narration import Narrator, label, node_troubles
from deadpool_megatron.observe.steps import StepTable, decimal
from deadpool_megatron.observe.story import PHASES, Interruption, Story
from deadpool_megatron.observe.view import State, View

_PAGE_FOLDER = Path(observe.__file__).parent
_FILES = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
_POLL_SECONDS = 0.5
_MAX_LINES = 200
_MAX_RECOVERIES = 50
_MAX_LOST_NODES = 50
# The maximum number of points of the loss curve.
_MAX_POINTS = 400
_LONG_FIELDS = ("hangs", "stacks", "losses", "seats_changed")
_HEADERS = {
    # The page loads only answers of this server, whatever a run's texts contain.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    common.add_run_directory(parser)
    text = "address of the page (default: a free port, on this host only)"
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="ADDR:PORT", help=text)


class RunPage:
    """The values of the page as JSON, which its script (``page.js``) displays. They are computed at
    most every half a second, for any number of readers. The script decides colours and layout.
    """

    def __init__(self, run_id: str, run: RunDirectory) -> None:
        self._run_id, self._run, self._poller = run_id, run.path, common.StatusPoller(run)
        self._tail = EventTail(run.events)
        self.story = Story()
        self._narrator = Narrator(self.story)
        self._lines: deque[tuple[float, str, str]] = deque(maxlen=_MAX_LINES)
        self._lock = threading.Lock()
        self._cached = b""
        self._valid_until = 0.0

    def answer(self) -> bytes:
        """Return the values of the page, at most half a second old. Thread-safe."""
        with self._lock:
            if time.monotonic() >= self._valid_until:
                self._tail.feed(self.take)
                values = self.to_dict(self._poller.view(self.story))
                self._cached = json.dumps(values, allow_nan=False).encode()
                self._valid_until = time.monotonic() + _POLL_SECONDS
            return self._cached

    def take(self, event: Event) -> None:
        """Add an event. Raises an error of :data:`events.DAMAGE` if it is damaged."""
        for line in self._narrator.take(event):
            if not line.passes:  # a passing line gives progress, which the page shows elsewhere
                text = line.text.replace("--run-dir DIR", f"--run-dir {self._run}")
                self._lines.append((event.wall_seconds, text, line.style))

    def to_dict(self, view: View) -> dict[str, Any]:
        """Return all values of the page."""
        story, until = view.story, view.until
        progress = story.progress()
        if view.state is State.GONE:
            progress |= dict.fromkeys(("samples_per_second", "tokens_per_second", "seconds_left"))
        uses = {use.value: spent for use, spent in story.account.uses(until).items() if spent > 0}
        return {
            "run": self._run_id,
            "now": view.now,
            **_banner_and_facts(view),
            "ended": dict(view.final) if view.state is State.OVER else None,
            "iteration": view.iteration,
            "progress": progress,
            "step_seconds": story.pace(),
            "goodput": story.goodput(until),
            "node_seconds": uses,
            "loss": _losses(story.steps),
            "recoveries": [_failure(each, view) for each in story.all_failures[-_MAX_RECOVERIES:]],
            "survived": story.survived,
            "lost": [
                {
                    "node": node,
                    "host": story.hosts.get(node, ""),
                    "at": event.wall_seconds,
                    "cause": str(event.data.get("cause", "")),
                    "planned": story.has_left(event),
                }
                for node, event in [*story.lost_nodes.items()][-_MAX_LOST_NODES:]
            ],
            "phases": dict(PHASES),
            "lines": [list(line) for line in self._lines],
        }


def _losses(steps: StepTable) -> list[tuple[int, float | None, float]]:
    """Return points (iteration, loss, wall clock) at even distances, and the newest. The loss is
    None if it is not finite, as JSON has no such numbers."""
    points = list[tuple[int, float | None, float]]()
    distance = max(1, -(-len(steps) // _MAX_POINTS))
    for index in [*range(0, len(steps), distance), *([len(steps) - 1] if len(steps) else [])]:
        step, loss = steps[index], decimal(steps[index].loss)
        if loss is not None:
            value = loss if math.isfinite(loss) else None
            points.append((step.iteration, value, step.wall_seconds))
    return points


def _banner_and_facts(view: View) -> dict[str, Any]:
    """Return the facts from the coordinator, nodes and roles, and the banner: whether all is well,
    the newest failure, the numbers of spares (present, wanted), and the time of the last step.
    """
    story, status, ago = view.story, view.status, view.step_seconds_ago
    failures = [failure for failure in story.all_failures if not failure.planned]
    banner = {
        **{name: getattr(view, name) for name in ("state", "look", "title", "to_do")},
        "why": view.reason,
        "spares": None,
        "last_step_at": None if ago is None else view.now - ago,
        "failure": _failure(failures[-1], view) if failures else None,
    }
    facts = list[tuple[str, str]]()
    if status is not None:
        epoch = f"{status['epoch']} (each change of the nodes makes a new one)"
        facts = [*common.facts(view, status), ("epoch", epoch)]
        if view.exposed is not None:  # None while nodes join, and at the end
            uses = [status["nodes"][str(node)]["use"] for node in status["spares"]]
            banner["spares"] = uses.count(NodeUse.SPARE), story.wanted[1]
    return {"banner": banner, "facts": facts, "status": _nodes_and_roles(view)}


def _nodes_and_roles(view: View) -> dict[str, Any]:
    """Return nodes and roles from the coordinator's status. Nodes that it does not have, as after
    a takeover or without an answer, come from the events."""
    story, status = view.story, view.status
    hosts = {node: host for node, host in story.hosts.items() if node not in story.lost_nodes}
    # Nodes of unknown use are drawn as spares are, in a faint colour.
    unknown = {"use": "", "spare": True, "restarts": 0, "vault": dict[str, Any]()}
    nodes = {str(node): {**unknown, "host": host} for node, host in hosts.items()}
    if status is None:
        return {"roles": {}, "nodes": nodes, "fewer_copies": [], "troubles": []}
    absences = [(node, "not back yet") for node in nodes if node not in status["nodes"]]
    return {
        "roles": status["roles"],
        "nodes": {**nodes, **status["nodes"]},
        "fewer_copies": view.exposed or [],
        "troubles": [*absences, *node_troubles(status)],
    }


def _failure(failure: Interruption, view: View) -> dict[str, Any]:
    """Return the facts on a failure without the long fields, and its text."""
    values = failure_to_dict(failure, view)
    return {
        **{name: value for name, value in values.items() if name not in _LONG_FIELDS},
        "began": failure.began,
        "noticed": failure.noticed,
        "is_cut_short": failure.is_cut_short,
        "text": failure.cause if failure.planned else label(failure, view.story.hosts),
    }


def make_server(page: RunPage, host: str, port: int, token: str) -> LimitedServer:
    """Return a server that requires the token for all answers. Raises OSError."""

    class Handler(BaseHTTPRequestHandler):
        """Serves the files of the page and its values."""

        server_version, sys_version = "deadpool", ""

        def do_GET(self) -> None:
            """Answer a request. Without the token the answer is an error."""
            status, kind, body = self._response()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            for name, value in _HEADERS.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def _response(self) -> tuple[HTTPStatus, str, bytes]:
            try:
                parts = urlsplit(self.path)
            except ValueError:
                return HTTPStatus.BAD_REQUEST, "text/plain", b"that is no address\n"
            sent_token = parse_qs(parts.query).get("token", [""])[0]
            if not hmac.compare_digest(sent_token.encode(), token.encode()):
                return HTTPStatus.FORBIDDEN, "text/plain", b"the token is missing\n"
            if parts.path == "/state":
                return HTTPStatus.OK, "application/json", page.answer()
            if parts.path not in _FILES:
                return HTTPStatus.NOT_FOUND, "text/plain", b"there is nothing\n"
            name, kind = _FILES[parts.path]
            body = (_PAGE_FOLDER / name).read_bytes()
            if name == "page.html":
                # With "<" escaped, no text of a run can end the script.
                values = page.answer().replace(b"<", b"\\u003c")
                body = body.replace(b"TOKEN", token.encode()).replace(b"FIRST", values)
            return HTTPStatus.OK, kind, body

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing, as the request line contains the token."""

    return LimitedServer(host, port, Handler)


def run(args: argparse.Namespace) -> int:
    """Carry out ``deadpool serve``. Raises CommandError."""
    host, port = common.listen_address(args.listen, min_port=0)
    run, token = RunDirectory(args.run_dir), secrets.token_urlsafe(16)
    run_id = run.read_run(only_to_show=True).run_id
    name = f"{run_id}, {socket.gethostname()}:{run.path}"
    try:
        server = make_server(RunPage(name, run), host, port, token)
    except OSError as error:
        raise common.CommandError(f"--listen {args.listen}: {error.strerror or error}") from error
    url_host = common.url_host(socket.gethostname() if host in ("0.0.0.0", "::") else host)
    print(f"http://{url_host}:{server.server_port}/?token={token}", flush=True)
    if not host.startswith("127.") and host not in ("::1", "localhost"):
        text = "the page and its token cross the network in the clear; a tunnel (--help) hides them"
        print(f"deadpool serve: {text}", file=sys.stderr, flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return 0
    finally:
        server.server_close()
    return 0
