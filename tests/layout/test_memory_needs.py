"""The memory that a plan of protection asks of each node."""

from dataclasses import replace

from hypothesis import given, settings, strategies as st

from deadpool_megatron.layout.memory_needs import Topology, memory_needs, shortfall
from deadpool_megatron.layout.records import BOUNDARIES, PartInfo, RoleLayout, extras_part
from deadpool_megatron.layout.schemes import ProtectionPlan, plan_of_kind

GIGA = 10**9
SLOTS = 2


def scene(
    nodes: int = 6,
    per_node: int = 2,
    survived: int = 1,
    sizes: tuple[int, ...] = (10,),
    racks: int = 0,
) -> Topology:
    """Roles on consecutive nodes, all in one data-parallel group; sizes of shard parts in GB."""
    world = nodes * per_node
    peers = tuple(range(world))
    layouts = {}
    for role in range(world):
        shards = [PartInfo(f"shard{n}", s * GIGA, (role,)) for n, s in enumerate(sizes)]
        extras = [PartInfo(extras_part(name), 1000, (role,)) for name in BOUNDARIES]
        layouts[role] = RoleLayout(role, (*shards, *extras), peers, SLOTS, f"h{role}")
    domains = {n: f"rack{n % racks}" if racks else f"node{n}" for n in range(nodes)}
    return Topology(layouts, {r: r // per_node for r in range(world)}, domains, (), survived)


SCENES = st.builds(
    scene,
    nodes=st.integers(4, 9),
    per_node=st.integers(1, 2),
    survived=st.integers(1, 2),
    sizes=st.sampled_from([(10,), (8, 3), (2, 9)]),
    racks=st.sampled_from([0, 3, 4]),
)


@settings(max_examples=40)
@given(SCENES, st.lists(st.integers(10, 140), min_size=4, max_size=4), st.integers(0, 3))
def test_a_plan_lacks_memory_where_a_node_has_less_than_it_needs(of, gigabytes, group):
    """The node that lacks most is named; a node that has not said how much it has lacks none."""
    plan = plan_of_kind("parity", 1, 2) if group else ProtectionPlan()
    limits = {node: size * GIGA for node, size in zip(of.domains, gigabytes, strict=False)}
    needs = memory_needs(plan, of)
    lack = shortfall(plan, of, limits)
    missing = {node: needs[node] - has for node, has in limits.items()}
    if lack is None:
        assert max(missing.values()) <= 0
    else:
        assert missing[lack.node] == max(missing.values()) > 0
        assert (lack.needed_bytes, lack.has_bytes) == (needs[lack.node], limits[lack.node])


def test_parts_that_peers_hold_need_no_memory():
    of = scene(nodes=4, per_node=1)
    everybody = tuple(range(4))
    same = {
        role: replace(layout, parts=tuple(replace(p, replicas=everybody) for p in layout.parts[:1]))
        for role, layout in of.layouts.items()
    }
    for plan in (ProtectionPlan(), plan_of_kind("parity", 1, 3)):
        needs = memory_needs(plan, replace(of, layouts=same))
        assert max(needs.values()) < SLOTS * (10 * GIGA + 5000) + 200_000


def test_shortfall_names_the_node_with_the_largest_lack():
    """And of two that lack as much the first; not one that has most, or needs most."""
    of = scene(nodes=3, per_node=1)
    plan = ProtectionPlan()
    needs = memory_needs(plan, of)
    short = {0: 5, 1: 9, 2: 9}
    lack = shortfall(plan, of, {node: needs[node] - short[node] for node in needs})
    assert (lack.node, lack.needed_bytes - lack.has_bytes) == (1, 9)
    assert shortfall(plan, of, needs) is None
    assert shortfall(plan, of, {}) is None
