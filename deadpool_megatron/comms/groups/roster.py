"""The groups that a process knows: every call of new_group, member or not, in order.

Survivors and a spare made the same calls, so the roster gives each group a key that is equal on all
its ranks, an order of creation that cannot deadlock, and the map from a role's groups to those of
another role.
"""

from __future__ import annotations

import hashlib
from typing import Any

from torch.distributed import distributed_c10d as c10d

from deadpool_megatron.comms.groups.group import Entry, ReconfigurableGroup

_c10d: Any = c10d


class Roster:
    """The groups in order of creation; only the thread that creates groups changes it."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._key_counts: dict[tuple[int, ...], int] = {}

    def add(self, entry: Entry) -> None:
        """Add a creation; the first is that of WORLD."""
        self._entries.append(entry)

    def remove(self, group: ReconfigurableGroup) -> None:
        """Remove a destroyed group; with WORLD all groups."""
        if self._entries and self._entries[0].group is group:
            self._entries.clear()
        self._entries = [entry for entry in self._entries if entry.group is not group]

    def groups(self) -> list[ReconfigurableGroup]:
        """Return the groups of which this process is a member, in order of creation."""
        return [entry.group for entry in self._entries if entry.group is not None]

    def entries(self) -> list[Entry]:
        """Return all creations but WORLD, in order."""
        return self._entries[1:]

    def world(self) -> ReconfigurableGroup:
        """Return WORLD. Raises RuntimeError before init_process_group."""
        groups = self.groups()
        if not groups:
            raise RuntimeError("torch.distributed was not initialised through the seam")
        return groups[0]

    def in_attach_order(self) -> list[ReconfigurableGroup]:
        """Return the groups in the order of attach: WORLD, then by ranks, then by creation.

        Every rank takes its groups out of the same global order. So all members of the first group
        in that order which is not connected wait for it, and no circle of waits can exist.
        """
        groups = self.groups()
        return groups[:1] + sorted(groups[1:], key=lambda group: group.ranks)

    def splits(self) -> tuple[str, list[list[ReconfigurableGroup | None]]]:
        """Return a digest, which is equal on ranks that know the same groups, and the rounds in
        which the groups of all roles, except those of gloo, are split from WORLD. The groups of a
        round share no rank; None stands for a group without this rank."""
        entries = [entry for entry in self._entries[1:] if entry.requested.lower() != "gloo"]
        round_ranks: list[set[int]] = []
        rounds: list[list[ReconfigurableGroup | None]] = []
        for entry in entries:
            ranks = set(entry.ranks)
            free = (i for i, others in enumerate(round_ranks) if others.isdisjoint(ranks))
            if (number := next(free, len(round_ranks))) == len(round_ranks):
                round_ranks.append(set())
                rounds.append([])
            round_ranks[number] |= ranks
            rounds[number].append(entry.group)
        text = str([(entry.ranks, entry.description) for entry in entries])
        return hashlib.blake2b(text.encode()).hexdigest(), rounds

    def start_epoch(self) -> None:
        """Number store keys from the start."""
        self._key_counts.clear()

    def next_key(self, group: ReconfigurableGroup) -> str:
        """Return the store prefix of the group: a digest of its ranks, and its number among the
        groups with these ranks."""
        number = self._key_counts.get(group.ranks, 0)
        self._key_counts[group.ranks] = number + 1
        text = ",".join(map(str, group.ranks))
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return f"{len(group.ranks)}-{digest}-{number}"

    def renumber(self, rank: int) -> None:
        """Let the groups of this process become the groups of ``rank``, object by object.

        Both ranks must be members of the same number of groups, with equal descriptions, sizes and
        backends in the same order. Raises ValueError otherwise: the groups must be built again.
        """
        old_rank = self.world().rank()
        if rank == old_rank:
            return
        sources = [entry for entry in self._entries if old_rank in entry.ranks]
        targets = [entry for entry in self._entries if rank in entry.ranks]
        shape = [(e.description, len(e.ranks), e.requested) for e in sources]
        if shape != [(e.description, len(e.ranks), e.requested) for e in targets]:
            raise ValueError(f"rank {rank} has other groups than rank {old_rank}")
        moves = [(entry.group, target) for entry, target in zip(sources, targets, strict=True)]
        for entry in sources:
            entry.group = None
        for group, target in moves:
            assert group is not None
            target.group = group
            group.renumber(target.ranks, target.ranks.index(rank))
            _c10d._world.pg_group_ranks[group] = {g: i for i, g in enumerate(target.ranks)}
