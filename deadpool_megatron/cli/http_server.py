"""The HTTP server of ``deadpool serve`` and ``deadpool metrics``: anyone may connect, up to limits.

A connection that never ends its request would hold a thread, and other processes of the user share
the limit of threads: an agent that cannot fork loses its node.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_REQUEST_SECONDS, MOST_REQUESTS = 20.0, 32


class LimitedServer(ThreadingHTTPServer):
    """Answers so many requests at a time, each within some seconds. Raises OSError."""

    daemon_threads = True
    request_queue_size = MOST_REQUESTS  # those that the kernel has to drop come again after seconds

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        handler.timeout = _REQUEST_SECONDS
        super().__init__((host, port), handler)
        self._taken: deque[Any] = deque()

    def process_request(self, request: Any, client_address: Any) -> None:
        """See the base class. Of too many the oldest ends, if it has not by itself."""
        self._taken.append(request)
        if len(self._taken) > MOST_REQUESTS:
            with contextlib.suppress(OSError):
                self._taken.popleft().shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a reader that went away, or that is too slow."""
        quiet = ConnectionError | TimeoutError | RuntimeError  # the last: no more threads
        if not isinstance(sys.exc_info()[1], quiet):
            super().handle_error(request, client_address)
