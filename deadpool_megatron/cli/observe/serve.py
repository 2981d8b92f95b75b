"""``deadpool serve DIR``: a run on one page, to read only."""

from __future__ import annotations

import argparse
import hmac
import json
import secrets
import socket
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from deadpool_megatron.cli.common import CommandError, add_run_directory
from deadpool_megatron.cli.observe.addresses import listen_address, shown_host
from deadpool_megatron.cli.observe.asking import Asker
from deadpool_megatron.cli.observe.page_state import PageState
from deadpool_megatron.cli.show.tail import EventTail
from deadpool_megatron.cluster.run_directory.directory import RunDirectory

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
    """A run as the page's JSON, made anew at most once a second however many people look."""

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
