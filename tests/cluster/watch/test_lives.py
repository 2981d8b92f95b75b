"""Hangs over the life of a run, line by line: what is looked at, and each word of what comes of it.

How the file is written again: tests/common/lives.py.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
        word, _sep, rest = line.partition(" ")
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
            first, _sep, last = word.partition("-")
            usual = {"section": "step", "iteration": 7, "progress": 50}
            for role in range(int(first), int(last or first) + 1):
                if rest == "gone":
                    del beats[role]
                else:
                    beats[role] = {**usual, **json.loads(rest)}
    return told


def test_hangs_are_told_as_before(tmp_path: Path) -> None:
    lives.compare(LIVES / "hangs.txt", live_with_hangs, tmp_path)
