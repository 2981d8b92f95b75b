"""The model and its roles: published sizes, Megatron's split and groups, seats and copies."""

from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from megatron.core.parallel_state import RankGenerator

from deadpool_megatron.planning import shards
from deadpool_megatron.planning.traffic import place
from tests.planning.plans import make

ORDER = "tp-cp-ep-dp-pp"
CONFIGS = Path(__file__).parents[2] / "configs"
SHAPE = {"parameters": None, "layers": 4, "hidden": 64, "ffn": 256, "heads": 4, "vocab": 1024}


@pytest.mark.parametrize(("tp", "cp", "dp", "pp"), [(2, 1, 4, 2), (2, 2, 2, 3), (1, 1, 8, 2)])
@pytest.mark.parametrize(("etp", "ep"), [(None, 1), (1, 4), (None, 2)])
def test_groups_are_megatrons(tp, cp, dp, pp, etp, ep):
    sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": pp, "ep": ep, "etp": etp}
    parallel = make(
        parallel=sizes, cluster={"nodes": tp * cp * dp * pp, "gpus_per_node": 1}
    ).parallel
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=ORDER)
    for group in dense.get_ranks("dp-cp"):
        assert all(shards.data_parallel_peers(rank, parallel) == tuple(group) for rank in group)
    experts = RankGenerator(
        tp=etp or tp, ep=ep, dp=tp * cp * dp // (etp or tp) // ep, pp=pp, cp=1, order=ORDER
    )
    for group in experts.get_ranks("dp"):
        assert all(
            shards.expert_data_parallel_peers(rank, parallel) == tuple(group) for rank in group
        )


@settings(max_examples=40)
@given(
    replicas=st.integers(1, 4),
    racks=st.sampled_from([None, 1, 3, 8]),
    spares=st.integers(0, 3),
    tp=st.sampled_from([1, 2, 4]),
)
def test_copies_lie_in_other_domains_where_there_are_enough(replicas, racks, spares, tp):
    plan = make(
        parallel={"tp": tp, "pp": 2, "dp": 8 // tp},
        protection={"replicas": replicas},
        cluster={"racks": racks, "spares": spares},
    )
    placement = place(plan)
    if len(set(placement.topology.domains.values())) > replicas:
        assert placement.same_domain == 0
    for number, role in placement.roles.items():
        assert placement.topology.seats[number] not in role.buddies


@pytest.mark.parametrize("untied", [False, True])
@given(
    tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2, 4]), experts=st.sampled_from([0, 4])
)
def test_the_stages_are_the_whole_model(untied, tp, pp, experts):
    """Without vectors that tensor ranks repeat: the rest is shared out, nothing is left."""
    shape = {**SHAPE, "biases": False, "untied": untied, "experts": experts}
    plan = make(model=shape, parallel={"tp": tp, "pp": pp, "dp": 16 // tp // pp})
    stages = shards.stage_parameters(plan.model, plan.parallel)
    split = tp * sum(stage.dense + stage.expert for stage in stages)
    repeated = (tp - 1) * (4 * (2 * 2 * 64 + 64 * experts) + 2 * 64)
    both_ends = 1024 * 64 if pp > 1 and not untied else 0
    assert split == shards.total_parameters(plan.model) + repeated + both_ends
