"""Going on from memory with new processes: what is said about it, and whether the program fits.

The slots of processes that have all died say which state there is; the program that is started on
them may be another one than that which filled them. Pure functions on a Turn.
"""

from __future__ import annotations

from dataclasses import replace

from deadpool_megatron.cluster.machine.epoch.ending import finish
from deadpool_megatron.cluster.machine.turn import Turn
from deadpool_megatron.layout import planner
from deadpool_megatron.layout.meanings import difference
from deadpool_megatron.layout.planner import NoRestore
from deadpool_megatron.layout.records import Restore, RoleLayout

EXIT_OTHER_MODEL = 2


def refuses(turn: Turn, layout: RoleLayout) -> bool:
    """A member has built its role: end the run, with the slots kept, if the state in memory is not
    its own. Nothing was computed by then."""
    memory, role = turn.state.memory, layout.role
    known = memory.layouts[role]
    if known.layout_hash == layout.layout_hash:
        memory = replace(memory, inherited=memory.inherited - {role})
        turn.state = turn.state._replace(memory=memory)
        return False
    reason = (
        f"the state in memory is of another model or other flags: role {role}:"
        f" {difference(known, layout)}; start the run again with the command that it had, or remove"
        " the state ('deadpool clean RUN') and start anew with another --run-dir"
    )
    finish(turn, EXIT_OTHER_MODEL, reason, keeps_slots=True)
    return True


def tell(turn: Turn, restore: Restore) -> None:
    """Tell the state that it continues from, and why no other."""
    state, generation = turn.state, restore.generation
    if restore.kind == "memory":
        nodes = sorted({s.node for p in restore.sources.values() for f in p.values() for s in f})
        what = f"generation {generation.lineage}:{generation.iteration} in memory of nodes {nodes}"
        why = "the newest that every role can be given"
    else:
        query = replace(turn.restore_query(state.seats), durable=None, start=None)
        found = planner.choose_restore(query)
        where = f"{restore.kind} state {restore.path}".rstrip()
        what = f"{where}, iteration {generation.iteration}"
        why = "memory has nothing newer"
        if isinstance(found, NoRestore):
            why = found.reason
    turn.log("notice", f"restarted: goes on from {what}: {why}")
