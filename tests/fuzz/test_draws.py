"""Draws of configurations: the same for a seed, valid, and even in pairs."""

import argparse
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatch

import pytest

from deadpool_megatron import arguments
from deadpool_megatron.support.findings import judge
from deadpool_megatron.support.flags import Level
from tests.fuzz import draws
from tests.fuzz.draws import FEATURES, Draw, count, draw, least_covered, pairs, without
from tests.fuzz.minimal import smallest
from tests.megatron_lm.harness.checkout import TAG, needs_megatron_lm
from tests.megatron_lm.harness.parsing import Question, ask
from tests.reach.shrink import _RULES

DRAWS = [draw(seed) for seed in range(300)]


def test_a_seed_draws_the_same_always():
    assert [draw(seed) for seed in range(9)] == DRAWS[:9]
    assert len({str(one) for one in DRAWS}) == len(DRAWS)
    assert draw(5, "core_v0.17.1").choice["tag"] == "core_v0.17.1"


def test_every_draw_obeys_the_rules():
    gpu_only = " ".join(_RULES["cannot"].values()).split()
    for one in DRAWS:
        assert one.choice.keys() == FEATURES.keys()
        assert not [pair for pair in pairs(one.choice) if draws.forbidden(*pair)]
        names = [word for word in one.flags if word.startswith("--")]
        assert len(set(names)) == len(names)
        assert not [name for name in names for row in gpu_only if fnmatch(name, row)]
        struck = [fault["match"].get("iteration", 0) for fault in one.faults]
        assert all(0 <= at <= draws.ITERATIONS - 3 for at in struck)


def test_the_package_takes_every_draw():
    for one in DRAWS:
        found = judge([one.script, *one.flags, "--deadpool"], version=one.choice["tag"][6:])
        assert {each.level for each in found} <= {Level.SET}, (one.seed, found)
        parser = argparse.ArgumentParser()
        arguments.add_arguments(parser)
        arguments.settings_from(parser.parse_args(one.settings))


def test_every_value_is_drawn_and_every_pattern_names_one():
    drawn = {word for one in DRAWS for word in map("=".join, one.choice.items())}
    known = {f"{name}={value}" for name, rows in FEATURES.items() for value in rows}
    assert drawn == known
    patterns = {word for rule in draws.NEVER for word in (rule["these"], rule["with"])}
    for pattern in " ".join(patterns).split():
        assert [one for one in known if fnmatch(one, pattern)], pattern


def chosen(number: int, candidates: int) -> Counter[draws.Pair]:
    drawn: Counter[draws.Pair] = Counter()
    for first in range(0, number * candidates, candidates):
        drawn += count([least_covered(range(first, first + candidates), drawn).choice])
    return drawn


def test_pairs_are_drawn_evenly():
    """More of them with as many draws than at random, and no value much more than its share."""
    even, at_random = chosen(40, 8), count(one.choice for one in DRAWS[:40])
    assert len(even) > 1.05 * len(at_random)
    assert even.keys() <= set(draws.possible())
    wide = count(one.choice for one in DRAWS)
    assert len(wide) > 0.95 * len(draws.possible())


def test_the_least_covered_draw_is_taken():
    first = DRAWS[0]
    assert least_covered([0, 0], Counter()) == first
    assert least_covered([0, 1], count([first.choice] * 3)) == DRAWS[1]


def test_features_become_plain_unless_others_need_them():
    one = next(one for one in DRAWS if one.choice["router"] != "usual" and one.faults)
    with pytest.raises(ValueError, match="others of this draw need them"):
        without(one, ["experts"])
    plain = without(one, ["experts", "router", "recompute", *("first", "second", "third")])
    assert "--num-experts" not in plain.flags
    assert plain.faults == []
    assert without(one, FEATURES).choice == {name: next(iter(FEATURES[name])) for name in FEATURES}


def test_what_fails_is_shrunk_to_what_matters():
    parts, tried = [f"part {number}" for number in range(40)], 0

    def fails(left: Sequence[str]) -> bool:
        nonlocal tried
        tried += 1
        return {"part 3", "part 31"} <= set(left)

    assert smallest(parts, fails) == ["part 3", "part 31"]
    assert tried < 40
    assert smallest(parts, lambda left: True) == []
    assert smallest(parts, lambda left: len(left) == 40) == parts


def test_what_was_drawn_is_written_and_read(tmp_path):
    drawn = [one.choice for one in DRAWS[:5]]
    draws.write_choices(tmp_path / "pairs.json", drawn)
    assert draws.read_choices(tmp_path / "pairs.json") == drawn


@pytest.mark.megatron_lm
@needs_megatron_lm
def test_megatron_takes_the_flags_of_every_draw():
    ones = [draw(one.seed, TAG) for one in DRAWS[:12]]
    answers = ask([Question([*_placed(one), "--deadpool"], 4) for one in ones])
    assert [answer.error + answer.refused for answer in answers] == [""] * len(ones)


def _placed(one: Draw) -> list[str]:
    return [word.format(run="run", data="data") for word in one.flags]
