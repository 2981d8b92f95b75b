"""Connections that would hold the server of the page, or of metrics, for ever."""

from __future__ import annotations

import socket
import threading
import urllib.request
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler

from deadpool_megatron.cli import http_server
from tests.common.waiting import wait_for


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(204)
        self.end_headers()


def test_requests_that_never_end_take_neither_its_threads_nor_its_answers() -> None:
    server = http_server.LimitedServer("127.0.0.1", 0, Handler)
    before = threading.active_count()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with ExitStack() as stack:
        stack.callback(server.server_close)
        stack.callback(server.shutdown)
        for _ in range(3 * http_server.MOST_REQUESTS):
            one = stack.enter_context(socket.create_connection(server.server_address[:2]))
            one.sendall(b"GET / HTTP/1.0\r\n")
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}", timeout=10) as answer:
            assert answer.status == 204
        most = before + 1 + http_server.MOST_REQUESTS
        wait_for("threads to end", lambda: threading.active_count() <= most)
