"""The layouts under test: how models are cut, and over how many nodes of how many members."""

from __future__ import annotations

from tests.faults.jobs import Layout

DISTRIBUTED = "--bf16 --use-distributed-optimizer"
PIPELINE = f"{DISTRIBUTED} --pipeline-model-parallel-size 2"
TENSOR = f"{PIPELINE} --tensor-model-parallel-size 2"

PP2_DP2 = Layout("pp2-dp2", PIPELINE, nodes=4, members_per_node=1)
TP2_PP2_DP2 = Layout("tp2-pp2-dp2", TENSOR, nodes=4, members_per_node=2)
