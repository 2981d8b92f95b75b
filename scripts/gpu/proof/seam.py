"""Parts seam, rebuild and losses: communicators aborted and made again in living processes."""

from __future__ import annotations

import signal
import statistics
import tempfile
from typing import Any

from proof.flock import Flock, Lose, Member, Recovery
from proof.rank import Fate, Setup
from proof.result import Task, read_json

_HELD = ("threads", "descriptors", "device_bytes", "group left open")
_REPORTED = [f"{what}_seconds" for what in ("abort", "drain", "device", "attach", "first_use")]
_EACH = "attach_seconds_per_communicator"
#: values of --deadpool-set rebuild, last the one of which most doubt that a device bears it
_WAYS = ("one-by-one", "split", "side-by-side")


def first_kills(task: Task) -> None:
    """Part seam: few communicators, made one by one."""
    _lose_ranks(task, 3, [_WAYS[0]] * task.size.kills)


def rebuilds(task: Task) -> None:
    """Part rebuild: more communicators, in all ways in turns, for as long as there is time."""
    _lose_ranks(task, task.size.groups, [*_WAYS] * task.size.rounds)


def _lose_ranks(task: Task, groups: int, ways: list[str]) -> None:
    """Rank 1 is killed over and over; rank 0 lives through all of it."""
    known: dict[str, list[dict[str, Any]]] = {}
    runner = task.facts["course"] = []
    with tempfile.TemporaryDirectory() as folder, Flock(_setup(task, 2, groups, folder)) as flock:
        for way in ways:
            if len(runner) >= len(_WAYS) and task.left_seconds < 4 * runner[-1]["seconds"]:
                break  # it has no end of its own
            flock.way = way
            runner.append(_told(flock.recover(1, Member.kill, Fate.NONE)))
            known.setdefault(way, []).append(runner[-1])
            task.facts[way] = _summary(known[way])
            task.findings = [_answer(way, task.facts[way]) for way in known]
            task.save()
    for number, one in enumerate(runner):
        task.expect(not one["replaced"], f"kill {number}: survivors replaced: {one['replaced']}")
        task.expect(not one["group left open"], f"kill {number}: a group of NCCL was left open")


def _answer(way: str, facts: dict[str, Any]) -> str:
    each, whole = (facts[name]["median"] for name in (_EACH, "seconds"))
    made = f"{facts['communicators']} communicators made {way}: {each:.3f} s each"
    return f"{made}, {whole:.2f} s a recovery ({facts['kills']} kills)"


def _setup(task: Task, ranks: int, groups: int, folder: str) -> Setup:
    """What warms up is what was seen to do so: a hang there would cost all of the part."""
    seen = read_json(task.folder / "smoke.json").get("facts", {}).get("warm", {})
    is_warm, spares = "held_at_end" in seen, 4 if task.is_on_gpu else 1
    return Setup(task.device, ranks, spares, groups, folder, is_warm)


def _told(recovery: Recovery) -> dict[str, Any]:
    """Of one recovery: the slowest rank's seconds, and what rank 0 held afterwards."""
    found: dict[str, Any] = {name: recovery.longest(name) for name in _REPORTED}
    survivor = dict(recovery.ready[0].values)
    found["seconds"] = recovery.seconds
    # Who comes last waits for nobody.
    last = min((r.values for r in recovery.ready.values()), key=lambda v: v["attach_seconds"])
    found[_EACH] = last["attach_seconds"] / last["communicators"]
    found["communicators"] = last["communicators"]
    found |= {name: survivor[name] for name in _HELD if name in survivor}
    return found | {"epochs": recovery.epochs, "replaced": recovery.replaced}


def special_losses(task: Task) -> None:
    """Part losses: losses at the moments at which NCCL is in the way."""
    with tempfile.TemporaryDirectory() as folder, Flock(_setup(task, 3, 3, folder)) as flock:

        def one(name: str, lose: Lose, fate: Fate = Fate.NONE, victim: int = 1) -> None:
            recovery = flock.recover(victim, lose, fate)
            # A survivor may be replaced, for a reason that docs/gpu.md lists; it is told here.
            told = {"epochs": recovery.epochs, "replaced": recovery.replaced}
            task.facts[name] = {"seconds": round(recovery.seconds, 3), **told}
            task.save()

        one("batch", lambda member: member.meet(Fate.DIE_IN_BATCH))
        one("device-assert", lambda member: member.meet(Fate.DEVICE_ASSERT))
        one("rebuild", Member.kill, Fate.DIE_IN_REBUILD)
        stopped = flock.members[1]
        one("stopped", lambda member: member.signal(signal.SIGSTOP))
        # It wakes in an epoch that is over, and must not get in anybody's way.
        stopped.signal(signal.SIGCONT)
        one("after-the-stopped-one-woke", Member.kill, victim=2)


def _summary(kills: list[dict[str, Any]]) -> dict[str, Any]:
    found = {"kills": len(kills), "communicators": kills[0]["communicators"]}
    for name in (*_REPORTED, "seconds", _EACH):
        values = [one[name] for one in kills]
        found[name] = {"median": round(statistics.median(values), 4), "longest": max(values)}
    return found
