"""Blame: causes of the end of an epoch or a run, suspicions, bytes that must not be trusted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from deadpool_megatron.failures import GRACE_SECONDS, OF_THE_HOST, FailureKind
from deadpool_megatron.layout.records import BadPart, Generation, Inventory, Restore
from deadpool_megatron.wire.forms import Coded

# This many causes of an end are reported.
SHOWN_FAILURES = 3
# This many equal failures in a row, without any progress, end the retries.
_SAME_EXITS = 2
_SAME_FAILURES = 3


@dataclass(frozen=True)
class Failure(Coded):
    """The cause of an epoch's end. ``signature``: equal for the same failure again; () if it is no
    failure.

    ``exited``: the process ended by itself, so another try will most likely end in the same way.
    ``evidence``: details beyond ``cause`` for the search for a bug, such as the name of a log.
    """

    cause: str
    kind: FailureKind
    signature: tuple[str, ...] = ()
    exited: bool = False
    node: int | None = None
    evidence: str = ""

    @staticmethod
    def of_node(node: int, cause: str, kind: FailureKind = FailureKind.NODE_LOST) -> Failure:
        """Return the failure of a whole node."""
        return Failure(cause, kind, ("node", str(node)), node=node)

    def with_evidence(self) -> str:
        """Return the cause, and where to look further."""
        return f"{self.cause} [{self.evidence}]" if self.evidence else self.cause


@dataclass(frozen=True)
class FinalStatus:
    """The end of the run once its state is saved. ``kind``: that of the failure that ends it.
    ``exports``: a dump is made a checkpoint, too, as nothing waits for the end."""

    status: int
    reason: str
    kind: FailureKind | None = None
    exports: bool = False

    def with_detail(self, detail: str) -> FinalStatus:
        """Return the same end with another clause of its reason."""
        return replace(self, reason=f"{self.reason}; {detail}")


@dataclass
class Suspicion:
    """A failure whose better cause may still arrive."""

    failure: Failure
    at: float
    bad_parts: frozenset[BadPart] = frozenset()
    restore_failed: bool = False  # the generation as a whole did not restore
    grace_seconds: float = GRACE_SECONDS

    @property
    def until(self) -> float:
        """Return when the failure counts as the cause."""
        return self.at + self.grace_seconds


@dataclass
class Blame:
    """Failures and bad state. ``failures``: those since the newest iteration, with it; ``stacks``:
    positions of processes that hung. ``bad_parts``, ``bad_generations``: must not be restored from;
    ``suspected``: failed to restore once. ``nonfinite``: see :class:`History`. ``poisoned_from``:
    nothing may be restored from this iteration on, until an epoch is decided that continues before
    it."""

    failures: tuple[tuple[int, Failure], ...] = ()
    stacks: tuple[str, ...] = ()
    suspicion: Suspicion | None = None
    bad_parts: frozenset[BadPart] = frozenset()
    suspected: frozenset[Generation] = frozenset()
    bad_generations: frozenset[Generation] = frozenset()
    nonfinite: Mapping[int, int] = field(default_factory=dict)
    poisoned_from: int | None = None

    def note_failure(self, reached: int, failure: Failure) -> None:
        """Count a failure after the iteration ``reached``; progress followed the failures before
        that, so these do not count any more."""
        same = (known for known in self.failures if known[0] >= reached)
        self.failures = (*same, (reached, failure))

    def crash_loop(self, allowed: int) -> FinalStatus | None:
        """Return how the run ends if the last failure repeats, or more than ``allowed`` came
        without a new iteration in between: that is the program's own fault."""
        failure, newest = self.failures[-1][1], max(iteration for iteration, _ in self.failures)
        every = [known for _, known in self.failures]
        same = [known for known in every if known.signature == failure.signature]
        repeated = _is_repeated(same, failure)
        if not repeated and len(every) <= allowed:
            return None
        chosen = same if repeated else every
        listed = [*dict.fromkeys(known.with_evidence() for known in chosen[-SHOWN_FAILURES:])]
        if failure.kind in (FailureKind.HANG, FailureKind.MEMBER_FROZEN):
            listed += self.stacks
        count = f"{len(chosen)} times the same failure, so it is not tried again: "
        reason = f"no progress after iteration {newest}: {count if repeated else ''}"
        kind = FailureKind.BUG if repeated else failure.kind
        return FinalStatus(1, reason + "; ".join(listed), kind)

    def suspect(self, new: Suspicion) -> None:
        """Take its failure for the cause unless a better cause comes in time; state that did not
        restore is a better cause."""
        known = self.suspicion
        if known is None:
            self.suspicion = new
            return
        if new.bad_parts or new.restore_failed:
            known.failure = new.failure
        known.bad_parts |= new.bad_parts
        known.restore_failed |= new.restore_failed

    def believe(self, suspicion: Suspicion, restore: Restore) -> None:
        """Note the bad state of a ``restore`` that failed, as no better cause came.

        The first time a device may be at fault; the second time the generation is given up. State
        that did not come from memory has another name in each epoch: its path is struck off.
        """
        self.bad_parts |= suspicion.bad_parts
        if suspicion.restore_failed and restore.kind == "memory":
            self.bad_generations |= self.suspected & {restore.generation}
            self.suspected |= {restore.generation}

    def is_poisoned(self, generation: Generation) -> bool:
        """Return whether the generation includes a discarded update."""
        return self.poisoned_from is not None and generation.iteration >= self.poisoned_from

    def discard(self, iteration: int, lineage: int) -> None:
        """Bar from any restore the state that includes ``iteration`` and was computed in this
        lineage or before."""
        self.nonfinite = {**self.nonfinite, iteration: lineage}
        self.poisoned_from = iteration

    def untrusted(self, inventories: Iterable[Inventory]) -> frozenset[Generation]:
        """Return the generations in these inventories that must not be restored, among others."""
        if self.poisoned_from is None:
            return self.bad_generations
        held = {holding.generation for inventory in inventories for holding in inventory.holdings}
        return self.bad_generations.union(filter(self.is_poisoned, held))

    def trusted(self, valid: Iterable[Restore]) -> tuple[Restore, ...]:
        """Return the checkpoints that may be used."""
        return tuple(restore for restore in valid if not self.is_poisoned(restore.generation))


def _is_repeated(same: list[Failure], failure: Failure) -> bool:
    """Return whether failures with equal signature since the last new iteration are the program's
    fault."""
    if failure.kind in OF_THE_HOST:
        # A host that fails again loses its roles; if another fails alike, no host is at fault.
        return len({known.node for known in same}) > 1 or len(same) >= _SAME_FAILURES
    return len(same) >= (_SAME_EXITS if failure.exited else _SAME_FAILURES)
