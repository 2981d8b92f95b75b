"""Megatron-LM's ``pretrain()`` as a program of a session: the flags of ``--deadpool``, the refusals
of a command line, and the handlers of all hooked functions. Imported at the first call of a hooked
function.

The refused flags are a table in :mod:`deadpool_megatron.support`. Without ``--deadpool`` none of
the flags has an effect.

pretrain() is called in passes. Pass 1 ends when Megatron's groups exist, pass 2 when ``train()`` is
reached and all objects are built. Then the loop calls ``train()`` itself, as often as recoveries
require. When training is over, it calls ``pretrain()`` again with the built objects, for the part
after ``train()``.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import io
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from megatron.core import parallel_state

from deadpool_megatron import arguments
from deadpool_megatron.cluster.coordinator.new_checkpoint import saves_problem
from deadpool_megatron.cluster.process import member_place
from deadpool_megatron.cluster.process.member_place import MemberPlace
from deadpool_megatron.cluster.process.program import LOADED_PROGRAM
from deadpool_megatron.cluster.run_directory import directory as run_files
from deadpool_megatron.failures import ExitStatus
from deadpool_megatron.file_systems import write_text
from deadpool_megatron.hookpoints import FLAG, POINTS, Handler
from deadpool_megatron.megatron.framework import MegatronFramework
from deadpool_megatron.megatron.pretraining import build, dispatch, stages
from deadpool_megatron.megatron.pretraining.dispatch import bound_arguments, use_handlers
from deadpool_megatron.megatron.pretraining.families import family, place
from deadpool_megatron.megatron.pretraining.megatron_checkpoints import unusable_reason
from deadpool_megatron.megatron.pretraining.training_loop import PretrainLoop, loaded_checkpoint
from deadpool_megatron.megatron.replacement import replaced
from deadpool_megatron.member import Session
from deadpool_megatron.member.loop import Emit, Program, ProtectedLoop
from deadpool_megatron.settings import Settings
from deadpool_megatron.support import findings, flags


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group ``deadpool``. The settings of this process's run are the defaults, so that
    Megatron's list of arguments shows the settings in force."""
    arguments.add_arguments(parser, defaults=Settings.from_environment(os.environ))
    return parser


def set_implied(args: argparse.Namespace) -> None:
    """Set the arguments that a protected run implies, after parsing and before validation."""
    if getattr(args, "deadpool", False):
        for row in flags.SET:
            if row.applies(args):
                row.set_in(args)


def refusal(args: argparse.Namespace, argv: Sequence[str]) -> str:
    """Return the reason why a run with validated arguments, or with flags in ``argv`` (the script's
    command line), cannot be protected: a line with flags, reason and advice, or empty."""
    if not getattr(args, "deadpool", False):
        return ""
    line = findings.refusal(findings.judge(argv, args))
    return line or saves_problem(getattr(args, "save", None), os.environ)


def launch_problem(environ: Mapping[str, str], argv: Sequence[str]) -> str | None:
    """Return a line with the reason why this process cannot be protected as it was started, and the
    command that starts it protected; None for a member of a run, and without ``--deadpool``."""
    if FLAG not in argv or member_place.VARIABLE in environ:
        return None
    if any(name.startswith("TORCHELASTIC_") for name in environ):
        reason = "torchrun kills all ranks when one dies, so no spare could take over"
    elif "SLURM_STEP_ID" in environ:
        reason = "started by srun directly, no agent watches this process or starts another"
    else:
        reason = "no agent watches this process or starts another"
    nodes, processes = _size(environ)
    options = f"--nodes {nodes} --spares 1 --nproc-per-node {processes} --run-dir DIR"
    advice = f"start it with: deadpool run {options} -- {shlex.join(argv)}"
    if nodes > 1:
        advice += (
            " (all on this host; over several hosts, one 'deadpool agent' on each, with the same"
            " options and its --node-id)"
        )
    return f"{reason}; {advice}"


def _add_arguments(
    original: Callable[..., argparse.ArgumentParser], parser: argparse.ArgumentParser
) -> argparse.ArgumentParser:
    filled: argparse.ArgumentParser = add_flags(original(parser))
    parse = filled.parse_known_args

    # Implied arguments are set here, since a script of Megatron-LM reads --inprocess-restart before
    # arguments are validated.
    def parse_and_set(*args: Any, **kwargs: Any) -> Any:
        found, others = parse(*args, **kwargs)
        own = [name for name in vars(found) if name.startswith("deadpool_")]
        LOADED_PROGRAM.note_arguments(vars(found), [*own, "rank", "local_rank"])
        set_implied(found)
        return found, others

    filled.parse_known_args = parse_and_set  # type: ignore[method-assign]
    return filled


def _validate(original: Callable[..., Any], args: Any, *more: Any, **kwargs: Any) -> Any:
    validated = original(args, *more, **kwargs)
    if line := refusal(args, sys.argv):
        _end(line)
    return validated


# A process has a single command line, and is a member of a single run.
_command_line = build.CommandLine()


@functools.cache
def _session() -> Session:
    """Join the session at the first call, which selects the device before Megatron uses any."""
    if problem := launch_problem(os.environ, sys.argv):
        _end(problem)
    return Session.join()


def _parse_and_validate(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    _session()
    return _command_line.parse_without_role(functools.partial(original, *args, **kwargs))


def _pretrain(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    def call() -> Any:
        own = family().own_config
        return original(*map(own, args), **{name: own(value) for name, value in kwargs.items()})

    session = _session()
    program = PretrainProgram(call, _command_line, Path(os.environ["DEADPOOL_RUN_DIR"]))
    try:
        session.run(program)
    except build.NothingToTrain as error:
        _end(str(error))


def _end(problem: str) -> None:
    print(f"deadpool: {problem}", file=sys.stderr, flush=True)
    sys.exit(ExitStatus.BAD_INPUT)


def _size(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the number of nodes, and of processes on each, that another launcher has set; 1 by
    default."""
    if "SLURM_STEP_ID" in environ and "LOCAL_WORLD_SIZE" not in environ:
        nodes = _number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
        return nodes, max(1, _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") // nodes)
    world = _number(environ, "WORLD_SIZE")
    local = min(world, _number(environ, "LOCAL_WORLD_SIZE"))
    return world // local, local


def _number(environ: Mapping[str, str], *names: str) -> int:
    for name in names:
        if environ.get(name, "").isdigit():
            return max(1, int(environ[name]))
    return 1


class PretrainProgram(Program):
    """pretrain() as a program. ``pretrain``: Megatron's function with the arguments of the user's
    script."""

    def __init__(
        self, pretrain: Callable[[], Any], command_line: build.CommandLine, run_directory: Path
    ) -> None:
        self._pretrain = pretrain
        self._command_line = command_line
        self._run_directory = run_directory
        # Functions of the user's script, as _initialize_distributed() gets them.
        self._group_makers: tuple[Any, ...] = (None, None)

    def make_groups(self) -> None:
        """See :class:`Program`: parse arguments for the role, and make only the groups."""

        def make(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            names = ("get_embedding_ranks", "get_position_embedding_ranks")
            bound = bound_arguments(original, args, kwargs)
            self._group_makers = tuple(bound[name] for name in names)
            original(*args, **kwargs)
            raise build.PassEnd

        self._parse(make)

    def make_loop(self, emit: Emit) -> ProtectedLoop:
        """See :class:`Program`: run pretrain() up to the call of train()."""
        build.forget_globals()
        note, kinds = run_files.RunDirectory(self._run_directory).built, []
        # Role 0 may not have been built yet, or its kinds may not be literals.
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            kinds = ast.literal_eval(note.read_text())
        made = build.Build(self._command_line, kinds)
        # The loop opens the writers: a spare must not open them.
        with (
            use_handlers(made.handlers()),
            build.no_writers(),
            made.progress_log_kept(),
            made.kinds_exchanged(),
            made.user_buffers.deferred(),
            contextlib.suppress(build.PassEnd),
        ):
            self._pretrain()
        if not made.complete:
            problem = "pretrain() returned without training: is --train-iters above 0?"
            raise build.NothingToTrain(problem)
        if not made.detached and dist.get_rank() == 0:
            write_text(note, repr(made.kinds))
            _take_saves(run_files.RunDirectory(self._run_directory))
        return PretrainLoop(made, self._pretrain, self._run_directory, emit)

    def loaded_checkpoint(self, iteration: int) -> Path | None:
        """See :class:`Program`: the checkpoint, if it was loaded whole."""
        from megatron.training import get_args

        path = loaded_checkpoint(get_args(), iteration)
        return path if iteration and path and (path / "metadata.json").exists() else None

    def framework(self, loop: ProtectedLoop) -> MegatronFramework:
        """See :class:`Program`."""
        return MegatronFramework(cast(PretrainLoop, loop))

    def serves(self, loop: ProtectedLoop, role: int) -> bool:
        """See :class:`Program`: whether the two roles are of one stage class."""
        assert isinstance(loop, PretrainLoop)
        return loop.class_of(role) == loop.stage_class()

    def renumber(self, loop: ProtectedLoop, emit: Emit) -> ProtectedLoop:
        """See :class:`Program`: keep model and data sets, find groups again, renew the
        optimizer."""
        from megatron.training import get_args, initialize

        assert isinstance(loop, PretrainLoop)
        old, args = loop.role, get_args()
        args.rank = int(os.environ["RANK"])
        # destroy_model_parallel() would destroy some of the groups, which have to be found again.
        with replaced(dist, destroy_process_group=lambda *_args: None):
            parallel_state.destroy_model_parallel()
        with contextlib.redirect_stdout(io.StringIO()):
            initialize._initialize_distributed(*self._group_makers, None)
            loop.build.renumber(old, args.rank)
        return PretrainLoop(loop.build, self._pretrain, self._run_directory, emit)

    def provisional_role(self, wanted: int, world_size: int) -> int:
        """See :class:`Program`: a role of the commonest stage class."""
        from megatron.training import get_args
        from megatron.training.arguments import core_transformer_config_from_args

        os.environ["RANK"] = str(wanted)
        os.environ["WORLD_SIZE"] = str(world_size)
        self._parse(_end_pass)
        args = get_args()
        config = core_transformer_config_from_args(args)
        return stages.commonest_role(
            args, config, wanted, MemberPlace.from_environment().members_per_node
        )

    def drop_groups(self) -> None:
        """See :class:`Program`."""
        from megatron.training import training

        training.destroy_global_state()
        dist.destroy_process_group()

    def _parse(self, then: Handler) -> None:
        """Parse the arguments for the role, and call ``then`` where the groups would be made."""
        from megatron.training import global_vars

        def parse_first(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._command_line.parse_for_role()
            return original(*args, **kwargs)

        build.forget_globals()
        # The next pass makes tokenizer, writers and all other globals.
        holder, name = place(family().globals_setter)
        with (
            use_handlers({"initialize_megatron": parse_first, "_initialize_distributed": then}),
            replaced(holder, **{name: global_vars.set_args}),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            try:
                self._pretrain()
            except build.PassEnd:
                return
        raise RuntimeError("pretrain() returned without making its groups")

    def spares_may_build(self) -> bool:
        """Return whether role 0 has made the index files, which need not be made twice."""
        return run_files.RunDirectory(self._run_directory).built.exists()


def _take_saves(run: run_files.RunDirectory) -> None:
    """Have a later start search the directory of saves for checkpoints that were never reported."""
    from megatron.training import get_args

    args = get_args()
    if args.save and not unusable_reason(args):
        with contextlib.suppress(OSError, run_files.RunDirectoryError):  # the first save reports it
            run_files.take_saves(run, Path(args.save).absolute())


def _end_pass(*_args: Any, **_kwargs: Any) -> None:
    raise build.PassEnd


HANDLERS: dict[str, Handler] = {
    **{point.function: dispatch.route(point.function) for point in POINTS},
    "add_megatron_arguments": _add_arguments,
    "validate_args": _validate,
    "parse_and_validate_args": _parse_and_validate,
    "pretrain": _pretrain,
}
