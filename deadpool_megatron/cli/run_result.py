"""The results of a run: ``final.json`` as typed values, and the facts that its events give."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunDirectoryError
from deadpool_megatron.events import DAMAGE, EventTail, complain, date, event_files
from deadpool_megatron.layout.ranks import rank_of
from deadpool_megatron.observe.narration import describe_loss
from deadpool_megatron.observe.story import RECENT_STEPS, Interruption, Story
from deadpool_megatron.observe.view import View
from deadpool_megatron.ownership import OwnershipError

_RECENT_BYTES = 16 << 20


class ResultError(CommandError):
    """A run directory has no usable result."""


@dataclass(frozen=True)
class RoleResult:
    """The final state of a role. ``sha256``: hash of all state; ``samples``: number of consumed
    samples; ``entries``: a short digest for each part of the state except weights and optimizer
    state."""

    sha256: str
    samples: int | None
    entries: Mapping[str, str]


@dataclass(frozen=True)
class RunResult:
    """The contents of ``final.json``, with the story of the run's events.

    ``roles``: by rank. ``resumed_after``: the iteration whose state the run resumed from; 0 for a
    run from the start.
    """

    directory: Path
    exit_status: int
    reason: str
    world_size: int
    iterations: int
    roles: Mapping[int, RoleResult]
    story: Story
    resumed_after: int = 0

    @property
    def recoveries(self) -> list[Interruption]:
        """The interruptions that are over."""
        return [failure for failure in self.story.failures if failure.is_over]

    def ranks_at(self, iteration: int) -> int:
        """Return the number of ranks that computed an iteration."""
        sizes = [ranks for first, ranks in self.story.sizes.items() if first <= iteration]
        return sizes[-1] if sizes else self.world_size


def read_story(directory: Path, *, hashes: bool = False) -> Story:
    """Return the story of all events of a run; ``hashes``: keep the hashes of the state. Raises
    ResultError if there are no events or they cannot be read.
    """
    path, story = RunDirectory(directory).events, Story(hashes=hashes)
    if not event_files(path):
        raise ResultError(f"{directory} is not the directory of a run (no events.jsonl)")
    try:
        EventTail(path, complain).feed(story.take)
    except OSError as error:
        raise ResultError(f"{path} cannot be read: {error}") from error
    return story


def read_recent(directory: Path) -> Story:
    """Return the story of the newest events, so that the time to read does not grow with the run.
    Return an empty story if they cannot be read."""
    run, story = RunDirectory(directory), Story(RECENT_STEPS + 1)
    with contextlib.suppress(OSError, OwnershipError, RunDirectoryError):
        info, tail = run.read_run(only_to_show=True), EventTail(run.events)
        story.wanted = info.nodes, info.spares  # the event with these numbers may be too old
        tail.skip_all_but(_RECENT_BYTES)
        tail.feed(story.take)
    return story


def failure_to_dict(failure: Interruption, view: View) -> dict[str, Any]:
    """Return all facts about a failure as JSON values; ``kind`` is the code of its cause."""
    node, story = failure.cause_event.node, view.story
    names = (
        *("number", "cause", "kind", "planned", "last_iteration", "closes", "generation"),
        *("seconds", "steps_recomputed", "exposed_seconds"),
    )
    stacks = [{"role": e.role, "node": e.node, **e.data} for e in failure.stacks]
    return {
        **{name: getattr(failure, name) for name in names},
        "at": date(failure.began),
        "noticed_at": date(failure.noticed),
        "to_do": view.advice(failure),
        "closed_epoch": failure.closing.epoch,
        "node": node,
        "host": None if node is None else story.hosts.get(node),
        "hangs": [dict(event.data) for event in failure.hangs],
        "stacks": stacks,
        "losses": [describe_loss(loss) for loss in failure.losses],
        "recovered": failure.is_over,
        "phases": dict(failure.phases),
    }


def read_result(directory: Path) -> RunResult:
    """Return the result of the run in ``directory``. Raises ResultError."""
    run = RunDirectory(directory)
    if not run.has_final():
        text = "it is not the directory of a run, or the run is not over, or was killed as a whole"
        raise ResultError(f"{directory} has no final.json: {text}")
    try:
        values = run.read_final()
        return RunResult(
            directory=directory,
            exit_status=values["exit_status"],
            reason=values["reason"],
            world_size=int(values["world_size"]),
            iterations=values["iterations"],
            roles={
                rank_of(int(role)): RoleResult(
                    str(facts["sha256"]), facts.get("samples"), dict(facts.get("entries", {}))
                )
                for role, facts in values["roles"].items()
            },
            story=read_story(directory, hashes=True),
            resumed_after=_resumed_after(directory),
        )
    except RunDirectoryError as error:
        raise ResultError(str(error)) from error
    except DAMAGE as error:
        raise ResultError(f"{run.final} is damaged: {type(error).__name__}: {error}") from error


def _resumed_after(directory: Path) -> int:
    try:
        restore = RunDirectory(directory).read_run(only_to_show=True).restore
    except RunDirectoryError:
        return 0  # a copy of the result without the run directory
    return restore[0].generation.iteration if restore else 0
