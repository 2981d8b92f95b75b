"""The launcher starts the agents on this host, supervises them, and cleans up after them.

It stays single-threaded, because it forks the agents and a server, which imports torch and Megatron
once and forks the members of all agents. The launcher holds one end of a pipe to each agent. End of
file shows the agent that the launcher has died, even by SIGKILL. A byte appoints the agent to keep
a standby. Two agents are appointed at any time, and the standby of either becomes the coordinator.
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

from deadpool_megatron.cli.common import ignore_notices, local_addresses, refusing_system_errors
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
from deadpool_megatron.preflight.host import GPU_VARIABLE, share_of
from deadpool_megatron.wire import auth

_POLL_SECONDS = 0.1
# Interval of the displayed progress, and of checks for the end of the run.
_REFRESH_SECONDS = 1.0
_STANDBYS = 2
# Time for agents to end by themselves after the result of the run.
_LEAVE_SECONDS = 1.0
# Nodes whose agents end within this time may have been killed together.
_TOGETHER_SECONDS = 1.0
# Time for agents to end after the launcher has closed their pipes.
_FENCE_SECONDS = 5.0


@dataclass(eq=False)
class Launcher:
    """A run on this host. Call :meth:`run` once. ``failure``: the reason of a failure that the
    coordinator has not recorded.

    ``refills``: the number of lost nodes that are replaced by new spares. ``report`` prints a line;
    ``refresh`` is called regularly to show progress. ``numbers``: the numbers of the nodes at the
    start. ``gpus`` are divided among the nodes; if empty, each node sees all GPUs of this process.
    """

    directory: run_files.RunDirectory
    info: run_files.RunInfo
    modules: tuple[str, ...]
    refills: int
    report: Callable[[str], None]
    refresh: Callable[[], object]
    numbers: tuple[int, ...]
    gpus: tuple[str, ...] = ()
    failure: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.directory.run_id = self.info.run_id
        self._agents: dict[int, int] = {}  # node -> pid
        self._pipes: dict[int, int] = {}  # node -> launcher's end of the pipe to its agent
        self._server: ForkServer | None = None
        # node -> number of its share of the GPUs
        self._shares = {node: share for share, node in enumerate(sorted(self.numbers))}
        self._appointed: set[int] = set()
        self._next_node = max(self.numbers) + 1
        self._due_refills = 0  # lost nodes that are not yet replaced
        self._signals = 0
        self._discards = False  # whether a stop removes the state in memory
        self._stopped_pids: set[int] = set()  # coordinators that got the user's signal
        self._stop_deadline = 0.0
        self._hosts: list[str] = []
        self._segments_claim = -1  # descriptor; while it is open, the segments count as in use
        self._is_ending = False
        self._ended_at: dict[int, float] = {}  # node -> end of its agent, if recent
        self._last_shortage = ""
        self._directory_problem = ""  # the last reported problem of the run directory
        self._status: int = ExitStatus.FAILED

    def run(self) -> int:
        """Run all processes to their end; return the exit status of the run.

        Raises CommandError for errors of the environment. No process remains in either case.
        """
        self._hosts = local_addresses(self.info.settings.interface)
        previous = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            # nohup ignores SIGHUP on purpose; shells ignore SIGINT for jobs in the background, too.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            with refusing_system_errors():
                self.directory.create(self.info)
                auth.create_secret(self.directory.path)
                self._segments_claim = cleanup.claim_segments(self.directory, self.info.run_id)
            self.report(f"starting {len(self.numbers)} nodes; their logs: {self.directory.logs}")
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
        """Fork the agent of a node, with its share of the GPUs. Raises OSError."""
        self._shares.setdefault(node, self._free_share())
        sys.stdout.flush()
        sys.stderr.flush()
        agent_end, own_end = os.pipe()
        server = None if self._server is None else self._server.serve_node()
        try:
            pid = os.fork()
        except OSError:
            os.close(own_end)
            raise
        else:
            if pid == 0:
                fds = (agent_end,) if server is None else (agent_end, server.connection.fileno())
                log = self.directory.log(f"node{node}-agent")
                _run_forked(lambda: self._serve(node, agent_end, server), fds, log)
        finally:
            os.close(agent_end)
            if server is not None:
                server.connection.close()
        self._agents[node] = pid
        self._pipes[node] = own_end
        self._appoint_agents()

    def _serve(self, node: int, pipe: int, server: ForkServer | None) -> int:
        """Serve as the agent of ``node``, in the forked child; return its exit status."""
        if gpus := self.gpus:
            size = self.info.nproc_per_node
            os.environ[GPU_VARIABLE] = share_of(gpus, self._shares[node], size)
        options = AgentOptions(
            node,
            self.directory,
            self.info,
            auth.load_secret(self.directory.path),
            self._hosts[0],
            "",
            server,
            self.modules,
            launcher_fd=pipe,
            siblings=frozenset(self.numbers),
            more_hosts=tuple(self._hosts[1:]),
        )
        return serve(options, standby_port=0)

    def _free_share(self) -> int:
        """Return the first share of the GPUs that no live node has."""
        used = {self._shares[node] for node in self._agents}
        return min(set(range(len(self._agents) + 1)) - used)

    def _appoint_agents(self) -> None:
        """Appoint the agents with the highest numbers, as their nodes get roles last, if at all."""
        self._appointed &= self._agents.keys()
        others = sorted(self._agents.keys() - self._appointed, reverse=True)
        for node in others[: _STANDBYS - len(self._appointed)]:
            self._appointed.add(node)
            with contextlib.suppress(BrokenPipeError):  # the agent has ended, and is reaped next
                os.write(self._pipes[node], b"\0")

    # Watching.

    def _supervise(self) -> None:
        """Supervise until the run and its coordinator have ended, or a stop has timed out."""
        orphans, refresh_at = posix.Orphans() if os.getpid() == 1 else None, 0.0
        while True:
            self._reap_agents()
            if self.failure:
                return
            if not self._agents and not self._due_refills:
                self._note_failure()
                return
            if self._signals or time.monotonic() >= refresh_at:
                refresh_at = time.monotonic() + _REFRESH_SECONDS
                if orphans is not None:
                    orphans.reap()
                self.refresh()
                self._check_directory()
                coordinators = cleanup.coordinator_processes(self.directory)
                if not coordinators and self.directory.has_final():
                    return
                for pid in set(coordinators) - self._stopped_pids if self._signals else ():
                    self._stopped_pids.add(pid)
                    posix.kill(pid, signal.SIGTERM if self._discards else signal.SIGINT)
            if self._stop_deadline and time.monotonic() > self._stop_deadline:
                self.report("the run does not end: killing it")
                return
            self._wait()

    def _check_directory(self) -> None:
        """Report that another run has taken over the run directory, once for each error."""
        try:
            self.directory.check_own()
        except OSError as error:
            if str(error) != self._directory_problem:
                self._directory_problem = str(error)
                self.report(
                    f"{error.filename}: {error.strerror}. The run trains, but nobody can steer it:"
                    " put its directory back; Ctrl-C ends it and keeps its state in memory"
                )

    def _wait(self) -> None:
        """Wait a moment, or until an agent closes its end of a pipe."""
        poller = select.poll()
        for pipe in self._pipes.values():
            poller.register(pipe, select.POLLERR)
        poller.poll(_POLL_SECONDS * 1000)

    def _reap_agents(self) -> None:
        """Clean up after agents that have ended, and replace their nodes by spares."""
        ended = {
            node: status
            for node, pid in self._agents.items()
            for ended_pid, status in [os.waitpid(pid, os.WNOHANG)]
            if ended_pid
        }
        if ended:
            self.refresh()
        for node in ended:
            del self._agents[node]
            self._close_pipe(node)
            self._clean(node, keep_slots=True)
            self._ended_at[node] = time.monotonic()
        # Remove the memory of a lost node, as the loss of a real machine would, but not at once: if
        # all nodes were killed together, their memory is the only remaining state.
        until = time.monotonic() - _TOGETHER_SECONDS
        for node in [n for n, at in self._ended_at.items() if self._agents and at < until]:
            del self._ended_at[node]
            self._clean(node, keep_slots=run_files.slots_are_kept(self.directory))
        if not (ended or self._due_refills) or self.directory.has_final() or self._stop_deadline:
            return
        codes = [os.waitstatus_to_exitcode(status) for status in ended.values()]
        if ExitStatus.BAD_INPUT in codes and not self._has_started():
            self._status, self.failure = ExitStatus.BAD_INPUT, self._final_output(max(ended))
            return
        for node, status in ended.items():
            self.report(f"node {node}: agent {ProcessEnd.from_wait_status(status)}")
        self._due_refills = min(self._due_refills + len(ended), self.refills)
        # A new spare attaches to memory of dead nodes on its host. So start the spare only after
        # the removal, except if no agent lives: then this memory is the only remaining state.
        if not self._ended_at or not self._agents:
            self._refill()
        self._appoint_agents()

    def _clean(self, node: int, *, keep_slots: bool) -> None:
        with self._reporting_failures(f"what node {node} has left"):
            cleanup.clean_node(self.directory, self.info.run_id, node, keep_slots=keep_slots)

    def _refill(self) -> None:
        """Start the due spares; retry later if the host has no processes left."""
        while self._due_refills:
            try:
                self._start_agent(self._next_node)
            except OSError as error:
                if self._last_shortage != str(error):
                    self._last_shortage = str(error)
                    self.report(f"no new spare yet: {error}")
                return
            self.report(f"node {self._next_node} starts as a new spare")
            self._next_node += 1
            self.refills -= 1
            self._due_refills -= 1

    def _note_failure(self) -> None:
        """Record a failure that no coordinator can record: no node came up, or none is left."""
        if self._stop_deadline or self.directory.has_final():
            return
        if self._newest_epoch() != 0:
            self.failure = "no node is left"
            with contextlib.suppress(OSError, ValueError):
                for newest in filter(
                    run_files.is_there, run_files.read_valid(self.directory.latest)[:1]
                ):
                    self.failure += f"; the newest checkpoint is {newest.path}"
            return
        line = self._final_output(min(self.numbers))
        self.failure = f"no node came up: {line}" if line else "no node came up"

    def _final_output(self, node: int) -> str:
        """Return the agent's last report on why it waits or has ended, else its log's last line."""
        log = self.directory.log(f"node{node}-agent")
        reports = [line for line in tail(log).splitlines() if line.startswith("agent of node ")]
        return reports[-1] if reports else last_line(log)

    def _has_started(self) -> bool:
        """Return whether an epoch was decided; if the journal cannot be read, whether there was a
        coordinator."""
        epoch = self._newest_epoch()
        return self.directory.coordinator.exists() if epoch is None else epoch > 0

    def _newest_epoch(self) -> int | None:
        """Return the newest epoch, 0 if none was decided, None if the journal cannot be read."""
        try:
            journal = Journal(self.directory.journal, self.directory.check_own)
            return max(journal.numbers("epoch"), default=0)
        except JournalError:
            return None

    def _exit_status(self) -> int:
        if self.failure:
            return self._status
        try:
            final = self.directory.read_final()
        except run_files.RunDirectoryError:
            return ExitStatus.STOPPED if self._signals else ExitStatus.FAILED
        self.refresh()
        return int(final["exit_status"])

    # Ending.

    def _on_signal(self, number: int, frame: object) -> None:
        """End the run in order at the first signal, at once at the second. Only a SIGTERM removes
        the state in memory; after a Ctrl-C, or the loss of the terminal, the run can be continued.
        """
        del frame
        self._signals += 1
        self._discards = number == signal.SIGTERM
        settings = self.info.settings
        now = time.monotonic()
        self._stop_deadline = now + 2 * settings.close_seconds if self._signals == 1 else now
        if self._signals > 1 and not self._agents and not self._is_ending:
            raise KeyboardInterrupt  # the imports are running, which take long

    def _end_all(self) -> None:
        """Remove the run's processes and memory on this host, except slots to continue from."""
        self._is_ending = True
        self._stop_deadline = time.monotonic()  # no more refills
        if self.directory.has_final() and self._signals < 2:
            self._wait_for_agents(_LEAVE_SECONDS)
        for node in list(self._pipes):
            self._close_pipe(node)
        # Agents notice the closed pipes, and end also the processes that they have just started.
        self._wait_for_agents(_FENCE_SECONDS)
        for pid in self._agents.values():
            posix.kill(pid)
            os.waitpid(pid, 0)
        self._agents.clear()
        if self._server is not None:
            self._server.end()
        run_id = self.info.run_id
        directories = cleanup.node_directories(run_id)
        kept = self._keeps_slots() and any(any(node.glob("*.seg")) for node in directories)
        if self.directory.has_final() and self._signals < 2:
            self._wait_for_others(_FENCE_SECONDS)
        with self._reporting_failures("what the run has left"):
            cleanup.clean_run(self.directory, run_id, keep_slots=kept)
        if self._segments_claim >= 0:
            os.close(self._segments_claim)

    @contextlib.contextmanager
    def _reporting_failures(self, noun: str) -> Iterator[None]:
        """Report the errors of a removal, which neither end a run nor change its result."""
        try:
            yield
        except OSError as error:
            self.report(f"{noun} was not removed as a whole: {error}")

    def _close_pipe(self, node: int) -> None:
        """Close the pipe to an agent, which ends a live agent."""
        if node in self._pipes:
            os.close(self._pipes.pop(node))

    def _keeps_slots(self) -> bool:
        """Return whether slots remain in memory. The result of the run decides, if it exists.
        Otherwise they remain if an epoch was decided or the journal cannot be read. After a SIGTERM
        they remain only if all epochs are of earlier starts, whose slots they are."""
        if self.directory.has_final():
            return run_files.slots_are_kept(self.directory)
        epoch = self._newest_epoch()
        if self._discards:
            return epoch is not None and 0 < epoch <= self.info.ended_epoch
        return epoch != 0

    def _wait_for_others(self, deadline_seconds: float) -> None:
        """Wait for agents that joined by a command of their own, so that they end in order, too."""
        run, run_id = self.directory, self.info.run_id
        limit = time.monotonic() + deadline_seconds
        while time.monotonic() < limit and cleanup.working_processes(run, run_id):
            time.sleep(_POLL_SECONDS)

    def _wait_for_agents(self, deadline_seconds: float) -> None:
        limit = time.monotonic() + deadline_seconds
        while self._agents and time.monotonic() < limit and self._signals < 2:
            self._wait()
            self._reap_agents()


def _run_forked(serve_node: Callable[[], int], fds: tuple[int, ...], log: Path) -> None:
    """Serve in the forked child, in a session of its own, with no inherited descriptors but
    ``fds``, and exit."""
    code: int = ExitStatus.FAILED
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        gc.freeze()
        posix.close_inherited(fds)
        posix.redirect_output(log)
        posix.enable_stack_dumps()
        code = serve_node()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
