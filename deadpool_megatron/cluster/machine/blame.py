"""Blame: causes of the end of an epoch or a run, suspicions, bytes that must not be trusted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from deadpool_megatron.failures import GRACE_SECONDS, OF_THE_HOST, FailureKind
from deadpool_megatron.layout.records import BadPart, Generation, Inventory, Restore
from deadpool_megatron.wire.forms import Coded

# This many causes are reported at the end of a run.
SHOWN_FAILURES = 3
# This many equal failures without any progress end the run: the first number is for processes that
# exited by themselves, the second for all other failures.
_SAME_EXITS = 2
_SAME_FAILURES = 3


@dataclass(frozen=True)
class Failure(Coded):
    """The cause of an epoch's end. ``signature``: equal for each repetition of a failure; () for a
    cause that is no failure.

    ``exited``: the process ended by itself, so another try will most likely end in the same way.
    ``evidence``: details beyond ``cause`` that help to find a bug, such as the name of a log.
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
    """The end of the run once its state is saved. ``kind``: the kind of the failure that ends it.
    ``exports``: a dump is exported as a checkpoint too, as there is no hurry."""

    status: int
    reason: str
    kind: FailureKind | None = None
    exports: bool = False

    def with_detail(self, detail: str) -> FinalStatus:
        """Return the status with another clause added to its reason."""
        return replace(self, reason=f"{self.reason}; {detail}")


@dataclass
class Suspicion:
    """A failure that may be a consequence of another failure, of which a report may arrive."""

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
    """Failures and bad state. ``failures``: pairs of the iteration that was reached and a failure
    since; ``stacks``: positions of processes that hung. ``bad_parts``, ``bad_generations``: state
    that must not be restored; ``suspected``: generations that failed to restore once.
    ``nonfinite``: see :class:`History`. ``poisoned_from``: no state of this iteration or a later
    iteration may be restored, until an epoch is decided that continues before it."""

    failures: tuple[tuple[int, Failure], ...] = ()
    stacks: tuple[str, ...] = ()
    suspicion: Suspicion | None = None
    bad_parts: frozenset[BadPart] = frozenset()
    suspected: frozenset[Generation] = frozenset()
    bad_generations: frozenset[Generation] = frozenset()
    nonfinite: Mapping[int, int] = field(default_factory=dict)
    poisoned_from: int | None = None

    def note_failure(self, reached: int, failure: Failure) -> None:
        """Count a failure after the iteration ``reached``. Failures before that iteration do not
        count any more, as progress followed them."""
        recent = (entry for entry in self.failures if entry[0] >= reached)
        self.failures = (*recent, (reached, failure))

    def crash_loop(self, allowed: int) -> FinalStatus | None:
        """Return the end of the run if the last failure is repeated, or if more than ``allowed``
        failures came without a new iteration in between; else None."""
        last, newest = self.failures[-1][1], max(iteration for iteration, _ in self.failures)
        failures = [failure for _, failure in self.failures]
        same = [failure for failure in failures if failure.signature == last.signature]
        is_repeated = _is_repeated(same, last)
        if not is_repeated and len(failures) <= allowed:
            return None
        chosen = same if is_repeated else failures
        causes = [*dict.fromkeys(failure.with_evidence() for failure in chosen[-SHOWN_FAILURES:])]
        if last.kind in (FailureKind.HANG, FailureKind.MEMBER_FROZEN):
            causes += self.stacks
        count = f"{len(chosen)} times the same failure, so it is not tried again: "
        reason = f"no progress after iteration {newest}: {count if is_repeated else ''}"
        kind = FailureKind.BUG if is_repeated else last.kind
        return FinalStatus(1, reason + "; ".join(causes), kind)

    def suspect(self, new: Suspicion) -> None:
        """Take the failure of ``new`` for the cause, unless a better cause comes in time. State
        that did not restore is a better cause than the suspicion so far."""
        present = self.suspicion
        if present is None:
            self.suspicion = new
            return
        if new.bad_parts or new.restore_failed:
            present.failure = new.failure
        present.bad_parts |= new.bad_parts
        present.restore_failed |= new.restore_failed

    def believe(self, suspicion: Suspicion, restore: Restore) -> None:
        """Note the bad state of a ``restore`` that failed, as no better cause came.

        After the first failure, a device may be at fault; after the second, the generation is given
        up. State that is not from memory is a new generation in each epoch, so its path is
        invalidated instead (:func:`.faults.believe`).
        """
        self.bad_parts |= suspicion.bad_parts
        if suspicion.restore_failed and restore.kind == "memory":
            self.bad_generations |= self.suspected & {restore.generation}
            self.suspected |= {restore.generation}

    def is_poisoned(self, generation: Generation) -> bool:
        """Return whether the generation includes a discarded update."""
        return self.poisoned_from is not None and generation.iteration >= self.poisoned_from

    def discard(self, iteration: int, lineage: int) -> None:
        """Exclude from restores all state that includes ``iteration`` and was computed in this
        lineage or an earlier lineage."""
        self.nonfinite = {**self.nonfinite, iteration: lineage}
        self.poisoned_from = iteration

    def untrusted(self, inventories: Iterable[Inventory]) -> frozenset[Generation]:
        """Return the generations that must not be restored: all that are known to be bad, and those
        in ``inventories`` that include a discarded update."""
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
        # A host that fails again loses its roles. If another host fails too, no host is at fault.
        return len({other.node for other in same}) > 1 or len(same) >= _SAME_FAILURES
    return len(same) >= (_SAME_EXITS if failure.exited else _SAME_FAILURES)
