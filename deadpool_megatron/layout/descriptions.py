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
    """Return the roles of ``known`` in the group with this name, in which the numbers are ranks.
    Return no role for a name without ranks, or with more ranks than there are roles."""
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
    """Return the longest range that begins at index ``at``; a single role if there is no range."""
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
    """Return the range in ``text``, such as ``0-12:4`` or ``7``. Raises ValueError."""
    ends, _, step = text.partition(":")
    first, dash, last = ends.partition("-")
    start = int(first)
    return range(start, (int(last) if dash else start) + 1, int(step) if step else 1)


def meaning_of(facts: Mapping[str, Any]) -> str:
    """Return the ``meaning`` of a layout: the names and values of facts, in the order in which
    :func:`difference` compares them."""
    return SEPARATOR.join(f"{name} {value}".replace(";", ",") for name, value in facts.items())


def difference(stored: RoleLayout, own: RoleLayout) -> str:
    """Return the first difference between the layout of stored state and this program's own."""
    there, here = _facts(stored), _facts(own)
    for name in {**here, **there}:
        if there.get(name) != here.get(name):
            return f"{name} is {there.get(name, 'none')} there and {here.get(name, 'none')} here"
    for part in (*own.parts, *stored.parts):
        if not (stored.has(part) and own.has(part)):
            return f"part {part.name} is of other parameters, or of the same in another order"
    return "its state is laid out in another way"


def _facts(layout: RoleLayout) -> dict[str, str]:
    facts = [fact.partition(" ") for fact in layout.meaning.split(SEPARATOR) if fact]
    return {name: value for name, _, value in facts}
