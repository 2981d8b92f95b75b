"""The store in which communicators meet, between members, their agents and the coordinator.

All three send each other messages of the same form, which may be repeated::

    {"t": "store", "epoch": e, "values": {key: value in base64}, "want": [folder, ...]}

The first value of a key stays. The folder of a key is the text before its last ``/``: a client that
wants a folder gets all values in it, present and future.

Coordinator and agents each have a hub with the values of one epoch, and the folders that each
client wants. The coordinator serves the agents, and each agent serves its members: it forwards
their values to the coordinator, and requests each wanted folder once for all of them. The agent
keeps these values and requests until the epoch is closed and repeats them at each welcome. So
nothing is lost if a connection is cut, or if a new coordinator begins with an empty store.
"""

from __future__ import annotations

import asyncio
import base64
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Generic, Protocol, TypeVar

from deadpool_megatron import failpoints
from deadpool_megatron.wire.framing import encode

MAXIMUM_KEY_CHARACTERS = 512
MAXIMUM_VALUE_BYTES = 1 << 20
_MAXIMUM_TEXT = (MAXIMUM_VALUE_BYTES + 2) // 3 * 4
# Far above the values of 512 roles in full meshes (some 20 MiB).
MAXIMUM_EPOCH_BYTES = 256 << 20
_PIECE_BYTES = 1 << 20
_ENTRY_BYTES = 64  # the cost of a key in addition to its text
Client = TypeVar("Client")


def folder_of(key: str) -> str:
    """Return the folder of a key."""
    return key.rpartition("/")[0]


def pack(epoch: int, values: Mapping[str, str], want: Iterable[str] = ()) -> dict[str, Any]:
    """Return the message of the store."""
    return {"t": "store", "epoch": epoch, "values": dict(values), "want": list(want)}


def unpack(message: Mapping[str, Any]) -> tuple[int, Mapping[str, str], list[str]]:
    """Return epoch, values and wanted folders. Raises ValueError for a message that is malformed or
    too large."""
    epoch, values, want = message.get("epoch"), message.get("values"), message.get("want")
    if type(epoch) is not int or not isinstance(values, dict) or not isinstance(want, list):
        raise ValueError("malformed store message")
    if not all(_is_text(key, MAXIMUM_KEY_CHARACTERS) for key in (*values, *want)):
        raise ValueError(f"a key of the store is no text of up to {MAXIMUM_KEY_CHARACTERS} letters")
    if not all(_is_text(value, _MAXIMUM_TEXT) for value in values.values()):
        raise ValueError(f"a value of the store is no text of up to {MAXIMUM_VALUE_BYTES} bytes")
    return epoch, values, want


def _is_text(value: object, limit: int) -> bool:
    return isinstance(value, str) and len(value) <= limit


@dataclass
class _Folder(Generic[Client]):
    """One folder. The clients ``served`` have received all values except ``fresh``; the clients
    ``newcomers`` have yet to receive all."""

    values: dict[str, str] = field(default_factory=dict)
    fresh: dict[str, str] = field(default_factory=dict)
    served: dict[Client, None] = field(default_factory=dict)
    newcomers: dict[Client, None] = field(default_factory=dict)


class StoreHub(ABC, Generic[Client]):
    """The values of one epoch, 0 for none, and the clients that want them. Used from one loop."""

    def __init__(self, maximum_bytes: int = MAXIMUM_EPOCH_BYTES) -> None:
        self.epoch = 0
        self._is_flush_due = False
        self._maximum_bytes = maximum_bytes
        self._bytes = 0
        self._folders: dict[str, _Folder[Client]] = {}
        self._due: dict[str, None] = {}

    def enter(self, epoch: int) -> None:
        """Serve ``epoch`` from now on, and drop the values of any other epoch."""
        if epoch != self.epoch:
            self.epoch, self._bytes = epoch, 0
            self._folders.clear()
            self._due.clear()

    def put(self, values: Mapping[str, str]) -> dict[str, str]:
        """Take values, and return the values that are new. Raises ValueError for too many."""
        new = {}
        for key, value in values.items():
            name = folder_of(key)
            folder = self._folder(name)
            if key not in folder.values:
                self._count(len(key) + len(value))
                folder.values[key] = folder.fresh[key] = new[key] = value
                self._due[name] = None
        return new

    def want(self, client: Client, name: str) -> bool:
        """Deliver all values of a folder, present and future; a repeated request delivers the
        present values again. Returns whether this is the first request for the folder. Raises
        ValueError when too much is requested.
        """
        folder = self._folder(name)
        first = not folder.served and not folder.newcomers
        if folder.served.pop(client, 0) == 0 and client not in folder.newcomers:
            self._count(len(name))
        folder.newcomers[client] = None
        self._due[name] = None
        return first

    def deliveries(self) -> Iterator[tuple[list[Client], dict[str, str]]]:
        """Yield the deliveries that are due: receivers and values, in pieces of a bounded size.
        Each delivery is yielded once.
        """
        due, self._due = self._due, {}
        for folder in (self._folders[name] for name in due):
            fresh, folder.fresh = folder.fresh, {}
            served, newcomers = list(folder.served), list(folder.newcomers)
            folder.served |= folder.newcomers
            folder.newcomers = {}
            for receivers, values in ((served, fresh), (newcomers, folder.values)):
                if receivers:
                    for piece in _pieces(values):
                        yield receivers, piece

    @abstractmethod
    def _deliver(self, clients: list[Client], message: dict[str, Any]) -> None:
        """Send values to clients that want them."""

    def _flush_soon(self) -> None:
        """Deliver after all messages of this turn of the loop, which share one delivery."""
        if not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        for clients, piece in self.deliveries():
            self._deliver(clients, pack(self.epoch, piece))

    def _folder(self, name: str) -> _Folder[Client]:
        folder = self._folders.get(name)
        if folder is None:
            self._count(len(name))
            folder = self._folders[name] = _Folder()
        return folder

    def _count(self, characters: int) -> None:
        self._bytes += characters + _ENTRY_BYTES
        if self._bytes > self._maximum_bytes:
            raise ValueError(f"the store of epoch {self.epoch} is over {self._maximum_bytes} bytes")


class CoordinatorStore(StoreHub[int]):
    """The coordinator's store. ``send_frame`` sends an encoded message to a node; ``epoch`` returns
    the epoch that is open or being opened, 0 when there is none.
    """

    def __init__(self, send_frame: Callable[[int, bytes], None], epoch: Callable[[], int]) -> None:
        super().__init__()
        self._send_frame = send_frame
        self._open_epoch = epoch

    def receive(self, node: int, message: Mapping[str, Any]) -> None:
        """Take an agent's message, and drop it if its epoch is not the open epoch.

        Raises ValueError for a message that no correct agent sends.
        """
        epoch, values, want = unpack(message)
        self.enter(self._open_epoch())
        if epoch != self.epoch or not epoch:
            return
        failpoints.hit("coordinator.store", epoch=epoch)
        self.put(values)
        for folder in want:
            self.want(node, folder)
        self._flush_soon()

    def _deliver(self, clients: list[int], message: dict[str, Any]) -> None:
        frame = encode(message)
        for node in clients:
            self._send_frame(node, frame)


class StoreMember(Protocol):
    """A member as the relay sees it."""

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message."""

    def kill(self, cause: str) -> None:
        """End the process."""


class StoreRelay(StoreHub[StoreMember]):
    """The agent's store. ``send`` sends to the coordinator."""

    def __init__(self, send: Callable[[Mapping[str, Any]], None]) -> None:
        super().__init__()
        self._send = send
        self._own: dict[str, str] = {}
        self._wanted: dict[str, None] = {}
        self._unsent: tuple[dict[str, str], dict[str, None]] = {}, {}

    def enter(self, epoch: int) -> None:
        """See the base class."""
        if epoch != self.epoch:
            self._own, self._wanted, self._unsent = {}, {}, ({}, {})
        super().enter(epoch)

    def from_member(self, member: StoreMember, message: Mapping[str, Any]) -> None:
        """Take a member's message; kill the member if it is invalid."""
        try:
            epoch, written, wanted = unpack(message)
            if epoch != self.epoch or not epoch:
                return  # the close has not reached this member yet
            values, want = self._unsent
            new = self.put(written)
            self._own |= new
            values |= new
            for folder in wanted:
                if self.want(member, folder):
                    self._wanted[folder] = want[folder] = None
            self._flush_soon()
        except ValueError as error:
            member.kill(f"sent garbage: {error}")

    def from_coordinator(self, message: Mapping[str, Any]) -> None:
        """Take the values of members of other nodes."""
        try:
            epoch, values, _ = unpack(message)
            if epoch == self.epoch > 0:
                self.put(values)
                self._flush_soon()
        except ValueError as error:
            print(f"refused of the coordinator: {error}", file=sys.stderr, flush=True)

    def repeat(self) -> None:
        """Send all values and requests again, as the coordinator may not have received them, or its
        answers may be lost.
        """
        if self._own or self._wanted:
            self._unsent = dict(self._own), dict(self._wanted)
            self._flush_soon()

    def _flush(self) -> None:
        (values, want), self._unsent = self._unsent, ({}, {})
        # The values, or the requests, of an epoch may be too large for one frame.
        nothing: dict[str, str] = {}
        folders = _pieces(dict.fromkeys(want, ""))
        for piece, wanted in zip_longest(_pieces(values), folders, fillvalue=nothing):
            self._send(pack(self.epoch, piece, wanted))
        super()._flush()

    def _deliver(self, clients: list[StoreMember], message: dict[str, Any]) -> None:
        for member in clients:
            member.send(message)


def _pieces(values: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield the values in parts of about ``_PIECE_BYTES``."""
    piece: dict[str, str] = {}
    size = 0
    for key, value in values.items():
        piece[key] = value
        size += len(key) + len(value)
        if size >= _PIECE_BYTES:
            yield piece
            piece, size = {}, 0
    if piece:
        yield piece


class StoreError(RuntimeError):
    """A closed epoch, a value that did not come in time, or a value that is too large."""


class MemberStore:
    """A member's end of the store, for any thread. ``send`` sends to the agent without blocking.

    It holds the values of one epoch: the newest in which this member wrote or requested values.
    """

    def __init__(self, send: Callable[[Mapping[str, Any]], None]) -> None:
        self._send = send
        self._changed = threading.Condition()
        self._epoch = 0
        self._closed = 0
        self._values: dict[str, str] = {}
        self._wanted: set[str] = set()

    def set(self, epoch: int, key: str, value: bytes) -> None:
        """Write a value, once. Raises StoreError."""
        if len(value) > MAXIMUM_VALUE_BYTES or len(key) > MAXIMUM_KEY_CHARACTERS:
            raise StoreError(f"key {key[:80]!r} or its {len(value)} bytes are over the limit")
        text = base64.b64encode(value).decode()
        with self._changed:
            self._enter(epoch)
            self._values[key] = text
            self._changed.notify_all()
        self._send(pack(epoch, {key: text}))

    def has(self, epoch: int, keys: Sequence[str]) -> bool:
        """Return whether all values have arrived; request the missing values. Raises StoreError."""
        with self._changed:
            self._request(epoch, keys)
            return all(key in self._values for key in keys)

    def wait(self, epoch: int, keys: Sequence[str], deadline_seconds: float) -> None:
        """Wait until all values are written.

        Raises StoreError at once when the epoch is or gets closed, and after ``deadline_seconds``.
        """
        limit = time.monotonic() + deadline_seconds
        with self._changed:
            self._request(epoch, keys)
            for key in keys:
                while key not in self._values:
                    seconds = limit - time.monotonic()
                    if seconds <= 0:
                        raise StoreError(f"{key!r} was not written within {deadline_seconds:g} s")
                    self._changed.wait(seconds)
                    self._check(epoch)

    def get(self, epoch: int, key: str, deadline_seconds: float) -> bytes:
        """Return a value, as soon as it is written; raises as :meth:`wait` does."""
        self.wait(epoch, [key], deadline_seconds)
        with self._changed:
            self._check(epoch)
            return base64.b64decode(self._values[key])

    def take(self, message: Mapping[str, Any]) -> None:
        """Take values from the agent. Raises ValueError when they are malformed."""
        epoch, values, _ = unpack(message)
        with self._changed:
            if epoch == self._epoch and epoch > self._closed:
                self._values |= values
                self._changed.notify_all()

    def close(self, epoch: int) -> None:
        """End every wait in ``epoch`` and earlier epochs."""
        with self._changed:
            self._closed = max(self._closed, epoch)
            if self._epoch <= self._closed:
                self._values, self._wanted = {}, set()
            self._changed.notify_all()

    # The callers of these methods hold the lock.

    def _enter(self, epoch: int) -> None:
        if epoch > self._epoch:
            self._epoch, self._values, self._wanted = epoch, {}, set()
        self._check(epoch)

    def _check(self, epoch: int) -> None:
        if epoch <= self._closed or epoch < self._epoch:
            raise StoreError(f"epoch {epoch} is closed")

    def _request(self, epoch: int, keys: Sequence[str]) -> None:
        self._enter(epoch)
        want = {folder_of(key) for key in keys if key not in self._values} - self._wanted
        if want:
            self._wanted |= want
            self._send(pack(epoch, {}, sorted(want)))
