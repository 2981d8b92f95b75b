"""A stand-in for collaborators in the statements of the folders calls/."""

from __future__ import annotations

from typing import Any


class StandIn:
    """Prints each call of it and of its attributes, but for those that are given."""

    def __init__(self, name: str, /, **given: Any) -> None:
        vars(self).update(given, _name=name)

    def __getattr__(self, name: str) -> StandIn:
        return StandIn(f"{self._name}.{name}")

    def __call__(self, *given: Any, **named: Any) -> None:
        print(self._name, *given, *named.items())

    def __repr__(self) -> str:
        return str(self._name)
