"""Several buddies of a role as a chain: the owner sends each byte once. Pure.

The first buddy of the placement's order that can be had is the head; the others that lack the same
parts are reached through it, each buddy handing on to the next what arrives. What is owed still
follows from the ledger alone: who was not reached is simply owed its copy, and is sent it directly.

The order is that of the placement, whose choices lie evenly around the ring of peers: the hops of
all chains have the same length, so every node sends to one other, as often as there are copies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

from deadpool_megatron.layout.replaying import NO_BASE

Work = TypeVar("Work")
# After a link has failed its node is served directly for so many iterations, and for twice as many
# after each further failure in a row: an attempt on a dead link costs its deadline.
_FIRST_DIRECT_ITERATIONS = 16
_MOST_DIRECT_ITERATIONS = 1024
# Said of a node behind one that could not be asked: it has not failed itself.
NOT_REACHED = "not reached"
# Reasons that say nothing against the link.
_INNOCENT = ("early", "superseded", NO_BASE, NOT_REACHED)


class Chain:
    """Who is reached through whom, for one role in one epoch. The vault's lock guards it."""

    def __init__(self, order: tuple[int, ...]) -> None:
        self._order = order
        self._busy: set[int] = set()
        self._taken: dict[int, int] = {}  # node -> head
        self._direct: dict[int, tuple[int, int]] = {}  # node -> (until iteration, for how many)

    def taken(self, node: int) -> bool:
        """True while ``node`` is reached through another one."""
        return node in self._taken

    def links(
        self, node: int, iteration: int, work_of: Callable[[int], Work | None]
    ) -> tuple[int, ...] | None:
        """The nodes to reach through ``node``, in order; None: it will be reached itself.

        ``work_of(node)``: what a node lacks, as something that can be compared.
        """
        wanted = work_of(node)
        alike = [
            other
            for other in self._order
            if other not in self._busy
            and other not in self._taken
            and not self.is_direct(other, iteration)
            and work_of(other) == wanted
        ]
        if node not in alike:
            return ()
        return tuple(alike[1:]) if alike[0] == node else None

    def begin(self, node: int, links: tuple[int, ...]) -> None:
        """``node`` is sent to, and through it ``links`` are reached."""
        self._busy.add(node)
        self._taken.update(dict.fromkeys(links, node))

    def release(self, head: int, nodes: Collection[int]) -> None:
        """These are not reached through ``head`` any more."""
        for node in nodes:
            if self._taken.get(node) == head:
                del self._taken[node]

    def idle(self, node: int) -> None:
        """``node`` can be sent to again."""
        self._busy.discard(node)

    def is_direct(self, node: int, iteration: int) -> bool:
        """True while nothing is sent to ``node`` through others."""
        return node in self._direct and iteration < self._direct[node][0]

    def reached(self, node: int) -> None:
        """A link has worked."""
        self._direct.pop(node, None)

    def failed(self, node: int, iteration: int, why: str) -> None:
        """A link has not worked."""
        if why in _INNOCENT:
            return
        before = self._direct.get(node, (0, _FIRST_DIRECT_ITERATIONS // 2))[1]
        count = min(2 * before, _MOST_DIRECT_ITERATIONS)
        self._direct[node] = iteration + count, count


def link(node: int, parts: list[str], why: str = "") -> dict[str, Any]:
    """What the owner hears of a buddy behind the head: the parts it has sealed, or why not."""
    return {"t": "link", "node": node, "parts": parts, "why": why}
