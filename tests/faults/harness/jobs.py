"""Runs whole jobs with planned faults and holds them against an undisturbed run of the same seed.

A job is ``deadpool run`` in a process of its own, with real kills. Its program is the embedded
trainer on real text, or what a test names. Faults strike at exact points (failpoints.py). Every job
hashes the state of all roles after every iteration, so one comparison with the cached reference
covers every recovery of a chain of faults.
"""

import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.cli.compare import compare_results
from deadpool_megatron.cli.run_result import read_result
from deadpool_megatron.cli.start import scripts
from deadpool_megatron.cli.start.scripts import DEFAULT_PRELOAD
from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import Event, EventTail, read_events
from deadpool_megatron.hookpoints import SCRIPT_VARIABLE
from tests.common import forks
from tests.common.finished_run import read_final
from tests.common.wait import wait_for
from tests.megatron_lm.harness.checkout import checkout

JOB_SECONDS = 240.0

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1"
    " --global-batch-size 8 --lr 1e-2 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2"
    " --seed 11 --log-interval 3"
)


@dataclass(frozen=True)
class Layout:
    """One way to cut a model: trainer flags, and how many nodes of how many members."""

    name: str
    flags: str
    nodes: int = 4
    members_per_node: int = 1

    @property
    def roles(self) -> int:
        """Number of roles."""
        return self.nodes * self.members_per_node


@dataclass(frozen=True)
class Program:
    """The command after the ``--`` of ``deadpool run``, and the numbers of nodes and members.

    ``{run}`` in the command stands for the directory of the run.
    """

    command: tuple[str, ...]
    nodes: int
    members_per_node: int = 1

    @property
    def status(self) -> int:
        """The exit status of success."""
        return 75 if "--exit-interval" in self.command else 0


@dataclass
class Outcome:
    """The results of a job."""

    directory: Path
    status: int
    output: str
    final: Mapping[str, Any]
    events: list[Event]
    fired: set[str] = field(default_factory=set)

    def of_kind(self, kind: str) -> list[Event]:
        """Events of one kind, in order."""
        return [event for event in self.events if event.kind == kind]

    def story(self) -> str:
        """Return the run's output and its last events, for a failed assertion."""
        lines = [json.dumps(event.to_dict()) for event in self.events[-60:]]
        return "\n".join([f"exit status {self.status}", self.output[-4000:], *lines])


def fault(name: str, point: str, **options: Any) -> dict[str, Any]:
    """One entry of a fault plan; ``match`` keys are given with a ``when_`` prefix."""
    match = {k.removeprefix("when_"): v for k, v in options.items() if k.startswith("when_")}
    rest = {k: v for k, v in options.items() if not k.startswith("when_")}
    return {"id": name, "point": point, "match": match, **rest}


def dies(
    name: str, point: str, role: int, iteration: int | None = None, **options: Any
) -> dict[str, Any]:
    """Return a fault that kills the node of ``role``, or the ``target``, at ``point``."""
    when = {} if iteration is None else {"when_iteration": iteration}
    return fault(name, point, when_role=role, **{"target": "node", **when, **options})


def end_members(directory: Path, node: int) -> None:
    """SIGKILL to the training processes of a node."""
    for pid in RunDirectory(directory).node_listings()[node]["members"].values():
        posix.kill(pid)


def trainer(layout: Layout, iterations: int, flags: str = "") -> Program:
    """The embedded trainer."""
    command = (
        *("-m", "deadpool_megatron.trainer", *MODEL.split(), *layout.flags.split()),
        *("--train-iters", str(iterations), *flags.split()),
    )
    return Program(command, layout.nodes, layout.members_per_node)


def run_job(
    directory: Path,
    layout: Layout,
    iterations: int,
    faults: Sequence[Mapping[str, Any]] = (),
    *,
    flags: str = "",
    **options: Any,
) -> Outcome:
    """:func:`run_program` with the embedded trainer."""
    return run_program(directory, trainer(layout, iterations, flags), faults, **options)


def strike(
    directory: Path,
    layout: Layout,
    iterations: int,
    faults: Sequence[Mapping[str, Any]],
    *,
    flags: str = "",
    saving: str = "",
    **options: Any,
) -> Outcome:
    """Run the embedded trainer with these faults and hold it against the undisturbed run.

    ``saving``: flags that change nothing of what is computed; the undisturbed run has none.
    """
    wanted = reference(layout, iterations, flags)
    outcome = run_job(
        directory, layout, iterations, faults, flags=f"{flags} {saving}".strip(), **options
    )
    assert_unnoticed(outcome, wanted, faults)
    return outcome


def run_program(
    directory: Path,
    program: Program,
    faults: Sequence[Mapping[str, Any]] = (),
    *,
    spares: int = 0,
    refill: int = 0,
    settings: str = "",
    seconds: float = JOB_SECONDS,
    arguments: Sequence[str] = (),
    when_stepping: tuple[int, Callable[[], None]] | None = None,
) -> Outcome:
    """Run one job to its end (or kill it after ``seconds``, which fails the test).

    ``settings`` and ``arguments`` are those of ``deadpool run``. ``when_stepping``: call the
    function once the run has finished that iteration.
    """
    plan = directory.with_suffix(".faults")
    plan.write_text(json.dumps(list(faults)))
    command = [
        *("deadpool_megatron", "run"),
        *("--nodes", str(program.nodes), "--nproc-per-node", str(program.members_per_node)),
        *("--spares", str(spares), "--refill", str(refill), "--run-dir", str(directory)),
        *("--deadpool-set", "hash-interval=1", *settings.split(), *arguments),
        *("--", *(part.replace("{run}", str(directory)) for part in program.command)),
    ]
    environment = {**os.environ, failpoints.ENVIRONMENT_NAME: str(plan)}
    printed = directory.with_suffix(".output")
    process = _launch(command, environment, printed)
    if when_stepping is not None:
        number = when_stepping[0]
        await_event(directory, lambda e: e.kind == "step" and e.iteration == number, seconds)
        when_stepping[1]()
    late = ""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGTERM)
        process.wait(60)
        late = f"\n(the test's limit of {seconds:g} s was over)"
    output = printed.read_text() + late
    final = directory / "final.json"
    log = directory / "events.jsonl"
    return Outcome(
        directory=directory,
        status=process.wait(),
        output=output,
        final=read_final(directory) if final.exists() else {},
        events=list(read_events(log)) if log.exists() else [],
        fired=failpoints.fired(plan),
    )


def await_event(
    directory: Path, wanted: Callable[[Event], bool], seconds: float = JOB_SECONDS
) -> None:
    """Follow the event file of a run until there is such an event."""
    log = directory / "events.jsonl"
    tail = EventTail(log)
    wait_for(f"such an event in {log}", lambda: any(map(wanted, tail.poll())), seconds)


def _launch(
    command: Sequence[str], environment: Mapping[str, str], printed: Path
) -> subprocess.Popen[bytes] | forks.Forked:
    """``python -m COMMAND``, from a process that has imported what its members need."""
    with open(printed, "wb") as output, open(os.devnull, "rb") as nothing:
        files = (nothing.fileno(), output.fileno(), output.fileno())
        server = _importer(command[command.index("--") + 1 :])
        if server is not None:
            handles = dict(enumerate(files))
            return server.start(*command, environment=environment, handles=handles, leads=True)
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            **dict(zip(("stdin", "stdout", "stderr"), files, strict=True)),
            env=environment,
            start_new_session=True,
        )


def _importer(command: Sequence[str]) -> forks.ForkServer | None:
    """Return a process with the imports of members of this command; None if it cannot be shared:
    with a tree that a test has changed, or with a GPU, where nothing is forked."""
    if not scripts.waits_for_forks("auto"):
        return None
    tree, members = checkout(), scripts.member_command(command)
    script = scripts.script_of(members)
    if script is not None and (tree is None or Path(script).parent != tree):
        return None
    environment = {} if script is None else {SCRIPT_VARIABLE: script}
    modules = scripts.modules(None, DEFAULT_PRELOAD, members)
    return forks.server(("deadpool_megatron.cli.start.run", *modules), environment)


@functools.cache
def _reference_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="reference-")


def reference(layout: Layout, iterations: int, flags: str = "") -> Outcome:
    """The undisturbed run of the embedded trainer in this layout."""
    return undisturbed(trainer(layout, iterations, flags))


@functools.cache
def undisturbed(program: Program) -> Outcome:
    """The undisturbed run of this program; made once per test session."""
    name = hashlib.sha256(repr(program).encode()).hexdigest()[:12]
    outcome = run_program(Path(_reference_folder().name) / name, program)
    assert outcome.status == program.status, outcome.story()
    return outcome


def assert_unnoticed(
    outcome: Outcome, wanted: Outcome, faults: Sequence[Mapping[str, Any]], after: int = 0
) -> None:
    """Assert that all faults fired, and the job ended bit-identical to the undisturbed job.

    ``after``: the iteration of the checkpoint that the job began with.
    """
    missing = {str(entry["id"]) for entry in faults} - outcome.fired
    assert outcome.status == wanted.status, outcome.story()
    assert not missing, f"never fired: {sorted(missing)}\n{outcome.story()}"
    found = read_result(outcome.directory)
    found = replace(found, resumed_after=max(after, found.resumed_after))
    comparison = compare_results(read_result(wanted.directory), found)
    assert comparison.identical, "\n".join(map(str, comparison.differences))
    assert comparison.compared["hashes"] >= len(wanted.final["roles"])
    assert_restored_state_was_hashed(outcome)


def assert_restored_state_was_hashed(outcome: Outcome) -> None:
    """Assert that all roles reported the hash of the state that each recovery restored from memory
    at the end of a step; another hash than before would have ended the run. An epoch that was
    never opened (a run of another model, which was refused) restored nothing.
    """
    opened = {event.epoch for event in outcome.of_kind("epoch-opened")}
    hashed = {(event.epoch, event.iteration, event.role) for event in outcome.of_kind("state-hash")}
    looked_at = {iteration for _, iteration, _ in hashed}  # each, unless a run hashes some only
    sources = {event.epoch: event.data["restore"] for event in outcome.of_kind("epoch-decided")}
    for recovery in outcome.final["recoveries"]:
        epoch, (_, iteration) = recovery["epoch"], recovery["generation"]
        if recovery["boundary"] != "step" or sources[epoch] != "memory":
            continue
        if epoch not in opened or iteration not in looked_at - {0}:
            continue
        missing = [r for r in outcome.final["roles"] if (epoch, iteration, int(r)) not in hashed]
        assert not missing, f"epoch {epoch}, iteration {iteration}: no hash of roles {missing}"


def logged(outcome: Outcome) -> str:
    """Return all output and log lines of the run."""
    return "\n".join(str(event.data["text"]) for event in outcome.of_kind("log"))


def recomputed(outcome: Outcome) -> list[int]:
    """Finished iterations that each recovery computed again."""
    return [entry["steps_recomputed"] for entry in outcome.final["recoveries"]]


def restart_kinds(outcome: Outcome) -> list[str]:
    """Where each epoch's state came from."""
    return [event.data["restore"] for event in outcome.of_kind("epoch-decided")]
