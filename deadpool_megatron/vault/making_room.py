"""Memory for copies and blocks; where there is none left, that of what nobody is owed any more.

With another plan, or other nodes, a vault holds what it kept by the record before until something
newer has taken its place. Both together may be more than the limit, and what is new would wait for
room that is only given back once it is there. So the old is given back as soon as it may be:

* parts that are not sealed, in slots nobody writes to: at once;
* sealed parts that no role of the open epoch owes to this node: those older than the generation
  that the epoch began with at once, that generation itself when what is offered here proves that
  all roles have committed it anew. With 2+N slots any newer one does: a collective keeps all roles
  at the gate that waits for it. With 3+N it is the second one after it (design, section 4).

What a role seated here has fetched for itself, and chains of steps, are left alone.
"""

from __future__ import annotations

from collections.abc import Collection

from deadpool_megatron.layout.cadence import successors_by
from deadpool_megatron.layout.parity import is_parity_role
from deadpool_megatron.layout.records import Generation, RoleLayout
from deadpool_megatron.layout.replaying import keeps_steps
from deadpool_megatron.vault.errors import NoRoom
from deadpool_megatron.vault.segment import PartState, Segment, SlotState
from deadpool_megatron.vault.state import VaultState


def ensure_copy(state: VaultState, layout: RoleLayout, generation: Generation) -> Segment:
    """See :meth:`VaultState.ensure_copy`; for ``generation``, which is offered here."""
    try:
        return state.ensure_copy(layout)
    except NoRoom:
        if not give_back(state, generation):
            raise
    return state.ensure_copy(layout)


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


def give_back(state: VaultState, offered: Generation) -> bool:
    """Give memory back that is not needed once ``offered`` is offered; False when there is none."""
    table, given = state.table, False
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
                if owed is None or key in table.writers or table.pins[key]:
                    continue
                found = segment.generation(slot)
                enough = 1 if segment.layout.slots <= 2 + state.settings.max_lag else 2
                is_old = found < restored or (found == restored and later >= enough)
                given |= _give_back(segment, slot, owed, is_old=is_old)
    return given


def _owed(state: VaultState, layout: RoleLayout) -> Collection[str] | None:
    """Parts of a role that belong here; None for what is not looked at."""
    ledger = state.ledger
    if ledger is None or layout.role in state.own_roles():
        return None
    if is_parity_role(layout.role):
        return {part.name for part in layout.parts} if ledger.keeps(layout, state.node) else ()
    return {name for name, nodes in ledger.owed(layout).items() if state.node in nodes}


def _give_back(segment: Segment, slot: int, owed: Collection[str], *, is_old: bool) -> bool:
    """Parts of one slot that nobody needs; False where there is no memory behind any."""
    names = []
    for part in segment.layout.parts:
        entry = segment.entry(slot, part.name)
        is_sealed = segment.state(slot) is SlotState.SEALED and entry.state is PartState.SEALED
        if part.name in owed or (is_sealed and not is_old):
            continue
        segment.invalidate_part(slot, part.name, PartState.ABSENT)
        names.append(part.name)
    return segment.give_back(names, slot) > 0
