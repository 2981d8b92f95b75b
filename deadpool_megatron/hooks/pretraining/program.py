"""``pretrain()`` of Megatron-LM as a program of a session: called in passes, never edited.

Pass 1 ends when Megatron's groups exist, pass 2 when ``train()`` is reached and everything is
built. Then the loop calls ``train()`` itself, as often as recoveries ask for, and when training is
over it goes once more through ``pretrain()`` with what was built, for the part that follows.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from deadpool_megatron.hooks.loop import Emit, Program, ProtectedLoop
from deadpool_megatron.hooks.pretraining.build import Build, NothingToTrain, Reached
from deadpool_megatron.hooks.pretraining.loop import PretrainLoop
from deadpool_megatron.hooks.pretraining.scene import acting, replaced

# In the run directory: role 0 has made the index files of the data sets.
_DATA_READY = "datasets-ready"


class PretrainProgram(Program):
    """``pretrain``: Megatron's function with the arguments that the user's script gave it."""

    def __init__(self, pretrain: Callable[[], Any], run_directory: Path) -> None:
        self.exit_code: int | None = None
        self._pretrain = pretrain
        self._ready = run_directory / _DATA_READY

    def make_groups(self) -> None:
        """See :class:`Program`: arguments are parsed for the role, then nothing but the groups."""
        from megatron.training import global_vars, initialize

        _forget_globals()

        def stop_after(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            raise Reached

        # Tokenizer, writers and the rest are made by the second pass.
        with (
            acting({"_initialize_distributed": stop_after}),
            replaced(initialize, "set_global_variables", global_vars.set_args),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            try:
                self._pretrain()
            except Reached:
                return
        raise RuntimeError("pretrain() returned without making its groups")

    def make_loop(self, emit: Emit) -> ProtectedLoop:
        """See :class:`Program`: everything up to the call of train()."""
        from megatron.training import global_vars

        _forget_globals()
        build = Build()
        # The loop opens the writers: a spare must not, and an adopter goes on in the same files.
        with (
            acting(build.handlers()),
            replaced(global_vars, "_set_tensorboard_writer", lambda args: None),
            replaced(global_vars, "_set_wandb_writer", lambda args: None),
        ):
            try:
                self._pretrain()
            except Reached:
                pass
        if not build.complete:
            raise NothingToTrain("pretrain() returned without training: is --train-iters above 0?")
        if not build.detached and dist.get_rank() == 0:
            self._ready.touch()
        return PretrainLoop(build, self._pretrain, emit)

    def drop_groups(self) -> None:
        """See :class:`Program`."""
        from megatron.training import training

        training.destroy_global_state()
        dist.destroy_process_group()

    def spares_may_build(self) -> bool:
        """Not before role 0 has made the index files: a build without peers only reads them."""
        return self._ready.exists()


def run_directory() -> Path:
    """The directory of the run, from the environment that the agent made."""
    return Path(os.environ["DEADPOOL_RUN_DIR"])


def _forget_globals() -> None:
    """What initialize_megatron() sets, so that it can be called again. The groups stay."""
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine
    from megatron.training import global_vars

    global_vars.unset_global_variables()
    destroy_rerun_state_machine()
