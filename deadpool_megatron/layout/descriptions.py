"""Descriptions of the layout for users: the name of a group of roles, with its dimension and its
roles (``DATA_PARALLEL(0-12:4)``), and the meaning of a role's bytes. Pure.

Many groups of a run share a description, and their roles distinguish them. The roles of a Megatron
group are at equal distances, so that even the name of the largest group is short.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from deadpool_megatron.layout.ranks import first_role
from deadpool_megatron.layout.records import RoleLayout

#: separates the facts in a meaning
SEPARATOR = "; "
# At least this many roles at equal distances are written as a range.
_SHORTEST_RUN = 3


def group_name(description: str, roles: Sequence[int]) -> str:
    """Return the name of the group of ``roles``, in the order of the group."""
    return f"{description}({in_short(roles)})"


def in_short(roles: Sequence[int]) -> str:
    """Return roles in short form: ``0-3``, ``0-12:4`` (every fourth), ``0,1,7``."""
    parts: list[str] = []
    at = 0
    while at < len(roles):
        run = _run_at(roles, at)
        step = f":{run.step}" if run.step > 1 else ""
        parts.append(f"{run[0]}-{run[-1]}{step}" if len(run) > 1 else str(run.start))
        at += len(run)
    return ",".join(parts)


def roles_in(name: str, known: Collection[int]) -> tuple[int, ...]:
    """Return the roles of ``known`` in the group with this name, whose numbers are ranks; none for
    a name without ranks, or with more than there are roles."""
    _, bracket, rest = name.rpartition("(")
    if not bracket or not rest.endswith(")"):
        return ()
    found: list[int] = []
    first = first_role(min(known, default=0))
    try:
        for run in map(_read_run, rest[:-1].split(",")):
            # A damaged name, or another version's, must not exhaust the coordinator's memory.
            if len(run) > len(known):
                return ()
            found += [first + rank for rank in run if first + rank in known]
            if len(found) > len(known):
                return ()
    except (ValueError, OverflowError):  # a range may be longer than the maximum of ``len``
        return ()
    return tuple(found)


def _run_at(roles: Sequence[int], at: int) -> range:
    """Return the longest range that begins at a position; a single role, if there is none."""
    first = roles[at]
    if at + 1 == len(roles) or roles[at + 1] <= first:
        return range(first, first + 1)
    step, end = roles[at + 1] - first, at + 1
    while end + 1 < len(roles) and roles[end + 1] - roles[end] == step:
        end += 1
    if end - at + 1 < _SHORTEST_RUN:
        return range(first, first + 1)
    return range(first, roles[end] + 1, step)


def _read_run(text: str) -> range:
    """Return the range that a text means. Raises ValueError."""
    ends, _, step = text.partition(":")
    first, dash, last = ends.partition("-")
    start = int(first)
    return range(start, (int(last) if dash else start) + 1, int(step) if step else 1)


def meaning_of(facts: Mapping[str, Any]) -> str:
    """Return the ``meaning`` of a layout: names and values in the order of their comparison."""
    return SEPARATOR.join(f"{name} {value}".replace(";", ",") for name, value in facts.items())


def difference(there: RoleLayout, here: RoleLayout) -> str:
    """Return the first difference between kept state (``there``) and this program's (``here``)."""
    kept, own = _facts(there), _facts(here)
    for name in {**own, **kept}:
        if kept.get(name) != own.get(name):
            return f"{name} is {kept.get(name, 'none')} there and {own.get(name, 'none')} here"
    for part in (*here.parts, *there.parts):
        if not (there.has(part) and here.has(part)):
            return f"part {part.name} is of other parameters, or of the same in another order"
    return "its state is laid out in another way"


def _facts(layout: RoleLayout) -> dict[str, str]:
    facts = [fact.partition(" ") for fact in layout.meaning.split(SEPARATOR) if fact]
    return {name: value for name, _, value in facts}
