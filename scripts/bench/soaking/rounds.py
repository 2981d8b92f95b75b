"""A round of a soak: a whole run with many faults, compared with plain training.

Every role reports the hash of its state after each iteration. At the end of a round each is
compared with the trainer on stock gloo, which begins again from its checkpoint wherever the run has
changed its size.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.termination import stop

from deadpool_megatron import failpoints
from deadpool_megatron.cluster.journal.journal import Journal
from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.run_directory.directory import (
    RunDirectory,
    RunDirectoryError,
    RunInfo,
    read_json,
)
from deadpool_megatron.events import Event, EventTail, Kind
from deadpool_megatron.failures import FailureKind
from deadpool_megatron.layout.ranks import SIZE_STEP
from deadpool_megatron.layout.records import EpochRecord
from soaking import faults, growth
from tests.elastic.harness.legs import trainer_legs
from tests.elastic.harness.runs import differing, lengths

_MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1"
    " --global-batch-size 12 --lr 1e-3 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 2"
    " --seed 11 --log-interval 100 --use-distributed-optimizer"
)
_PP2 = "--pipeline-model-parallel-size 2"
_ELASTIC = "--deadpool-elastic on --deadpool-elastic-wait 0.5 --deadpool-set settle-seconds=3"
_PARITY = f"{_ELASTIC} --deadpool-protection parity"
# Nodes, members of each, model replicas, flags of the trainer, options of the run; by turns.
VARIANTS = (
    (4, 1, 4, "", _ELASTIC),
    (3, 2, 3, _PP2, _PARITY),
    (4, 1, 2, _PP2, "--deadpool-elastic off --spares 2"),
    (4, 1, 4, "--num-experts 4 --expert-model-parallel-size 2", _ELASTIC),
    (4, 1, 4, "--bf16", _PARITY),
)
_SETTINGS = "--deadpool-set hash-interval=1 --deadpool-hang 30 --deadpool-nonfinite rollback"
_SAVE_INTERVAL = "40"
# Events that report a fault or a request.
_REPORTED_KINDS = {
    *(Kind.EPOCH_CLOSED, Kind.NODE_LOST, Kind.COORDINATOR, Kind.MEMBER_LOST, Kind.VAULT_LOST),
    *(Kind.NONFINITE, Kind.PROTECTION, Kind.DRAIN, Kind.DURABLE),
}
_SAMPLE_SECONDS = 5.0
_LEAVE_SECONDS = 120.0


class SoakError(Exception):
    """The soak found something: a state that is wrong, a run that hangs or ends."""


@dataclass
class Struck:
    """A fault and its effect. ``over_at``: its strike, or the end of its own duration if that is
    later, on the wall clock; ``seconds``: from there to the next new iteration; ``recomputed``:
    iterations that each of its recoveries computed again; ``observed``: it had an effect, as
    reported by the run or the fault itself."""

    kind: str
    effect: str
    at_seconds: float
    iteration: int
    over_at: float = 0.0
    seconds: float | None = None
    recomputed: list[int] = field(default_factory=list)
    observed: bool = False

    def settle(self, recoveries: Iterable[Event]) -> None:
        """Take over the numbers of its recoveries, the last of which may end later than the first
        iteration that was reported: that was under way, and no node was needed for it. A planned
        change is no part of a death: the run trains until another node takes that place.
        """
        for event in recoveries:
            is_own = self.kind not in faults.DEATHS or not is_planned(event)
            if is_own and event.wall_seconds > self.over_at:
                self.recomputed.append(int(event.data["steps_recomputed"]))
                self.seconds = max(self.seconds or 0.0, event.wall_seconds - self.over_at)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {"what" if name == "effect" else name: value for name, value in vars(self).items()}


def is_planned(recovery: Event) -> bool:
    """Whether a recovery is that of a planned change, such as a change of size."""
    return bool(recovery.data["kind"] == FailureKind.PLANNED)


@dataclass
class Round:
    """A run in progress. ``began``: the start of the whole soak, monotonic seconds; ``variant``:
    its place in VARIANTS; ``sizes``: its numbers of ranks, each with its last iteration."""

    directory: Path
    began: float
    process: subprocess.Popen[bytes]
    variant: int
    arguments: str
    info: RunInfo | None = None
    hashes: dict[str, dict[str, str]] = field(default_factory=dict)
    decided: list[Event] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    newest: int = 0
    recoveries: list[Event] = field(default_factory=list)
    samples: list[growth.Sample] = field(default_factory=list)
    files: list[growth.Files] = field(default_factory=list)
    compared: int = 0
    reported: int = 0

    def __post_init__(self) -> None:
        self.run = RunDirectory(self.directory)
        self._tail = EventTail(self.run.events)
        self._sampled = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the launcher has ended."""
        return self.process.poll() is not None

    def look(self) -> None:
        """Read new events. Raises SoakError for other numbers of a replayed iteration."""
        for event in self._tail.poll():
            self._take(event)
        if time.monotonic() - self._sampled >= _SAMPLE_SECONDS:
            self._sampled = time.monotonic()
            self._sample()

    def _take(self, event: Event) -> None:
        self.reported += event.kind in _REPORTED_KINDS
        if event.kind is Kind.STEP:
            self.newest = max(self.newest, event.iteration or 0)
        elif event.kind is Kind.RECOVERED:
            self.recoveries.append(event)
        elif event.kind is Kind.STALE_DIVERGENCE:
            raise SoakError(f"a replayed iteration gave other numbers: {dict(event.data)}")
        elif event.kind is Kind.STATE_HASH:
            states = self.hashes.setdefault(str(event.iteration), {})
            states[str(event.role)] = str(event.data["sha256"])
        elif event.kind is Kind.EPOCH_DECIDED:
            self.decided.append(event)
            again = event.data.get("forgotten_from", self.newest + 1)
            self.hashes = {key: states for key, states in self.hashes.items() if int(key) < again}

    def _sample(self) -> None:
        seconds = time.monotonic() - self.began
        if self.info is None:
            try:
                self.info = self.run.read_run()
            except RunDirectoryError:
                return  # not written yet
        for listing in self.run.node_listings().values():
            pids = [("agent", listing["agent"]), ("vault", listing["vault"])]
            pids += [("member", pid) for pid in listing["members"].values()]
            for part, pid in pids:
                self._add(growth.sample(seconds, part, int(pid)))
        try:
            pid = int(read_json(self.run.coordinator)["pid"])
            self._add(growth.sample(seconds, "coordinator", pid))
        except (OSError, ValueError, KeyError):
            pass  # it is being replaced
        segments = faults.segments_bytes(self.info.run_id) / 1e6
        directory = faults.directory_bytes(self.directory) / 1e6
        self.files.append(growth.Files(seconds, self.newest, segments, directory))

    def _add(self, found: growth.Sample | None) -> None:
        if found is not None:
            self.samples.append(found)

    def seats(self) -> dict[int, tuple[int, int]]:
        """Return role -> (node, slot) of the newest record; empty before the first."""
        if self.info is None:
            return {}
        found = Journal(self.run.journal).newest("epoch")
        if found is None:
            return {}
        record = EpochRecord.from_dict(found[1])
        return {role: (seat.node, seat.local_rank) for role, seat in record.seats.items()}

    def has_a_living_node_for_each_role(self) -> bool:
        """Whether the agents of all nodes with roles in the newest record are alive."""
        listings = self.run.node_listings()
        nodes = {node for node, _ in self.seats().values()}
        return all(n in listings and posix.is_alive(int(listings[n]["agent"])) for n in nodes)


def start(directory: Path, iterations: int, began: float, variant: int) -> Round:
    """Start ``deadpool run`` with faults at named points, saves, and replacements for lost nodes,
    in a process group of its own."""
    nodes, members, _, flags, options = VARIANTS[variant]
    target = faults.Target(RunDirectory(directory), "", random.Random(), False)
    target.plan.write_text(json.dumps(faults.planned()))
    environment = dict(os.environ) | {
        failpoints.ENVIRONMENT_NAME: str(target.plan),
        "DEADPOOL_SOAK_SLOW_FSYNC": str(target.slow_fsync),
        "PYTHONPATH": str(Path(__file__).parent / "slow"),
    }
    arguments = f"{_MODEL} {flags} --train-iters {iterations}"
    command = [
        *(sys.executable, "-m", "deadpool_megatron", "run", "--run-dir", str(directory), "--quiet"),
        *("--nodes", str(nodes), "--nproc-per-node", str(members), "--refill", "100000"),
        *(*options.split(), *_SETTINGS.split(), "--", "-m", "deadpool_megatron.trainer"),
        *(*arguments.split(), "--save", f"{directory}-saves", "--save-interval", _SAVE_INTERVAL),
    ]
    with open(directory.with_suffix(".out"), "wb") as output:
        files = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        process = subprocess.Popen(command, env=environment, start_new_session=True, **files)
    return Round(directory, began, process, variant, arguments)


def follow(round_: Round, until: Callable[[], bool], seconds: float, condition: str) -> None:
    """Poll until a condition holds. Raises SoakError if it does not in time, or the run ends."""
    limit = time.monotonic() + seconds
    while not until():
        if round_.is_over and not until():
            status = round_.process.returncode
            if status == 0:
                return
            output = round_.directory.with_suffix(".out").read_text()[-1500:]
            raise SoakError(f"the run ended with {status} while waiting for {condition}: {output}")
        if time.monotonic() > limit:
            raise SoakError(f"waited {seconds:g} s for {condition}: the run hangs")
        round_.look()
        time.sleep(0.05)


def end(round_: Round) -> None:
    """Stop a round that is not over, with all its processes."""
    stop(round_.process, _LEAVE_SECONDS)


@dataclass(frozen=True)
class Plan:
    """The faults of a round. ``pause_seconds``: minimum and maximum between a recovery and the next
    fault; ``progress_seconds``: limit of the time from a fault to a new iteration."""

    kinds: Mapping[str, Callable[[faults.Target], str]]
    pause_seconds: tuple[float, float]
    progress_seconds: float
    isolated: bool


def strike_on(
    round_: Round,
    plan: Plan,
    dice: random.Random,
    deadline: float,
    iterations: int,
    struck: list[Struck],
) -> None:
    """Strike until the round is near its end or the deadline has come; each fault is added to
    ``struck``. Raises SoakError."""
    follow(round_, lambda: round_.newest >= 2, 240.0, "the first iterations")
    info = round_.run.read_run()
    target = faults.Target(round_.run, info.run_id, dice, plan.isolated)
    names = sorted(plan.kinds) + 3 * sorted(plan.kinds.keys() & {"node", "agent"})
    pauses, last = (lambda: dice.uniform(*plan.pause_seconds)), iterations - 40
    pause(round_, pauses())
    while time.monotonic() < deadline and round_.newest < last and not round_.is_over:
        if not names:
            pause(round_, pauses())
            continue
        kind = dice.choice(names)
        reported, recoveries = round_.reported, len(round_.recoveries)
        target.is_seen, target.over_at = False, 0.0
        try:
            target.seats = round_.seats()
            fault = Struck(kind, "", time.monotonic() - round_.began, round_.newest)
            fault.effect = plan.kinds[kind](target)
        except faults.NotNow as error:
            print(f"  {kind}: not now: {error}", file=sys.stderr)
            pause(round_, pauses())
            continue
        struck.append(fault)
        fault.over_at = target.over_at or time.time()
        round_.look()
        await_progress(round_, plan.progress_seconds, fault.effect)
        fault.seconds = max(0.0, time.time() - fault.over_at)
        pause(round_, pauses())  # an order may be carried out an iteration later
        fault.observed = target.is_seen or round_.reported > reported
        fault.settle(round_.recoveries[recoveries:])
        seconds = f"{fault.at_seconds:7.1f} s  {fault.effect}: {fault.seconds:.1f} s"
        print(f"  {seconds}", file=sys.stderr)


def pause(round_: Round, seconds: float) -> None:
    """Let the run continue undisturbed for that time."""
    limit = time.monotonic() + seconds
    follow(round_, lambda: time.monotonic() > limit, seconds + 60.0, "the next fault")


def await_progress(round_: Round, seconds: float, effect: str) -> None:
    """Wait until a new iteration is finished, and no role is left with a dead node: the run is
    protected against one loss at a time. An iteration may still end right after a node's death,
    and if the coordinator has died with it, its loss is decided only seconds later.

    Raises SoakError as :func:`follow`.
    """
    before = round_.newest
    follow(
        round_,
        lambda: round_.newest > before and round_.has_a_living_node_for_each_role(),
        seconds,
        f"life after: {effect}",
    )


def finish(round_: Round, iterations: int) -> None:
    """Let a round end by itself. Raises SoakError unless it ends well."""
    follow(round_, lambda: round_.is_over, 1200.0, "the end of the round")
    round_.look()
    if round_.process.returncode != 0:
        raise SoakError(f"the round ended with {round_.process.returncode}")
    if round_.newest != iterations:
        raise SoakError(f"the round ended after {round_.newest} of {iterations} iterations")
    final = read_json(round_.run.final)
    if final["exit_status"] != 0:
        raise SoakError(f"final.json: {json.dumps(final)[:500]}")


def compare(round_: Round) -> None:
    """Hold the states of a round that has ended against plain training at the same sizes. Raises
    SoakError for the first that differs."""
    nodes, members, replicas, *_ = VARIANTS[round_.variant]
    per_replica = nodes * members // replicas
    round_.sizes = list(lengths(round_.decided, round_.newest, replicas, per_replica))
    with tempfile.TemporaryDirectory(prefix="deadpool-soak-plain-") as name:
        legs = trainer_legs(round_.arguments, round_.sizes, Path(name))
        for (ranks, _), leg in zip(round_.sizes, legs, strict=True):
            first_role = (replicas - ranks // per_replica) * SIZE_STEP
            other, compared = differing(leg, round_.hashes, first_role)
            if other:
                raise SoakError(f"other states (role, iteration), {ranks} ranks: {other[:8]}")
            round_.compared += compared
