"""``deadpool run ... -- -m deadpool_megatron.trainer ARGS``: the embedded trainer, protected.

This file is also the example for other loops on Megatron: a program creates the groups and the
loop, and a session does everything else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from deadpool_megatron.cluster.coordinator.new_checkpoint import saves_problem
from deadpool_megatron.cluster.process import member_place
from deadpool_megatron.cluster.process.member_place import MemberPlace
from deadpool_megatron.cluster.process.program import LOADED_PROGRAM
from deadpool_megatron.member import Emit, Program, ProtectedLoop, Session
from deadpool_megatron.trainer.config import BadArgumentsError, TrainerConfig, parse_args

if TYPE_CHECKING:
    from deadpool_megatron.megatron.framework import MegatronFramework
    from deadpool_megatron.trainer.gpt_loop import TrainingLoop


class GptProgram(Program):
    """Creates the groups and the loop of :mod:`deadpool_megatron.trainer` for any role."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config

    def make_groups(self) -> None:
        """Create WORLD and Megatron's groups, for the RANK that the session has set."""
        from deadpool_megatron.trainer.model import initialize_parallel_state

        torch.distributed.init_process_group()
        initialize_parallel_state(self._config)

    def make_loop(self, emit: Emit) -> TrainingLoop:
        """Create model, optimizer, scheduler and data."""
        from deadpool_megatron.trainer.gpt_loop import TrainingLoop

        LOADED_PROGRAM.note_arguments(vars(self._config))
        LOADED_PROGRAM.note_data(self._config.data)
        return TrainingLoop(self._config, emit)

    def framework(self, loop: ProtectedLoop) -> MegatronFramework:
        """Return Megatron's framework for the loop."""
        from deadpool_megatron.megatron.framework import MegatronFramework

        return MegatronFramework(cast("TrainingLoop", loop))

    def drop_groups(self) -> None:
        """Undo :meth:`make_groups`."""
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()

    def checkpoint_directory(self) -> Path | None:
        """Return the directory of ``--save``, or None."""
        return self._config.save


def main(argv: Sequence[str]) -> int:
    """Hold a role, or wait as a spare, until the run is over; return the exit status."""
    is_member = member_place.VARIABLE in os.environ
    world_size = MemberPlace.from_environment().world_size if is_member else None
    config = parse_args(argv, world_size)
    try:
        if refusal := saves_problem(config.save, os.environ):
            raise BadArgumentsError(refusal)
        if not is_member:
            raise BadArgumentsError(
                "no agent watches this process: start it with deadpool run, or"
                " deadpool_megatron.trainer.plain without protection"
            )
        torch.set_num_threads(1)
        Session.join().run(GptProgram(config))
    except BadArgumentsError as error:
        print(f"trainer: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
