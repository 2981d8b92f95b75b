"""Attaches to Megatron-LM: what ``--deadpool`` adds to its command line and refuses to go with,
where the marked functions lead, and its ``pretrain()`` as a program of a session, never edited.
Imported at the first call of one of them.

What is refused is a table in :mod:`deadpool_megatron.support`. Without ``--deadpool`` all of the
flags do nothing.

pretrain() is called in passes. Pass 1 ends when Megatron's groups exist, pass 2 when ``train()`` is
reached and everything is built. Then the loop calls ``train()`` itself, as often as recoveries ask
for, and when training is over it goes once more through ``pretrain()`` with what was built, for the
part that follows.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import inspect
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
from deadpool_megatron.cluster.coordinator.durable import saves_refusal
from deadpool_megatron.cluster.process import member_place
from deadpool_megatron.cluster.process.member_place import MemberPlace
from deadpool_megatron.cluster.process.program import LOADED
from deadpool_megatron.cluster.run_directory.directory import (
    RunDirectory,
    RunDirectoryError,
    take_saves,
)
from deadpool_megatron.failures import ExitStatus
from deadpool_megatron.file_systems import write_text
from deadpool_megatron.hookpoints import FLAG, POINTS, Handler
from deadpool_megatron.megatron.framework import MegatronFramework
from deadpool_megatron.megatron.pretraining import dispatch, stages
from deadpool_megatron.megatron.pretraining.build import (
    Build,
    CommandLine,
    NothingToTrain,
    Reached,
    forget_globals,
    no_writers,
)
from deadpool_megatron.megatron.pretraining.dispatch import use_handlers
from deadpool_megatron.megatron.pretraining.families import family, place
from deadpool_megatron.megatron.pretraining.megatron_checkpoints import lacking
from deadpool_megatron.megatron.pretraining.training_loop import PretrainLoop
from deadpool_megatron.megatron.replacement import replaced
from deadpool_megatron.member import Session
from deadpool_megatron.member.loop import Emit, Program, ProtectedLoop
from deadpool_megatron.settings import Settings
from deadpool_megatron.support import findings, flags


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group ``deadpool``, with the settings of the run that this process belongs to.

    Those given to ``deadpool run`` itself are its defaults, so that Megatron's list of arguments
    shows what is in force.
    """
    defaults = Settings.from_environment(os.environ)
    arguments.add_arguments(parser, defaults=defaults)
    return parser


def set_implied(args: argparse.Namespace) -> None:
    """Set what a protected run sets in arguments that were parsed and not yet validated."""
    if getattr(args, "deadpool", False):
        for row in flags.SET:
            if row.applies(args):
                row.set_in(args)


def refusal(args: argparse.Namespace, argv: Sequence[str]) -> str:
    """Return why arguments, validated by Megatron, cannot be protected, or that nobody has looked
    at flags in ``argv``, the script's command line: one line, which, why, what to do; empty if they
    can be."""
    if not getattr(args, "deadpool", False):
        return ""
    line = findings.refusal(findings.judge(argv, args))
    return line or saves_refusal(getattr(args, "save", None), os.environ)


def launch_problem(environ: Mapping[str, str], argv: Sequence[str]) -> str | None:
    """Return why this process cannot be protected as it was started, and the command that can; one
    line.

    None for a member of a run, and without ``--deadpool``.
    """
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

    # Here, for a script of Megatron-LM looks at --inprocess-restart before anything validates.
    def parse_and_set(*args: Any, **kwargs: Any) -> Any:
        found, others = parse(*args, **kwargs)
        own = [name for name in vars(found) if name.startswith("deadpool_")]
        LOADED.note_arguments(vars(found), [*own, "rank", "local_rank"])
        set_implied(found)
        return found, others

    filled.parse_known_args = parse_and_set  # type: ignore[method-assign]
    return filled


def _validate(original: Callable[..., Any], args: Any, *more: Any, **kwargs: Any) -> Any:
    answer = original(args, *more, **kwargs)
    if line := refusal(args, sys.argv):
        _end(line)
    return answer


# Of this process, which has one command line and is a member of one run.
_command_line = CommandLine()


@functools.cache
def _session() -> Session:
    """Joined at the first call; its device is taken before anything of Megatron looks at one."""
    problem = launch_problem(os.environ, sys.argv)
    if problem is not None:
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
    except NothingToTrain as error:
        _end(str(error))


def _end(problem: str) -> None:
    print(f"deadpool: {problem}", file=sys.stderr, flush=True)
    sys.exit(ExitStatus.BAD_INPUT)


def _size(environ: Mapping[str, str]) -> tuple[int, int]:
    """Nodes, and processes on each, as another launcher has set them; 1 where it says nothing."""
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
        note, kinds = RunDirectory(self._run_directory).built, []
        # Role 0 may not have been built, or with kinds that cannot be written down.
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            kinds = ast.literal_eval(note.read_text())
        build = Build(self._command_line, kinds)
        # The loop opens the writers: a spare must not, and an adopter continues in the same files.
        with (
            use_handlers(build.handlers()),
            no_writers(),
            build.progress_log_kept(),
            build.kinds_exchanged(),
            build.user_buffers.put_off(),
            contextlib.suppress(Reached),
        ):
            self._pretrain()
        if not build.complete:
            raise NothingToTrain("pretrain() returned without training: is --train-iters above 0?")
        if not build.detached and dist.get_rank() == 0:
            write_text(note, repr(build.kinds))
            _take_saves(RunDirectory(self._run_directory))
        return PretrainLoop(build, self._pretrain, self._run_directory, emit)

    def loaded_checkpoint(self, iteration: int) -> Path | None:
        """See :class:`Program`: one of which all was loaded."""
        from megatron.training import get_args

        args = get_args()
        path = Path(args.load or "").absolute() / f"iter_{iteration:07d}"
        is_part = args.finetune or args.no_load_optim or args.no_load_rng
        return path if iteration and not is_part and (path / "metadata.json").exists() else None

    def framework(self, loop: ProtectedLoop) -> MegatronFramework:
        """See :class:`Program`."""
        return MegatronFramework(cast(PretrainLoop, loop))

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

    def provisional_role(self, wanted: int, world_size: int) -> int:
        """See :class:`Program`: one of the commonest stage class."""
        from megatron.training import get_args
        from megatron.training.arguments import core_transformer_config_from_args

        os.environ["RANK"] = str(wanted)
        os.environ["WORLD_SIZE"] = str(world_size)
        self._parse(_reached)
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
        """Have the arguments parsed for the role, up to where groups are made; ``then`` that."""
        from megatron.training import global_vars

        def parse_first(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._command_line.parse_for_role()
            return original(*args, **kwargs)

        forget_globals()
        # Tokenizer, writers and the rest are made by the next pass.
        with (
            use_handlers({"initialize_megatron": parse_first, "_initialize_distributed": then}),
            replaced(*place(family().globals_setter), global_vars.set_args),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            try:
                self._pretrain()
            except Reached:
                return
        raise RuntimeError("pretrain() returned without making its groups")

    def spares_may_build(self) -> bool:
        """Not before role 0 has made the index files, so that nobody makes them twice."""
        return RunDirectory(self._run_directory).built.exists()


def _take_saves(run: RunDirectory) -> None:
    """Checkpoints of which nobody was told are looked for as well."""
    from megatron.training import get_args

    args = get_args()
    if args.save and not lacking(args):
        with contextlib.suppress(OSError, RunDirectoryError):  # the first save says it
            take_saves(run, Path(args.save).absolute())


def _reached(*_args: Any, **_kwargs: Any) -> None:
    raise Reached


HANDLERS: dict[str, Handler] = {
    **{point.function: dispatch.route(point.function) for point in POINTS},
    "add_megatron_arguments": _add_arguments,
    "validate_args": _validate,
    "parse_and_validate_args": _parse_and_validate,
    "pretrain": _pretrain,
}
