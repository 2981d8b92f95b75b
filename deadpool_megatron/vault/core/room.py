"""Memory for slots and blocks; where there is none left, that of what nobody is owed any more.

With another plan, or other nodes, a vault holds what it kept by the record before until something
newer has taken its place. Both together may be more than the limit, and what is new would wait for
room that is only given back once it is there. So the old is given back as soon as it may be:

* parts that are not sealed, in slots nobody writes to: at once;
* sealed parts that no role of the open epoch owes to this node: those older than the generation
  that the epoch began with at once, that generation itself when what is offered here proves that
  all roles have committed it again. With 2+N slots any newer one does: a collective keeps all roles
  at the gate that waits for it. With 3+N it is the second one after it (design, section 4).

Chains of steps are left alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from deadpool_megatron.layout.records import (
    Generation,
    PartKind,
    RoleLayout,
    Seat,
    kind_of,
    successors_by,
)
from deadpool_megatron.layout.replaying import keeps_steps
from deadpool_megatron.vault.core.state import VaultState
from deadpool_megatron.vault.errors import NoRoom, VaultError
from deadpool_megatron.vault.shm.own_slots import make_own
from deadpool_megatron.vault.shm.segment import PartState, Segment, SlotState, own_name, steps_name


def ensure_own(
    state: VaultState,
    layout: RoleLayout,
    seat: Seat,
    *,
    epoch: int | None = None,
) -> Segment:
    """The segment of the member on ``seat``, made if it is not there yet: with the role, or for
    what is restored before its process has come to it.

    ``epoch``: the one it is made for. Raises NoRoom, VaultError when the layouts differ or
    that epoch is over.
    """
    path = state.table.directory / own_name(layout.role, seat)
    with state.makes(layout.role):
        with state.lock:
            is_new = path.name not in state.table.segments and not path.exists()
        if is_new:
            _make_own(state, path, layout, seat)
        with state.lock:
            is_over = epoch is not None and not state.is_open(epoch)
            if is_over and is_new and state.own_roles().get(layout.role) != seat:
                path.unlink()  # the adoption that would have taken it away is past
            else:
                segment = state.attach(path.name)
            if is_over:
                raise VaultError(f"epoch {epoch} is over")
    if segment.layout.layout_hash != layout.layout_hash:
        raise VaultError(
            f"layout {layout.layout_hash} of role {layout.role} differs from the"
            f" {segment.layout.layout_hash} of {path.name}"
        )
    return segment


def _make_own(state: VaultState, path: Path, layout: RoleLayout, seat: Seat) -> None:
    try:
        make_own(path, layout, seat, state.table.budget)
    except NoRoom:
        record = state.record
        if record is None or not give_back(state, record.restore.generation):
            raise
        make_own(path, layout, seat, state.table.budget)


def ensure_copy(
    state: VaultState, layout: RoleLayout, generation: Generation, names: Collection[str] = ()
) -> Segment:
    """The segment for parts of a role that is seated elsewhere, of ``generation``, which is offered
    here; steps have one of their own. Raises VaultError when there is no room or layouts differ."""
    steps = _belong_to_step(state, layout, generation, names)
    ensure = state.ensure_steps if steps else state.ensure_copy
    try:
        return ensure(layout)
    except NoRoom:
        if not give_back(state, generation):
            raise
    return ensure(layout)


def _belong_to_step(
    state: VaultState, layout: RoleLayout, generation: Generation, names: Collection[str]
) -> bool:
    if any(kind_of(name) is PartKind.STEP for name in names):
        return True
    if any(name in layout.shard_parts for name in names):
        return False
    # Extras alone, of a later boundary: a slot of their own would be that of a whole copy.
    with state.lock:
        segment = state.table.segments.get(steps_name(layout.role))
        return segment is not None and state.table.holds(segment, generation)


def reserve(
    state: VaultState,
    segment: Segment,
    names: Collection[str],
    slot: int,
    generation: Generation,
) -> None:
    """Have memory behind parts of a claimed slot, for ``generation``. Raises NoRoom."""
    try:
        segment.reserve(names, [slot])
    except NoRoom:
        if not give_back(state, generation):
            raise
        segment.reserve(names, [slot])


def require_fit(segment: Segment, sizes: Mapping[str, int]) -> None:
    """Raise NoRoom for a part that is larger than its place. A segment stays as it was made, while
    layouts whose extras have other room count as the same."""
    for name, nbytes in sizes.items():
        if nbytes > segment.capacity(name):
            raise NoRoom(
                f"{segment.path.name} has room for {segment.capacity(name)} bytes of {name},"
                f" not for {nbytes}"
            )


def own_come_first(state: VaultState) -> bool:
    """True when memory is limited, and a member has yet to get its slots: it ends if there is no
    room for them, while a copy that comes too early comes again."""
    with state.lock:
        return bool(state.settings.memory_bytes) and any(
            state.table.own(role, seat) is None for role, seat in state.own_roles().items()
        )


def give_back(state: VaultState, offered: Generation) -> bool:
    """Give memory back that is not needed once ``offered`` is offered; False when there is none."""
    table, chosen = state.table, list[tuple[Segment, int, list[str]]]()
    with state.lock:
        if state.record is None or not state.open_epoch:
            return False
        restored = state.record.restore.generation
        later = successors_by(state.record, offered)(restored)
        for segment in table.segments.values():
            if segment.seat is not None or keeps_steps(segment.layout):
                continue
            owed = _owed(state, segment.layout)
            for slot in range(segment.slots):
                key = segment.path.name, slot
                if key in table.writers or table.pins[key]:
                    continue
                found = segment.generation(slot)
                enough = 1 if segment.layout.slots <= 2 + state.settings.max_lag else 2
                has_passed = found == restored and later >= enough
                is_old = found < restored or has_passed
                if names := _unneeded(segment, slot, owed, is_old=is_old):
                    chosen.append((segment, slot, names))
                    table.writers.add(key)
    # Gigabytes take a while, and a close does not wait for them: nobody takes the slots meanwhile.
    given = [segment.give_back(names, slot) for segment, slot, names in chosen]
    for segment, slot, _ in chosen:
        state.release(segment, slot)
    return any(given)


def _owed(state: VaultState, layout: RoleLayout) -> Collection[str]:
    """Parts of a role that are owed to this node."""
    ledger = state.ledger
    if ledger is None:
        return {part.name for part in layout.parts}
    return ledger.scheme.keeps(layout, state.node)


def _unneeded(segment: Segment, slot: int, owed: Collection[str], *, is_old: bool) -> list[str]:
    """Parts of one slot that nobody needs; they do not count any more."""
    names = []
    for part in segment.layout.parts:
        entry = segment.entry(slot, part.name)
        vouched_for = entry.state in (PartState.SEALED, PartState.ELSEWHERE)
        is_sealed = segment.state(slot) is SlotState.SEALED and vouched_for
        if part.name in owed or (is_sealed and not is_old):
            continue
        segment.invalidate_part(slot, part.name, PartState.ABSENT)
        names.append(part.name)
    return names
