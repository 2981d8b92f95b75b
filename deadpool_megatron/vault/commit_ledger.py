"""The commit ledger: parts owed to other nodes, their acknowledgements, and commits.

A generation of a role is committed at a boundary when its own slot has all shard parts and the
extras up to that boundary sealed, and every target that the scheme names has acknowledged the parts
that it is owed: a buddy when it has sealed its copy, the holder of a parity block when it has
sealed the block with the part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

from deadpool_megatron.events import Kind
from deadpool_megatron.layout.records import BOUNDARIES, Generation, RoleLayout, extras_part
from deadpool_megatron.vault.copies import Scheme, Target
from deadpool_megatron.vault.epoch_gate import EpochGate
from deadpool_megatron.vault.errors import Refusal, Refused, VaultReports
from deadpool_megatron.vault.shared_nic import Pace, SharedNic
from deadpool_megatron.vault.shm.table import Place, Table


class CommitLedger:
    """Commits of the roles seated here, epoch after epoch. Thread-safe, by the gate's lock.

    ``on_committed(role, generation, boundary)`` is called under that lock: it must not wait.
    """

    def __init__(
        self, gate: EpochGate, table: Table, nic: SharedNic, reports: VaultReports
    ) -> None:
        self._gate = gate
        self._table = table
        self._nic = nic
        self._reports = reports
        self.scheme: Scheme | None = None
        # Roles whose members have reached the end of the run and will seal no newer generation.
        self.ended: set[int] = set()
        self.committed: dict[int, tuple[Generation, str]] = {}
        self.on_committed: Callable[[int, Generation, str], None] = lambda *_: None
        self._acknowledged: Acknowledgements | None = None
        self._unprotected: dict[int, float] = {}  # role -> monotonic time of the loss
        self._shipped: dict[int, int] = {}  # role -> bytes shipped since its last commit

    def begin(self, scheme: Scheme) -> None:
        """Start the epoch of a scheme. The gate has its record already. Called under the lock."""
        self.cut()
        self.scheme, self._acknowledged = scheme, Acknowledgements(scheme)
        self.ended, self.committed, self._shipped = set(), {}, {}
        since = self._gate.closed_at or time.monotonic()
        restored = scheme.record.restore.kind in ("memory", "dump")
        self._unprotected = dict.fromkeys(self._gate.own_roles(), since) if restored else {}

    def cut(self) -> None:
        """End the scheme's own activity; called under the lock."""
        if self.scheme is not None:
            self.scheme.cut()

    def require_scheme(self, epoch: int) -> Scheme:
        """Return the scheme of an open epoch. Raises Refused for any other epoch."""
        with self._gate.lock:
            if not self._gate.is_open(epoch) or self.scheme is None:
                raise Refused(Refusal.STALE)
            return self.scheme

    def shipment(
        self, layout: RoleLayout, target: Target, epoch: int
    ) -> tuple[Generation, list[Place]] | None:
        """Return the oldest generation with parts that a target is owed and has not acknowledged,
        and the places of these parts."""
        with self._gate.lock:
            if not self._gate.is_open(epoch) or self._acknowledged is None:
                return None
            held = self._table.held(layout.role)
            for generation in self._tracked(held):
                missing = self._acknowledged.missing(layout, generation, held[generation], target)
                # The member may be overwriting the slot already: a restarted vault does not know
                # yet that the generation was committed.
                found = (self._table.find(layout.role, generation, name) for name in missing)
                if places := [copies[0] for copies in found if copies]:
                    return generation, places
            return None

    def elsewhere(self, layout: RoleLayout, generation: Generation) -> list[tuple[str, int, int]]:
        """Return name, bytes and checksum of the role's parts that are not shipped, because peers
        hold them."""
        with self._gate.lock:
            names = () if self.scheme is None else self.scheme.elsewhere(layout)
            found = (self._table.find(layout.role, generation, name) for name in names)
            return [(held[0].name, held[0].nbytes, held[0].checksum) for held in found if held]

    def count_shipped(self, role: int, nbytes: int, epoch: int) -> None:
        """Count bytes that were sent to protect a role."""
        with self._gate.lock:
            if self._gate.is_open(epoch):
                self._shipped[role] = self._shipped.get(role, 0) + nbytes

    def acknowledge(
        self, layout: RoleLayout, generation: Generation, node: int, names: list[str], epoch: int
    ) -> None:
        """Note that a node has sealed these parts, or a parity block with them."""
        with self._gate.lock:
            if self._gate.is_open(epoch) and self._acknowledged is not None:
                self._acknowledged.add(layout.role, generation, node, names)
                self.advance(layout)

    def forget(self, role: int, generation: Generation, node: int) -> None:
        """Have a generation sent again to a node that has lost acknowledged parts of it."""
        with self._gate.changed:
            if self._acknowledged is not None:
                self._acknowledged.forget(role, generation, node)
                self._gate.changed.notify_all()

    def advance(self, layout: RoleLayout) -> None:
        """Enter and report the new commits of a role. Called under the lock, after a seal or an
        acknowledgement."""
        role, acknowledged = layout.role, self._acknowledged
        held = self._table.held(role)
        if acknowledged is not None and role in self._gate.own_roles():
            tracked = self._tracked(held)
            if tracked:
                acknowledged.forget_before(role, tracked[0])
            for generation in tracked:
                boundary = acknowledged.boundary(layout, generation, held[generation])
                if boundary is None or (generation, boundary) == self.committed.get(role):
                    continue
                if role in self.committed and generation < self.committed[role][0]:
                    continue
                self.committed[role] = generation, boundary
                released = acknowledged.released(layout)
                self._report_commit(role, generation, boundary, released)
        self._gate.changed.notify_all()

    def _tracked(self, held: Iterable[Generation]) -> list[Generation]:
        """Return the generations that are shipped in this epoch, oldest first: the restored
        generation and those that the epoch has computed."""
        if self._gate.record is None:
            return []
        restored, epoch = self._gate.record.restore.generation, self._gate.open_epoch
        return sorted(g for g in held if g == restored or g.lineage == epoch)

    def _report_commit(
        self, role: int, generation: Generation, boundary: str, released: bool
    ) -> None:
        self.on_committed(role, generation, boundary)
        shipped_bytes = self._shipped.pop(role, 0)
        facts: dict[str, object] = {"lineage": generation.lineage, "boundary": boundary}
        facts |= {"released": released, "bytes": shipped_bytes}
        facts |= self._nic.note(Pace.committed, role, generation)
        self._reports.emit(Kind.COMMITTED, role, generation, facts)
        if released or role not in self._unprotected:
            return
        seconds = time.monotonic() - self._unprotected.pop(role)
        if shipped_bytes:
            self._reports.emit(Kind.EXPOSED, role, generation, {"seconds": seconds})


class Acknowledgements:
    """Acknowledged parts of one epoch. Not thread-safe: the gate's lock guards it."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        self._names: dict[tuple[int, Generation, int], set[str]] = {}

    def released(self, layout: RoleLayout) -> bool:
        """Return whether the role passes the gate with fewer copies, as the record permits."""
        fewer = self.scheme.record.fewer_copies
        return layout.role in fewer and self.scheme.owed(layout).is_short

    def add(self, role: int, generation: Generation, node: int, names: Iterable[str]) -> None:
        """Note that a node has sealed these parts, or a parity block with them."""
        self._names.setdefault((role, generation, node), set()).update(names)

    def forget(self, role: int, generation: Generation, node: int) -> None:
        """Drop the acknowledgements of a node that has lost its parts of a generation."""
        self._names.pop((role, generation, node), None)

    def forget_before(self, role: int, oldest: Generation) -> None:
        """Drop older generations: no slot holds them any more."""
        for key in [k for k in self._names if k[0] == role and k[1] < oldest]:
            del self._names[key]

    def missing(
        self, layout: RoleLayout, generation: Generation, sealed: Collection[str], target: Target
    ) -> list[str]:
        """Return the sealed parts that a target is owed and has not acknowledged, in layout
        order."""
        owed = self.scheme.owed(layout).names.get(target, frozenset())
        acknowledged = self._names.get((layout.role, generation, target.node), set())
        missing = (owed & {*sealed}) - acknowledged
        return [part.name for part in layout.parts if part.name in missing]

    def boundary(
        self, layout: RoleLayout, generation: Generation, sealed: Collection[str]
    ) -> str | None:
        """Return the last boundary at which the generation is committed, or None."""
        owed = self.scheme.owed(layout)
        if owed.is_short and layout.role not in self.scheme.record.fewer_copies:
            return None
        missing = set[str]()
        for target, names in owed.names.items():
            missing |= names - self._names.get((layout.role, generation, target.node), set())
        if not {*layout.shard_parts} <= {*sealed} - missing:
            return None
        reached = None
        for boundary in BOUNDARIES:
            name = extras_part(boundary)
            if name in sealed:
                if name in missing:
                    break
                reached = boundary
        return reached
