"""``pretrain()`` of Megatron-LM as a program of a session: called in passes, never edited.

Pass 1 ends when Megatron's groups exist, pass 2 when ``train()`` is reached and everything is
built. Then the loop calls ``train()`` itself, as often as recoveries ask for, and when training is
over it goes once more through ``pretrain()`` with what was built, for the part that follows.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from deadpool_megatron.cluster.run_directory.directory import RunDirectory, write_json
from deadpool_megatron.hookpoints import Handler
from deadpool_megatron.hooks.loop import Emit, Program, ProtectedLoop
from deadpool_megatron.hooks.pretraining import stages
from deadpool_megatron.hooks.pretraining.build import (
    Build,
    CommandLine,
    NothingToTrain,
    Reached,
    forget_globals,
    no_writers,
)
from deadpool_megatron.hooks.pretraining.families import family, place
from deadpool_megatron.hooks.pretraining.loop import PretrainLoop
from deadpool_megatron.hooks.pretraining.scene import acting, replaced

# In the run directory: role 0 has made the index files of the data sets.
_DATA_READY = "datasets-ready"


class PretrainProgram(Program):
    """``pretrain``: Megatron's function with the arguments that the user's script gave it."""

    def __init__(
        self, pretrain: Callable[[], Any], command_line: CommandLine, run_directory: Path
    ) -> None:
        self._pretrain = pretrain
        self._command_line = command_line
        self._run_directory = run_directory
        # Functions of the user's script, as _initialize_distributed() gets them.
        self._group_makers: tuple[Any, Any] = (None, None)

    def make_groups(self) -> None:
        """See :class:`Program`: arguments are parsed for the role, then nothing but the groups."""

        def make(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            given = inspect.signature(original).bind(*args, **kwargs).arguments
            self._group_makers = (
                given["get_embedding_ranks"],
                given["get_position_embedding_ranks"],
            )
            original(*args, **kwargs)
            raise Reached

        self._parse(make)

    def make_loop(self, emit: Emit) -> ProtectedLoop:
        """See :class:`Program`: everything up to the call of train()."""
        forget_globals()
        build = Build(self._command_line)
        # The loop opens the writers: a spare must not, and an adopter goes on in the same files.
        with acting(build.handlers()), no_writers(), build.progress_kept():
            try:
                self._pretrain()
            except Reached:
                pass
        if not build.complete:
            raise NothingToTrain("pretrain() returned without training: is --train-iters above 0?")
        if not build.detached and dist.get_rank() == 0:
            (self._run_directory / _DATA_READY).touch()
            _note_saves(RunDirectory(self._run_directory).saves)
        return PretrainLoop(build, self._pretrain, self._run_directory, emit)

    def serves(self, loop: ProtectedLoop, role: int) -> bool:
        """See :class:`Program`: whether the two roles are of one stage class."""
        assert isinstance(loop, PretrainLoop)
        return loop.class_of(role) == loop.stage_class()

    def renumber(self, loop: ProtectedLoop, emit: Emit) -> ProtectedLoop:
        """See :class:`Program`: same model and data sets; groups found again, a new optimizer."""
        from megatron.training import get_args, initialize

        assert isinstance(loop, PretrainLoop)
        old, args = loop.role, get_args()
        args.rank = int(os.environ["RANK"])
        # It would destroy some of the groups, which are to be found again.
        with replaced(dist, "destroy_process_group", lambda *_args: None):
            parallel_state.destroy_model_parallel()
        with contextlib.redirect_stdout(io.StringIO()):
            initialize._initialize_distributed(*self._group_makers, None)
            loop.build.renumber(old, args.rank)
        return PretrainLoop(loop.build, self._pretrain, self._run_directory, emit)

    def provisional_role(self, wanted: int) -> int:
        """See :class:`Program`: one of the commonest stage class."""
        from megatron.training import get_args
        from megatron.training.arguments import core_transformer_config_from_args

        os.environ["RANK"] = str(wanted)
        os.environ["WORLD_SIZE"] = os.environ["DEADPOOL_WORLD_SIZE"]
        self._parse(_reached)
        args = get_args()
        config = core_transformer_config_from_args(args)
        return stages.commonest_role(args, config, wanted, int(os.environ["DEADPOOL_NPROC"]))

    def drop_groups(self) -> None:
        """See :class:`Program`."""
        from megatron.training import training

        training.destroy_global_state()
        dist.destroy_process_group()

    def _parse(self, then: Handler) -> None:
        """Have the arguments parsed for the role, up to where groups are made; ``then`` that."""
        from megatron.training import global_vars

        def parse_first(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._command_line.parse_for_role()
            return original(*args, **kwargs)

        forget_globals()
        # Tokenizer, writers and the rest are made by the next pass.
        with (
            acting({"initialize_megatron": parse_first, "_initialize_distributed": then}),
            replaced(*place(family().globals_setter), global_vars.set_args),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            try:
                self._pretrain()
            except Reached:
                return
        raise RuntimeError("pretrain() returned without making its groups")

    def spares_may_build(self) -> bool:
        """Not before role 0 has made the index files: a build without peers only reads them."""
        return (self._run_directory / _DATA_READY).exists()


def _note_saves(note: Path) -> None:
    """Note where checkpoints are looked for of which nobody was told; once, for its time counts."""
    from megatron.training import get_args

    if get_args().save and not note.exists():
        write_json(note, {"directory": str(Path(get_args().save).absolute())})


def _reached(*_args: Any, **_kwargs: Any) -> None:
    raise Reached


def run_directory() -> Path:
    """The directory of the run, from the environment that the agent made."""
    return Path(os.environ["DEADPOOL_RUN_DIR"])
