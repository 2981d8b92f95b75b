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
_REPORTED = [f"{name}_seconds" for name in ("abort", "drain", "device", "attach", "first_use")]
_EACH = "attach_seconds_per_communicator"
#: values of --deadpool-set rebuild, the riskiest for a device last
_WAYS = ("one-by-one", "split", "side-by-side")


def first_kills(task: Task) -> None:
    """Run part seam: few communicators, made sequentially."""
    _lose_ranks(task, 3, [_WAYS[0]] * task.size.kills)


def rebuilds(task: Task) -> None:
    """Run part rebuild: more communicators, made in all ways in turns while there is time."""
    _lose_ranks(task, task.size.groups, [*_WAYS] * task.size.rounds)


def _lose_ranks(task: Task, groups: int, ways: list[str]) -> None:
    """Kill rank 1 over and over; rank 0 survives."""
    known: dict[str, list[dict[str, Any]]] = {}
    course = task.facts["course"] = []
    with tempfile.TemporaryDirectory() as folder, Flock(_setup(task, 2, groups, folder)) as flock:
        for way in ways:
            if len(course) >= len(_WAYS) and task.left_seconds < 4 * course[-1]["seconds"]:
                break  # another recovery might not end in time
            flock.way = way
            course.append(_facts(flock.recover(1, Member.kill, Fate.NONE)))
            known.setdefault(way, []).append(course[-1])
            task.facts[way] = _summary(known[way])
            task.findings = [_answer(way, task.facts[way]) for way in known]
            task.save()
    for number, kill in enumerate(course):
        task.expect(not kill["replaced"], f"kill {number}: survivors replaced: {kill['replaced']}")
        task.expect(not kill["group left open"], f"kill {number}: a group of NCCL was left open")


def _answer(way: str, facts: dict[str, Any]) -> str:
    each, whole = (facts[name]["median"] for name in (_EACH, "seconds"))
    made = f"{facts['communicators']} communicators made {way}: {each:.3f} s each"
    return f"{made}, {whole:.2f} s a recovery ({facts['kills']} kills)"


def _setup(task: Task, ranks: int, groups: int, folder: str) -> Setup:
    """Return a setup that warms up only if part smoke could: a hang would cost the whole part."""
    seen = read_json(task.folder / "smoke.json").get("facts", {}).get("warm", {})
    is_warm, spares = "held_at_end" in seen, 4 if task.is_on_gpu else 1
    return Setup(task.device, ranks, spares, groups, folder, is_warm)


def _facts(recovery: Recovery) -> dict[str, Any]:
    """Return the slowest rank's seconds, and the resources of rank 0 after the recovery."""
    found: dict[str, Any] = {name: recovery.longest(name) for name in _REPORTED}
    survivor = dict(recovery.ready[0].values)
    found["seconds"] = recovery.seconds
    # The last rank to come waits for no other.
    last = min((r.values for r in recovery.ready.values()), key=lambda v: v["attach_seconds"])
    found[_EACH] = last["attach_seconds"] / last["communicators"]
    found["communicators"] = last["communicators"]
    found |= {name: survivor[name] for name in _HELD if name in survivor}
    return found | {"epochs": recovery.epochs, "replaced": recovery.replaced}


def special_losses(task: Task) -> None:
    """Run part losses: losses at moments that are difficult for NCCL."""
    with tempfile.TemporaryDirectory() as folder, Flock(_setup(task, 3, 3, folder)) as flock:

        def recover(name: str, lose: Lose, fate: Fate = Fate.NONE, victim: int = 1) -> None:
            recovery = flock.recover(victim, lose, fate)
            # A survivor may be replaced too, for a reason that docs/gpu.md lists.
            facts = {"epochs": recovery.epochs, "replaced": recovery.replaced}
            task.facts[name] = {"seconds": round(recovery.seconds, 3), **facts}
            task.save()

        recover("batch", lambda member: member.meet(Fate.DIE_IN_BATCH))
        recover("device-assert", lambda member: member.meet(Fate.DEVICE_ASSERT))
        recover("rebuild", Member.kill, Fate.DIE_IN_REBUILD)
        stopped = flock.members[1]
        recover("stopped", lambda member: member.signal(signal.SIGSTOP))
        # It wakes in an epoch that is over, and must not disturb the others.
        stopped.signal(signal.SIGCONT)
        recover("after-the-stopped-one-woke", Member.kill, victim=2)


def _summary(kills: list[dict[str, Any]]) -> dict[str, Any]:
    found = {"kills": len(kills), "communicators": kills[0]["communicators"]}
    for name in (*_REPORTED, "seconds", _EACH):
        values = [kill[name] for kill in kills]
        found[name] = {"median": round(statistics.median(values), 4), "longest": max(values)}
    return found
