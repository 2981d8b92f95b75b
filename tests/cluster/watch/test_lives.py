"""Hangs, slow nodes and cadences over the life of a run, line by line: what is looked at, and each
word of what comes of it. How the files are written again: tests/common/lives.py."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deadpool_megatron.cluster.watch import windows
from deadpool_megatron.cluster.watch.hang import HangLimit, ProgressClock, find_hang, table_of
from deadpool_megatron.settings import Settings
from tests.common import lives

LIVES = Path(__file__).parent / "lives"


def live_with_hangs(script: Sequence[str], options: dict[str, Any], _: Path) -> list[str]:
    """``ROLES BEAT``: from now on these roles (``0-3``) have a beat that differs so from the usual
    one. ``look NOW``: the limit, the hang and its table at this time."""
    settings, told = Settings(**options), list[str]()
    clock, limit = ProgressClock(), HangLimit(settings)
    beats: dict[int, dict[str, Any]] = {}
    for line in script:
        word, _, rest = line.partition(" ")
        told.append(line)
        if word == "look":
            statuses = clock.update(beats, float(rest))
            limit.look(statuses, float(rest))
            if hang := find_hang(statuses, settings, limit.seconds):
                told += [f"    {hang.culprits} after {hang.still_seconds} s: {hang.cause}"]
                table = table_of(statuses)
                for group in table["groups"]:
                    rows = [f"        {json.dumps(row)}" for row in group.pop("rows")]
                    told += [f"    {json.dumps(group)}", *rows]
                told += [f"    {table['left_out']} more groups"] * bool(table["left_out"])
            told += [f"    the limit is {limit.seconds} s"]
        elif word in ("was_reached", "forget_step"):
            getattr(limit, word)(*map(float, rest.split()))
        else:
            first, _, last = word.partition("-")
            usual = {"section": "step", "iteration": 7, "progress": 50}
            for role in range(int(first), int(last or first) + 1):
                if rest == "gone":
                    del beats[role]
                else:
                    beats[role] = {**usual, **json.loads(rest)}
    return told


def live_with_windows(script: Sequence[str], options: dict[str, Any], _: Path) -> list[str]:
    """A call with its arguments in each line. ``times SECONDS``: of an iteration of each role in
    one more window; ``nodes``: of the roles."""
    watch, meter = windows.SlownessWatch(1.25), windows.StretchMeter()
    nodes, peers = options.get("nodes", []), options.get("peers", [])
    done = [windows.OwnTime(0, 0.0) for _ in nodes]
    told = list[str]()
    for line in script:
        name, *words = line.split()
        given: list[Any] = [json.loads(word) for word in words]
        told.append(line)
        if name == "nodes":
            nodes, done = given, [windows.OwnTime(0, 0.0) for _ in given]
        elif name == "times":
            epoch, count, *times = given
            done = [
                windows.OwnTime(own.iterations + count, own.seconds + count * each)
                for own, each in zip(done, times, strict=True)
            ]
            played = zip(nodes, peers, done, strict=True)
            players = {r: windows.Player(n, tuple(p), own) for r, (n, p, own) in enumerate(played)}
            told += [f"    {one} x{one.factor:.3g}" for one in watch.look(epoch, players)]
            told += [f"    slow: {sorted(watch.slow)}"]
        elif name == "choose":
            every, calm, *measured = given
            stretch = windows.Stretch(*measured)
            told += [f"    {windows.denser_or_thinner(every, stretch, calm)}"]
            told += [f"    {windows.in_words(stretch)}"]
        else:
            answer = getattr(meter, name)(*given)
            told += [f"    {answer}"] * (answer is not None)
            told += [f"    calm {meter.calm}, a step of {meter.step_seconds} s"]
    return told


def test_hangs_are_told_as_before(tmp_path: Path) -> None:
    lives.compare(LIVES / "hangs.txt", live_with_hangs, tmp_path)


def test_windows_are_judged_as_before(tmp_path: Path) -> None:
    lives.compare(LIVES / "windows.txt", live_with_windows, tmp_path)
