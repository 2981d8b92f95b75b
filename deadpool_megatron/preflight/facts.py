"""What a check knows about nodes, as plain data. Sizes in bytes, times in seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class NodeFacts:
    """What a node says about itself. ``None`` for a limit means that there is none."""

    hostname: str
    address: str = ""
    interface: str = ""
    interface_up: bool = True
    domain: str = ""
    # Component -> version; a component that is not there is not named.
    versions: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0
    shm_bytes: int = 0
    shm_free_bytes: int = 0
    memory_bytes: int = 0
    memlock_bytes: int | None = None
    open_files: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {**dataclasses.asdict(self), "versions": dict(self.versions)}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> NodeFacts:
        """Inverse of :meth:`to_dict`. Raises KeyError, TypeError or ValueError."""
        limits = {
            name: None if values[name] is None else int(values[name])
            for name in ("memlock_bytes", "open_files")
        }
        return NodeFacts(
            hostname=str(values["hostname"]),
            address=str(values["address"]),
            interface=str(values["interface"]),
            interface_up=bool(values["interface_up"]),
            domain=str(values["domain"]),
            versions={str(key): str(value) for key, value in dict(values["versions"]).items()},
            gpus=int(values["gpus"]),
            shm_bytes=int(values["shm_bytes"]),
            shm_free_bytes=int(values["shm_free_bytes"]),
            memory_bytes=int(values["memory_bytes"]),
            **limits,
        )


@dataclass(frozen=True)
class Clock:
    """A node's wall clock minus the conductor's, and how far off that can be at most."""

    offset_seconds: float
    error_seconds: float


@dataclass(frozen=True)
class Rate:
    """One measurement of the link to ``peer``: one TCP connection, each direction by itself."""

    peer: int
    out_bytes_per_second: float
    in_bytes_per_second: float
    round_trip_seconds: float

    def seen_by_peer(self, node: int) -> Rate:
        """The same measurement from the other end; ``node`` made it."""
        return Rate(
            peer=node,
            out_bytes_per_second=self.in_bytes_per_second,
            in_bytes_per_second=self.out_bytes_per_second,
            round_trip_seconds=self.round_trip_seconds,
        )


@dataclass(frozen=True)
class NodeReport:
    """Everything measured about a node that took part to the end.

    ``unreached``: node -> why no connection to it could be made.
    """

    node: int
    facts: NodeFacts
    clock: Clock | None = None
    unreached: Mapping[int, str] = field(default_factory=dict)
    rates: tuple[Rate, ...] = ()

    @property
    def rate_bytes_per_second(self) -> float | None:
        """The slower direction, each at its best of all measurements; None without any."""
        if not self.rates:
            return None
        return min(
            max(rate.out_bytes_per_second for rate in self.rates),
            max(rate.in_bytes_per_second for rate in self.rates),
        )


@dataclass(frozen=True)
class Missing:
    """A node without a report, and why there is none."""

    node: int
    reason: str
    hostname: str = ""


@dataclass(frozen=True)
class Wanted:
    """What the run needs. ``shm_bytes``: shared memory of a node, 0 where it is not known."""

    nodes: int
    spares: int = 0
    nproc_per_node: int = 1
    shm_bytes: int = 0

    @property
    def total(self) -> int:
        """All nodes, spares included."""
        return self.nodes + self.spares
