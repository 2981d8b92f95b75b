"""Hangs over the life of a run, line by line: each look, and its whole verdict.

How the file is written again: tests/common/lives.py.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import given, strategies as st

from deadpool_megatron.cluster.watch.hang import (
    HangLimit,
    ProgressClock,
    RoleStatus,
    find_hang,
    table_of,
)
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.settings import Settings
from tests.common import lives
from tests.common.event_schema import check_event

LIVES = Path(__file__).parent / "lives"
GROUPS, COUNTS = st.sampled_from("ab"), st.integers(1, 3)
ON_HOST = st.fixed_dictionaries({"waiting": st.none() | st.tuples(GROUPS, st.just("sum"), COUNTS)})
NUMBERS = st.tuples(COUNTS, COUNTS, COUNTS).map(lambda counts: sorted(counts, reverse=True))
ON_DEVICE = st.tuples(NUMBERS, NUMBERS).map(
    lambda of: {"device": [[name, *each, True] for name, each in zip("ab", of, strict=True)]}
)


def live_with_hangs(script: Sequence[str], options: dict[str, Any], _: Path) -> list[str]:
    """``ROLES BEAT``: from now on the beats of these roles (``0-3``) have these values instead of
    the usual. ``look NOW``: the limit, the hang and its table at this time."""
    settings, lines = Settings(**options), list[str]()
    clock, limit = ProgressClock(), HangLimit(settings)
    beats: dict[int, dict[str, Any]] = {}
    for line in script:
        word, _sep, rest = line.partition(" ")
        lines.append(line)
        if word == "look":
            statuses = clock.update(beats, float(rest))
            limit.look(statuses, float(rest))
            if hang := find_hang(statuses, settings, limit.seconds):
                lines += [f"    {hang.culprits} after {hang.still_seconds} s: {hang.cause}"]
                table = table_of(statuses)
                check_event(Event(Kind.HANG, 1, data={"roles": [], **table}).to_dict())
                for group in table["groups"]:
                    rows = [f"        {json.dumps(row)}" for row in group.pop("rows")]
                    lines += [f"    {json.dumps(group)}", *rows]
                lines += [f"    {table['left_out']} more groups"] * bool(table["left_out"])
            lines += [f"    the limit is {limit.seconds} s"]
        elif word in ("note_hang", "forget_step"):
            getattr(limit, word)(*map(float, rest.split()))
        else:
            first, _sep, last = word.partition("-")
            usual = {"section": "step", "iteration": 7, "progress": 50}
            for role in range(int(first), int(last or first) + 1):
                if rest == "gone":
                    del beats[role]
                else:
                    beats[role] = {**usual, **json.loads(rest)}
    return lines


def test_hangs_are_as_recorded(tmp_path):
    lives.compare(LIVES / "hangs.txt", live_with_hangs, tmp_path)


@given(
    st.lists(st.tuples(ON_HOST, COUNTS, COUNTS), min_size=2, max_size=5)
    | st.lists(st.tuples(ON_DEVICE, COUNTS, COUNTS), min_size=1, max_size=5)
)
def test_hang_never_has_all_roles_as_culprits(found):
    """To kill all processes of a job for a hang would cost all that it has in its processes."""
    roles = {
        role: RoleStatus.from_beat({**beat, "section": "x", "iteration": k, "progress": n}, 11.0)
        for role, (beat, k, n) in enumerate(found)
    }
    hang = find_hang(roles, Settings(hang_seconds=10.0), 10.0)
    assert hang is not None
    assert len(hang.culprits) < len(roles)
