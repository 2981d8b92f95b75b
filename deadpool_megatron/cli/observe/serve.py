"""``deadpool serve DIR``: a run on one page, to read only.

The page's values are made from the events and from what the coordinator says; what is for the eye
alone (colours, places) is in ``page.html``.
"""

from __future__ import annotations

import argparse
import hmac
import json
import math
import secrets
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from deadpool_megatron.cli.common import (
    Asker,
    CommandError,
    add_run_directory,
    listen_address,
    shown_host,
)
from deadpool_megatron.cli.show.narration import describe_cause, describe_loss, tell
from deadpool_megatron.cli.show.progress import Progress
from deadpool_megatron.cli.show.run_result import PHASES
from deadpool_megatron.cli.show.story import Interruption, Story
from deadpool_megatron.cli.show.tail import EventTail
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import DAMAGE, Event

_DESCRIPTION = """\
Shows a run on one page: nodes and roles, iteration and loss, protection, the timeline of each
recovery with its phases, where the time went, what happens right now. The page is read-only and
needs nothing from elsewhere; its address, with a token that it asks for, is the first line printed.
"""
_EXAMPLES = """\
examples:
  deadpool serve runs/first
  ssh -L 8800:127.0.0.1:8800 node7      then: deadpool serve runs/first --listen 127.0.0.1:8800

exit status: 0 interrupted, 2 bad arguments
"""
_ROOM = Path(__file__).parent
_FILES = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
_LOOK_SECONDS = 0.5
_REQUEST_SECONDS = 20.0
# Nothing but what this server itself answers is ever loaded, whatever a run's texts hold.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SHOWN_LINES = 200
_SHOWN_RECOVERIES = 50
# The curve of the loss has so many points at most, whatever the length of the run.
_POINTS = 400
# The pace of training is that of so many steps; of a long run all of them take long to look at.
_RECENT_STEPS = 50


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``serve`` to the commands."""
    parser = subparsers.add_parser(
        "serve",
        help="a run on one page in the browser",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    add_run_directory(parser)
    parser.add_argument(
        "--listen",
        default="127.0.0.1:0",
        metavar="ADDR:PORT",
        help="(default: a free port of this host alone)",
    )


class Watched:
    """A run as the page's JSON, made again at most once a second however many people look."""

    def __init__(self, run: RunDirectory) -> None:
        """Raises RunDirectoryError when there is no run."""
        self._asker = Asker(run)
        self._state = PageState(run.read_run(only_to_show=True).run_id)
        self._tail = EventTail(run.events)
        self._lock = threading.Lock()
        self._made = b""
        self._good_until = 0.0

    def answer(self) -> bytes:
        """Return the state as of now, or of so little ago that nobody sees the difference."""
        with self._lock:
            if time.monotonic() >= self._good_until:
                self._tail.feed(self._state.add)
                found = self._state.to_dict(self._asker.status(), time.time())
                self._made = json.dumps(found, allow_nan=False).encode()
                self._good_until = time.monotonic() + _LOOK_SECONDS
            return self._made


def make_server(watched: Watched, host: str, port: int, token: str) -> ThreadingHTTPServer:
    """Return a server that answers the page to whoever names the token. Raises OSError."""

    class Handler(BaseHTTPRequestHandler):
        """Three files and one JSON answer."""

        timeout = _REQUEST_SECONDS
        server_version, sys_version = "deadpool", ""

        def do_GET(self) -> None:
            """Answer one request; without the token nothing is answered but that it is missing."""
            try:
                parts = urlsplit(self.path)
            except ValueError:
                self._answer(HTTPStatus.BAD_REQUEST, b"that is no address\n", "text/plain")
                return
            given = parse_qs(parts.query).get("token", [""])[0]
            if not hmac.compare_digest(given.encode(), token.encode()):
                self._answer(HTTPStatus.FORBIDDEN, b"the token is missing\n", "text/plain")
            elif parts.path == "/state":
                self._answer(HTTPStatus.OK, watched.answer(), "application/json")
            elif (file := _FILES.get(parts.path)) is not None:
                name, kind = file
                body = (_ROOM / name).read_text("utf-8")
                if name == "page.html":  # data, which no text of a run can end
                    first = watched.answer().decode().replace("<", "\\u003c")
                    body = body.replace("TOKEN", token).replace("FIRST", first)
                self._answer(HTTPStatus.OK, body.encode(), kind)
            else:
                self._answer(HTTPStatus.NOT_FOUND, b"there is nothing\n", "text/plain")

        def _answer(self, status: HTTPStatus, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Security-Policy", _POLICY)
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing: the address has the token in it."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Say nothing of a reader that went away, or that is too slow."""
            if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
                super().handle_error(request, client_address)

    return Server((host, port), Handler)


def run(args: argparse.Namespace) -> int:
    """Carry out ``deadpool serve``. Raises CommandError."""
    host, port = listen_address(args.listen, least_port=0)
    watched = Watched(RunDirectory(args.run_dir))
    token = secrets.token_urlsafe(16)
    try:
        server = make_server(watched, host, port, token)
    except OSError as error:
        raise CommandError(f"--listen {args.listen}: {error}") from error
    print(f"http://{shown_host(host)}:{server.server_port}/?token={token}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return 0
    finally:
        server.server_close()
    return 0


class PageState:
    """Feed it with events in their order. Not thread-safe."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._story = Story()
        self._progress = Progress(self._story.account)
        self._lines: deque[tuple[float, str, str]] = deque(maxlen=_SHOWN_LINES)

    def add(self, event: Event) -> None:
        """Take in one event. Raises LookupError, TypeError, ValueError or AttributeError for a
        damaged one.
        """
        self._story.add(event)
        self._progress.add(event)
        line = tell(event)
        if line is not None and not line.passes:
            self._lines.append((event.wall_seconds, line.text, line.style))

    def to_dict(self, status: Mapping[str, Any] | None, now: float) -> dict[str, Any]:
        """Return everything. ``status``: as of ``deadpool status --json``, None if nobody answers;
        ``now``: wall clock in seconds."""
        story = self._story
        ended = story.ended
        pace = story.step_seconds(_RECENT_STEPS)
        # Where nobody answers, nobody knows what nodes do since the newest event.
        until = None if status is None else now
        return {
            "run": self._run_id,
            "now": now,
            "ended": None if ended is None else dict(ended.data),
            "iteration": story.last_iteration,
            "progress": self._progress.to_dict(),
            "epoch": story.epoch,
            "step_seconds": statistics.median(pace) if pace else None,
            "goodput": story.account.goodput(until),
            "node_seconds": {
                use.value: seconds
                for use, seconds in story.account.seconds(until).items()
                if seconds > 0
            },
            "loss": self._losses(),
            "recoveries": [_recovery(failure) for failure in story.failures[-_SHOWN_RECOVERIES:]],
            "recovery_count": len(story.failures),
            "phases": dict(PHASES),
            "lines": [list(line) for line in self._lines],
            "status": _status(status),
        }

    def _losses(self) -> list[tuple[int, float | None]]:
        """None for what is not finite: JSON has no such numbers."""
        steps = self._story.steps
        every = max(1, -(-len(steps) // _POINTS))
        found: list[tuple[int, float | None]] = []
        for at in [*range(0, len(steps), every), *([len(steps) - 1] if len(steps) else [])]:
            timed = steps[at]
            if timed.step.loss is not None:
                loss = float.fromhex(timed.step.loss)
                found.append((timed.step.iteration, loss if math.isfinite(loss) else None))
        return found


def _recovery(failure: Interruption) -> dict[str, Any]:
    recovery = failure.recovery
    return {
        "number": failure.number,
        "at": failure.began,
        "cause": describe_cause({"kind": failure.kind, "cause": failure.cause}),
        "planned": failure.planned,
        "after_iteration": failure.last_iteration,
        "losses": [describe_loss(loss) for loss in failure.losses],
        "phases": {} if recovery is None else dict(recovery.phases),
        "seconds": None if recovery is None else recovery.seconds,
        "recomputed": None if recovery is None else recovery.steps_recomputed,
        "exposed_seconds": failure.exposure,
    }


def _status(status: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if status is None:
        return None
    try:
        return _known_status(status)
    except DAMAGE:  # of a coordinator of another version
        return None


def _known_status(status: Mapping[str, Any]) -> dict[str, Any]:
    aside = {str(node) for node in status["aside"]}
    fewer = set(status["fewer_copies"])
    return {
        "phase": status["phase"],
        "waiting_for": status["waiting_for"],
        "protection": status["protection"],
        "rpo": status["rpo"]["most_lost"],
        "coordinator": status["coordinator"],
        "failing": status["failing"],
        "requests": [
            {key: one[key] for key in ("number", "verb", "stage", "why") if key in one}
            for one in status["requests"]
        ],
        "roles": {
            role: {
                "node": known["seat"][0],
                "section": known["section"],
                "iteration": known["iteration"],
                "waits": bool(known["waiting"]),
                "exposed": int(role) in fewer,
            }
            for role, known in status["roles"].items()
        },
        "nodes": {
            node: {
                "host": known["host"],
                "state": "aside" if node in aside else "spare" if known["spare"] else "training",
                "standing": known["standing"],
                "reasons": list(known["reasons"]),
                "restarts": known["restarts"],
                "bytes": known["vault"].get("bytes"),
                "slow": node in status["slow"],
            }
            for node, known in status["nodes"].items()
        },
    }
