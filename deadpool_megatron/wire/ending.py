"""How a connection ends that is worth nothing any more, between two processes that live on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

# On, for no seconds: what closes the socket sends a reset.
_NO_LINGER = struct.pack("ii", 1, 0)


def reset(writer: asyncio.StreamWriter) -> None:
    """End it as a broken path would: what is unsent is lost, and the other end sees a reset, where
    the end of this process would look like an orderly close.
    """
    connection = writer.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):  # closed already
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    writer.transport.abort()
