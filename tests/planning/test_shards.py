"""The model and its roles: published sizes, Megatron's split, seats and copies."""

from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from deadpool_megatron.planning import shards
from deadpool_megatron.planning.traffic import place
from tests.planning.plans import make

CONFIGS = Path(__file__).parents[2] / "configs"
SHAPE = {"parameters": None, "layers": 4, "hidden": 64, "ffn": 256, "heads": 4, "vocab": 1024}


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
        protection={"copies": replicas},
        cluster={"racks": racks, "spares": spares},
    )
    placement = place(plan)
    if len(set(placement.topology.domains.values())) > replicas:
        assert placement.shared_domain_count == 0
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
