"""Checkpoints are looked at before one of them is decided on, and struck off when they fail."""

from __future__ import annotations

from dataclasses import replace

from deadpool_megatron.cluster.machine.actions import LookAtCheckpoints
from deadpool_megatron.cluster.machine.state.phases import Closing
from deadpool_megatron.cluster.machine.turn import Turn


def must_look(turn: Turn) -> bool:
    """Return whether there are checkpoints that were not looked at since the epoch was closed: the
    epoch is not decided before, nor does the run end."""
    line = turn.state.line
    if line.seen or not line.valid:
        return False
    if not (isinstance(turn.state.doing, Closing) and turn.state.doing.looks):
        turn.enter(Closing(turn.now + turn.config.settings.gather_seconds, looks=True))
        turn.act(LookAtCheckpoints(line.valid))
    return True


def seen(turn: Turn, gone: frozenset[str]) -> None:
    """Those that are gone are not decided on."""
    known = {one.path for one in turn.state.line.valid}
    for path in sorted(gone & known):
        turn.log("warning", f"checkpoint {path} is not there any more, or without its index")
    line = replace(turn.state.line.without(gone), seen=True)
    turn.state = turn.state._replace(line=line)


def strike(turn: Turn, path: str, cause: str) -> None:
    """It could not be loaded: the next older one is tried."""
    before = turn.state.line
    line = before.doubting(path)
    turn.state = turn.state._replace(line=line)
    if line.struck != before.struck:
        turn.log("warning", f"checkpoint {path} is struck off: {cause}")


def with_struck(turn: Turn, reason: str) -> str:
    """Return why nothing can be restored, and which checkpoints there would have been."""
    struck = sorted(turn.state.line.struck)
    return f"{reason}; could not be loaded: {', '.join(struck)}" if struck else reason
