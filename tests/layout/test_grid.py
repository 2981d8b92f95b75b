"""Ranks, groups and slices are Megatron's own, of each supported tree."""

import ast
import typing

import pytest

from deadpool_megatron.layout.grid import Grid
from tests.megatron_lm.harness.checkout import TREES, checkout

NAMES = {"RankGenerator", "generate_masked_orthogonal_rank_groups"}
# tp, cp, pp, ep, etp, and the number of replicas at two sizes
LAYOUTS = [
    (2, 1, 2, 1, 2, 4, 3),
    (2, 2, 3, 1, 2, 2, 1),
    (2, 1, 2, 4, 1, 4, 2),
    (1, 1, 2, 8, 1, 16, 8),
    (2, 2, 1, 2, 1, 3, 2),
    (4, 1, 2, 3, 2, 6, 3),
]


@pytest.fixture(params=TREES)
def generator(request):
    """Megatron's class, without the import of another Megatron than that of these tests."""
    tree = checkout(request.param)
    if tree is None:
        pytest.skip(f"no checkout of {request.param}")
    source = (tree / "megatron" / "core" / "parallel_state.py").read_text()
    found = [node for node in ast.parse(source).body if getattr(node, "name", "") in NAMES]
    names = {**vars(typing)}
    exec(compile(ast.Module(found, []), "parallel_state.py", "exec"), names)
    return names["RankGenerator"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("data_last", [False, True])
def test_ranks_and_groups_are_megatrons(generator, layout, data_last):
    tp, cp, pp, ep, etp, replicas, others = layout
    if data_last and pp > 1 and tp * cp != ep * etp:
        return  # Megatron refuses it: experts would have other pipeline groups
    grid, order = Grid(tp, cp, pp, ep, etp, data_last=data_last), "tp-cp-ep-dp-pp"
    order = "tp-cp-ep-pp-dp" if data_last else order
    expert = tp * cp * replicas // etp // ep
    dense = generator(tp=tp, ep=1, dp=replicas, pp=pp, cp=cp, order=order)
    experts = generator(tp=etp, ep=ep, dp=expert, pp=pp, cp=1, order=order)
    expected = {rank: [] for rank in range(grid.ranks * replicas)}
    for made, name in (
        (dense, "tp"),
        (dense, "cp"),
        (dense, "pp"),
        (experts, "ep"),
        (experts, "tp"),
    ):
        for group in made.get_ranks(name):
            for place, rank in enumerate(group):
                expected[rank].append(place)
    assert expected == {rank: [*grid.coordinates(rank, replicas)] for rank in expected}
    for group in dense.get_ranks("dp-cp"):
        assert all(grid.data_peers(rank, replicas) == (*group,) for rank in group)
    for group in experts.get_ranks("dp"):
        assert all(grid.expert_data_peers(rank, replicas) == (*group,) for rank in group)
    assert [replicas % grid.unit, others % grid.unit] == [0, 0]
    slices = [grid.coordinates(rank, others) for rank in range(grid.ranks * others)]
    for rank in expected:
        assert grid.donor(rank, replicas, others) == slices.index(grid.coordinates(rank, replicas))
