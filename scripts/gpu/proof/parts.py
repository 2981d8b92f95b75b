"""The parts of the proof, the most important first, and their shares of the time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import read_rows

from proof import copies, kernels, losses, overhead, smoke, trainings
from proof.result import Task


@dataclass(frozen=True)
class Part:
    """``seconds`` of eight minutes; the time that a part does not use goes to those after it."""

    name: str
    seconds: int
    title: str
    run: Callable[[Task], None]


PARTS = (
    Part("smoke", 70, "versions, streams, memory, futures: each alone", smoke.probe),
    Part("seam", 60, "a process lost over and over: communicators made again", losses.first_kills),
    Part("trainer", 120, "the embedded trainer loses a node", trainings.embedded),
    Part("rebuild", 60, "the same, communicators made in other ways", losses.rebuilds),
    Part("copies", 45, "steps with and without copies to the host", copies.measure),
    Part("overhead", 90, "steps of a training with and without protection", overhead.measure),
    Part("kernels", 30, "optimizers: state put back, the same bits", kernels.capture),
    Part("losses", 45, "a kill in a batch, in a rebuild; a stop; an assert", losses.special),
    Part(
        "rows",
        30,
        "flags that are taken by name: classes, and jobs that lose a node",
        read_rows.check,
    ),
    Part("pretrain", 120, "pretrain_gpt.py loses a node", trainings.megatron_lm),
)
