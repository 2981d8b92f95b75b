"""The scheme of an epoch: which copies must exist before a generation is committed.

Each epoch of a vault has one scheme object (:mod:`.schemes.registry`). It decides which parts are
owed to which nodes and which parts of other roles this node continues to receive, and it combines
parts into parity blocks. This module has the schemes that are made of copies.

The sources of a restored generation do not depend on the plan of the new epoch: the record's
recipes, and the files of a dump, describe the blocks of earlier epochs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deadpool_megatron.layout.placement import CopyPlacement, is_covered
from deadpool_megatron.layout.records import EpochRecord, Generation, RoleLayout
from deadpool_megatron.vault.errors import Refusal, Refused
from deadpool_megatron.vault.transport import Channel

# Name -> (bytes, checksum).
Parts = Mapping[str, tuple[int, int]]


class Target(NamedTuple):
    """A node that is owed parts of a role: it keeps a copy of them or, with ``block``, holds the
    parity role of that number, into which they are combined."""

    node: int
    block: int | None = None


# Groups of targets with the parts that each target of a group is owed.
OwedGroups = Iterable[tuple[Sequence[Target], Collection[str]]]


@dataclass(frozen=True)
class Offer:
    """Parts of a role's generation that its vault offers to another node. ``elsewhere``: name,
    bytes and checksum of the parts that it does not send."""

    epoch: int
    generation: Generation
    layout: RoleLayout
    parts: Parts
    elsewhere: tuple[tuple[str, int, int], ...] = ()

    @property
    def role(self) -> int:
        """Return the role of the parts."""
        return self.layout.role

    @property
    def names(self) -> list[str]:
        """Return the names of the parts, in their order."""
        return list(self.parts)


@dataclass(frozen=True)
class Owed:
    """The parts that each target must have (``names``). ``is_short``: some parts have fewer targets
    than the record asks for."""

    names: Mapping[Target, frozenset[str]]
    is_short: bool


class Scheme(ABC):
    """The protection of state in one epoch: see the module text. Not thread-safe: the vault's lock
    guards it."""

    def __init__(self, record: EpochRecord) -> None:
        self.record = record
        self._seats = {role: seat.node for role, seat in record.seats.items()}
        self._domains = {node: address.domain for node, address in record.nodes.items()}
        self._owed: dict[int, Owed] = {}

    @abstractmethod
    def _owed_groups(self, layout: RoleLayout) -> OwedGroups:
        """Return groups of targets with the parts that each target of a group is owed."""

    def owed(self, layout: RoleLayout) -> Owed:
        """Return the parts that must be on other nodes before a generation is committed."""
        found = self._owed.get(layout.role)
        if found is None:
            groups = [(targets, frozenset(names)) for targets, names in self._owed_groups(layout)]
            owed = {target: names for targets, names in groups if names for target in targets}
            is_short = any(names and len(to) < self.record.replicas for to, names in groups)
            found = self._owed[layout.role] = Owed(owed, is_short)
        return found

    def keeps(self, layout: RoleLayout, node: int) -> Collection[str]:
        """Return the parts that ``node`` continues to receive into the segment of this layout."""
        if layout.role not in self._seats:
            return ()
        owed = self.owed(layout).names.items()
        return {name for target, names in owed if target.node == node for name in names}

    def elsewhere(self, layout: RoleLayout) -> list[str]:
        """Return the shard parts that are not sent, because peers hold the same bytes."""
        return [
            part.name
            for part in layout.parts
            if part.name in layout.shard_parts and self._covered(layout, part.replicas)
        ]

    def combine(self, channel: Channel, block: int, offer: Offer) -> None:
        """Answer an offer of parts for a parity block of this node. Raises Refused. Called without
        the vault's lock."""
        raise Refused(Refusal.WRONG_BLOCK)

    def cut(self) -> None:  # noqa: B027  most schemes run nothing
        """End the scheme's own activity: the epoch is over."""

    def _covered(self, layout: RoleLayout, replicas: tuple[int, ...]) -> bool:
        return is_covered(replicas, layout.role, self._seats, self._domains, self.record.replicas)


class Copies(Scheme):
    """Copies of all parts that an iteration changes, except those that enough peers hold."""

    def __init__(self, record: EpochRecord) -> None:
        super().__init__(record)
        self._placement = CopyPlacement.of_record(record)

    def _owed_groups(self, layout: RoleLayout) -> OwedGroups:
        return [(self._buddies(layout), self._uncovered(layout))]

    def _buddies(self, layout: RoleLayout) -> list[Target]:
        return [Target(node) for node in self._placement.buddies(layout.role, layout.peers)]

    def _uncovered(self, layout: RoleLayout) -> list[str]:
        return [part.name for part in layout.parts if not self._covered(layout, part.replicas)]


class Local(Scheme):
    """Generations stay on their own node (REFT's SMP): no part is owed to another node."""

    def _owed_groups(self, layout: RoleLayout) -> OwedGroups:
        return ()


class LocalTwice(Scheme):
    """A second copy of all parts is owed to the node of the role, even if peers hold them. It is
    acknowledged like the copy of a buddy. A damaged slot of a dead process is repaired without the
    network: a restore uses the first place of a part on its node whose checksum matches."""

    def _owed_groups(self, layout: RoleLayout) -> OwedGroups:
        return [([Target(self._seats[layout.role])], [part.name for part in layout.parts])]
