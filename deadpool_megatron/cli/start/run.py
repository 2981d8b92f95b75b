"""Starts N + S nodes (agent, vault, P training processes each) and follows the run.
A node that dies is replaced by a spare within the running job.

examples:
  deadpool run -- Megatron-LM/pretrain_gpt.py $(cat configs/megatron-lm/small.args)
  deadpool run --nodes 2 --spares 1 --nproc-per-node 2 --run-dir runs/first \\
      -- -m deadpool_megatron.trainer --train-iters 500
  deadpool run --nodes 4 --nproc-per-node 1 --run-dir runs/second --deadpool-copies 2 -- train.py
  deadpool run --resume runs/first --run-dir runs/third -- -m deadpool_megatron.trainer

exit status: 0 done; 1 the command failed; 2 bad input or environment; 3 a replayed iteration gave
other numbers; 4 a number was not finite; 75 no spare was left, state was dumped (use --resume);
76 the extras have outgrown their room (as 75, with the setting that the line names);
130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from deadpool_megatron import arguments, failpoints
from deadpool_megatron.cli import common
from deadpool_megatron.cli.display import Display
from deadpool_megatron.cli.start import defaults, preconditions, restart as restarts, scripts
from deadpool_megatron.cli.start.launch import Launcher
from deadpool_megatron.cli.start.preconditions import choose_communicator, gpus_to_share
from deadpool_megatron.cli.start.resume import copy_frozen_weights, copy_notes, resume_point
from deadpool_megatron.cli.start.scripts import DEFAULT_PRELOAD
from deadpool_megatron.cli.watch import Follower
from deadpool_megatron.cluster.process.fork_server import keep_single_threaded
from deadpool_megatron.cluster.run_directory.cleanup import kept_memory
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunDirectoryError
from deadpool_megatron.failures import ExitStatus
from deadpool_megatron.observe.narration import printable
from deadpool_megatron.settings import NEVER


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.usage = "deadpool run [options] -- -m MODULE ARGS | SCRIPT.py ARGS"
    common.add_size(
        parser, "as many as the visible GPUs allow; without GPUs 2, or as the script needs"
    )
    add = parser.add_argument
    text = "new directory for this run (default: runs/DATE-NAME); or that of a run whose"
    text += " processes have all died: it continues from what is in memory"
    add("--run-dir", type=Path, metavar="DIR", help=text)
    text = "start up to K new spares as nodes die"
    add("--refill", type=common.number(int, 0), default=0, metavar="K", help=text)
    text = "begin at iteration 0 if no state of the run in --run-dir is left"
    text += " (else such a start is refused)"
    add("--from-scratch", action="store_true", help=text)
    add("--resume", type=Path, metavar="OLD", help="continue from the newest state of run OLD")
    add("--quiet", action="store_true", help="print errors only")
    text = "modules imported once for all processes, in place of the default"
    text += f" ({DEFAULT_PRELOAD}; for a script with --deadpool {scripts.PRELOAD})"
    add("--preload", metavar="MODULES", help=text)
    arguments.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Check everything, then run; return the exit status of the run."""
    launcher, follower, lock = _prepare(args)
    directory = launcher.directory
    try:
        status = launcher.run()
        follower.close_with_report()  # the reason is the last line
        print_result(directory, status, launcher.failure)
    finally:
        follower.close()
        os.close(lock)
        if line := kept_memory(directory, launcher.info.run_id):
            print(f"deadpool run: {line}", file=sys.stderr)
    return status


@common.refusing_system_errors()
def _prepare(args: argparse.Namespace) -> tuple[Launcher, Follower, int]:
    """Check everything; return the launcher, the follower of its events, and a descriptor that
    reserves the directory until it is closed. Raises CommandError."""
    keep_single_threaded()  # the search for the user's module may import its packages
    common.check_platform()
    preconditions.check_command(args.command)
    original, command = tuple(args.command), scripts.adopt(args)
    chosen = defaults.fill(args, command)
    directory = RunDirectory(args.run_dir)
    size = args.nodes + args.spares, args.nproc_per_node
    communicator = choose_communicator(
        arguments.communicator_in(args),
        *size,
        os.environ,
        advice=lambda gpus: defaults.advice(gpus, command),
    )
    settings = arguments.settings_from(args, communicator=communicator)
    outlive = defaults.files_outlive_hosts(command, directory)
    settings = defaults.resolve(settings, args.plan, outlives_hosts=outlive)
    restart = restarts.find_restart(directory, args, settings)
    if restart is not None:
        info = restart.info
    else:
        resumed = ([], 0) if args.resume is None else resume_point(RunDirectory(args.resume), args)
        info = common.make_info(args, settings, *resumed)
    modules = scripts.modules(args.preload, DEFAULT_PRELOAD, args.command)
    preconditions.check_sizes(info)
    preconditions.check_host_not_quarantined(directory, info)
    preconditions.read_domains(info.settings)
    if restart is None:
        preconditions.check_run_directory(directory)
        preconditions.check_shared_memory(info, info.nodes + info.spares)
    # Refuse an unusable address now; otherwise a standby would fail later.
    address, *_ = common.local_addresses(settings.interface)
    common.listen(address, 0).close()
    failpoints.load()  # report a bad plan here, not in each process
    common.warn_of_danger_above(directory.path, info)
    scripts.announce(args.command, os.environ)
    numbers = tuple(range(info.nodes + info.spares)) if restart is None else restart.numbers
    gpus = gpus_to_share(info, len(numbers), os.environ)
    lock = restarts.lock_directory(directory)
    display = Display(quiet=args.quiet)
    follower = Follower(directory, display)
    if chosen or command != original:
        display.line(f"run directory {directory.path}")
        display.line(shlex.join(["deadpool", *args.options, *chosen, "--", *command]))
    is_requested = args.deadpool_persist_interval != "auto"
    if settings.persist_interval in NEVER and (is_requested or chosen):
        text = "checkpoints in the background are off: a power cut loses the state in memory"
        display.line(f"{text} (--deadpool-persist-interval 100 turns them on)")
    if line := defaults.sizes_line(command, info.world_size, info.nproc_per_node, info.settings):
        display.line(line)
    if restart is None:
        copy_frozen_weights(args.resume, directory, info.restore)
        copy_notes(args.resume, directory)
    else:
        display.line(restarts.prepare_directory(directory, restart))
        follower.skip()
    launcher = Launcher(
        directory=directory,
        info=info,
        modules=modules,
        refills=args.refill,
        report=display.line,
        refresh=follower.poll,
        numbers=numbers,
        gpus=gpus,
    )
    return launcher, follower, lock


def print_result(directory: RunDirectory, status: int, reason: str) -> None:
    """Print a line for an exit status other than 0, with ``reason`` or else that of the result."""
    if not reason and directory.has_final():
        try:
            reason = str(directory.read_final()["reason"])
        except RunDirectoryError as error:
            reason = str(error)
    if status != 0:
        reason = reason or ("interrupted" if status == ExitStatus.STOPPED else "no reason known")
        print(printable(f"deadpool run: exit status {status}: {reason}"), file=sys.stderr)
