#!/usr/bin/env python
"""Inject random faults into a training run, for hours, and check its state after each fault.

    .venv/bin/python scripts/soak.py --minutes 120 --seed 1 --out soak.json --plot soak.png

Real processes on this machine: the embedded trainer, all kinds of faults. Rounds follow one after
the other, by turns with spares that are refilled, and without a spare, so that they continue with
fewer model replicas until a new node has joined (soaking/rounds.py). The reported hash of each
role's state after each iteration is compared with plain training at the same sizes. At the end: no
process and no shared memory left, and nothing that lived on grew, neither processes nor shared
memory, nor the run directory by more than the events of its iterations.

As root the soak gives itself a network and a mount namespace (unshare), in which it cuts
connections (nft) and fills the disk of the run directory; else these faults are left out.

Exit status: 0 nothing found; 1 a wrong state, a hang, a run that ended, or growth, described in the
last lines and the JSON; 2 bad arguments; 143 ended by SIGTERM, with nothing left.
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
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent / folder) for folder in (".", "bench", "..")]

from common.machine import machine_facts, write_facts  # noqa: E402
from common.termination import orderly_termination  # noqa: E402
from soaking import faults, growth, rounds  # noqa: E402

from deadpool_megatron.cluster.run_directory import cleanup  # noqa: E402
from deadpool_megatron.cluster.run_directory.directory import segment_root  # noqa: E402

_INSIDE = "DEADPOOL_SOAK_ISOLATED"
_DISK_MB = 400


@orderly_termination()
def main() -> int:
    """Run from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = f"only these, or none: then every recovery is a false alarm ({', '.join(faults.KINDS)})"
    add, file = parser.add_argument, {"type": Path, "metavar": "FILE"}
    add("--minutes", type=float, default=30.0, metavar="M", help="(default: 30)")
    add("--seed", type=int, default=1, metavar="S", help="of the dice (default: 1)")
    add("--round-iterations", type=int, default=2500, metavar="N", help="(default: 2500)")
    add("--kinds", metavar="A,B", help=kinds)
    pause = {"type": float, "nargs": 2, "metavar": "SECONDS", "help": "(default: 1 8)"}
    add("--pause", default=(1.0, 8.0), **pause)
    add("--out", help="JSON (default: standard output)", **file)
    add("--plot", help="faults and growth, drawn (PNG)", **file)
    add("--keep", type=Path, metavar="DIR", help="keep the run directories there")
    args = parser.parse_args()
    unknown = set((args.kinds or "").split(",")) - set(faults.KINDS) - {"", "none"}
    if unknown or args.minutes <= 0 or args.round_iterations < 100:
        parser.error(f"unknown kinds {sorted(unknown)}" if unknown else "too short")
    isolated = os.environ.get(_INSIDE) == "1"
    if not isolated and os.geteuid() == 0 and shutil.which("unshare") and shutil.which("nft"):
        again = ["unshare", "--net", "--mount", "--", sys.executable, *sys.argv]
        os.execvpe(again[0], again, {**os.environ, _INSIDE: "1"})
    base = Path(tempfile.mkdtemp(prefix="deadpool-soak-", dir=args.keep))
    try:
        if isolated:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            size = f"size={_DISK_MB}m"
            subprocess.run(["mount", "-t", "tmpfs", "-o", size, "soak", str(base)], check=True)
        else:
            print("not root, or without unshare and nft: no cuts, no full disk", file=sys.stderr)
        facts = soak(args, base, isolated)
    finally:
        if isolated:
            subprocess.run(["umount", "--lazy", str(base)])
        shutil.rmtree(base, ignore_errors=True)
    write_facts(args.out, facts)
    if args.plot:
        from soaking.plot import draw

        draw(facts, args.plot)
    print(verdict(facts), file=sys.stderr)
    return 0 if facts["passed"] else 1


def soak(args: argparse.Namespace, base: Path, isolated: bool) -> dict[str, Any]:
    """All rounds; returns the facts, also of a soak that found something."""
    became_parent_of_orphans()
    began, dice = time.monotonic(), random.Random(args.seed)
    given = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    facts = {"soak": given | {"isolated": isolated}, "machine": machine_facts()}
    kinds = {k: v for k, v in faults.KINDS.items() if not args.kinds or k in args.kinds.split(",")}
    plan = rounds.Plan(kinds, tuple(args.pause), 180.0, isolated)
    struck, done = list[rounds.Struck](), list[rounds.Round]()
    found, number = "", args.round_iterations
    try:
        deadline = time.monotonic() + 60.0 * args.minutes
        while time.monotonic() < deadline:
            name, variant = f"round-{len(done)}", len(done) % len(rounds.VARIANTS)
            print(f"{name}: {rounds.VARIANTS[variant]}, {len(struck)} faults", file=sys.stderr)
            done.append(round_ := rounds.start(base / name, number, began, variant))
            struck += rounds.strike_on(round_, plan, dice, deadline, number)
            is_whole = round_.newest >= number or time.monotonic() < deadline
            rounds.finish(round_, number) if is_whole else rounds.end(round_)
            rounds.compare(round_)
            clean(round_)
    except (rounds.SoakError, AssertionError) as error:
        found = str(error)
        struck += getattr(error, "struck", [])
        print(f"FOUND: {found}", file=sys.stderr)
        keep_evidence(done[-1], args)
    finally:
        if done:
            leave_nothing(done[-1])
    if args.kinds == "none" and not found and (alarms := sum(it.recoveries for it in done)):
        found = f"{alarms} recoveries though nothing was struck"
    return facts | summary(struck, done, found, time.monotonic() - began)


def became_parent_of_orphans() -> None:
    """Become the parent of the orphans of a killed agent, as an init would."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def clean(round_: rounds.Round) -> None:
    """Raises SoakError unless nothing of a finished round is left; removes its directory."""
    info = round_.run.read_run()
    limit = time.monotonic() + 30.0
    while True:
        reap()
        pids = cleanup.run_processes(round_.run, info.run_id)
        left = segment_root(info.run_id)
        if not pids and (not left.exists() or round_.process.returncode != 0):
            break
        if time.monotonic() > limit:
            raise rounds.SoakError(f"left over: processes {pids}, {left}")
        time.sleep(0.2)
    shutil.rmtree(left, ignore_errors=True)
    shutil.rmtree(round_.directory)
    shutil.rmtree(f"{round_.directory}-saves", ignore_errors=True)


def leave_nothing(round_: rounds.Round) -> None:
    """End a round wherever it is, with all that is left of it."""
    rounds.end(round_)
    if (round_.directory / "run.json").exists():  # else it has not begun, or is clean already
        cleanup.clean_run(round_.run, round_.run.read_run().run_id)


def reap() -> None:
    """Take the end of orphans."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def keep_evidence(round_: rounds.Round, args: argparse.Namespace) -> None:
    """Copy the run directory of what went wrong to where it can be looked at."""
    target = Path(tempfile.mkdtemp(prefix="deadpool-soak-found-", dir=args.keep))
    try:
        shutil.copytree(round_.directory, target / round_.directory.name, dirs_exist_ok=True)
        shutil.copy(round_.directory.with_suffix(".out"), target)
    except (OSError, shutil.Error) as error:
        print(f"evidence is not complete: {error}", file=sys.stderr)
    print(f"evidence: {target}", file=sys.stderr)


def summary(
    struck: list[rounds.Struck], done: list[rounds.Round], found: str, seconds: float
) -> dict[str, Any]:
    """Returns what was seen, by kind of fault, and the verdict."""
    kinds: dict[str, Any] = {}
    for name in sorted({fault.kind for fault in struck}):
        these = [fault for fault in struck if fault.kind == name]
        waits = sorted(fault.seconds for fault in these if fault.seconds is not None)
        observed = sum(fault.observed for fault in these)
        kinds[name] = {"faults": len(these), "observed": observed}
        kinds[name]["to_next_iteration_seconds"] = percentiles(waits)
    unseen = [name for name, kind in kinds.items() if not kind["observed"]]
    if unseen and not found:
        found = f"struck, and never observed: {', '.join(unseen)}"
    samples = [sample for round_ in done for sample in round_.samples]
    grown = growth.judge(samples, 120.0)
    files = [growth.files_verdict(round_.files) for round_ in done]
    return {
        "seconds": seconds,
        "found": found,
        "faults": len(struck),
        "kinds": kinds,
        "all_seconds": percentiles(sorted(o.seconds for o in struck if o.seconds is not None)),
        "recoveries": sum(round_.recoveries for round_ in done),
        "rounds": len(done),
        "sizes": [round_.sizes for round_ in done],
        "hashes_compared": sum(round_.compared for round_ in done),
        "iterations": sum(round_.newest for round_ in done),
        "growth": grown,
        "files": files,
        "struck": [fault.to_dict() for fault in struck],
        "samples": growth.as_dicts(growth.thinned(samples)),
        "files_seen": growth.as_dicts(entry for round_ in done for entry in round_.files[::6]),
        "passed": not found and all(each.get("flat", True) for each in (grown, *files)),
    }


def percentiles(waits: list[float]) -> dict[str, float]:
    """Returns p50, p95, p99 and the most of sorted seconds; empty without any."""
    if not waits:
        return {}
    pick = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "most": 1.0}
    return {name: waits[min(len(waits) - 1, int(part * len(waits)))] for name, part in pick.items()}


def verdict(facts: dict[str, Any]) -> str:
    """Returns the last lines, for people."""
    lines = [
        f"{facts['faults']} faults, {facts['recoveries']} recoveries, {facts['rounds']} rounds",
        "  (struck, observed; seconds to the next iteration)",
    ]
    for name, kind in facts["kinds"].items():
        waits = kind["to_next_iteration_seconds"]
        shown = ", ".join(f"{key} {value:.1f}" for key, value in waits.items())
        lines.append(f"  {name:<24} {kind['faults']:>4} {kind['observed']:>4}   {shown}")
    for part, grown in facts["growth"]["parts"].items():
        shown = ", ".join(f"{key} {value:+.1f}" for key, value in grown.items() if key != "lives")
        lines.append(f"  growth of {part:<14} {shown}  ({grown['lives']} lives)")
    for name, limit in growth.FILE_LIMITS.items():
        largest = max((values[name] for values in facts["files"] if values), default=0.0)
        lines.append(f"  {name:<36} {largest:+.1f} at most (limit {limit:g})")
    lines.append(facts["found"] or f"{facts['hashes_compared']} states compared, all equal")
    lines.append("passed" if facts["passed"] else "FAILED")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
