"""The choice of ``mixed`` over random clusters: never over a budget, never needlessly unsafe."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from deadpool_megatron.layout.records import BOUNDARIES, PartInfo, RoleLayout, extras_part
from deadpool_megatron.layout.schemes import ProtectionPlan, SchemeKind, plan_of_kind
from deadpool_megatron.layout.sizing import GROUP_SIZES, Scene, choose, lacking, memory_needs
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


@settings(max_examples=40)
@given(SCENES, LIMITS)
def test_the_first_that_fits_is_taken(of: Scene, gigabytes: list[int]) -> None:
    """With room to take over roles if any plan leaves it; never one that does not fit."""
    limits = budgets(of, *gigabytes)
    choice = choose(of, limits)
    sizes = [size for size in GROUP_SIZES if size + of.survived <= len(of.domains)]
    plans = [ProtectionPlan(), *(plan_of_kind("parity", Settings(), 1, size) for size in sizes)]
    roomy = [plan for plan in plans if lacking(plan, replace(of, roomy=True), limits) is None]
    fits = roomy or [plan for plan in plans if lacking(plan, of, limits) is None]
    assert choice.plan == (fits[0] if fits else plans[-1])
    assert (choice.lack is None) == bool(fits)
    assert choice.lack == lacking(choice.plan, of, limits)


@settings(max_examples=25)
@given(SCENES, LIMITS, st.integers(1, 60))
def test_more_memory_never_means_more_risk(of: Scene, gigabytes: list[int], more: int) -> None:
    """All nodes get the same more; among the plans that leave as much room."""
    less = choose(of, budgets(of, *gigabytes))
    better = choose(of, budgets(of, *(size + more for size in gigabytes)))
    assert better.lack is None or less.lack is not None
    if less.lack is None and ("without room" in less.why) == ("without room" in better.why):
        assert _risk(better.plan) <= _risk(less.plan)


def _risk(plan: ProtectionPlan) -> int:
    """Of the members of a group, copies being a group of one, any r + 1 lose state together."""
    return plan.scheme.group if plan.kind is SchemeKind.PARITY else 1


def test_parity_where_copies_do_not_fit() -> None:
    of = scene(nodes=6, per_node=4)
    choice = choose(of, budgets(of, 159))
    assert choice.plan == plan_of_kind("parity", Settings(), 1, 2)
    assert choice.why.startswith("parity(2) fits, with room to take over the roles of another node")
    assert "for copies node 0 would need 160 GB of memory for generations and has 159" in choice.why


# What a plan asks for.


def test_what_peers_hold_anyway_is_owed_to_nobody() -> None:
    of = scene(nodes=4, per_node=1)
    everybody = tuple(range(4))
    same = {
        role: replace(layout, parts=tuple(replace(p, replicas=everybody) for p in layout.parts[:1]))
        for role, layout in of.layouts.items()
    }
    for plan in (ProtectionPlan(), plan_of_kind("parity", Settings(), 1, 3)):
        needs = memory_needs(plan, replace(of, layouts=same))
        assert max(needs.values()) < SLOTS * (10 * GIGA + 5000) + 200_000
