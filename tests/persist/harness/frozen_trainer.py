"""The embedded trainer with some weights frozen, which count as too large for the extras.

Arguments: ITERATION=PATTERN[,...] (see hold.py, may be empty), then those of the trainer. A
spare is not built with what a run has loaded: here they are all -1 in a process built alone.
"""

import sys
from typing import Any

import torch

from deadpool_megatron.megatron import loop_extras as extras
from deadpool_megatron.member import frozen_weights
from deadpool_megatron.member.entry import EpochEntry
from deadpool_megatron.trainer import __main__ as trainer, gpt_loop, model
from tests.persist.harness.held_trainer import held
from tests.persist.harness.hold import waits_of

_build_chunk = model.build_chunk
_build_detached = EpochEntry.build_detached


def frozen_chunk(*arguments: Any) -> torch.nn.Module:
    """A chunk of the model whose first matrices of each layer are not trained."""
    chunk = _build_chunk(*arguments)
    for name, parameter in chunk.named_parameters():
        parameter.requires_grad_("linear_fc1" not in name)
    return chunk


def build_without_the_weights(self: EpochEntry, role: int, world_size: int) -> None:
    """Build for a role alone, as a spare does."""
    _build_detached(self, role, world_size)
    with torch.no_grad():
        for _, tensor in extras.large_frozen_weights(self.loop):
            tensor.fill_(-1)


if __name__ == "__main__":
    waits, *rest = sys.argv[1:]
    frozen_weights.MAX_FROZEN_BYTES = 0
    model.build_chunk = frozen_chunk
    EpochEntry.build_detached = build_without_the_weights  # type: ignore[method-assign]
    gpt_loop.TrainingLoop.train_step = held(waits_of(waits))  # type: ignore[method-assign]
    sys.exit(trainer.main(rest))
