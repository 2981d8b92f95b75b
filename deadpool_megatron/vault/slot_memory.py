"""Memory for slots and blocks, and the release of parts that are no longer owed.

A spare process may allocate the memory of its own slots before it has a role: it parks slots. Later
its vault gives them the name of the role, or creates other slots. Only the vault names slots,
whether the vault or the member needs them first.

After a change of plan or nodes, a vault keeps the parts of the earlier record until newer parts
have replaced them. Old and new parts together may exceed the limit, and new parts would then wait
for memory that is freed only after they have arrived. So old parts are freed as soon as possible:

* Unsealed parts in slots without a writer are freed at once.
* Sealed parts that no role of the open epoch owes to this node are freed at once if they are older
  than the restored generation. Those of the restored generation are freed when an offer proves that
  all roles have committed it again. With 2+N slots any newer generation is proof, because a
  collective keeps all roles at the gate for the restored generation. With 3+N slots the second
  newer generation is proof (docs/design.md, "Slots and the gate").
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from deadpool_megatron.layout.records import Generation, RoleLayout, Seat, successors_by
from deadpool_megatron.vault.errors import OutOfSpace, SegmentError, VaultError
from deadpool_megatron.vault.memory import Budget
from deadpool_megatron.vault.shm import segment as segments
from deadpool_megatron.vault.shm.segment import PartState, Segment, SlotState, copy_name

if TYPE_CHECKING:
    from deadpool_megatron.vault.slot_store import SlotStore

T = TypeVar("T")


def ensure_own(
    store: SlotStore, layout: RoleLayout, seat: Seat, *, epoch: int | None = None
) -> Segment:
    """Return the segment of the member on ``seat``, created if necessary: when the member
    registers, or earlier for restored parts.

    ``epoch``: the epoch of the restore. Raises OutOfSpace; VaultError when the layouts differ or
    that epoch is over.
    """
    path = store.table.directory / segments.own_name(layout.role, seat)
    with store.creation_lock(layout.role):
        with store.gate.lock:
            is_new = path.name not in store.table.segments and not path.exists()
        if is_new:
            _with_space(store, None, lambda: make_own(path, layout, seat, store.table.budget))
        with store.gate.lock:
            is_over = epoch is not None and not store.gate.is_open(epoch)
            if is_over and is_new and store.gate.own_roles().get(layout.role) != seat:
                path.unlink()  # no later adoption would remove this file
            else:
                segment = store.attach(path.name)
            if is_over:
                raise VaultError(f"epoch {epoch} is over")
    if segment.layout.layout_hash != layout.layout_hash:
        raise VaultError(
            f"layout {layout.layout_hash} of role {layout.role} differs from the"
            f" {segment.layout.layout_hash} of {path.name}"
        )
    return segment


def ensure_copy(store: SlotStore, layout: RoleLayout, generation: Generation) -> Segment:
    """Return the segment for offered parts of a role that is seated elsewhere. Raises OutOfSpace,
    or VaultError when layouts differ."""
    return _with_space(store, generation, lambda: _copy_segment(store, layout))


def _with_space(store: SlotStore, offered: Generation | None, make: Callable[[], T]) -> T:
    """Call ``make``. On OutOfSpace, free the memory that is not needed once ``offered`` (without
    it, the restored generation) is offered, and call ``make`` again."""
    try:
        return make()
    except OutOfSpace:
        if offered is None and store.gate.record is not None:
            offered = store.gate.record.restore.generation
        if offered is None or not give_back(store, offered):
            raise
    return make()


def _copy_segment(store: SlotStore, layout: RoleLayout) -> Segment:
    """Return the segment for copies of a role, whose slots get their memory at their first use."""
    node, name = store.gate.node, copy_name(layout.role)
    with store.creation_lock(layout.role):
        with store.gate.lock:
            held = store.table.segments.get(name)
        if held is None:
            path = store.table.directory / name
            made = Segment.create(path, layout, None, (), budget=store.table.budget)
            with store.gate.lock:
                store.table.segments[name] = made
            return made
    if held.layout.layout_hash != layout.layout_hash:
        raise VaultError(
            f"layout {layout.layout_hash} of role {layout.role} is not the"
            f" {held.layout.layout_hash} that node {node} holds"
        )
    return held


def reserve(
    store: SlotStore, segment: Segment, names: Collection[str], slot: int, generation: Generation
) -> None:
    """Allocate memory for parts of a claimed slot, for ``generation``. Raises OutOfSpace."""
    _with_space(store, generation, lambda: segment.reserve(names, [slot]))


def require_fit(segment: Segment, sizes: Mapping[str, int]) -> None:
    """Raise OutOfSpace for a part that exceeds its capacity. A segment keeps its capacities, while
    layouts that differ only in the capacity of extras are equal."""
    for name, nbytes in sizes.items():
        if nbytes > segment.capacity(name):
            raise OutOfSpace(
                f"{segment.path.name} has room for {segment.capacity(name)} bytes of {name},"
                f" not for {nbytes}"
            )


def own_slots_missing(store: SlotStore) -> bool:
    """Return whether memory is limited and a member still lacks its slots: without memory for them
    the member would fail, while a refused copy is offered again."""
    with store.gate.lock:
        return bool(store.settings.memory_bytes) and any(
            store.table.own(role, seat) is None for role, seat in store.gate.own_roles().items()
        )


def give_back(store: SlotStore, offered: Generation) -> bool:
    """Free the memory that is not needed once ``offered`` is offered; False if there is none."""
    table, gate, chosen = store.table, store.gate, list[tuple[Segment, int, list[str]]]()
    with gate.lock:
        record, scheme = gate.record, store.ledger.scheme
        if record is None or scheme is None or not gate.open_epoch:
            return False
        restored = record.restore.generation
        successors = successors_by(record, offered)(restored)
        # The oldest parts here may be of roles of another size, which had fewer slots.
        slots = max((held.layout.slots for held in table.segments.values()), default=0)
        has_proof = successors >= (1 if slots <= 2 + store.settings.max_lag else 2)
        for segment in table.segments.values():
            if segment.seat is not None:
                continue
            owed = scheme.keeps(segment.layout, gate.node)
            for slot in range(segment.slots):
                key = segment.path.name, slot
                if key in table.writers or table.pins[key]:
                    continue
                found = segment.generation(slot)
                is_old = found < restored or (found == restored and has_proof)
                if names := _unneeded(segment, slot, owed, is_old=is_old):
                    chosen.append((segment, slot, names))
                    table.writers.add(key)
    # Freeing gigabytes takes time, and a close must not wait: the slots count as being written.
    given = [segment.give_back(names, slot) for segment, slot, names in chosen]
    for segment, slot, _ in chosen:
        store.release(segment, slot)
    return any(given)


def remove_unneeded(store: SlotStore) -> None:
    """Remove unused segments that no restore can need, because newer generations were sealed here
    (:meth:`Table.unneeded`). Called periodically."""
    table = store.table
    with store.gate.lock:
        record = store.gate.record
        unused = [held for held in table.segments.values() if not store.is_used(held)]
        if not unused or record is None or not store.gate.open_epoch:
            return
        newest = max((slot.generation for slot in table.sealed() if slot.parts), default=None)
        successors = successors_by(record, newest or record.restore.generation)
        for segment in unused:
            if table.unneeded(segment, successors):
                table.remove(segment)


def _unneeded(segment: Segment, slot: int, owed: Collection[str], *, is_old: bool) -> list[str]:
    """Invalidate the parts of a slot that are no longer needed, and return their names."""
    names = []
    for name, entry in segment.entries(slot).items():
        has_checksum = entry.state in (PartState.SEALED, PartState.ELSEWHERE)
        is_sealed = segment.state(slot) is SlotState.SEALED and has_checksum
        if name not in owed and (is_old or not is_sealed):
            segment.invalidate_part(slot, name, PartState.ABSENT)
            names.append(name)
    return names


def park(directory: Path, layout: RoleLayout, seat: Seat, budget: Budget) -> Segment:
    """Create the slots of the process on ``seat``, which waits for a role and is likely to get one
    with this ``layout``. Filling gigabytes of memory with zeros takes seconds, which a recovery
    then saves.

    Raises OutOfSpace.
    """
    for stale in _parked_on_place(directory, seat):
        stale.unlink(missing_ok=True)
    return _create(directory / f"{_parked_prefix(seat)}{os.getpid()}", layout, seat, budget)


def unpark(directory: Path, seat: Seat) -> None:
    """Remove the slots that the process on ``seat`` has parked, unless they belong to a role now.

    Their memory is freed first, since the process may still have them mapped.
    """
    for path in directory.glob(f"{_parked_prefix(seat)}*"):
        with contextlib.suppress(FileNotFoundError):
            os.truncate(path, 0)
        path.unlink(missing_ok=True)


def make_own(path: Path, layout: RoleLayout, seat: Seat, budget: Budget) -> None:
    """Create ``path``, the segment of a role: from the slots that its process has parked, if their
    layout fits the role, else from new memory. Only for the vault. Raises OutOfSpace."""
    for parked in _parked_on_place(path.parent, seat):
        if not parked.name.lstrip(".").startswith(_parked_prefix(seat).lstrip(".")):
            parked.unlink(missing_ok=True)  # its process has ended: this seat is of a newer process
    for parked in path.parent.glob(f"{_parked_prefix(seat)}*"):
        with contextlib.suppress(SegmentError, FileNotFoundError):
            if Segment.open(parked, budget=budget, seat=seat).become(path, layout):
                return
    unpark(path.parent, seat)
    _create(path, layout, seat, budget)


def _parked_on_place(directory: Path, seat: Seat) -> list[Path]:
    """Return the files that processes of this node and local rank have parked, unfinished files
    included."""
    place = f"parked-{seat.node}.{seat.local_rank}.*"
    return [*directory.glob(f".{place}"), *directory.glob(f"..{place}")]


def _parked_prefix(seat: Seat) -> str:
    """Return the start of the name of parked slots; the process ID follows."""
    return f".parked-{seat.node}.{seat.local_rank}.{seat.incarnation}.seg."


def _create(path: Path, layout: RoleLayout, seat: Seat, budget: Budget) -> Segment:
    names = [part.name for part in layout.parts]
    return Segment.create(path, layout, seat, names, budget=budget)
