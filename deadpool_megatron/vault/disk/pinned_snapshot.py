"""The snapshot of a generation for an export: whole copies, in memory, of the parts of all roles
of a node.

Slots are overwritten as training continues, and an export takes far longer than an iteration. So
the vault copies the sealed parts once, into memory that it reserves first: without enough memory
the export is refused, and training is not affected. Each copy is verified by its checksum, because
the member does not wait for the copy and may have begun to overwrite the slot.

Whatever the scheme of protection, own slots hold the whole state of every role of the node.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deadpool_megatron import failpoints
from deadpool_megatron.layout.records import BOUNDARIES, Generation, RoleLayout, extras_part
from deadpool_megatron.vault.errors import OutOfSpace, TooLate, VaultError
from deadpool_megatron.vault.shm.segment import checksum
from deadpool_megatron.vault.shm.table import Place
from deadpool_megatron.vault.slot_store import SlotStore
from deadpool_megatron.wire.forms import Coded

_PREFIX = "taken-"


@dataclass(frozen=True)
class Snapshot(Coded):
    """A role's generation in a file: ``parts`` maps names to (offset, bytes, checksum). The extras
    are those of ``boundary``, the last boundary before the next iteration. ``elsewhere``: the files
    of parts that are not in ``path``."""

    role: int
    layout_hash: str
    generation: Generation
    boundary: str
    path: str
    parts: Mapping[str, tuple[int, int, int]]
    elsewhere: Mapping[str, str] = field(default_factory=dict)


def drop_snapshots(directory: Path, name: str = "") -> None:
    """Free the memory of the snapshots with a name, or of all. A thread that is still copying
    notices that its file is gone."""
    for path in directory.glob(f"{_PREFIX}{name}-*" if name else f"{_PREFIX}*"):
        path.unlink(missing_ok=True)


def snapshot_bytes(directory: Path) -> dict[str, int]:
    """Return the bytes of each snapshot file."""
    found = {}
    for path in directory.glob(f"{_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # the agent has just dropped it
            found[path.name] = path.stat().st_size
    return found


def take(store: SlotStore, name: str, iteration: int, deadline_seconds: float) -> list[Snapshot]:
    """Copy the generation of ``iteration``, computed in the open epoch, for all roles seated here.

    Returns once each role has committed it and has sealed the next generation, or will have no next
    generation: by then all its extras have been captured. Raises TooLate, or VaultError: no space,
    epoch closed, or not in time. Blocks, so it needs a separate thread.
    """
    limit = time.monotonic() + deadline_seconds
    with store.gate.lock:
        epoch, roles = store.gate.open_epoch, sorted(store.gate.own_roles())
    if not epoch:
        raise VaultError("no epoch is open")
    copiers = [_SnapshotCopier(store, name, Generation(epoch, iteration), role) for role in roles]
    try:
        for copier in copiers:
            copier.reserve(limit)
        for copier in copiers:
            copier.copy_shard(limit)
        return [copier.finish(limit) for copier in copiers]
    except BaseException:
        for copier in copiers:
            copier.path.unlink(missing_ok=True)
        raise
    finally:
        for copier in copiers:
            copier.close()


class _SnapshotCopier:
    """Copies the snapshot of a role."""

    def __init__(self, store: SlotStore, name: str, generation: Generation, role: int) -> None:
        self._store = store
        self._gate = store.gate
        self._ledger = store.ledger
        self._generation = generation
        self._role = role
        self._layout: RoleLayout | None = None
        self._file = -1
        self._parts: dict[str, tuple[int, int, int]] = {}
        self._end = 0
        self.path = store.table.directory / f"{_PREFIX}{name}-{role}"

    def reserve(self, limit: float) -> None:
        """Reserve memory for the shard parts and one extras part, as soon as the member has made
        its segment. Raises VaultError if there is not enough."""
        with self._gate.changed:
            while (layout := self._store.table.layout(self._role)) is None:
                self._wait(limit, "the layout")
        self._layout = layout
        names = (*layout.shard_parts, extras_part("step"))
        needed = sum(part.nbytes for part in layout.parts if part.name in names)
        self.path.unlink(missing_ok=True)  # the file of an earlier order
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(self.path, flags, 0o600)
        try:
            os.ftruncate(self._file, max(1, needed))
            if failpoints.ACTIVE and failpoints.hit("persist.reserve", role=self._role):
                raise OutOfSpace(f"{needed} bytes needed on {self.path.parent}, as a test wants it")
            self._store.table.budget.allocate(self._file, self.path, [(0, max(1, needed))])
        except OutOfSpace as error:
            text = f"no room to pin the state of role {self._role}: {error}"
            raise VaultError(text) from error

    def copy_shard(self, limit: float) -> None:
        """Copy the shard parts as soon as they are sealed."""
        assert self._layout is not None
        for name in self._layout.shard_parts:
            self._copy(self._sealed(name, limit))

    def finish(self, limit: float) -> Snapshot:
        """Copy the last extras of the generation; wait until it is committed."""
        store, wanted = self._store, self._generation
        assert self._layout is not None
        with self._gate.changed:
            while not self._newer() and self._role not in self._ledger.ended:
                self._wait(limit, f"iteration {wanted.iteration + 1}")
            held = store.table.held(self._role).get(wanted, ())
        reached = [boundary for boundary in BOUNDARIES if extras_part(boundary) in held]
        if not reached:
            raise self._too_late()
        boundary = reached[-1]
        self._copy(self._sealed(extras_part(boundary), limit))
        with self._gate.changed:
            while self._ledger.committed.get(self._role, (Generation(0, 0), ""))[0] < wanted:
                self._wait(limit, f"the commit of iteration {wanted.iteration}")
        os.ftruncate(self._file, max(1, self._end))
        about = self._role, self._layout.layout_hash, wanted, boundary, str(self.path)
        return Snapshot(*about, dict(self._parts))

    def close(self) -> None:
        """Close the file, which stays on disk."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _newer(self) -> bool:
        """Return whether a newer generation is sealed; the caller holds the lock."""
        return any(held > self._generation for held in self._store.table.held(self._role))

    def _sealed(self, name: str, limit: float) -> Place:
        """Return the place of a part once it is sealed; it may be overwritten at any time."""
        store, wanted = self._store, self._generation
        with self._gate.changed:
            while True:
                found = store.table.find(self._role, wanted, name)
                if found:
                    return found[0]
                if self._newer():
                    raise self._too_late()
                self._wait(limit, f"iteration {wanted.iteration}")

    def _copy(self, place: Place) -> None:
        """Append the bytes of a part, and verify them by the checksum."""
        failpoints.hit("persist.take", role=self._role, iteration=self._generation.iteration)
        view, done = place.view, 0
        while done < len(view):
            done += os.pwrite(self._file, view[done:], self._end + done)
        # Verify the bytes in the file, since the member may have changed the slot meanwhile.
        if done:
            written = memoryview(mmap.mmap(self._file, 0, access=mmap.ACCESS_READ))
            view = written[self._end : self._end + done]
        if checksum(view) != place.checksum:
            raise self._too_late()
        self._parts[place.name] = (self._end, place.nbytes, place.checksum)
        # Aligned, so that tensors of any dtype can lie in the mapped file.
        self._end += -(-place.nbytes // 64) * 64

    def _too_late(self) -> TooLate:
        iteration = self._generation.iteration
        return TooLate(f"the slot of iteration {iteration} of role {self._role} was overwritten")

    def _wait(self, limit: float, awaited: str) -> None:
        """Wait for a change, with the lock held. Raises VaultError at a close, or at the limit."""
        if not self._gate.is_open(self._generation.lineage):
            raise VaultError(f"epoch {self._generation.lineage} was closed")
        if self._file >= 0 and not self.path.exists():
            raise VaultError("it was dropped")
        left = limit - time.monotonic()
        if left <= 0:
            raise VaultError(f"role {self._role}: waited too long for {awaited}")
        self._gate.changed.wait(min(left, 1.0))
