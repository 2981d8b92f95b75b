"""A checkpoint beside the training: why there is one, how far it is. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from deadpool_megatron.cluster.run_directory.directory import unfinished_export
from deadpool_megatron.layout.records import Generation


class Purpose(StrEnum):
    """The reason of an export: the interval, somebody asked, a time limit is near, or the run ends
    for lack of a spare and its state was dumped."""

    INTERVAL = "interval"
    ASKED = "asked"
    TIME_LIMIT = "time limit"
    DUMPED = "dumped"


@dataclass(frozen=True)
class Wish:
    """One that is to begin as soon as it can; ``number``: of the request for it, 0 for none."""

    directory: Path
    purpose: Purpose
    number: int = 0


@dataclass(frozen=True)
class Leaving:
    """The run is to be dumped and to end when its last export is over, or at ``until``; when that
    one came to nothing, as soon as it is ``removed``, or ``removal_seconds`` after its end.
    ``ends``: when something else ends the run. Times are of the monotonic clock."""

    reason: str
    until: float
    ends: float
    removal_seconds: float
    removed: bool = True


@dataclass
class Export:
    """One that is under way; ``boundary``: the last moment after the iteration that it includes."""

    run_id: str
    name: str
    epoch: int
    iteration: int
    directory: Path
    purpose: Purpose
    limit: float
    awaited: set[int]
    nodes: frozenset[int]
    step: str = "taking"
    number: int = 0
    boundary: str = "save"
    generation: Generation | None = None
    said: dict[int, tuple[Generation, str]] = field(default_factory=dict)

    @property
    def is_publishing(self) -> bool:
        """Return whether all of it is written; nothing stops it from here on."""
        return self.step == "publishing"

    @property
    def unfinished(self) -> Path:
        """Return where it is written."""
        return unfinished_export(self.directory, self.run_id, self.name)

    @property
    def final(self) -> Path:
        """Return where it will be."""
        return self.directory / f"iter_{self.iteration:07d}"

    def common_generation(self, world_size: int) -> Generation | None:
        """Return what all roles have set aside, when it is the same moment for all of them."""
        found = set(self.said.values())
        if len(self.said) != world_size or len(found) != 1:
            return None
        return found.pop()[0]
