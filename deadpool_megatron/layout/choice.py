"""``mixed``: which scheme protects which shard parts in which failure domains. Pure.

All reasonable plans are tried, and they are few: a scheme for each family of parts (the dense
optimizer's, the experts') in each class of failure domains (those whose nodes have little memory,
and the others). What counts, in this order: memory, the window at a cadence of 1, risk, network,
memory again. ``recompute`` is not among the candidates: its gradients need room in every slot and
slots are laid out at the start, before anything is measured.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from deadpool_megatron.layout.demand import Demand, Scene, demand
from deadpool_megatron.layout.schemes import (
    ANY,
    Kind,
    ProtectionPlan,
    Rule,
    Scheme,
    plan_in_words,
)

# Sizes of parity groups that are tried: larger ones save little more memory, and cost risk.
GROUP_SIZES = (2, 3, 4, 6, 8)
_BUDDY = Scheme(Kind.BUDDY)
_ROOM = 0.9  # part of the window that shipping may need
_MOST_FAMILIES = 2
# Plans times roles: some seconds of one processor.
_MOST_WORK = 50_000

Key = tuple[float, float, int, int, int, int]


@dataclass(frozen=True)
class Measured:
    """What shipping needs: ``ship_seconds`` under ``plan`` for one generation, of the busiest role,
    and the ``window_seconds`` that an iteration has for it."""

    plan: ProtectionPlan
    ship_seconds: float
    window_seconds: float


@dataclass(frozen=True)
class Choice:
    """The best plan; ``holds``: it fits; ``why``: in words."""

    plan: ProtectionPlan
    holds: bool
    why: str


@dataclass(frozen=True)
class _Candidate:
    plan: ProtectionPlan
    demand: Demand
    key: Key


def choose(
    scene: Scene,
    budgets: Mapping[int, int],
    measured: Measured | None = None,
    every: int = 1,
) -> Choice:
    """The best plan for what is known. ``budgets``: node -> bytes for generations; a node that is
    not in it has as much as it wants. ``every``: the cadence, which is chosen elsewhere.
    """
    rate = _bytes_per_second(scene, measured)
    found = []
    for plan in _plans(scene, budgets, every):
        needs = demand(plan, scene)
        found.append(_Candidate(plan, needs, _key(needs, budgets, rate, measured)))
    best = min(found, key=lambda one: one.key)
    return Choice(best.plan, not any(best.key[:2]), _why(best, found[0], budgets, rate, measured))


def largest_group(nodes: int, survived: int) -> int:
    """Of the parity groups that are tried in a run of so many nodes, spares included; 0 for none.

    The same test as for the candidates of a choice, so that both agree on what is possible.
    """
    return max((size for size in GROUP_SIZES if size + survived <= nodes), default=0)


def _bytes_per_second(scene: Scene, measured: Measured | None) -> float:
    """Of the busiest node; 0 when it is not known."""
    if measured is None or measured.ship_seconds <= 0:
        return 0.0
    return demand(measured.plan, scene).largest_ship_bytes / measured.ship_seconds


def _key(
    needs: Demand,
    budgets: Mapping[int, int],
    rate: float,
    measured: Measured | None,
) -> Key:
    lacking = sum(max(0, needs.memory[n] - b) for n, b in budgets.items() if n in needs.memory)
    late = 0.0
    if measured is not None and rate:
        late = max(0.0, needs.largest_ship_bytes / rate - _ROOM * measured.window_seconds)
    return (
        lacking,
        late,
        len(needs.fatal_domains),
        needs.fatal_sets,
        needs.largest_ship_bytes,
        sum(needs.memory.values()),
    )


def _plans(scene: Scene, budgets: Mapping[int, int], every: int) -> Iterator[ProtectionPlan]:
    """All candidates, copies for everything first."""
    families, classes, for_class = _axes(scene, budgets)
    for chosen in itertools.product(for_class, repeat=len(classes)):
        yield ProtectionPlan(tuple(_rules(families, classes, chosen)), every)


def _axes(
    scene: Scene, budgets: Mapping[int, int]
) -> tuple[list[str], list[list[str]], list[tuple[Scheme, ...]]]:
    """Families, classes, and what may be chosen for each class: as fine as a large run allows."""
    classes = _classes(scene, budgets)
    for families in (_families(scene), [ANY]):
        for_class = list(_for_class(scene, families))
        if len(for_class) ** len(classes) * len(scene.seats) <= _MOST_WORK:
            return families, classes, for_class
    return families, [sorted(set(scene.domains.values()))], for_class


def _families(scene: Scene) -> list[str]:
    """Names of shard parts that may be treated apart, the largest first; ANY for the others."""
    sizes: Counter[str] = Counter()
    for layout in scene.layouts.values():
        names = layout.shard_parts
        sizes.update({part.name: part.nbytes for part in layout.parts if part.name in names})
    largest = [name for name, _ in sizes.most_common(_MOST_FAMILIES - 1)]
    return [*largest, ANY] if len(sizes) > 1 else [ANY]


def _classes(scene: Scene, budgets: Mapping[int, int]) -> list[list[str]]:
    """Failure domains with little memory and the others; one class where all have the same."""
    least: dict[str, float] = {}
    for node, domain in scene.domains.items():
        least[domain] = min(least.get(domain, float("inf")), budgets.get(node, float("inf")))
    values = sorted(set(least.values()))
    if len(values) < 2:
        return [sorted(least)]
    limit = values[len(values) // 2]
    poor = sorted(domain for domain, budget in least.items() if budget < limit)
    return [poor, sorted(set(least) - set(poor))]


def _for_class(scene: Scene, families: list[str]) -> Iterator[tuple[Scheme, ...]]:
    """A scheme for each family; groups of one domain have one size (layout.parity)."""
    yield (_BUDDY,) * len(families)
    for size in GROUP_SIZES:
        if size > largest_group(len(scene.domains), scene.survived):
            return
        parity = Scheme(Kind.PARITY, group=size)
        for chosen in itertools.product((_BUDDY, parity), repeat=len(families)):
            if parity in chosen:
                yield chosen


def _rules(
    families: list[str], classes: list[list[str]], chosen: tuple[tuple[Scheme, ...], ...]
) -> Iterator[Rule]:
    """The first rule that fits counts: named domains before the others, named parts before ANY."""
    *named, last = zip(classes, chosen, strict=True)
    for domains, schemes in named:
        if schemes == last[1]:
            continue
        for domain in domains:
            yield from _rules_of(domain, families, schemes)
    yield from _rules_of(ANY, families, last[1])


def _rules_of(domain: str, families: list[str], schemes: tuple[Scheme, ...]) -> Iterator[Rule]:
    if len(set(schemes)) == 1:
        yield Rule(ANY, domain, schemes[0])
        return
    for family, scheme in zip(families, schemes, strict=True):
        yield Rule(family, domain, scheme)


def _why(
    best: _Candidate,
    copies: _Candidate,
    budgets: Mapping[int, int],
    rate: float,
    measured: Measured | None,
) -> str:
    """One line; ``copies``: the plan that only copies, which is the best one where it fits."""
    name = plan_in_words(best.plan)
    if best.key[0]:
        node, needs, budget = _tightest(best, budgets)
        return (
            f"{name}: nothing fits, node {node} would need {sized(needs)} of {sized(budget)}; this"
            " needs least"
        )
    text = f"{name}: needs up to {sized(best.demand.largest_memory_bytes)} on a node"
    if best.plan != copies.plan and copies.key[0]:
        node, needs, budget = _tightest(copies, budgets)
        text += f"; copies of everything need {sized(needs)} on node {node}, {sized(budget)} fit"
    if measured is not None and rate:
        ship = best.demand.largest_ship_bytes / rate
        text += f"; ships {ship:.2g} s of a window of {measured.window_seconds:.2g} s"
    if best.key[1]:
        text += ", which needs a lower cadence, as any other scheme does"
    return text


def _tightest(candidate: _Candidate, budgets: Mapping[int, int]) -> tuple[int, int, int]:
    """The node that lacks most: its number, what it would need, what it has."""
    memory = candidate.demand.memory
    node = max(
        (node for node in sorted(budgets) if node in memory),
        key=lambda one: memory[one] - budgets[one],
    )
    return node, memory[node], budgets[node]


def sized(nbytes: int) -> str:
    """Three digits, GB or MB."""
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g} MB"
