"""The store of one epoch at one place: values, of which the first of a key stays, and who wants
which.

The coordinator has one for its agents, each agent one for its members.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from deadpool_megatron.wire.store import folder_of

# Far above what 512 roles in full meshes say of themselves (some 20 MiB).
MAXIMUM_EPOCH_BYTES = 256 << 20
_PIECE_BYTES = 1 << 20
_ENTRY_BYTES = 64  # what a key costs beside its text

Who = TypeVar("Who")


@dataclass
class _Folder(Generic[Who]):
    """``fresh`` has not been delivered to ``served``; ``newcomers`` have been delivered nothing."""

    values: dict[str, str] = field(default_factory=dict)
    fresh: dict[str, str] = field(default_factory=dict)
    served: dict[Who, None] = field(default_factory=dict)
    newcomers: dict[Who, None] = field(default_factory=dict)


class StoreHub(Generic[Who]):
    """Used from one thread. Holds the values of one epoch only."""

    def __init__(self, maximum_bytes: int = MAXIMUM_EPOCH_BYTES) -> None:
        self.epoch = 0
        self._maximum_bytes = maximum_bytes
        self._bytes = 0
        self._folders: dict[str, _Folder[Who]] = {}
        self._due: dict[str, None] = {}

    def enter(self, epoch: int) -> None:
        """Serve ``epoch`` from now on; what was held of another one is dropped."""
        if epoch != self.epoch:
            self.epoch, self._bytes = epoch, 0
            self._folders.clear()
            self._due.clear()

    def put(self, values: Mapping[str, str]) -> dict[str, str]:
        """Take values; returns those that are new. Raises ValueError when there are too many."""
        new = {}
        for key, value in values.items():
            name = folder_of(key)
            folder = self._folder(name)
            if key not in folder.values:
                self._count(len(key) + len(value))
                folder.values[key] = folder.fresh[key] = new[key] = value
                self._due[name] = None
        return new

    def want(self, who: Who, name: str) -> bool:
        """Deliver all values of a folder, present and future; asked again, the present ones are
        delivered again. Returns whether nobody had asked for it before. Raises ValueError when too
        much is asked for.
        """
        folder = self._folder(name)
        first = not folder.served and not folder.newcomers
        if folder.served.pop(who, 0) == 0 and who not in folder.newcomers:
            self._count(len(name))
        folder.newcomers[who] = None
        self._due[name] = None
        return first

    def deliveries(self) -> Iterator[tuple[list[Who], dict[str, str]]]:
        """Yields what is to be delivered now: to whom, and which values, in pieces of a bounded
        size. Each delivery comes once.
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

    def _folder(self, name: str) -> _Folder[Who]:
        folder = self._folders.get(name)
        if folder is None:
            self._count(len(name))
            folder = self._folders[name] = _Folder()
        return folder

    def _count(self, characters: int) -> None:
        self._bytes += characters + _ENTRY_BYTES
        if self._bytes > self._maximum_bytes:
            raise ValueError(f"the store of epoch {self.epoch} is over {self._maximum_bytes} bytes")


def _pieces(values: Mapping[str, str]) -> Iterator[dict[str, str]]:
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
