"""Meanings of the bytes of roles, in words: which role of which model; and their differences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deadpool_megatron.layout.records import RoleLayout

SEPARATOR = "; "


def in_words(facts: Mapping[str, Any]) -> str:
    """The ``meaning`` of a layout, of names and values in the order in which they are compared."""
    return SEPARATOR.join(f"{name} {value}".replace(";", ",") for name, value in facts.items())


def difference(there: RoleLayout, here: RoleLayout) -> str:
    """The first thing in which what was kept (``there``) differs from this program's state."""
    kept, own = _facts(there), _facts(here)
    if not kept:
        return "a version wrote it that did not say what its bytes mean: go on with that version"
    for name in {**own, **kept}:
        if kept.get(name) != own.get(name):
            return f"{name} is {kept.get(name, 'none')} there and {own.get(name, 'none')} here"
    for part in (*here.parts, *there.parts):
        if not (there.has(part) and here.has(part)):
            return f"part {part.name} is of other parameters, or of the same in another order"
    return "its state is laid out in another way"


def _facts(layout: RoleLayout) -> dict[str, str]:
    words = [fact.partition(" ") for fact in layout.meaning.split(SEPARATOR) if fact]
    return {name: value for name, _, value in words}
