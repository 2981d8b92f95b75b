"""A run under hazards as a short text that replays, and the shortest that still fails."""

import time
from collections.abc import Sequence

from deadpool_megatron.cluster.machine.state import Phase
from tests.simulated.clock import Clock
from tests.simulated.hazards import KINDS, Hazard
from tests.simulated.world import Shape, World

DELAY_SECONDS = 0.02
SHORTEN_SECONDS = 20.0  # at most


def replay(seed: str, shape: Shape, hazards: Sequence[tuple[float, str, int, int]]) -> World:
    """Run a world under these hazards; then no answer comes, and time alone ends every wait."""
    world = World(shape.config(), Clock(seed, DELAY_SECONDS))
    for at, kind, a, b in hazards:
        world.run_until(at)
        if world.finished is not None or not world.nodes:
            break
        KINDS[kind][1](world, a, b)
        is_waiting = world.state.phase_state.deadline is not None
        assert bool(world.state.waiting_for()) == is_waiting or world.state.phase is Phase.RUNNING
    world.calm_down()
    world.end_waits()
    assert world.state.phase is Phase.ENDED or world.state.final is None
    return world


def fails(seed: str, shape: Shape, hazards: Sequence[Hazard]) -> bool:
    try:
        replay(seed, shape, hazards)
    except Exception:
        return True
    return False


def shortened(seed: str, shape: Shape, hazards: Sequence[Hazard]) -> list[Hazard]:
    """Leave out hazards, first half of them at a time, as long as the run still fails."""
    end, left, size = time.monotonic() + SHORTEN_SECONDS, [*hazards], len(hazards)
    while size > 1 and time.monotonic() < end:
        size = (size + 1) // 2
        parts = [left[:first] + left[first + size :] for first in range(0, len(left), size)]
        fewer = next((part for part in parts if fails(seed, shape, part)), None)
        if fewer is not None:
            left, size = fewer, min(2 * size, len(fewer) + 1)
    return left


def hold(seed: str, shape: Shape, hazards: Sequence[Hazard]) -> World:
    """Run; a failure is raised again with a call that shows it."""
    try:
        return replay(seed, shape, hazards)
    except Exception as error:
        short = shortened(seed, shape, hazards)
        calls = "".join(f"\n        {hazard}," for hazard in short)
        text = f"replay({seed!r}, {shape}, [{calls}\n    ])"
        found = f"{len(hazards)} hazards, of which {len(short)} matter:\n{text}"
        raise AssertionError(found) from error
