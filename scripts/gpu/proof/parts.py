"""The parts of the proof, in the order in which they run: what fails first explains the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from proof import copies, kernels, overhead, seam, trainings
from proof.device import Device, Size
from proof.result import Findings

_SEAM_SECONDS = 390.0


@dataclass(frozen=True)
class Part:
    """``run`` gets the device, the size, a checkout of Megatron-LM if there is one, and a folder
    for what a person may want to look at afterwards."""

    name: str
    title: str
    run: Callable[[Device, Size, Path | None, Path], Findings]


PARTS = (
    Part(
        "seam",
        "communicators aborted and made anew, over and over",
        lambda device, size, _checkout, _out: seam.lose_ranks(device, size, _SEAM_SECONDS),
    ),
    Part(
        "losses",
        "a kill in a batch, in a rebuild; a stopped rank; a device assert",
        lambda device, size, _checkout, _out: seam.special_losses(device, size),
    ),
    Part("trainer", "the embedded trainer loses nodes", trainings.embedded),
    Part("pretrain", "pretrain_gpt.py loses nodes", trainings.megatron_lm),
    Part("copies", "steps with and without copies to the host", copies.measure),
    Part("overhead", "steps of a whole training with and without protection", overhead.measure),
    Part("kernels", "optimizers and FP8: state put back, the same bits again", kernels.capture),
)
