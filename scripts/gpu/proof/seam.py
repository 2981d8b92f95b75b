"""Parts a and b: communicators aborted and made anew in processes that go on."""

from __future__ import annotations

import math
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from proof.device import Device, Size
from proof.flock import Flock, FlockError, Player, Recovery, clear
from proof.rank import Fate, Setup
from proof.result import Findings

#: of the rank that outlives all kills; what is kept for good is seen as growth per kill
_MOST_THREADS, _MOST_DESCRIPTORS, _MOST_BYTES = 4, 8, 256 << 20
_MEASURED = ("abort_seconds", "drain_seconds", "device_seconds", "rebuild_seconds")
_DEATH_SECONDS = 30.0
#: of kills; a shorter course only shows how long leftovers of a closed epoch live
_LEAST_THIRD = 5


def kill(player: Player) -> None:
    """As if its node was gone."""
    player.signal(signal.SIGKILL)


def lose_ranks(device: Device, size: Size, limit_seconds: float) -> Findings:
    """Part a: one rank after the other is killed; rank 0 lives through all of it."""
    found = Findings()
    until = time.monotonic() + limit_seconds
    recoveries: list[Recovery] = []
    with tempfile.TemporaryDirectory() as folder:
        setup = Setup(device, size.ranks, size.spares, size.groups, folder)
        try:
            with Flock(setup) as flock:
                while len(recoveries) < size.kills and time.monotonic() < until:
                    victim = 1 + len(recoveries) % (size.ranks - 1)
                    recoveries.append(flock.recover(victim, kill, Fate.NONE))
                    clear(Path(folder), (flock.epoch,))
        except FlockError as error:
            found.problems.append(str(error))
    kills = len(recoveries)
    found.expect(kills == size.kills, f"{kills} of {size.kills} kills in the time there is")
    replaced = [reason for one in recoveries for reason in one.replaced.values()]
    found.expect(not replaced, f"survivors were replaced: {sorted(set(replaced))}")
    found.facts = {
        "ranks": size.ranks,
        "groups": size.groups,
        "kills": kills,
        "seconds": {
            name: _summary([one.longest(name) for one in recoveries]) for name in _MEASURED
        },
        "whole_seconds": _summary([one.seconds for one in recoveries]),
        "replaced": replaced,
    }
    _judge_growth(recoveries, found)
    return found


def _judge_growth(recoveries: list[Recovery], found: Findings) -> None:
    """Rank 0 at the end holds what it held after the first recoveries."""
    course = [one.ready[0].values for one in recoveries if 0 in one.ready]
    limits = {
        "threads": _MOST_THREADS,
        "descriptors": _MOST_DESCRIPTORS,
        "device_bytes": _MOST_BYTES,
    }
    for name, most in limits.items():
        values = [int(report[name]) for report in course]
        third = max(1, len(values) // 3)
        found.facts[name] = {"first": values[:third], "last": values[-third:]}
        if len(values) >= 3 * _LEAST_THIRD:
            growth = max(values[-third:]) - max(values[:third])
            found.facts[name]["growth"] = growth
            found.expect(growth <= most, f"{name} grew by {growth} over {len(values)} kills")


def special_losses(device: Device, size: Size) -> Findings:
    """Part b: losses at the moments at which NCCL is in the way."""
    found = Findings()
    with tempfile.TemporaryDirectory() as folder:
        setup = Setup(device, size.ranks, size.spares, size.groups, folder)
        try:
            with Flock(setup) as flock:
                _one(found, flock, "batch", _tell(Fate.DIE_IN_BATCH), Fate.NONE)
                _one(found, flock, "device-assert", _tell(Fate.DEVICE_ASSERT), Fate.NONE)
                _one(found, flock, "rebuild", kill, Fate.DIE_IN_REBUILD)
                stopped = flock.players[1]
                _one(found, flock, "stopped", lambda p: p.signal(signal.SIGSTOP), Fate.NONE)
                # It wakes in an epoch that is over, and must not get in anybody's way.
                stopped.signal(signal.SIGCONT)
                _one(found, flock, "after-the-stopped-one-woke", kill, Fate.NONE, victim=2)
        except FlockError as error:
            found.problems.append(str(error))
    return found


def _tell(fate: Fate) -> Callable[[Player], None]:
    def lose(player: Player) -> None:
        player.tell(fate)
        player.process.join(_DEATH_SECONDS)
        if player.process.is_alive():
            player.end()
            raise FlockError(f"{fate}: the process still lived after {_DEATH_SECONDS:g} s")

    return lose


def _one(
    found: Findings,
    flock: Flock,
    name: str,
    lose: Callable[[Player], None],
    fate: Fate,
    victim: int = 1,
) -> None:
    recovery = flock.recover(victim, lose, fate)
    survivors = sorted(set(range(flock.setup.ranks)) - {victim})
    found.facts[name] = {
        "seconds": round(recovery.seconds, 3),
        "epochs": recovery.epochs,
        "survivors": survivors,
        # A survivor may be replaced, for a reason that docs/gpu.md lists; it is told here.
        "replaced": {str(rank): why for rank, why in recovery.replaced.items()},
    }


def _summary(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 4),
        "p95": round(ordered[math.ceil(0.95 * (len(ordered) - 1))], 4),
        "longest": round(ordered[-1], 4),
    }
