"""The numbers that a run computed, from its events: each step once, a million of them in memory.

A replayed step is the same step: the first report of it stays, unless a number was not finite and
the run threw it away. Pure; used live and afterwards.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from deadpool_megatron.events import Event, Kind

_LOSS, _NORM, _RATE, _SAMPLES, _SKIPPED = (1 << bit for bit in range(5))


@dataclass(frozen=True)
class Step:
    """One training iteration. Numbers are exact, as ``float.hex`` text; None where there is none.

    ``grad_norm`` is None for a skipped update.
    """

    iteration: int
    loss: str | None
    grad_norm: str | None
    learning_rate: str | None
    skipped: bool
    samples: int | None


@dataclass(frozen=True)
class TimedStep:
    """A finished step and when it was heard of (wall clock, seconds)."""

    step: Step
    wall_seconds: float


class StepTable(Sequence[TimedStep]):
    """Steps by ascending iteration, 49 bytes each."""

    def __init__(self) -> None:
        self._iterations = array("q")
        self._walls = array("d")
        self._numbers = (array("d"), array("d"), array("d"))  # loss, norm, rate
        self._samples = array("q")
        self._flags = bytearray()

    @property
    def last_iteration(self) -> int:
        """The newest one; 0 before the first."""
        return self._iterations[-1] if self._iterations else 0

    def add(self, iteration: int, values: Mapping[str, Any], wall_seconds: float) -> None:
        """Take the data of a STEP event, unless that step is there. Raises ValueError or TypeError
        for values that are not of a step, and takes none of them then.
        """
        at = len(self)
        if iteration <= self.last_iteration:
            at = bisect_left(self._iterations, iteration)
            if at < len(self) and self._iterations[at] == iteration:
                return
        flags, found = 0, array("d")
        for name, bit in (("loss", _LOSS), ("grad_norm", _NORM), ("learning_rate", _RATE)):
            text = values.get(name)
            flags |= 0 if text is None else bit
            found.append(0.0 if text is None else _float(text))
        samples = values.get("samples")
        flags |= 0 if samples is None else _SAMPLES
        flags |= _SKIPPED if values.get("skipped") else 0
        iteration, count = _int64(iteration), 0 if samples is None else _int64(samples)
        wall_seconds = float(wall_seconds)
        self._samples.insert(at, count)
        for column, number in zip(self._numbers, found, strict=True):
            column.insert(at, number)
        self._walls.insert(at, wall_seconds)
        self._flags.insert(at, flags)
        self._iterations.insert(at, iteration)

    def forget_from(self, iteration: int) -> None:
        """These steps were thrown away."""
        at = bisect_left(self._iterations, iteration)
        for column in (self._iterations, self._walls, *self._numbers, self._samples, self._flags):
            del column[at:]

    def after(self, iteration: int) -> Iterator[Step]:
        """The steps behind an iteration, in order."""
        for at in range(bisect_left(self._iterations, iteration + 1), len(self)):
            yield self._step(at)

    def times(self, newest: int | None = None) -> Iterator[tuple[int, float]]:
        """Iteration and wall clock in seconds of each, or of so many newest ones."""
        at = 0 if newest is None else max(0, len(self) - newest)
        return zip(self._iterations[at:], self._walls[at:], strict=True)

    def __len__(self) -> int:
        return len(self._iterations)

    @overload
    def __getitem__(self, at: int) -> TimedStep: ...
    @overload
    def __getitem__(self, at: slice) -> list[TimedStep]: ...
    def __getitem__(self, at: int | slice) -> TimedStep | list[TimedStep]:
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(len(self)))]
        return TimedStep(self._step(at), self._walls[at])

    def _step(self, at: int) -> Step:
        flags = self._flags[at]
        loss, norm, rate = (column[at].hex() for column in self._numbers)
        return Step(
            iteration=self._iterations[at],
            loss=loss if flags & _LOSS else None,
            grad_norm=norm if flags & _NORM else None,
            learning_rate=rate if flags & _RATE else None,
            skipped=bool(flags & _SKIPPED),
            samples=self._samples[at] if flags & _SAMPLES else None,
        )


def _float(text: str) -> float:
    try:
        return float.fromhex(text)
    except OverflowError as error:
        raise ValueError(f"{text:.40} is beyond all floats") from error


def _int64(value: Any) -> int:
    number = int(value)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"a count of {number.bit_length()} bits")
    return number


class Hashes:
    """State hashes on the way, by iteration and role: 36 bytes each."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[array[int], bytearray]] = {}

    def add(self, iteration: int, role: int, sha256: str) -> None:
        """Take one, unless it is there. Raises ValueError for what is no hash."""
        roles, digests = self._found.setdefault(iteration, (array("i"), bytearray()))
        if role not in roles:
            digest = bytes.fromhex(sha256)
            if len(digest) != 32:
                raise ValueError(f"a state hash of {len(digest)} bytes")
            roles.append(role)
            digests += digest

    def forget_from(self, iteration: int) -> None:
        """These were thrown away."""
        for known in [known for known in self._found if known >= iteration]:
            del self._found[known]

    def iterations(self) -> set[int]:
        """Those with hashes."""
        return set(self._found)

    def at(self, iteration: int) -> dict[int, str]:
        """Role -> sha256 in hexadecimal digits."""
        roles, digests = self._found.get(iteration, (array("i"), bytearray()))
        return {role: digests[32 * i : 32 * i + 32].hex() for i, role in enumerate(roles)}


class Numbers:
    """Fed with every event in the order of the files."""

    def __init__(self) -> None:
        self.steps = StepTable()
        self.evaluations: dict[int, str] = {}  # iteration -> loss
        self.hashes = Hashes()

    def add(self, event: Event) -> None:
        """Take in one event; raises KeyError, TypeError or ValueError for one that is damaged."""
        iteration, data = event.iteration, event.data
        if event.kind is Kind.STEP and iteration is not None:
            self.steps.add(iteration, data, event.wall_seconds)
        elif event.kind is Kind.EVALUATION and iteration is not None:
            self.evaluations.setdefault(iteration, str(data["loss"]))
        elif event.kind is Kind.STATE_HASH and iteration is not None and event.role is not None:
            self.hashes.add(iteration, event.role, str(data["sha256"]))
        elif event.kind is Kind.EPOCH_DECIDED and "forgotten_from" in data:
            first = int(data["forgotten_from"])
            self.steps.forget_from(first)
            self.hashes.forget_from(first)
            self.evaluations = {k: loss for k, loss in self.evaluations.items() if k < first}
