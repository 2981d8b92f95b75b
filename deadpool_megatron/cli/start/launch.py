"""The launcher: starts the agents on this host, watches over them, cleans up behind.

It has one thread for its whole life, for agents are forked from it, and so is the process that
imports torch and Megatron once and forks members for all of them. A pipe to each agent, of which
only the launcher holds the other end, tells the agent of its death, even by SIGKILL; a byte in it
appoints the agent, which then keeps a standby. Two agents are appointed at any time: one of their
standbys coordinates.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from deadpool_megatron.cli.common import ignore_notices, local_address, refusing_system_errors
from deadpool_megatron.cli.start.agent_process import serve
from deadpool_megatron.cli.start.scripts import preload_modules
from deadpool_megatron.cluster.agent.options import AgentOptions
from deadpool_megatron.cluster.journal.journal import Journal, JournalError
from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.process.children import ProcessEnd
from deadpool_megatron.cluster.process.fork_server import ForkServer
from deadpool_megatron.cluster.process.logs import last_line, tail
from deadpool_megatron.cluster.run_directory import cleanup, directory as run_files
from deadpool_megatron.failures import ExitStatus
from deadpool_megatron.preflight.host import VISIBLE, share_of
from deadpool_megatron.wire import auth

_POLL_SECONDS = 0.1
# Interval of the displayed progress, and of checks for the end of the run.
_REFRESH_SECONDS = 1.0
_STANDBYS = 2
_LEAVE_SECONDS = 1.0
_TOGETHER_SECONDS = 1.0
_FENCE_SECONDS = 5.0


@dataclass(eq=False)
class Launcher:
    """One run on this host. Use :meth:`run` once; ``trouble`` is why it failed, if it was not for
    a reason that the coordinator has written down.

    ``refills``: how many dead nodes are followed by a new spare node; ``say``: one line to the
    user; ``look``: called several times a second, to show progress. ``numbers``: of the nodes to
    start with. ``gpus``: what they share out; none leaves all of them with what this process sees.
    """

    directory: run_files.RunDirectory
    info: run_files.RunInfo
    modules: tuple[str, ...]
    refills: int
    say: Callable[[str], None]
    look: Callable[[], object]
    numbers: tuple[int, ...]
    gpus: tuple[str, ...] = ()
    trouble: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.directory.run_id = self.info.run_id
        self._agents: dict[int, int] = {}  # node -> pid
        self._lines: dict[int, int] = {}  # node -> our end of the pipe to its agent
        self._server: ForkServer | None = None
        # node -> which share of the GPUs it has
        self._shares = {node: share for share, node in enumerate(sorted(self.numbers))}
        self._appointed: set[int] = set()
        self._next_node = max(self.numbers) + 1
        self._unfilled = 0  # dead nodes that no new one has followed yet
        self._signals = 0
        self._discards = False  # what is in memory, when stopped
        self._stopped: set[int] = set()
        self._stop_deadline = 0.0
        self._address = ""
        self._held = -1
        self._ending = False
        self._fallen: dict[int, float] = {}  # node -> when its agent had ended, not long ago
        self._shortage = ""
        self._replaced = ""  # why its directory is not that of the run any more
        self._status: int = ExitStatus.FAILED

    def run(self) -> int:
        """From the first process to the last; returns the exit status of the run.

        Raises CommandError for what is wrong with the environment; nothing is left running then.
        """
        self._address = local_address(self.info.settings.interface)
        previous = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            # nohup has it ignored, and means it. A shell has its background ignore interrupts, too.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            with refusing_system_errors():
                self.directory.create(self.info)
                auth.create_secret(self.directory.path)
                self._held = cleanup.claim_segments(self.directory, self.info.run_id)
            self.say(f"starting {len(self.numbers)} nodes; their logs: {self.directory.logs}")
            ignore_notices()
            self._server = preload_modules(self.info.settings, self.modules)
            for node in sorted(self.numbers, reverse=True):
                if not self._signals:
                    self._start_agent(node)
            self._supervise()
            return self._exit_status()
        finally:
            self._end_all()
            for number, handler in previous.items():
                signal.signal(number, handler)

    # Starting.

    def _start_agent(self, node: int) -> None:
        self._shares.setdefault(node, self._free_share())
        sys.stdout.flush()
        sys.stderr.flush()
        theirs, ours = os.pipe()
        server = None if self._server is None else self._server.serve_node()
        try:
            pid = os.fork()
        except OSError:
            os.close(ours)
            raise
        else:
            if pid == 0:
                kept = (theirs,) if server is None else (theirs, server.connection.fileno())
                log = self.directory.log(f"node{node}-agent")
                _become_agent(lambda: self._serve(node, theirs, server), kept, log)
        finally:
            os.close(theirs)
            if server is not None:
                server.connection.close()
        self._agents[node] = pid
        self._lines[node] = ours
        self._appoint()

    def _serve(self, node: int, line: int, server: ForkServer | None) -> int:
        """In the forked child: be the agent of ``node``; returns its exit status."""
        if gpus := self.gpus:
            size = self.info.nproc_per_node
            os.environ[VISIBLE] = share_of(gpus, self._shares[node], size)
        options = AgentOptions(
            node,
            self.directory,
            self.info,
            auth.load_secret(self.directory.path),
            self._address,
            "",
            server,
            self.modules,
            launcher_fd=line,
            siblings=frozenset(self.numbers),
        )
        return serve(options, standby_port=0)

    def _free_share(self) -> int:
        """Returns the first share of the GPUs that no live node has."""
        taken = {self._shares[node] for node in self._agents}
        return min(set(range(len(self._agents) + 1)) - taken)

    def _appoint(self) -> None:
        """The agents of the highest numbers get roles last, if at all."""
        self._appointed &= self._agents.keys()
        others = sorted(self._agents.keys() - self._appointed, reverse=True)
        for node in others[: _STANDBYS - len(self._appointed)]:
            self._appointed.add(node)
            with contextlib.suppress(BrokenPipeError):  # it has ended, and is reaped next
                os.write(self._lines[node], b"\0")

    # Watching.

    def _supervise(self) -> None:
        """Until the run is over and its coordinator has ended, or has had its time to."""
        orphans, look_at = posix.Orphans() if os.getpid() == 1 else None, 0.0
        while True:
            self._reap_agents()
            if self.trouble:
                return
            if not self._agents and not self._unfilled:
                self._note_trouble()
                return
            if self._signals or time.monotonic() >= look_at:
                look_at = time.monotonic() + _REFRESH_SECONDS
                if orphans is not None:
                    orphans.reap()
                self.look()
                self._look_for_directory()
                coordinators = cleanup.coordinator_processes(self.directory)
                if not coordinators and self.directory.has_final():
                    return
                for pid in set(coordinators) - self._stopped if self._signals else ():
                    self._stopped.add(pid)
                    posix.kill(pid, signal.SIGTERM if self._discards else signal.SIGINT)
            if self._stop_deadline and time.monotonic() > self._stop_deadline:
                self.say("the run does not end: killing it")
                return
            self._wait()

    def _look_for_directory(self) -> None:
        """Say once that the directory is another run's. One that is removed is made again."""
        try:
            self.directory.check_own()
        except OSError as error:
            if str(error) != self._replaced:
                self._replaced = str(error)
                self.say(
                    f"{error.filename}: {error.strerror}. The run trains, but nobody can steer it:"
                    " put its directory back; Ctrl-C ends it and keeps its state in memory"
                )

    def _wait(self) -> None:
        """A line whose other end is gone says so at once."""
        poller = select.poll()
        for line in self._lines.values():
            poller.register(line, select.POLLERR)
        poller.poll(_POLL_SECONDS * 1000)

    def _reap_agents(self) -> None:
        ended = {
            node: status
            for node, pid in self._agents.items()
            for found, status in [os.waitpid(pid, os.WNOHANG)]
            if found
        }
        if ended:
            self.look()
        for node in ended:
            del self._agents[node]
            self._hang_up(node)
            self._clean(node, keep_slots=True)
            self._fallen[node] = time.monotonic()
        # What a node held is gone with it, as on a real machine. What the last ones held that were
        # killed together is all that there is.
        until = time.monotonic() - _TOGETHER_SECONDS
        for node in [n for n, at in self._fallen.items() if self._agents and at < until]:
            del self._fallen[node]
            self._clean(node, keep_slots=run_files.slots_are_kept(self.directory))
        if not (ended or self._unfilled) or self.directory.has_final() or self._stop_deadline:
            return
        codes = [os.waitstatus_to_exitcode(status) for status in ended.values()]
        if ExitStatus.BAD_INPUT in codes and not self._has_begun():
            self._status, self.trouble = ExitStatus.BAD_INPUT, self._words_of(max(ended))
            return
        for node, status in ended.items():
            self.say(f"node {node}: agent {ProcessEnd.from_wait_status(status)}")
        self._unfilled = min(self._unfilled + len(ended), self.refills)
        if not self._fallen or not self._agents:  # a spare takes up what it finds on its host
            self._refill()
        self._appoint()

    def _clean(self, node: int, *, keep_slots: bool) -> None:
        with self._saying_what_fails(f"what node {node} has left"):
            cleanup.clean_node(self.directory, self.info.run_id, node, keep_slots=keep_slots)

    def _refill(self) -> None:
        """Start what is due. A host that is short of processes has its new spare later."""
        while self._unfilled:
            try:
                self._start_agent(self._next_node)
            except OSError as error:
                if self._shortage != str(error):
                    self._shortage = str(error)
                    self.say(f"no new spare yet: {error}")
                return
            self.say(f"node {self._next_node} starts as a new spare")
            self._next_node += 1
            self.refills -= 1
            self._unfilled -= 1

    def _note_trouble(self) -> None:
        """Note what no coordinator can notice: that no node came up, or that none is left."""
        if self._stop_deadline or self.directory.has_final():
            return
        if self._newest_epoch() != 0:
            self.trouble = "no node is left"
            with contextlib.suppress(OSError, ValueError):
                for newest in filter(
                    run_files.is_there, run_files.read_valid(self.directory.latest)[:1]
                ):
                    self.trouble += f"; the newest checkpoint is {newest.path}"
            return
        line = self._words_of(min(self.numbers))
        self.trouble = f"no node came up: {line}" if line else "no node came up"

    def _words_of(self, node: int) -> str:
        """Return in its own words why an agent waits, or has ended; else its log's last line."""
        log = self.directory.log(f"node{node}-agent")
        said = [line for line in tail(log).splitlines() if line.startswith("agent of node ")]
        return said[-1] if said else last_line(log)

    def _has_begun(self) -> bool:
        """Return whether an epoch was decided; where the journal does not say, it may have been
        once there was a coordinator."""
        epoch = self._newest_epoch()
        return self.directory.coordinator.exists() if epoch is None else epoch > 0

    def _newest_epoch(self) -> int | None:
        """0 where none was decided, None when the journal does not say."""
        try:
            journal = Journal(self.directory.journal, self.directory.check_own)
            return max(journal.numbers("epoch"), default=0)
        except JournalError:
            return None

    def _exit_status(self) -> int:
        if self.trouble:
            return self._status
        try:
            final = self.directory.read_final()
        except run_files.RunDirectoryError:
            return ExitStatus.STOPPED if self._signals else ExitStatus.FAILED
        self.look()
        return int(final["exit_status"])

    # ProcessEnd.

    def _on_signal(self, number: int, frame: object) -> None:
        """The first signal ends the run in order, the second one at once. What it holds in memory
        goes with a SIGTERM only; after a Ctrl-C, or without its terminal, it can be continued with.
        """
        del frame
        self._signals += 1
        self._discards = number == signal.SIGTERM
        settings = self.info.settings
        now = time.monotonic()
        self._stop_deadline = now + 2 * settings.close_seconds if self._signals == 1 else now
        if self._signals > 1 and not self._agents and not self._ending:
            raise KeyboardInterrupt  # something is imported, which takes its time

    def _end_all(self) -> None:
        """Nothing of the run is left on this host when this returns, but for slots that are to be
        continued from."""
        self._ending = True
        self._stop_deadline = time.monotonic()  # from here on nothing is started again
        if self.directory.has_final() and self._signals < 2:
            self._wait_for_agents(_LEAVE_SECONDS)
        for node in list(self._lines):
            self._hang_up(node)
        # They notice, and know best what they have started only an instant ago.
        self._wait_for_agents(_FENCE_SECONDS)
        for pid in self._agents.values():
            posix.kill(pid)
            os.waitpid(pid, 0)
        self._agents.clear()
        if self._server is not None:
            self._server.end()
        run_id = self.info.run_id
        kept = self._keeps_slots() and any(
            any(node.glob("*.seg")) for node in cleanup.node_directories(run_id)
        )
        if self.directory.has_final() and self._signals < 2:
            self._wait_for_others(_FENCE_SECONDS)
        with self._saying_what_fails("what the run has left"):
            cleanup.clean_run(self.directory, run_id, keep_slots=kept)
        if self._held >= 0:
            os.close(self._held)

    @contextlib.contextmanager
    def _saying_what_fails(self, what: str) -> Iterator[None]:
        """A run directory that is away ends no run, nor does it change how one has ended."""
        try:
            yield
        except OSError as error:
            self.say(f"{what} was not removed as a whole: {error}")

    def _hang_up(self, node: int) -> None:
        """Close the line to an agent, which ends when it lives."""
        if node in self._lines:
            os.close(self._lines.pop(node))

    def _keeps_slots(self) -> bool:
        """Return whether they stay: the result says so, or there is none and nobody had it removed:
        then only starting it has failed, perhaps not for the first time. Told to remove it before
        it has decided anything, it leaves what was there before it."""
        if self.directory.has_final():
            return run_files.slots_are_kept(self.directory)
        epoch = self._newest_epoch()
        if self._discards:
            return epoch is not None and 0 < epoch <= self.info.ended_epoch
        return epoch != 0

    def _wait_for_others(self, deadline_seconds: float) -> None:
        """Agents that came to the run by a command of their own are told that it is over, too."""
        run, run_id = self.directory, self.info.run_id
        limit = time.monotonic() + deadline_seconds
        while time.monotonic() < limit and cleanup.working_processes(run, run_id):
            time.sleep(_POLL_SECONDS)

    def _wait_for_agents(self, deadline_seconds: float) -> None:
        limit = time.monotonic() + deadline_seconds
        while self._agents and time.monotonic() < limit and self._signals < 2:
            self._wait()
            self._reap_agents()


def _become_agent(serve_node: Callable[[], int], kept: tuple[int, ...], log: Path) -> None:
    """In the forked child: a session of its own, no other descriptors; ends here."""
    code: int = ExitStatus.FAILED
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        gc.freeze()
        posix.close_inherited(kept)
        posix.redirect_output(log)
        posix.answer_asks()
        code = serve_node()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
