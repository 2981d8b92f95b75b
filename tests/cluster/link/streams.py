"""The writing half of a connection without a network, of which each rig sees its own side."""

from typing import Any


class Stream:
    """As much of a stream as agents and coordinators use; what is written is kept."""

    def __init__(self) -> None:
        self.transport = self
        self.sent = bytearray()
        self.size = 0  # bytes that wait in it
        self.is_closed = False

    def write(self, data: bytes) -> None:
        assert not self.is_closed
        self.sent += data

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return self.size

    def get_extra_info(self, name: str) -> Any:
        assert name == "socket"
        return self

    def setsockopt(self, *option: int | bytes) -> None:
        """Of the socket."""

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True
