"""The layouts under test: how models are cut, and over how many nodes of how many members."""

from tests.faults.harness.jobs import Layout

DISTRIBUTED = "--bf16 --use-distributed-optimizer"
PIPELINE = f"{DISTRIBUTED} --pipeline-model-parallel-size 2"
TENSOR = f"{PIPELINE} --tensor-model-parallel-size 2"

PP2_DP2 = Layout("pp2-dp2", PIPELINE)
TP2_PP2_DP2 = Layout("tp2-pp2-dp2", TENSOR, nodes=4, members_per_node=2)
WHOLE_NODES = Layout("pp2-dp2-on-2-nodes", PIPELINE, nodes=2, members_per_node=2)
OVERLAP = Layout("overlap", f"{PIPELINE} --overlap-grad-reduce --overlap-param-gather")
INSTANCES = Layout("two-instances", f"{DISTRIBUTED} --num-distributed-optimizer-instances 2")
PLAIN_OPTIMIZER = Layout("plain-optimizer", "--bf16 --pipeline-model-parallel-size 2")
FOUR_SHARDS = Layout("dp4", DISTRIBUTED)
FP32 = Layout("fp32", "--use-distributed-optimizer --pipeline-model-parallel-size 2")
FP16 = Layout(
    "fp16",
    "--fp16 --initial-loss-scale 4294967296 --hysteresis 1 --use-distributed-optimizer"
    " --pipeline-model-parallel-size 2",
)
VIRTUAL = Layout("virtual-pipeline", f"{PIPELINE} --num-layers-per-virtual-pipeline-stage 1")
_EXPERTS = (
    "--num-experts 4 --expert-model-parallel-size 2 --moe-router-score-function sigmoid"
    " --moe-router-enable-expert-bias --moe-input-jitter-eps 0.01 --disable-bias-linear"
)
PLAIN_EXPERTS = Layout("plain-experts", f"--bf16 --pipeline-model-parallel-size 2 {_EXPERTS}")
EXPERTS = Layout("experts", f"{PIPELINE} {_EXPERTS}")
TENSOR_EXPERTS = Layout(
    "tensor-experts", f"{DISTRIBUTED} --tensor-model-parallel-size 2 --sequence-parallel {_EXPERTS}"
)
