"""Starts of members: forked from this process (imports shared), or as fresh processes.

``ForkStarter`` needs a single-threaded process that has never touched a GPU driver. ``ExecStarter``
serves all others: it keeps one parked process per slot whose imports are done, so that a
replacement starts at once there too.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.process.member_main import MemberSpec, become_member
from deadpool_megatron.process_names import interpreter
from deadpool_megatron.wire import framing

NVIDIA_CONTROL_DEVICE = Path("/dev/nvidiactl")
_GO_SECONDS = 5.0


class StartError(Exception):
    """A member could not be started; one clear line."""


@dataclass(frozen=True)
class StartedMember:
    """A running member: its pid (also its process group) and the agent's end of its socket."""

    pid: int
    connection: socket.socket


class Starter(ABC):
    """Starts member processes. Not thread-safe: used from the agent's only thread."""

    @abstractmethod
    def start(self, spec: MemberSpec) -> StartedMember:
        """Start one member. Raises StartError, and OSError without leaving anything behind."""

    @abstractmethod
    def prepare(self, slot: int) -> None:
        """Get ready for a later start in this slot, where that takes time."""

    @abstractmethod
    def close(self) -> None:
        """End what was prepared."""


class ForkStarter(Starter):
    """Forks the member from this very process; the parent-death signal is this thread's."""

    def start(self, spec: MemberSpec) -> StartedMember:
        """See :class:`Starter`. Raises StartError when other threads make a fork unsafe."""
        if posix.thread_count() != 1:
            raise StartError(
                f"the agent has {posix.thread_count()} threads, a fork is not safe:"
                " use --deadpool-start-method exec"
            )
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if pid == 0:
            posix.die_with_parent(parent)
            become_member(spec, theirs.detach())
        theirs.close()
        _own_group(pid)
        return StartedMember(pid, ours)

    def prepare(self, slot: int) -> None:
        """Nothing: a fork takes milliseconds."""

    def close(self) -> None:
        """Nothing was prepared."""


class ExecStarter(Starter):
    """Starts fresh Python processes; ``modules`` are imported before they are needed, with what
    ``environment`` gives each slot: a driver looks at some of it once."""

    def __init__(
        self, modules: Sequence[str], environment: Callable[[int], Mapping[str, str]]
    ) -> None:
        self._modules = ",".join(modules)
        self._environment = environment
        self._parked: dict[int, tuple[subprocess.Popen[bytes], socket.socket]] = {}

    def start(self, spec: MemberSpec) -> StartedMember:
        """See :class:`Starter`; uses the slot's parked process if it lives."""
        self.prepare(spec.slot)
        process, connection = self._parked.pop(spec.slot)
        connection.settimeout(_GO_SECONDS)
        try:
            framing.send(connection, spec.to_dict())
        except OSError as error:
            process.kill()
            process.wait()
            raise StartError(f"parked process of slot {spec.slot} failed: {error}") from error
        _own_group(process.pid)
        # The agent reaps members by their pid; this object must not try to as well.
        process.returncode = 0
        return StartedMember(process.pid, connection)

    def prepare(self, slot: int) -> None:
        """Start the slot's parked process unless there is a live one."""
        parked = self._parked.get(slot)
        if parked is not None and parked[0].poll() is None:
            return
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        module = "deadpool_megatron.cluster.process.member_main"
        command = interpreter("-W", "ignore", "-m", module)
        try:
            process = subprocess.Popen(
                [*command, str(theirs.fileno()), self._modules],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self._environment(slot)},
                preexec_fn=lambda: posix.die_with_parent(parent),
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._parked[slot] = (process, ours)

    def close(self) -> None:
        """End the parked processes."""
        for process, connection in self._parked.values():
            connection.close()
            process.kill()
            process.wait()
        self._parked.clear()


def choose_method(wanted: str) -> str:
    """``auto`` is fork, except where a GPU driver could be touched before the fork."""
    if wanted != "auto":
        return wanted
    return "exec" if NVIDIA_CONTROL_DEVICE.exists() else "fork"


def choose_starter(
    wanted: str, modules: Sequence[str], environment: Callable[[int], Mapping[str, str]]
) -> Starter:
    """See :func:`choose_method`, and :class:`ExecStarter` for the others."""
    return ForkStarter() if choose_method(wanted) == "fork" else ExecStarter(modules, environment)


def _own_group(pid: int) -> None:
    """Parent and child both set the group, so that neither sees it unset."""
    try:
        os.setpgid(pid, pid)
    except (ProcessLookupError, PermissionError):
        pass  # ended already, or has set it and gone on to exec
