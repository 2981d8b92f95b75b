"""Facts about nodes, as plain data. Sizes in bytes, times in seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deadpool_megatron.preflight.health import Answer, Health


@dataclass(frozen=True)
class HostFacts:
    """The facts that a node tells about itself. ``None`` for a limit means that there is none."""

    hostname: str
    address: str = ""
    interface: str = ""
    interface_up: bool = True
    # Component -> version; a component that is not there is not named.
    versions: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0
    shm_bytes: int = 0
    shm_free_bytes: int = 0
    memory_bytes: int = 0
    memlock_bytes: int | None = None
    open_files: int | None = None
    # What the site's own command says; good where there is none.
    health: Answer = field(default_factory=Answer)
    # Why an earlier run speaks against this host; empty where none does.
    noted: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form."""
        health = {"health": int(self.health.health), "health_text": self.health.text}
        return {**dataclasses.asdict(self), "versions": dict(self.versions), **health}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> HostFacts:
        """Inverse of :meth:`to_dict`. Raises KeyError, TypeError or ValueError."""
        health = Answer(Health(values["health"]), str(values["health_text"]))
        versions = {str(key): str(value) for key, value in dict(values["versions"]).items()}
        plain = _plain_fields(HostFacts, values)
        return HostFacts(**plain, health=health, versions=versions)


@dataclass(frozen=True)
class Link:
    """The findings of a node about its link to ``peer``.

    ``error``: why no connection could be made; empty when the peer answered. ``clock_seconds``:
    the peer's wall clock minus the node's own, wrong by half the round trip at most.
    ``bytes_per_second``: what arrived from the peer; None when it was not measured.
    """

    peer: int
    error: str = ""
    round_trip_seconds: float = 0.0
    clock_seconds: float = 0.0
    bytes_per_second: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Link:
        """Inverse of :meth:`to_dict`. Raises KeyError, TypeError or ValueError."""
        return Link(**_plain_fields(Link, values))


@dataclass(frozen=True)
class NodeReport:
    """Everything known about a node. ``facts``: None when it did not tell them; ``links``: what it
    found, the same peer perhaps several times.
    """

    node: int
    facts: HostFacts | None = None
    links: tuple[Link, ...] = ()

    @property
    def name(self) -> str:
        """The host's name, as far as it is known."""
        return "" if self.facts is None else self.facts.hostname


@dataclass(frozen=True)
class Needs:
    """The needs of a run. ``gpus_per_node``: where any node has GPUs; 0 where it needs none there,
    either. ``shm_bytes``: shared memory of a node, 0 where it is not known.
    """

    nodes: int
    gpus_per_node: int = 1
    shm_bytes: int = 0


_PLAIN = {"str": str, "int": int, "bool": bool, "float": float}


def _plain_fields(cls: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a number or text, of the type that the field has; ``| None`` is kept."""
    found: dict[str, Any] = {}
    for field_ in dataclasses.fields(cls):
        name, _, may_miss = str(field_.type).partition(" | ")
        if name in _PLAIN:
            value = values[field_.name]
            found[field_.name] = None if may_miss and value is None else _PLAIN[name](value)
    return found
