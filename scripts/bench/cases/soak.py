"""Does a run survive random faults for hours, with the right state, and how long do they take it?

    bench.py soak --minutes 120 --seed 1 --out soak.json --plot soak.png

Real processes on this machine: the embedded trainer, all kinds of faults. Rounds follow one after
the other, by turns with spares that are refilled, and without a spare, so that they continue with
fewer model replicas until a new node has joined (soaking/rounds.py). The reported hash of each
role's state after each iteration is compared with plain training at the same sizes. At the end: no
process and no shared memory left, and nothing that lived on grew, neither processes nor shared
memory, nor the run directory by more than the events of its iterations.

A row for each kind, and one for all deaths together:

  recovery_seconds         from the strike, or from the end of the fault's own duration if that is
                           later (a cut, a stop, a full disk), to the end of the first new iteration
  steps_recomputed         of each recovery, after a strike at a random moment

and a row for planned changes (growth with a new node, a drain): how long training stood still.

As root the soak gives itself a network and a mount namespace, in which it cuts connections (nft)
and fills the disk of the run directory; else these faults are left out.

Exit status 1: a wrong state, a hang, a run that ended, growth, or a fault that was never observed,
described in the last lines and the JSON. SIGTERM ends it with nothing left.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from common.figures import Row, row
from common.frame import Facts, UsageError
from soaking import faults, growth, rounds

from deadpool_megatron.cluster.run_directory import cleanup
from deadpool_megatron.cluster.run_directory.directory import segment_root
from deadpool_megatron.events import Event

MINUTES = 120
QUICK = (*("--minutes", "0.5", "--seed", "3", "--round-iterations", "150", "--pause", "1", "3"),)
_DISK_MB = 400
_PROGRESS_SECONDS = 180.0
_MIN_LIFE_SECONDS = 120.0
_NEWNS, _NEWNET, _SET_CHILD_SUBREAPER = 0x20000, 0x40000000, 36


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this case."""
    kinds = f"only these, or none: then every recovery is a false alarm ({', '.join(faults.KINDS)})"
    add = parser.add_argument
    add("--minutes", type=float, default=30.0, metavar="M", help="(default: 30)")
    add("--seed", type=int, default=1, metavar="S", help="of the dice (default: 1)")
    add("--round-iterations", type=int, default=2500, metavar="N", help="(default: 2500)")
    add("--kinds", metavar="A,B", help=kinds)
    pause = {"type": float, "nargs": 2, "metavar": "SECONDS", "help": "(default: 1 8)"}
    add("--pause", default=(1.0, 8.0), **pause)
    add("--keep", type=Path, metavar="DIR", help="keep the run directory of what was found there")


def measure(args: argparse.Namespace, base: Path) -> Facts:
    """Soak, in namespaces of its own if that can be."""
    unknown = set((args.kinds or "").split(",")) - set(faults.KINDS) - {"", "none"}
    if unknown or args.minutes <= 0 or args.round_iterations < 100:
        raise UsageError(f"unknown kinds {sorted(unknown)}" if unknown else "too short")
    (disk := base / "disk").mkdir()
    isolated = isolate(disk)
    try:
        return soak(args, disk, isolated)
    finally:
        if isolated:
            subprocess.run(["umount", "--lazy", str(disk)])


def isolate(disk: Path) -> bool:
    """Give this thread and what it starts a network and mounts of their own, with a small file
    system at ``disk``; return whether that could be done."""
    if os.geteuid() or not shutil.which("nft") or ctypes.CDLL(None).unshare(_NEWNS | _NEWNET):
        print("not root, or without nft: no cuts, no full disk", file=sys.stderr)
        return False
    for command in ("ip link set lo up", "mount --make-rprivate /"):
        subprocess.run(command.split(), check=True)
    size = f"size={_DISK_MB}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "soak", str(disk)], check=True)
    return True


def soak(args: argparse.Namespace, base: Path, isolated: bool) -> Facts:
    """All rounds; returns the facts, also of a soak that found something."""
    # The parent of the orphans of a killed agent, as an init would be.
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    began, dice = time.monotonic(), random.Random(args.seed)
    kinds = {k: v for k, v in faults.KINDS.items() if not args.kinds or k in args.kinds.split(",")}
    plan = rounds.Plan(kinds, tuple(args.pause), _PROGRESS_SECONDS, isolated)
    struck, done = list[rounds.Struck](), list[rounds.Round]()
    found, number = "", args.round_iterations
    try:
        deadline = time.monotonic() + 60.0 * args.minutes
        while time.monotonic() < deadline:
            name, variant = f"round-{len(done)}", len(done) % len(rounds.VARIANTS)
            print(f"{name}: {rounds.VARIANTS[variant]}, {len(struck)} faults", file=sys.stderr)
            done.append(round_ := rounds.start(base / name, number, began, variant))
            rounds.strike_on(round_, plan, dice, deadline, number, struck)
            is_whole = round_.newest >= number or time.monotonic() < deadline
            rounds.finish(round_, number) if is_whole else rounds.end(round_)
            rounds.compare(round_)
            clean(round_)
    except (rounds.SoakError, AssertionError) as error:
        found = str(error)
        keep_evidence(done[-1], args)
    finally:
        if done:
            leave_nothing(done[-1])
    if args.kinds == "none" and not found and (alarms := sum(len(it.recoveries) for it in done)):
        found = f"{alarms} recoveries though nothing was struck"
    facts = {"soak": vars(args) | {"isolated": isolated}}
    return facts | summary(struck, done, found, time.monotonic() - began)


def clean(round_: rounds.Round) -> None:
    """Raises SoakError unless nothing of a finished round is left; removes its directory."""
    info = round_.run.read_run()
    limit = time.monotonic() + 30.0
    while True:
        with contextlib.suppress(ChildProcessError):  # the end of orphans
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        pids = cleanup.run_processes(round_.run, info.run_id)
        left = segment_root(info.run_id)
        if not pids and (not left.exists() or round_.process.returncode != 0):
            break
        if time.monotonic() > limit:
            raise rounds.SoakError(f"left over: processes {pids}, {left}")
        time.sleep(0.2)
    for path in (left, round_.directory, Path(f"{round_.directory}-saves")):
        shutil.rmtree(path, ignore_errors=True)


def leave_nothing(round_: rounds.Round) -> None:
    """End a round wherever it is, with all that is left of it."""
    rounds.end(round_)
    if (round_.directory / "run.json").exists():  # else it has not begun, or is clean already
        cleanup.clean_run(round_.run, round_.run.read_run().run_id)


def keep_evidence(round_: rounds.Round, args: argparse.Namespace) -> None:
    """Copy the run directory of what went wrong to where it can be looked at."""
    target = Path(tempfile.mkdtemp(prefix="deadpool-soak-found-", dir=args.keep))
    try:
        shutil.copytree(round_.directory, target / round_.directory.name, dirs_exist_ok=True)
        shutil.copy(round_.directory.with_suffix(".out"), target)
    except (OSError, shutil.Error) as error:
        print(f"evidence is not complete: {error}", file=sys.stderr)
    print(f"evidence: {target}", file=sys.stderr)


def rows_of(struck: Sequence[rounds.Struck]) -> list[Row]:
    """Return a row for each kind, and one for all deaths."""
    groups = {name: [it for it in struck if it.kind == name] for name in {it.kind for it in struck}}
    deaths = [fault for fault in struck if fault.kind in faults.DEATHS]
    return [
        row(
            name,
            {
                "recovery_seconds": [it.seconds for it in these if it.seconds is not None],
                "steps_recomputed": [number for it in these for number in it.recomputed],
            },
        )
        | {"faults": len(these), "observed": sum(fault.observed for fault in these)}
        for name, these in [("all deaths", deaths), *sorted(groups.items())]
    ]


def planned_rows(recoveries: Iterable[Event]) -> list[Row]:
    """Return a row for planned changes, mostly of size: how long training stood still."""
    data = [event.data for event in recoveries if rounds.is_planned(event)]
    seconds, again = ([values[key] for values in data] for key in ("seconds", "steps_recomputed"))
    values = {"recovery_seconds": seconds, "steps_recomputed": again}
    return [row("planned change", values)] if data else []


def summary(
    struck: Sequence[rounds.Struck], done: Sequence[rounds.Round], found: str, seconds: float
) -> dict[str, Any]:
    """Return what was seen, by kind of fault, and the verdict: ``wrong`` is what was found."""
    rows = rows_of(struck)
    again = rows[0]["values"]["steps_recomputed"]
    samples = [sample for round_ in done for sample in round_.samples]
    thinned = growth.thinned(samples)
    grown = growth.judge(samples, _MIN_LIFE_SECONDS)
    files = [growth.files_verdict(round_.files) for round_ in done]
    unseen = [line["row"] for line in rows[1:] if not line["observed"]]
    wrong = [found] if found else []
    if unseen:
        wrong.append(f"struck, and never observed: {', '.join(unseen)}")
    if not all(each.get("flat", True) for each in (grown, *files)):
        wrong.append(f"growth: {grown['parts']}, {files}")
    return {
        "seconds": seconds,
        "rows": rows + planned_rows(event for round_ in done for event in round_.recoveries),
        "wrong": wrong,
        "faults": len(struck),
        "recoveries": sum(len(round_.recoveries) for round_ in done),
        "deaths_recomputed": {
            "share_with_none": again.count(0) / max(1, len(again)),
            "most": max(again, default=0),
        },
        "rounds": len(done),
        "sizes": [round_.sizes for round_ in done],
        "hashes_compared": sum(round_.compared for round_ in done),
        "iterations": sum(round_.newest for round_ in done),
        "growth": grown,
        "files": files,
        "struck": [fault.to_dict() for fault in struck],
        "samples": growth.as_dicts(thinned),
        "curves": {
            "rss_mb by minutes": [
                (life[0].part, [(sample.seconds / 60, sample.rss_mb) for sample in life])
                for life in growth.lives(thinned)
            ]
        },
        "files_seen": growth.as_dicts(entry for round_ in done for entry in round_.files[::6]),
    }
