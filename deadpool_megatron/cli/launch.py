"""The launcher: starts coordinator and agents on this host, watches over them, cleans up behind.

It has one thread for its whole life, for agents and (through them) members are forked from it after
torch and Megatron have been imported once. A pipe that only the launcher holds open tells agents
and coordinator of its death, even by SIGKILL.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deadpool_megatron.cli.common import coordinator_address, listen
from deadpool_megatron.cli.node import domain_of
from deadpool_megatron.cli.preloading import preload_modules
from deadpool_megatron.cli.slurm_environment import local_address
from deadpool_megatron.cluster.agent.options import AgentOptions
from deadpool_megatron.cluster.agent.process import run_agent
from deadpool_megatron.cluster.journal.choice import open_journal
from deadpool_megatron.cluster.journal.entries import JournalError
from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.process.liveness import Ending, last_line
from deadpool_megatron.cluster.process.starter import choose_method
from deadpool_megatron.cluster.run_directory.cleanup import claim_segments, clean_node, clean_run
from deadpool_megatron.cluster.run_directory.directory import (
    RunDirectory,
    RunInfo,
    read_json,
    slots_are_kept,
)
from deadpool_megatron.cluster.run_directory.slots import is_followed
from deadpool_megatron.wire import auth

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_POLL_SECONDS = 0.1
_COORDINATOR_RESTARTS = 5
_LEAVE_SECONDS = 1.0
_FENCE_SECONDS = 5.0


@dataclass(frozen=True)
class LaunchOptions:
    """``refill``: how many dead nodes are followed by a new spare node; ``say``: one line to the
    user; ``look``: called several times a second, to show progress. ``numbers``: of the nodes to
    start with; ``restarted``: the run is an earlier one, which goes on from what is in memory.
    """

    run: RunDirectory
    info: RunInfo
    port: int
    modules: tuple[str, ...]
    refill: int
    say: Callable[[str], None]
    look: Callable[[], object]
    numbers: tuple[int, ...]
    restarted: bool = False


class Launcher:
    """One run on this host. Use :meth:`run` once; ``trouble`` is why it failed, if it was not for
    a reason that the coordinator has written down.
    """

    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        self._run = options.run
        self._info = options.info
        self._agents: dict[int, tuple[int, int]] = {}  # node -> (pid, pidfd)
        self._coordinator: subprocess.Popen[bytes] | None = None
        self._coordinator_restarts = 0
        self._next_node = max(options.numbers) + 1
        self._refills = options.refill
        self._signals = 0
        self._stop_sent = False
        self._stop_deadline = 0.0
        self._coordinator_moved = time.monotonic()
        self._address = ""
        self._held = -1
        self._ending = False
        self.trouble = ""

    def run(self) -> int:
        """From the first process to the last; answers the exit status of the run.

        Raises CommandError for what is wrong with the environment; nothing is left running then.
        """
        self._address = local_address(self._info.settings.interface)
        self._listener = listen(self._address, self._options.port)
        self._lifeline, self._lifeline_end = os.pipe()
        previous = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        try:
            self._run.create(self._info)
            auth.create_secret(self._run.path)
            self._held = claim_segments(self._run, self._info.run_id)
            self._run.forget_followed()
            self._start_coordinator(restarted=self._options.restarted)
            if choose_method(self._info.settings.start_method) == "fork":
                preload_modules(self._info.settings, self._options.modules)
            for node in self._options.numbers:
                if not self._signals:
                    self._start_agent(node)
            self._supervise()
            return self._exit_status()
        finally:
            self._end_all()
            for number, handler in previous.items():
                signal.signal(number, handler)

    # Starting.

    def _start_coordinator(self, *, restarted: bool = False) -> None:
        command = [sys.executable, "-m", "deadpool_megatron", "coordinator"]
        handles = (self._listener.fileno(), self._lifeline)
        with open(self._run.log("coordinator"), "ab") as log:
            self._coordinator = subprocess.Popen(
                [
                    *command,
                    *("--run-dir", str(self._run.path)),
                    *("--listen-fd", str(handles[0]), "--lifeline-fd", str(handles[1])),
                    *(("--restarted",) if restarted else ()),
                ],
                pass_fds=handles,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={
                    **os.environ,
                    "DEADPOOL_RUN_DIR": str(self._run.path),
                    "DEADPOOL_RUN_ID": self._info.run_id,
                },
            )

    def _start_agent(self, node: int, *, takes_up: bool = False) -> None:
        options = AgentOptions(
            node=node,
            run=self._run,
            info=self._info,
            secret=auth.load_secret(self._run.path),
            address=lambda: coordinator_address(self._run),
            host=self._address,
            domain=domain_of(self._info.settings, node),
            modules=self._options.modules,
            directory=Path.cwd(),
            lifeline_fd=self._lifeline,
            takes_up=takes_up or self._options.restarted,
        )
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _become_agent(options)
        self._agents[node] = (pid, os.pidfd_open(pid))

    # Watching.

    def _supervise(self) -> None:
        """Until coordinator and agents have ended, or have had their time to."""
        while True:
            self._options.look()
            self._reap_agents()
            if self._coordinator_ended():
                return
            self._look_for_trouble()
            if self._signals and not self._stop_sent:
                self._stop_sent = True
                assert self._coordinator is not None
                self._coordinator.terminate()
            if self._stop_deadline and time.monotonic() > self._stop_deadline:
                self._options.say("the run does not end by itself: killing it")
                return
            self._wait()

    def _wait(self) -> None:
        poller = select.poll()
        for _, handle in self._agents.values():
            poller.register(handle, select.POLLIN)
        poller.poll(_POLL_SECONDS * 1000)

    def _reap_agents(self) -> None:
        for node, (pid, handle) in list(self._agents.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended == 0:
                continue
            os.close(handle)
            del self._agents[node]
            # What the node held is gone with it, as on a real machine.
            kept = self._keeps_slots() if self._ending else slots_are_kept(self._run)
            follows = self._is_followed(node)
            kept = kept or follows
            clean_node(self._run, self._info.run_id, node, keep_slots=kept)
            if self._run.final.exists() or self._stop_deadline:
                continue
            ending = Ending.from_wait_status(status)
            self._options.say(f"node {node}: agent {ending}")
            if follows:
                self._options.say(f"node {self._next_node} takes up what node {node} held")
                self._start_agent(self._next_node, takes_up=True)
                self._next_node += 1
            elif self._refills > 0:
                self._refills -= 1
                self._options.say(f"node {self._next_node} starts as a new spare")
                self._start_agent(self._next_node)
                self._next_node += 1

    def _is_followed(self, node: int) -> bool:
        """Whether the next agent takes up what this one held."""
        if self._ending or self._run.final.exists():
            return False
        return is_followed(self._info.settings, self._run, node)

    def _coordinator_ended(self) -> bool:
        """True when the run is over; a coordinator that failed is started again."""
        assert self._coordinator is not None
        if self._coordinator.poll() is None:
            return False
        if self._run.final.exists() or self._stop_deadline:
            return True
        code = self._coordinator.returncode
        line = last_line(self._run.log("coordinator"))
        self._coordinator_restarts += 1
        if self._coordinator_restarts > _COORDINATOR_RESTARTS or code == 2:
            self.trouble = f"the coordinator ended with status {code}: {line}"
            return True
        self._options.say(f"the coordinator ended (status {code}) and is started again")
        # Until one has begun to serve, what it takes up is what an earlier start has left.
        began = self._run.coordinator.exists()
        self._start_coordinator(restarted=self._options.restarted and not began)
        return False

    def _look_for_trouble(self) -> None:
        """What the coordinator cannot notice: that it is stopped itself, that no node came up."""
        assert self._coordinator is not None
        now, pid = time.monotonic(), self._coordinator.pid
        found = posix.state_and_cpu_ticks(pid)
        if found is None or found[0] not in "Tt":
            self._coordinator_moved = now
        elif now - self._coordinator_moved > self._info.settings.freeze_seconds:
            self._options.say("the coordinator is stopped: it is killed")
            self._coordinator.kill()
        if self._agents or self._stop_deadline or self._run.final.exists():
            return
        if not self._came_up():
            line = last_line(self._run.log("node0-agent"))
            self.trouble = f"no node came up: {line}" if line else "no node came up"
            self._stop_deadline = now + self._info.settings.close_seconds
            self._coordinator.terminate()

    def _came_up(self) -> bool:
        """Whether an epoch was ever decided; True as well when the journal does not say."""
        try:
            journal = open_journal(self._info.settings, self._info.run_id, self._run.journal)
            return journal.newest("epoch") is not None
        except JournalError:
            return True

    def _exit_status(self) -> int:
        if self.trouble:
            return EXIT_FAILED
        try:
            final = read_json(self._run.final)
        except (OSError, ValueError):
            return EXIT_INTERRUPTED if self._signals else EXIT_FAILED
        self._options.look()
        return int(final["exit_status"])

    # Ending.

    def _on_signal(self, number: int, frame: object) -> None:
        """The first signal ends the run in order, the second one at once."""
        del number, frame
        self._signals += 1
        settings = self._info.settings
        now = time.monotonic()
        self._stop_deadline = now + 2 * settings.close_seconds if self._signals == 1 else now

    def _end_all(self) -> None:
        """Nothing of the run is left on this host when this returns, but for slots that are to be
        gone on from."""
        self._ending = True
        self._stop_deadline = time.monotonic()  # from here on nothing is started again
        if self._run.final.exists() and self._signals < 2:
            self._wait_for_agents(_LEAVE_SECONDS)
        os.close(self._lifeline_end)
        # They notice, and know best what they have started only an instant ago.
        self._wait_for_agents(_FENCE_SECONDS)
        if self._coordinator is not None and self._coordinator.poll() is None:
            self._coordinator.kill()
            self._coordinator.wait()
        for pid, handle in self._agents.values():
            posix.kill(pid)
            os.waitpid(pid, 0)
            os.close(handle)
        self._agents.clear()
        kept = self._keeps_slots()
        clean_run(self._run, self._info.run_id, keep_slots=kept)
        if kept and not self._run.final.exists():
            self._options.say(
                "what it holds in memory stays: the same command goes on from it, 'deadpool clean"
                f" {self._run.path}' removes it"
            )
        if self._held >= 0:
            os.close(self._held)
        self._listener.close()
        os.close(self._lifeline)

    def _keeps_slots(self) -> bool:
        """Where the result says so, or where there is none and nobody stopped the run: then only
        starting it has failed, perhaps not for the first time."""
        if slots_are_kept(self._run):
            return True
        return not self._run.final.exists() and not self._signals and self._came_up()

    def _wait_for_agents(self, deadline_seconds: float) -> None:
        limit = time.monotonic() + deadline_seconds
        while self._agents and time.monotonic() < limit:
            self._wait()
            self._reap_agents()


def _become_agent(options: AgentOptions) -> None:
    """In the forked child: a session of its own, no descriptors but the lifeline; ends here."""
    code = EXIT_FAILED
    try:
        os.setsid()
        assert options.lifeline_fd is not None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        gc.freeze()
        posix.close_inherited((options.lifeline_fd,))
        posix.redirect_output(options.run.log(f"node{options.node}-agent"))
        code = run_agent(options)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
