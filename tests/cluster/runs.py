"""Real runs of the counting member, under ``deadpool run`` or as one ``deadpool agent`` per node;
and the check that they leave nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from deadpool_megatron import failpoints
from deadpool_megatron.cluster.journal.journal import Journal
from deadpool_megatron.cluster.journal.terms import Term, newest_term
from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.run_directory import cleanup
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, read_json, segment_root
from deadpool_megatron.events import Event, EventTail, Kind
from tests.cluster.counting_member import expected_sha256
from tests.common import forks
from tests.common.finished_run import read_final
from tests.common.limits import FAST, setting_flags
from tests.common.wait import MAX_WAIT_SECONDS, T, wait_for

MEMBER = str(Path(__file__).with_name("counting_member.py"))
_ROOT = Path(__file__).parents[2]
_STACKS_SECONDS = 1.0
# Here a busy machine must not look like a cut network, and a takeover takes some time anyway.
_LIMITS = setting_flags(node_silence_seconds=5, fence_seconds=4)
# Imports of commands that start runs; the processes of the tests are forks with these imports.
_IMPORTED = ("deadpool_megatron.cli.start.run", "deadpool_megatron.cli.start.node_agent")


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """Return that of a command line: this checkout first, nothing of an outer run."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("DEADPOOL_")}
    return {**inherited, "PYTHONPATH": str(_ROOT), **(extra or {})}


def start(printed: Path, *arguments: str, **extra: str) -> forks.Forked:
    """Start a ``deadpool`` command; its output is appended to a file."""
    with open(printed, "ab") as output:
        return _start(output, output, arguments, extra)


def deadpool(*arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a ``deadpool`` command to its end."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        command = _start(output, errors, arguments, extra)
        try:
            status = command.wait(MAX_WAIT_SECONDS)
        finally:
            command.kill()
        for file in (output, errors):
            file.seek(0)
        texts = (file.read().decode() for file in (output, errors))
        return subprocess.CompletedProcess(arguments, status, *texts)


def _start(
    output: IO[bytes], errors: IO[bytes], arguments: Sequence[str], extra: dict[str, str]
) -> forks.Forked:
    with open(os.devnull, "rb") as nothing:
        handles = (file.fileno() for file in (nothing, output, errors))
        return forks.server(_IMPORTED).start(
            *("deadpool_megatron", *arguments),
            environment=environment(extra),
            handles=dict(enumerate(handles)),
            leads=True,
        )


def _ask_stacks(launcher: int) -> None:
    """Have the agents write to their logs where they stand."""
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), posix.ASK_SIGNAL)
    time.sleep(_STACKS_SECONDS)


class ObservedRun:
    """A run by its directory: its events, and the check of its result."""

    def __init__(self, directory: Path, roles: int, faults: Sequence[dict[str, Any]] = ()) -> None:
        self.run = RunDirectory(directory)
        self.roles = roles
        self.extra: dict[str, str] = {}
        if faults:
            plan = directory.with_name(directory.name + "-faults.json")
            plan.write_text(json.dumps(list(faults)))
            self.extra[failpoints.ENVIRONMENT_NAME] = str(plan)
        self._tail = EventTail(self.run.events)
        self._events: list[Event] = []

    def print_facts(self, outputs: Iterable[Path]) -> None:
        """Print the events and logs, for a failed test."""
        for event in self.events():
            if event.kind not in (Kind.COMMITTED, Kind.SEALED, Kind.STEP):
                print(json.dumps(event.to_dict()))
        for log in [*sorted(outputs), *sorted((self.run.path / "logs").glob("*.log"))]:
            text = log.read_text(errors="replace").strip()
            if text:
                print(f"== {log.name}\n{text[-3000:]}")

    def run_id(self) -> str:
        """Empty before the run has begun."""
        return self.run.read_run().run_id if (self.run.path / "run.json").exists() else ""

    def wait_gone(self, run_id: str) -> None:
        wait_for("its processes to go", lambda: not cleanup.run_processes(self.run, run_id))

    def events(self, *kinds: Kind) -> list[Event]:
        """Events so far, of these kinds, of all coordinators."""
        self._events += self._tail.poll()
        return [e for e in self._events if not kinds or e.kind in kinds]

    def newest_iteration(self) -> int:
        """Return the newest iteration reported so far."""
        return max((e.iteration or 0 for e in self.events(Kind.STEP)), default=0)

    def wait_for(self, name: str, ready: Callable[[], T]) -> T:
        """Poll until ``ready()`` is true."""
        return wait_for(name, ready)

    def wait_iteration(self, iteration: int) -> None:
        """Until a step has been reported."""
        self.wait_for(f"iteration {iteration}", lambda: self.newest_iteration() >= iteration)

    def wait_over(self) -> None:
        """Until the run has ended."""
        wait_for("the result", self.run.final.exists)

    def finish(self) -> dict[str, Any]:
        """Let an endless run end well, and check its result."""
        (self.run.path / "finish").touch()
        self.wait_over()
        return self.check_result(int((self.run.path / "finish-after").read_text()))

    def check_result(self, iterations: int) -> dict[str, Any]:
        """The run ended well, each step is there once, every role's state is exact."""
        self.wait_over()
        final = read_final(self.run.path)
        assert final["exit_status"] == 0, final["reason"]
        assert [step["iteration"] for step in final["steps"]] == list(range(1, iterations + 1))
        for role in range(self.roles):
            assert final["roles"][str(role)]["sha256"] == expected_sha256(role, iterations), role
        return final


class Run(ObservedRun):
    """``deadpool run`` as a child. A context manager: at its end the run must leave nothing."""

    def __init__(
        self,
        directory: Path,
        *member: str,
        nodes: int = 2,
        spares: int = 1,
        nproc: int = 1,
        options: Sequence[str] = (),
        faults: Sequence[dict[str, Any]] = (),
        preload: str = "",
        extra: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(directory, nodes * nproc, faults)
        self.extra |= extra or {}
        size = ("--nodes", str(nodes), "--spares", str(spares), "--nproc-per-node", str(nproc))
        self.output = directory.with_name(directory.name + ".out")
        self.output.unlink(missing_ok=True)
        self.launcher = start(
            self.output,
            *("run", *size, "--preload", preload),
            *("--run-dir", str(directory), *FAST, *options, "--", MEMBER, *member),
            **self.extra,
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.launcher.poll() is None:
            if kind is not None:
                _ask_stacks(self.launcher.pid)
            self.launcher.kill()
        self.launcher.wait()
        if kind is None:
            self.wait_clean()
        elif run_id := self.run_id():
            self.print_facts([self.output])
            cleanup.clean_run(self.run, run_id)

    def wait_for(self, name: str, ready: Callable[[], T]) -> T:
        """Poll until ``ready()`` is true; fail when the run has ended or the patience is over."""

        def ended() -> str:
            status = self.launcher.poll()
            return "" if status is None else f"the run ended ({status})"

        return wait_for(name, ready, failure=ended)

    def wait_event(self, kind: Kind, count: int = 1) -> Event:
        """Until the ``count``-th event of a kind."""
        self.wait_for(f"{count} x {kind}", lambda: len(self.events(kind)) >= count)
        return self.events(kind)[count - 1]

    def wait_end(self, status: int = 0) -> dict[str, Any]:
        """Wait until the launcher has ended with this status; return the result."""
        assert self.launcher.wait(MAX_WAIT_SECONDS) == status, self.output.read_text()
        return read_final(self.run.path)

    def listing(self, node: int) -> dict[str, Any]:
        """The processes of a node."""
        return read_json(self.run.node(node))

    def wait_over(self) -> None:
        """Until the launcher has ended well."""
        self.wait_end()

    def wait_clean(self) -> None:
        """No process and no shared memory of the run is left."""
        if run_id := self.run_id():
            self.wait_gone(run_id)
            wait_for("its memory to go", lambda: not segment_root(run_id).exists())


class Agents(ObservedRun):
    """Agents of a run. A context manager: its end checks that they leave nothing."""

    def __init__(
        self,
        directory: Path,
        *member: str,
        nodes: int = 2,
        spares: int = 1,
        options: Sequence[str] = (),
        faults: Sequence[dict[str, Any]] = (),
        outputs: Path | None = None,
    ) -> None:
        super().__init__(directory, nodes, faults)
        self._outputs = outputs or directory.with_name(directory.name + "-outputs")
        self._outputs.mkdir()
        size = ("--nodes", str(nodes), "--spares", str(spares), "--nproc-per-node", "1")
        self._size = (*size, *FAST, *_LIMITS, *options)
        self._member = (MEMBER, *member)
        self.agents: dict[str, forks.Forked] = {}
        for node in range(nodes + spares):
            self.start(str(node), "--node-id", str(node))

    def start(self, name: str, *flags: str) -> forks.Forked:
        """Start another agent; ``flags``: its ``--node-id`` or ``--attach``, and more options."""
        self.agents[name] = start(
            self._outputs / f"{name}.out",
            *("agent", "--preload", "", "--run-dir", str(self.run.path)),
            *(*self._size, *flags, "--", *self._member),
            **self.extra,
        )
        return self.agents[name]

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        run_id = self.run_id()
        if kind is None:
            self._check_clean(run_id)
            return
        for agent in self.agents.values():
            agent.kill()
            agent.wait()
        self.print_facts(self._outputs.iterdir())
        if run_id:
            cleanup.clean_run(self.run, run_id)

    def _check_clean(self, run_id: str) -> None:
        for agent in self.agents.values():
            agent.wait(MAX_WAIT_SECONDS)
        self.wait_gone(run_id)
        # A killed agent cannot clear up; on a real cluster its memory dies with its host.
        cleanup.clean_run(self.run, run_id)
        assert not segment_root(run_id).exists()

    def wait_more(self, iterations: int) -> None:
        """Wait for more iterations from now."""
        self.wait_iteration(self.newest_iteration() + iterations)

    def journal(self) -> Journal:
        """The run's, wherever it is."""
        return Journal(self.run.journal)

    def term(self) -> Term:
        """Wait for a term; return the newest."""
        journal = self.journal()
        found = wait_for("a coordinator", lambda: newest_term(journal))
        assert found is not None
        return found

    def wait_term(self, number: int) -> Term:
        """Wait until another coordinator has taken over and reports its address."""

        def there() -> bool:
            kind = Kind.COORDINATOR
            return any(e.data["term"] >= number for e in self.events(kind))

        wait_for(f"term {number}", there)
        return self.term()

    def epochs(self) -> list[int]:
        """Numbers of all records."""
        return self.journal().numbers("epoch")

    def power_off(self, node: int) -> None:
        """SIGKILL everything on a node: agent first, which takes members and standby along."""
        listing = read_json(self.run.node(node))
        for pid in (listing["agent"], listing["vault"], *listing["members"].values()):
            if posix.is_alive(pid):
                send(pid)


def send(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal a process that is there."""
    assert posix.is_alive(pid)
    os.kill(pid, number)
