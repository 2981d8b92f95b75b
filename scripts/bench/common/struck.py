"""The training of most cases: a protected GPT on four nodes, perhaps with a fault."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.machine import ROOT
from common.trainings import WARM_UP, Measured, run_protected
from deadpool_megatron.trainer.config import TrainerConfig, parse_args

NODES = 4
# Unmeasured steps before and after the interrupted step.
BEFORE, AFTER = 2, 4
UNMEASURED = BEFORE + AFTER
# Hidden size and layers, in place of those of the configuration file.
SIZES = {"tiny": (64, 2), "5M": (256, 6), "20M": (512, 6), "50M": (832, 6)}
TOKENS = 2048


def size_flags(hidden: int, layers: int) -> list[str]:
    """Return the trainer's flags for a model of this size."""
    return [
        *(f"@{ROOT / 'configs' / '20m.args'}", "--lr-warmup-iters", "1", "--log-interval", "1"),
        *("--hidden-size", str(hidden), "--num-layers", str(layers)),
        *("--num-attention-heads", str(hidden // 64), "--use-distributed-optimizer"),
    ]


def sizes_of(name: str) -> TrainerConfig:
    """Return the configuration of one size."""
    return parse_args(size_flags(*SIZES[name]))


def training_arguments(name: str, iterations: int) -> list[str]:
    """Return the trainer's flags, the same with and without protection."""
    return [
        *(*size_flags(*SIZES[name]), "--pipeline-model-parallel-size", "2"),
        *("--global-batch-size", str(TOKENS // sizes_of(name).seq_length)),
        *("--micro-batch-size", "2", "--train-iters", str(iterations)),
    ]


def iterations(steps: int) -> int:
    """Return the steps of a whole run, of which ``steps`` are measured."""
    return WARM_UP + 1 + steps + UNMEASURED


def struck_iteration(steps: int) -> int:
    """Return the iteration in which the fault strikes."""
    return iterations(steps) - AFTER


def strike(steps: int, target: str, **more: str) -> dict[str, object]:
    """Return the fault of a struck run: the ``node`` of role 1, or its process (``self``), is
    killed in a backward pass."""
    match = {"role": 1, "iteration": struck_iteration(steps)}
    return {"id": "strike", "point": "backward", "match": match, "target": target, **more}


def run_struck(
    name: str, flags: Sequence[str], steps: int, base: Path, victim: str = "", **more: object
) -> Measured:
    """Run a training of a size under ``deadpool run``, with a spare. ``victim``: see
    :func:`strike`; without any, the run is undisturbed."""
    return run_protected(
        *(training_arguments(name, iterations(steps)), steps, base, NODES, 1),
        ("--spares", "1", *flags),
        faults=[strike(steps, victim)] if victim else [],
        unmeasured_steps=UNMEASURED,
        **more,  # type: ignore[arg-type]
    )
