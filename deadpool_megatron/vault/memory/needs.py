"""How much memory the generations of a node take, and whether it is there. Pure.

Looked at before the first slot is made, when the layout of a role is known: all roles are cut from
one model, so that one of them stands for the others of its node and for those whose copies come.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deadpool_megatron.layout.reckoning.choice import largest_group
from deadpool_megatron.layout.reckoning.footprint import (
    block_bytes,
    chain_bytes,
    copy_bytes,
    own_bytes,
)
from deadpool_megatron.layout.records import RoleLayout
from deadpool_megatron.settings import Settings


@dataclass(frozen=True)
class Needs:
    """Bytes of one node's generations: ``own`` slots of its roles, and ``kept`` for other nodes
    (copies, parity blocks). ``slots``: generations of each."""

    roles: int
    slots: int
    own: int
    kept: int
    scheme: str

    @property
    def total(self) -> int:
        """What is in use while training goes on."""
        return self.own + self.kept

    @property
    def peak(self) -> int:
        """While processes are restarted in place: the slots of the ones that died are the source
        for the new ones, which have made theirs already."""
        return self.total + self.own

    def in_words(self) -> str:
        """What takes the memory."""
        return (
            f"{_size(self.own)} for own slots ({self.roles} roles x {self.slots} generations)"
            f" + {_size(self.kept)} {self.scheme}"
        )


@dataclass(frozen=True)
class Room:
    """One thing that limits a node's memory: bytes it allows in all, and what to do about it."""

    name: str
    nbytes: int
    remedy: str


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


def node_needs(
    layout: RoleLayout, roles_per_node: int, settings: Settings, nodes: int = 0
) -> Needs:
    """Reckoned as for a plan, where all layouts are known (layout.reckoning.demand). ``nodes``: of
    the run, spares included; where the scheme is chosen by what fits, they say how large parity
    groups may be, and it is the least that any plan needs which counts here."""
    shards, replicas = set(layout.shard_parts), settings.replicas
    # Bytes that enough peers hold anyway are not copied.
    owed = {
        p.name: p.nbytes for p in layout.parts if p.name in shards and len(p.replicas) <= replicas
    }
    extras = [p.nbytes for p in layout.parts if p.name not in shards]
    kept = replicas * copy_bytes(layout, [*owed.values(), *extras])
    scheme = f"for {replicas} copies (--deadpool-replicas {replicas})"
    group = 0
    if settings.protection == "local":
        kept, scheme = 0, "for copies (--deadpool-protection local)"
    elif settings.protection == "local-twice":
        kept = copy_bytes(layout, [part.nbytes for part in layout.parts])
        scheme = "for second copies (--deadpool-protection local-twice)"
    elif settings.protection == "parity":
        group = settings.parity_group
        scheme = f"for parity ({replicas} of {group} roles)"
    elif settings.protection == "mixed" and (group := largest_group(nodes, replicas)):
        scheme = f"at least, for parity ({replicas} of {group} roles, --deadpool-protection mixed)"
    elif settings.protection == "recompute":
        kept = replicas * chain_bytes(layout, owed, settings.full_every)
        scheme = f"for {replicas} copies with their steps"
    if group:
        blocks = block_bytes(layout.slots, group, owed) if owed else 0
        kept = replicas * (copy_bytes(layout, extras) + math.ceil(blocks / group))
    return Needs(
        roles=roles_per_node,
        slots=layout.slots,
        own=own_bytes(layout) * roles_per_node,
        kept=kept * roles_per_node,
        scheme=scheme,
    )


def objection(needs: Needs, rooms: Sequence[Room]) -> str:
    """Why a node with these needs must not start: one line; empty when all is well."""
    tightest = min(rooms, key=lambda room: room.nbytes, default=None)
    if tightest is None or needs.total <= tightest.nbytes:
        return ""
    return (
        f"generations need {needs.total} bytes of memory on this node, {tightest.name} allows"
        f" {tightest.nbytes}: {needs.in_words()}; {tightest.remedy}, or lower --deadpool-replicas"
        " or --deadpool-max-lag"
    )


def warnings(
    needs: Needs, rooms: Sequence[Room], memlock_bytes: int | None, *, pinned: bool
) -> list[str]:
    """What lets training start but may hurt later. ``pinned``: slots get locked for a device."""
    found = []
    tightest = min(rooms, key=lambda room: room.nbytes, default=None)
    if tightest is not None and needs.total <= tightest.nbytes < needs.peak:
        found.append(
            f"memory for generations is tight: {needs.total} bytes in use ({needs.in_words()}),"
            f" {needs.peak} while processes are restarted in place, {tightest.name} allows"
            f" {tightest.nbytes}: {tightest.remedy}"
        )
    each = needs.own // max(1, needs.roles)
    if pinned and memlock_bytes is not None and memlock_bytes < each:
        found.append(
            f"a process may lock {memlock_bytes} bytes in memory, its slots have {each}: copies"
            " from the device may be slower; 'ulimit -l unlimited', for Slurm"
            " LimitMEMLOCK=infinity of slurmd, docker --ulimit memlock=-1"
        )
    return found
