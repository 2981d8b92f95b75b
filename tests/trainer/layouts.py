"""The ways to cut a small model that tests train, and how they are trained."""

from pathlib import Path
from typing import Any

import pytest

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1"
    " --global-batch-size 8 --lr 1e-2 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2"
    " --train-iters 6 --seed 11 --log-interval 3"
)
PP2 = "--pipeline-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2"
BF16 = "--bf16 --use-distributed-optimizer"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
BUCKETS = "--ddp-bucket-size 10000"
MOE = "--num-experts 4 --expert-model-parallel-size 2"
# A first scale at which some updates are skipped and some are not, within a few iterations.
FP16 = "--fp16 --initial-loss-scale 524288 --hysteresis 1"

# name -> (ranks, flags); all of them run on stock gloo.
LAYOUTS = {
    "bf16": (4, f"{PP2} {BF16}"),
    "bf16-whole": (4, f"{PP2} --bf16"),
    "fp32": (4, f"{PP2} --use-distributed-optimizer"),
    "fp32-whole": (4, PP2),
    "fp16": (4, f"{PP2} {FP16} --use-distributed-optimizer"),
    "overlap": (4, f"{PP2} {BF16} {OVERLAP} {BUCKETS}"),
    "instances": (4, f"{BF16} {OVERLAP} {BUCKETS} --num-distributed-optimizer-instances 2"),
    "sequence-parallel": (4, f"{TP2} {PP2} {BF16} --sequence-parallel"),
    "moe-bias-jitter": (
        4,
        f"{PP2} {BF16} {MOE} --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
        " --moe-router-load-balancing-type none --moe-input-jitter-eps 0.01",
    ),
}

# Small enough for many iterations in tests of what a generation holds.
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1"
    " --global-batch-size 8 --train-iters 8 --lr 1e-2 --lr-decay-style cosine --min-lr 1e-4"
    " --lr-warmup-iters 2 --seed 7"
)

Facts = dict[str, Any]


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Flags that name a small text."""
    folder = tmp_path_factory.mktemp("text")
    content = " ".join(f"{number} is {number * number} squared;" for number in range(4000))
    (folder / "squares.txt").write_text(content)
    return f"--data {folder / 'squares.txt'}"


def train(arguments: str) -> Facts:
    """Run on each rank: the plain trainer; answers its facts."""
    from deadpool_megatron.trainer.config import parse_args
    from deadpool_megatron.trainer.plain import train as train_plain

    return train_plain(parse_args(arguments.split()))


def make_loop(arguments: str) -> tuple[Any, list[tuple[str, Facts]]]:
    """A training loop and the list that its emitted events are added to."""
    from deadpool_megatron.trainer.config import parse_args
    from deadpool_megatron.trainer.gpt_loop import TrainingLoop

    emitted: list[tuple[str, Facts]] = []
    loop = TrainingLoop(
        parse_args(arguments.split()), lambda kind, facts: emitted.append((kind, facts))
    )
    return loop, emitted


def steps(loop: Any, count: int) -> None:
    """Train some iterations with the segments due after them."""
    for _ in range(count):
        loop.train_step()
        for segment in loop.segments_after(loop.counters["iteration"]):
            loop.run_segment(segment)
    loop.synchronize_parameters()


def losses(facts: Facts) -> list[float]:
    """The losses of all iterations."""
    return [float.fromhex(step["loss"]) for step in facts["steps"]]


def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).parents[2]
