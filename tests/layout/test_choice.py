"""The choice of ``mixed`` over random clusters: never over a budget, never needlessly unsafe."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deadpool_megatron.layout.choice import Choice, Measured, choose
from deadpool_megatron.layout.demand import Scene, demand
from deadpool_megatron.layout.records import BOUNDARIES, PartInfo, RoleLayout, extras_part
from deadpool_megatron.layout.schemes import ANY, Kind, ProtectionPlan, Rule, Scheme, uniform
from deadpool_megatron.settings import Settings

GIGA = 10**9
SLOTS = 2


def scene(
    nodes: int = 6,
    per_node: int = 2,
    survived: int = 1,
    sizes: tuple[int, ...] = (10,),
    racks: int = 0,
) -> Scene:
    """Roles on consecutive nodes, all in one data-parallel group; sizes of shard parts in GB."""
    world = nodes * per_node
    peers = tuple(range(world))
    layouts = {}
    for role in range(world):
        shards = [PartInfo(f"shard{n}", s * GIGA, (role,)) for n, s in enumerate(sizes)]
        extras = [PartInfo(extras_part(name), 1000, (role,)) for name in BOUNDARIES]
        layouts[role] = RoleLayout(role, (*shards, *extras), peers, SLOTS, f"h{role}")
    domains = {n: f"rack{n % racks}" if racks else f"node{n}" for n in range(nodes)}
    return Scene(layouts, {r: r // per_node for r in range(world)}, domains, (), survived)


def budgets(of: Scene, *gigabytes: float) -> dict[int, int]:
    """By node; the last one for all others."""
    return {
        node: int(gigabytes[min(node, len(gigabytes) - 1)] * GIGA) for node in sorted(of.domains)
    }


SCENES = st.builds(
    scene,
    nodes=st.integers(4, 9),
    per_node=st.integers(1, 2),
    survived=st.integers(1, 2),
    sizes=st.sampled_from([(10,), (8, 3), (2, 9)]),
    racks=st.sampled_from([0, 3, 4]),
)
LIMITS = st.lists(st.integers(10, 140), min_size=1, max_size=3)


def over(choice: Choice, of: Scene, limits: dict[int, int]) -> int:
    """Bytes that do not fit."""
    needs = demand(choice.plan, of).memory
    return sum(max(0, needs[node] - limit) for node, limit in limits.items())


@settings(max_examples=25, deadline=None)
@given(SCENES, LIMITS)
def test_no_budget_is_exceeded_where_that_can_be(of: Scene, gigabytes: list[int]) -> None:
    limits = budgets(of, *gigabytes)
    choice = choose(of, limits)
    assert choice.holds == (over(choice, of, limits) == 0)
    if not choice.holds:
        for size in (2, 3, 4, 6, 8):
            if size + of.survived <= len(of.domains):
                other = replace(choice, plan=uniform("parity", Settings(), 1, size))
                assert over(other, of, limits) >= over(choice, of, limits)
        assert over(replace(choice, plan=ProtectionPlan()), of, limits) > 0


@settings(max_examples=25, deadline=None)
@given(SCENES, LIMITS, st.integers(1, 60))
def test_more_memory_never_means_more_risk(of: Scene, gigabytes: list[int], more: int) -> None:
    """All nodes get the same more, so that the same plans are compared."""
    less = choose(of, budgets(of, *gigabytes))
    better = choose(of, budgets(of, *(size + more for size in gigabytes)))
    assert better.holds or not less.holds
    if less.holds:
        assert _risk(better, of) <= _risk(less, of)


def _risk(choice: Choice, of: Scene) -> tuple[int, int]:
    needs = demand(choice.plan, of)
    return len(needs.fatal_domains), needs.fatal_sets


@settings(max_examples=20, deadline=None)
@given(SCENES)
def test_without_limits_everything_is_copied(of: Scene) -> None:
    choice = choose(of, {})
    assert choice.holds
    assert choice.plan == ProtectionPlan()


def test_a_large_run_is_chosen_for_as_a_whole() -> None:
    """Two families in two classes would be 256 plans for 1,600 roles, even one family 36."""
    of = scene(nodes=200, per_node=8, sizes=(8, 3))
    choice = choose(of, budgets(of, 331, 331, 351))
    assert choice.holds
    assert len(choice.plan.rules) == 1


def test_parity_where_copies_do_not_fit() -> None:
    of = scene(nodes=6, per_node=4)
    choice = choose(of, budgets(of, 150))
    assert choice.holds
    assert choice.plan.kinds == {Kind.PARITY}
    assert "copies of everything need 160 GB on node 0, 150 GB fit" in choice.why


def test_the_smaller_group_is_the_safer_one() -> None:
    """Of those that fit."""
    of = scene(nodes=9, per_node=8)
    chosen = [choose(of, budgets(of, limit)) for limit in (321, 300, 215)]
    assert all(choice.holds for choice in chosen)
    assert [_risk(choice, of) for choice in chosen] == sorted(_risk(c, of) for c in chosen)
    sizes = [choice.plan.rules[-1].scheme.group for choice in chosen]
    assert sizes[0] < sizes[1] < sizes[2]


def test_one_family_may_be_coded_alone() -> None:
    """Experts, which take most of the memory; the blocks are as long as their part."""
    of = scene(nodes=6, per_node=4, sizes=(2, 18))
    experts = Rule("shard1", ANY, Scheme(Kind.PARITY, group=3))
    found = demand(ProtectionPlan((experts, Rule(ANY, ANY, Scheme(Kind.BUDDY)))), of)
    own, dense, blocks = 24 * 20, 24 * 2, 24 * 18 / 3
    assert sum(found.memory.values()) == pytest.approx(SLOTS * (own + dense + blocks) * GIGA, 1e-3)


def test_domains_with_little_memory_are_treated_apart() -> None:
    of = scene(nodes=8, per_node=4)
    limits = budgets(of, 159, 159, 159, 159, 170)
    choice = choose(of, limits)
    assert choice.holds
    assert over(choice, of, limits) == 0
    assert choice.plan.kinds == {Kind.PARITY, Kind.BUDDY}


def test_nothing_fits() -> None:
    of = scene(nodes=4, per_node=1)
    choice = choose(of, budgets(of, 15))
    assert not choice.holds
    assert "nothing fits" in choice.why


def test_a_window_that_is_too_short_is_said() -> None:
    of = scene(nodes=6, per_node=1)
    slow = Measured(ProtectionPlan(), ship_seconds=3.0, window_seconds=1.0)
    choice = choose(of, {}, slow)
    assert not choice.holds
    assert "needs a lower cadence" in choice.why
    quick = choose(of, {}, replace(slow, window_seconds=9.0), every=3)
    assert quick.holds
    assert quick.plan.every == 3


# What a plan asks for.


def test_demand_of_copies_and_of_none() -> None:
    of = scene(nodes=4, per_node=1)
    copies = demand(ProtectionPlan(), of)
    # Headers and whole pages come on top.
    assert 0 < copies.largest_memory_bytes - 2 * SLOTS * (10 * GIGA + 5000) < 200_000
    assert copies.largest_ship_bytes == 10 * GIGA + 5000
    assert (copies.fatal_sets, copies.fatal_domains) == (2, frozenset())
    local = demand(uniform("local", Settings(), 1, 0), of)
    assert 0 < local.largest_memory_bytes - SLOTS * (10 * GIGA + 5000) < 100_000
    assert local.largest_ship_bytes == 0
    assert (local.fatal_sets, len(local.fatal_domains)) == (4, 4)


@pytest.mark.parametrize("survived", [1, 2])
def test_demand_of_parity(survived: int) -> None:
    """Memory of m blocks for a group of three; the network of m copies."""
    of = scene(nodes=6, per_node=1, survived=survived)
    copies = demand(ProtectionPlan(), of)
    parity = demand(uniform("parity", Settings(), 1, 3), of)
    own = SLOTS * 6 * 10 * GIGA
    assert sum(parity.memory.values()) - own == pytest.approx(
        (sum(copies.memory.values()) - own) / 3, rel=1e-3
    )
    assert sum(parity.out.values()) == sum(copies.out.values())
    assert sum(parity.into.values()) == sum(parity.out.values())
    assert parity.fatal_sets > copies.fatal_sets
    assert parity.fatal_domains == copies.fatal_domains == frozenset()


def test_what_peers_hold_anyway_is_owed_to_nobody() -> None:
    of = scene(nodes=4, per_node=1)
    everybody = tuple(range(4))
    same = {
        role: replace(layout, parts=tuple(replace(p, replicas=everybody) for p in layout.parts[:1]))
        for role, layout in of.layouts.items()
    }
    for plan in (ProtectionPlan(), uniform("parity", Settings(), 1, 3)):
        assert demand(plan, replace(of, layouts=same)).largest_ship_bytes == 0


def test_rules_by_domain_reach_the_roles_of_that_domain() -> None:
    of = scene(nodes=6, per_node=1)
    rules = (
        Rule(ANY, "node0", Scheme(Kind.BUDDY)),
        Rule(ANY, "node1", Scheme(Kind.BUDDY)),
        Rule(ANY, ANY, Scheme(Kind.PARITY, group=2)),
    )
    found = demand(ProtectionPlan(rules), of)
    assert sum(found.memory.values()) == pytest.approx(SLOTS * 10 * GIGA * (6 + 2 + 2), rel=1e-3)
