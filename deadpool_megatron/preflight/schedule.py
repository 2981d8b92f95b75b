"""Which links are measured, and when: no node takes part in two measurements at once. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from deadpool_megatron.preflight.facts import Link

Pair = tuple[int, int]


@dataclass(frozen=True)
class Checkup:
    """Links are being measured. ``number``: of the question that the ``awaited`` nodes have not
    answered yet; ``until``: how long they have for it. ``planned``: all nodes have tried all links,
    and ``turns`` are what is asked next, one after the other. ``measured``: pairs whose speed was
    asked for; ``looks``: how often slow ones were measured again. ``links``: what nodes have found.
    """

    number: int = 0
    awaited: frozenset[int] = frozenset()
    until: float = 0.0
    planned: bool = False
    turns: tuple[tuple[Pair, ...], ...] = ()
    measured: tuple[Pair, ...] = ()
    looks: int = 0
    links: Mapping[int, tuple[Link, ...]] = field(default_factory=dict)


def first_pairs(nodes: Iterable[int]) -> list[Pair]:
    """Returns each node with the next one, and with the one half the ring away.

    With three nodes or more each has two partners: a slow link has two ends, and the end that is
    quick with another partner is not the weak one.
    """
    ring = sorted(nodes)
    pairs = set()
    for distance in (1, len(ring) // 2):
        for place, node in enumerate(ring):
            peer = ring[(place + distance) % len(ring)]
            if peer != node:
                pairs.add((min(node, peer), max(node, peer)))
    return sorted(pairs)


def second_look(
    doubtful: Sequence[int], nodes: Iterable[int], measured: Iterable[Pair]
) -> list[Pair]:
    """Returns each doubtful node with another partner than before, one that is not doubtful if
    possible. They are dealt out to the partners one after another; where all are doubtful, to each
    other.
    """
    known = {frozenset(pair) for pair in measured}
    everyone = sorted(nodes)
    partners = [node for node in everyone if node not in doubtful]
    pairs = []
    for place, node in enumerate(doubtful):
        order = [*partners[place % max(1, len(partners)) :], *partners, *everyone]
        partner = next((p for p in order if p != node and frozenset((node, p)) not in known), None)
        if partner is not None:
            pairs.append((node, partner))
    return pairs


def rounds(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Returns the pairs in rounds that are measured one after another; each node is once in a
    round.
    """
    found: list[list[Pair]] = []
    busy: list[set[int]] = []
    for pair in pairs:
        place = next((i for i, taken in enumerate(busy) if not taken & set(pair)), len(busy))
        if place == len(busy):
            found.append([])
            busy.append(set())
        found[place].append(pair)
        busy[place].update(pair)
    return found
