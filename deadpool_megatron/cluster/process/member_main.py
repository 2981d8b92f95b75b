"""The start of a new member process up to the user's command. The process was forked by the fork
server, or parked: it has imported the modules and waited (see fork_server)."""

from __future__ import annotations

import contextlib
import gc
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from deadpool_megatron import failpoints
from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.process.member_place import MemberPlace
from deadpool_megatron.cluster.process.program import LOADED_PROGRAM, OtherProgram
from deadpool_megatron.failures import ExitStatus
from deadpool_megatron.process_names import set_process_name
from deadpool_megatron.wire.auth import ENVIRONMENT_NAME as SECRET_VARIABLE
from deadpool_megatron.wire.forms import Coded


@dataclass(frozen=True)
class MemberSpec(Coded):
    """One member to start. ``command``: ``-m MODULE ARGS`` or ``SCRIPT ARGS``. ``ended_epoch`` is
    the newest epoch of the earlier starts of the run.
    """

    place: MemberPlace
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path
    directory: Path
    ended_epoch: int = 0


def become_member(spec: MemberSpec, agent_fd: int) -> NoReturn:
    """Turn this process (just forked, or parked) into the member, and end it with the member.

    The objects of the server are excluded from garbage collection: their deletion would close
    descriptors whose numbers are in use again.
    """
    try:
        os.setpgid(0, 0)
        gc.freeze()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher stops members by an order
        posix.close_inherited((agent_fd,))
        try:
            posix.redirect_output(spec.log)
        except OSError as error:  # keep the present output, as last lines must not be lost
            print(f"{spec.log.name} is here: {error}", file=sys.stderr, flush=True)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        posix.enable_stack_dumps()
        place = spec.place
        set_process_name(f"dp-n{place.node}s{place.local_rank}.{place.incarnation}")
        os.chdir(spec.directory)
        os.environ.clear()
        os.environ.update(spec.environment)
        posix.forget_variable(SECRET_VARIABLE)  # the member and its children do not need it
        place.enter(agent_fd)
        failpoints.load()
        failpoints.set_context(
            run_dir=os.environ["DEADPOOL_RUN_DIR"],
            node=place.node,
            slot=place.local_rank,
            incarnation=place.incarnation,
        )
        LOADED_PROGRAM.note_data(Path(word[1:]) for word in spec.command if word.startswith("@"))
        LOADED_PROGRAM.ended_epoch = spec.ended_epoch
        code = _run(spec.command)
        if code:
            with contextlib.suppress(OSError, ValueError):
                LOADED_PROGRAM.check_after_failure(Path(os.environ["DEADPOOL_RUN_DIR"]))
    except OtherProgram:
        traceback.print_exc()
        code = ExitStatus.OTHER_PROGRAM
    except BaseException:
        traceback.print_exc()
        code = 1
    leave(code)


def _run(command: Sequence[str]) -> int:
    """Run the user's command as ``__main__``, and return its exit status."""
    try:
        if command[0] == "-m":
            sys.argv = [command[1], *command[2:]]
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(command)
            sys.path.insert(0, str(Path(command[0]).resolve().parent))
            LOADED_PROGRAM.note_source(f"script {Path(command[0]).name}", command[0])
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException:
        # Omit the frames of this package and of runpy, which are below those of the user's code.
        kind, error, trace = sys.exc_info()
        while trace is not None and "runpy" not in trace.tb_frame.f_code.co_filename:
            trace = trace.tb_next
        while trace is not None and "runpy" in trace.tb_frame.f_code.co_filename:
            trace = trace.tb_next
        traceback.print_exception(kind, error, trace)
        return 1
    return 0


def leave(code: int) -> NoReturn:
    """End the process without the interpreter's teardown, which would run the server's handlers."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass  # the disk is full, or the user's code has closed the stream
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            print(f"thread {thread.name} was still running at the end", file=sys.stderr)
    os._exit(code)
