"""Blame: causes of the end of an epoch or a run, suspicions, bytes that must not be counted on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deadpool_megatron.failures import GRACE_SECONDS, OF_THE_HOST, FailureKind
from deadpool_megatron.layout.records import BadPart, Generation, Inventory, Restore
from deadpool_megatron.wire.forms import read, write

# So many causes of an end are told.
SHOWN_FAILURES = 3
# The same failure so often in a row without any progress is not worth another try.
_SAME_EXITS = 2
_SAME_FAILURES = 3


@dataclass(frozen=True)
class Failure:
    """The cause of an epoch's end. ``signature``: equal for the same failure again; () is not a
    failure.

    ``exited``: the process ended by itself, so trying again will most likely end the same.
    ``evidence``: more than ``cause`` for whoever has to find a bug, such as the name of a log.
    """

    cause: str
    kind: FailureKind
    signature: tuple[str, ...] = ()
    exited: bool = False
    node: int | None = None
    evidence: str = ""

    def with_evidence(self) -> str:
        """The cause, and where to look further."""
        return f"{self.cause} [{self.evidence}]" if self.evidence else self.cause

    @staticmethod
    def from_record(values: Mapping[str, Any]) -> Failure:
        """Return what :meth:`to_record` has kept."""
        return read(Failure, values)

    def to_record(self, iteration: int) -> dict[str, Any]:
        """Return what a record of the next epoch says of it; see :class:`History`."""
        return {**write(self), "iteration": iteration}


@dataclass(frozen=True)
class LastWords:
    """The end of the run once its state is saved. ``kind``: of the failure that ends it.
    ``exports``: a dump is made a checkpoint, too, as nobody waits for the end."""

    status: int
    reason: str
    kind: FailureKind | None = None
    exports: bool = False


@dataclass
class Suspicion:
    """Something failed, but its cause may still be on the way."""

    failure: Failure
    at: float
    until: float
    bad_parts: frozenset[BadPart] = frozenset()
    doubtful: bool = False  # the generation as a whole did not restore


@dataclass
class Blame:
    """``failures``: those since the newest iteration, with it; ``stacks``: where processes stood
    that hung. ``bad_parts``, ``bad_generations``: must not be restored from; ``doubted``: did not
    restore once. ``nonfinite``: see :class:`History`; ``poisoned_from``: the iteration from which
    on nothing may be restored, until an epoch is decided that continues before it.
    """

    failures: tuple[tuple[int, Failure], ...] = ()
    stacks: tuple[str, ...] = ()
    suspicion: Suspicion | None = None
    bad_parts: frozenset[BadPart] = frozenset()
    doubted: frozenset[Generation] = frozenset()
    bad_generations: frozenset[Generation] = frozenset()
    nonfinite: Mapping[int, int] = field(default_factory=dict)
    poisoned_from: int | None = None

    def note_failure(self, reached: int, failure: Failure) -> None:
        """Count a failure after the iteration ``reached``; those before it had progress after them
        and do not count any more."""
        same = (known for known in self.failures if known[0] >= reached)
        self.failures = (*same, (reached, failure))

    def crash_loop(self, allowed: int) -> LastWords | None:
        """Returns how the run ends when the last failure repeats, or more than ``allowed`` came
        without a new iteration in between: that is the program's own fault."""
        failure, newest = self.failures[-1][1], max(iteration for iteration, _ in self.failures)
        every = [known for _, known in self.failures]
        same = [known for known in every if known.signature == failure.signature]
        repeated = _is_repeated(same, failure)
        if not repeated and len(every) <= allowed:
            return None
        shown = same if repeated else every
        told = [*dict.fromkeys(known.with_evidence() for known in shown[-SHOWN_FAILURES:])]
        if failure.kind in (FailureKind.HANG, FailureKind.MEMBER_FROZEN):
            told += self.stacks
        count = f"{len(shown)} times the same failure, so it is not tried again: "
        reason = f"no progress after iteration {newest}: {count if repeated else ''}"
        kind = FailureKind.BUG if repeated else failure.kind
        return LastWords(1, reason + "; ".join(told), kind)

    def suspect(
        self,
        failure: Failure,
        now: float,
        bad_parts: frozenset[BadPart] = frozenset(),
        *,
        doubtful: bool = False,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        """Hold this against the epoch unless a better cause comes within ``grace_seconds``; state
        that did not restore is one already."""
        known = self.suspicion
        if known is None:
            self.suspicion = Suspicion(failure, now, now + grace_seconds, bad_parts, doubtful)
            return
        if bad_parts or doubtful:
            known.failure = failure
        known.bad_parts |= bad_parts
        known.doubtful |= doubtful

    def believe(self, suspicion: Suspicion, restore: Restore) -> None:
        """No better cause came; ``restore``: what was restored.

        The first time the fault may be a device's; the second time the generation is given up. One
        that did not come from memory has another name in each epoch: its path is struck off.
        """
        self.bad_parts |= suspicion.bad_parts
        if suspicion.doubtful and restore.kind == "memory":
            self.bad_generations |= self.doubted & {restore.generation}
            self.doubted |= {restore.generation}

    def is_poisoned(self, generation: Generation) -> bool:
        """Returns whether the generation includes an update that is thrown away."""
        return self.poisoned_from is not None and generation.iteration >= self.poisoned_from

    def throw_away(self, iteration: int, lineage: int) -> None:
        """Have nothing restored any more that includes ``iteration`` and was computed in this
        lineage or before."""
        self.nonfinite = {**self.nonfinite, iteration: lineage}
        self.poisoned_from = iteration

    def untrusted(self, inventories: Iterable[Inventory]) -> frozenset[Generation]:
        """Returns the generations in these inventories that must not be restored, and others."""
        if self.poisoned_from is None:
            return self.bad_generations
        held = {holding.generation for one in inventories for holding in one.holdings}
        return self.bad_generations.union(filter(self.is_poisoned, held))

    def trusted(self, valid: Iterable[Restore]) -> tuple[Restore, ...]:
        """Returns those of the checkpoints that may be used."""
        return tuple(one for one in valid if not self.is_poisoned(one.generation))


def _is_repeated(same: list[Failure], failure: Failure) -> bool:
    """Return whether failures with one signature since the last new iteration are the program's
    fault."""
    if failure.kind in OF_THE_HOST:
        # A host that fails again is left for another; where that fails alike, it is no host's.
        return len({known.node for known in same}) > 1 or len(same) >= _SAME_FAILURES
    return len(same) >= (_SAME_EXITS if failure.exited else _SAME_FAILURES)
