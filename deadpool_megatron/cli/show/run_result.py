"""``final.json``, and the numbers in the events, as typed values: what a finished run tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deadpool_megatron.cli.show.numbers import Numbers
from deadpool_megatron.cluster.run_directory.directory import (
    RunDirectory,
    RunDirectoryError,
    read_json,
)
from deadpool_megatron.events import Event, Kind, take_events

# The phases of a recovery in the order in which they begin; ``reprotect`` runs beside the later
# ones. The text says what happens in each, for people.
PHASES: Mapping[str, str] = {
    "detect": "the failure is noticed",
    "close": "everybody leaves the epoch, vaults freeze",
    "decide": "who plays which role, from which state",
    "adopt": "the spare takes the empty roles",
    "rebuild": "communicators of the new epoch connect",
    "restore": "state comes back from host memory",
    "sync": "parameters come from the data-parallel peers",
    "verify": "peers compare what they must hold equal",
    "reprotect": "lost copies are made again",
    "replay": "the interrupted step runs again",
    "abandoned": "a new epoch failed again before it was open",
}


class ResultError(Exception):
    """A run directory has no usable result; one clear line."""


@dataclass(frozen=True)
class RoleResult:
    """The end state of one role: hash over everything training depends on, samples consumed."""

    sha256: str
    samples: int | None


@dataclass(frozen=True)
class FinishedRecovery:
    """One recovery. Times in seconds; ``seconds`` is from the failure to the next finished step."""

    epoch: int
    cause: str
    generation: tuple[int, int] | None
    boundary: str
    phases: Mapping[str, float]
    seconds: float | None
    steps_recomputed: int | None
    exposed_seconds: float | None
    seats_changed: Mapping[int, tuple[object, object]]

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> FinishedRecovery:
        """Read the data of a RECOVERED event."""
        generation = values.get("generation")
        return FinishedRecovery(
            epoch=int(values.get("epoch", 0)),
            cause=str(values.get("cause", "")),
            generation=(int(generation[0]), int(generation[1])) if generation else None,
            boundary=str(values.get("boundary", "")),
            phases=ordered_phases(values.get("phases", {})),
            seconds=_optional_float(values.get("seconds")),
            steps_recomputed=_optional_int(values.get("steps_recomputed")),
            exposed_seconds=_optional_float(values.get("exposed_seconds")),
            seats_changed={
                int(role): (change[0], change[1])
                for role, change in values.get("seats_changed", {}).items()
            },
        )


@dataclass(frozen=True)
class RunResult:
    """The contents of ``final.json``, with the numbers and recoveries that the events tell.

    ``resumed_after``: the iteration whose state another run handed over; 0 for a whole run.
    """

    directory: Path
    exit_status: int
    reason: str
    world_size: int
    iterations: int
    roles: Mapping[int, RoleResult]
    numbers: Numbers
    recoveries: tuple[FinishedRecovery, ...]
    resumed_after: int = 0


def read_result(directory: Path) -> RunResult:
    """The result of the run in ``directory``. Raises ResultError with one clear line."""
    if not directory.is_dir():
        raise ResultError(f"{directory}: no such directory")
    path = RunDirectory(directory).final
    try:
        values = read_json(path)
    except FileNotFoundError:
        kind = "has no final.json: the run is still going, or it was killed as a whole"
        if not (directory / "run.json").exists():
            kind = "is not the directory of a run (no run.json, no final.json)"
        raise ResultError(f"{directory} {kind}") from None
    except (OSError, ValueError) as error:
        raise ResultError(f"{path} cannot be read: {error}") from error
    try:
        return _from_dict(directory, values)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ResultError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _resumed_after(directory: Path) -> int:
    try:
        restore = RunDirectory(directory).read_run(only_to_show=True).restore
    except RunDirectoryError:
        return 0  # a result without its run directory, as a copy may be
    return int(restore["generation"][1]) if restore else 0


def _from_dict(directory: Path, values: Mapping[str, Any]) -> RunResult:
    numbers, recoveries = Numbers(), list[FinishedRecovery]()

    def take(event: Event) -> None:
        numbers.add(event)
        if event.kind is Kind.RECOVERED:
            recoveries.append(FinishedRecovery.from_dict({"epoch": event.epoch, **event.data}))

    take_events(RunDirectory(directory).events, take)
    return RunResult(
        directory=directory,
        exit_status=int(values["exit_status"]),
        reason=str(values.get("reason", "")),
        world_size=int(values["world_size"]),
        iterations=int(values["iterations"]),
        roles={
            int(role): RoleResult(str(facts["sha256"]), _optional_int(facts.get("samples")))
            for role, facts in values["roles"].items()
        },
        numbers=numbers,
        recoveries=tuple(recoveries),
        resumed_after=_resumed_after(directory),
    )


def ordered_phases(phases: Mapping[str, Any]) -> dict[str, float]:
    """The given phases with seconds, in the order of :data:`PHASES`; unknown ones at the end.

    ``abandoned`` is left out where no time was spent on it, as almost always.
    """
    names = [name for name in PHASES if name in phases]
    names += [name for name in phases if name not in PHASES]
    found = {name: float(phases[name]) for name in names}
    return {k: seconds for k, seconds in found.items() if k != "abandoned" or seconds > 0}


def decimal(text: str | None) -> float | None:
    """The value of a hexadecimal float."""
    return None if text is None else float.fromhex(text)


def _optional_int(value: object) -> int | None:
    return None if value is None else int(str(value))


def _optional_float(value: object) -> float | None:
    return None if value is None else float(str(value))
