"""The HTTP server of ``deadpool serve`` and ``deadpool metrics``, with limits for all clients.

Each request holds a thread, and all processes of the user share the system's limit of threads.
Endless requests could exhaust that limit, and an agent that cannot fork loses its node.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_REQUEST_SECONDS, MAX_REQUESTS = 20.0, 32


class LimitedServer(ThreadingHTTPServer):
    """Serves a limited number of requests, each for a limited time. Raises OSError if the address
    is not available."""

    daemon_threads = True
    request_queue_size = MAX_REQUESTS  # a client whose connection is dropped retries after seconds

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        handler.timeout = _REQUEST_SECONDS
        super().__init__((host, port), handler)
        self._accepted: deque[Any] = deque()

    def process_request(self, request: Any, client_address: Any) -> None:
        """See the base class. Above the limit, close the oldest connection."""
        self._accepted.append(request)
        if len(self._accepted) > MAX_REQUESTS:
            with contextlib.suppress(OSError):
                self._accepted.popleft().shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect or are too slow, and requests that get no thread."""
        ignored = ConnectionError | TimeoutError | RuntimeError  # RuntimeError: no thread is free
        if not isinstance(sys.exc_info()[1], ignored):
            super().handle_error(request, client_address)
