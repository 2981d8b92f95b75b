"""Elasticity: without a spare the run continues with fewer model replicas, and grows back later.

Roles of each size have numbers of their own (layout.ranks). A failed change is blamed on its size,
not on generations, copies or nodes. After the second failure, the size is excluded for the rest of
the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from deadpool_megatron.cluster.journal.journal import SIZES
from deadpool_megatron.cluster.machine import shutdown, state as states
from deadpool_megatron.cluster.machine.actions import Note
from deadpool_megatron.cluster.machine.core import Core
from deadpool_megatron.events import Kind
from deadpool_megatron.layout import planner, records
from deadpool_megatron.layout.planner import Seating
from deadpool_megatron.layout.records import EpochRecord, Restore, Seat
from deadpool_megatron.layout.sizes import Sizes

_MAX_FAILURES = 2


def allowed_sizes(core: Core) -> tuple[int, ...]:
    """Return the numbers of model replicas that the run may have, ascending; none where their
    number is fixed."""
    sizes, failed = core.state.memory.sizes, core.state.changes.failed
    if core.settings.elastic == "off" or sizes is None or len(sizes.replicas) < 2:
        return ()
    return tuple(size for size in sizes.replicas if failed.count(size) < _MAX_FAILURES)


def present_size(core: Core) -> int:
    """Return the number of model replicas of the newest record; 0 as long as it is not known."""
    sizes = core.state.memory.sizes
    return 0 if sizes is None else len(core.state.seats) // sizes.ranks_per_replica


def is_size_excluded(core: Core) -> bool:
    """Return whether the size of the newest record must not be tried again."""
    return core.state.changes.failed.count(present_size(core)) >= _MAX_FAILURES


def wait_seconds(core: Core) -> float:
    """Return how long the run waits for a spare before another size is chosen."""
    setting, longest = core.settings.elastic_wait, core.settings.spare_timeout_seconds
    usual = min(core.state.changes.wait_seconds or longest, longest)
    return usual if setting == "auto" else float(setting)


def other_size(core: Core, *, stuck: bool) -> tuple[Seating, Restore] | None:
    """Return seats and state of the largest other size for which there are nodes and state. A run
    that is not ``stuck``, so that it could continue at its size, only grows and must not compute an
    iteration again."""
    state, present = core.state, present_size(core)
    for size in reversed(allowed_sizes(core)):
        seats = _seats(core, size, stuck) if size > present or (stuck and size < present) else {}
        if not seats:
            continue
        query = replace(shutdown.restore_query(core, seats), roles=seats, start=None)
        if (saved := query.durable) is not None:  # a dump can be used only at its own size
            loses = not stuck and saved.generation.iteration < state.reached
            query = replace(query, durable=None if loses or saved.kind == "dump" else saved)
        restore = planner.choose_restore(query)
        if isinstance(restore, Restore):
            return Seating(seats), restore
        if state.grows:
            note_failure(core, size, restore.reason)
    return None


def can_grow(core: Core) -> bool:
    """Return whether there are ready nodes for a larger size, and state that it can restore."""
    larger = (size for size in allowed_sizes(core) if size > present_size(core))
    seatings = (seats for size in larger if (seats := _seats(core, size, stuck=False)))
    return any(isinstance(_restore_after_pause(core, seats), Restore) for seats in seatings)


def _restore_after_pause(core: Core, seats: Mapping[int, Seat]) -> Restore | planner.NoRestore:
    """Return the state for these seats after a pause, when all roles will hold the newest
    generation. A single inventory stands for the inventories of all nodes."""
    newest = records.Generation(core.state.epoch, core.state.reached)
    layouts = [of for role, of in core.state.memory.layouts.items() if role in core.state.seats]
    held = [records.Holding(of.role, newest, frozenset(p.name for p in of.parts)) for of in layouts]
    inventories = {0: records.Inventory(0, 0, tuple(held), tuple(layouts))}
    query = replace(shutdown.restore_query(core, seats), inventories=inventories, durable=None)
    return planner.choose_restore(replace(query, roles=seats, start=None))


def _seats(core: Core, size: int, stuck: bool) -> dict[int, Seat]:
    """Return the seats of a size on whole nodes: first on nodes with roles, in the order of their
    ranks, then on spares. Return no seats if there are too few nodes. Only a run that is ``stuck``
    takes poor or cold spares."""
    fleet, members, nproc = core.state.fleet, core.state.fleet.members, core.config.nproc
    sizes, seated = core.state.memory.sizes, core.state.seats
    if sizes is None:
        return {}
    warm = set(fleet.places_with(states.MemberStatus.WARM))
    first = {seat.node: role for role, seat in sorted(seated.items(), reverse=True)}
    poor = fleet.drains | fleet.distrusted | fleet.deprioritized
    candidates = list[tuple[bool, bool, int, int]]()
    for node in fleet.nodes.keys() - fleet.draining - fleet.quarantined:
        places = {(node, rank) for rank in range(nproc)}
        is_ready = node in first or (node not in poor and places <= warm)
        if places <= members.keys() and (stuck or is_ready):
            rank = first.get(node, -len(places & warm))
            candidates.append((node in fleet.deprioritized, node not in first, rank, node))
    roles = shutdown.roles_of(core, size * sizes.ranks_per_replica)
    chosen = [node for *_, node in sorted(candidates)[: len(roles) // nproc]]
    free = [(node, rank) for node in chosen for rank in range(nproc)]
    if len(free) < len(roles):
        return {}
    return {r: Seat(*p, members[p].incarnation) for r, p in zip(roles, free, strict=True)}


def note_failure(core: Core, size: int, cause: str) -> None:
    """Note that a change to this size has failed, also for a successor."""
    changes, sizes = core.state.changes, core.state.memory.sizes
    core.state.changes = replace(changes, failed=(*changes.failed, size))
    if sizes is not None:
        _journal_changes(core, sizes)
    text = f"the change to {size} model replicas has failed: {cause}"
    is_over = size not in allowed_sizes(core)
    core.log("warning", text + ("; it is not tried again" if is_over else ""))


def note_opened(core: Core, seconds: float) -> None:
    """Note how long the start, or a change of size, took until all roles had their state. After
    the start also journal the sizes for a successor: they are known only now, so the first record
    lacks them."""
    state, sizes = core.state, core.state.memory.sizes
    state.changes = replace(state.changes, wait_seconds=(1 + state.is_changing) * seconds)
    if state.is_changing or sizes is None:
        return
    if len(sizes.replicas) > 1:
        _journal_changes(core, sizes)
    elif sizes.replicas[0] > 1:
        text = f"model replicas: {sizes.replicas[0]} only ({sizes.reason})"
        core.log("warning" if core.settings.elastic == "on" else "info", text)


def note_trained(core: Core, record: EpochRecord) -> None:
    """Note that the first iteration at this size is complete."""
    state, roles = core.state, len(record.seats)
    old_roles, state.changes = state.changes.trained, replace(state.changes, trained=roles)
    if state.memory.sizes is None:
        return
    _journal_changes(core, state.memory.sizes)
    ranks, last = state.memory.sizes.ranks_per_replica, state.recoveries.finished[-1:]
    facts: dict[str, Any] = {"from": old_roles // ranks, "to": roles // ranks, "why": record.cause}
    if last and last[0].epoch == record.epoch:  # else another coordinator began the recovery
        facts |= {"seconds": last[0].seconds, "phases": last[0].phases}
    core.emit(Kind.SIZE, **facts)


def _journal_changes(core: Core, sizes: Sizes) -> None:
    """Note the possible sizes and the changes so far in the journal, with the record."""
    entry = {"sizes": sizes.to_dict(), "changes": core.state.changes.to_dict()}
    core.act(Note(SIZES, core.state.epoch, entry))
