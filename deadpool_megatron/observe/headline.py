"""The first thing to know of a run: whether all is well, and if it is not, what to do now. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deadpool_megatron.cluster.failures import ExitStatus
from deadpool_megatron.layout.records import NodeUse
from deadpool_megatron.observe.narration import count, describe_state, describe_wait
from deadpool_megatron.observe.story import Story

# A coordinator that does not answer for so long has no successor, and a step that takes longer than
# this, and than so many others did, is worth a word.
_SILENT_SECONDS = 30.0
_LATE_STEPS = 10
_ATTACH = "start another node as a spare: deadpool agent --run-dir {run} --attach"
_LOOK = "deadpool status {run} shows what each role does"
#: advice where a coordinator does not answer, and processes of the run may be left
UNANSWERED = (
    "a standby may take over; if no process is left, the same command, with --run-dir {run},"
    " continues from memory"
)


@dataclass(frozen=True)
class Headline:
    """``look``: good, wait or bad; empty for a start. ``to_do``: about what the title says, and
    about nothing that is over; empty for nothing."""

    look: str
    title: str
    to_do: str = ""


def headline(
    story: Story, status: Mapping[str, Any] | None, left: str, run: object, now: float
) -> Headline:
    """Return the headline. ``status``: None if nobody answers; ``left``: what is left in memory of
    a run without a process; ``run``: its directory; ``now``: wall clock, seconds."""
    if story.ended is not None:
        if not story.exit_status:
            return Headline("good", f"Finished: {count(story.last_iteration, 'iteration')}")
        reason = str(story.ended.data.get("reason") or "no reason known")
        first, _, rest = reason.partition("; ")
        look = "wait" if story.exit_status == ExitStatus.SAVED else "bad"
        title = f"Ended with exit status {story.exit_status}: {first}"
        return Headline(look, title, "; ".join(filter(None, (rest, left))))
    if left:
        return Headline("bad", "All its processes ended, without a result", left)
    if status is None:
        silent = now - (story.last_wall or now)
        since = f"the last event came {silent:.0f} s ago"
        if not len(story.steps):
            return Headline("", f"Starting; {since}")
        look = "bad" if silent > _SILENT_SECONDS else "wait"
        advice = UNANSWERED.format(run=run)
        return Headline(look, f"No answer from the coordinator; {since}", advice)
    if not status["epoch"]:
        return Headline("", f"Starting: {len(story.hosts)} of {sum(story.wanted)} nodes joined")
    state, advice = describe_state(status), ""
    if state == "running":
        troubles = dict(_troubles(story, status, now))
        title, look = ", ".join(["Running", *troubles]), "wait" if troubles else "good"
        advice = "; ".join(filter(None, troubles.values()))
    elif story.waiting is not None:
        title = f"{state.capitalize()}: {describe_wait(story.waiting)}"
        look, advice = "wait", _ATTACH
    else:
        waits = f", waits for {status['waiting_for']}" if status["waiting_for"] else ""
        title, look = f"{state.capitalize()}{waits}", "wait"
    return Headline(look, title, advice.format(run=run))


def _troubles(story: Story, status: Mapping[str, Any], now: float) -> Iterator[tuple[str, str]]:
    """Troubles of a run that trains, each with what to do."""
    late = max(_SILENT_SECONDS, _LATE_STEPS * (story.pace() or 0.0))
    if story.last_step_at is not None and now - story.last_step_at > late:
        yield f"but no step for {now - story.last_step_at:.0f} s", _LOOK
    uses = {node: status["nodes"][str(node)]["use"] for node in status["spares"]}
    if story.wanted[1] and NodeUse.SPARE not in uses.values():
        yield f"no spare left{' but drained nodes' if uses else ''}", _ATTACH
    if fewer := len(status["fewer_copies"]):
        yield f"{count(fewer, 'role')} with fewer copies than wanted", ""
    if slow := len(status["slow"]):
        yield count(slow, "slow node"), ""
