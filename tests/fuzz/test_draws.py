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
from tests.fuzz.draws import FEATURES, Draw, count, draw, min_covered, pairs, without
from tests.fuzz.minimal import smallest
from tests.megatron_lm.harness.checkout import TAG, needs_megatron_lm
from tests.megatron_lm.harness.parsing import Question, ask
from tests.reach.shrink import _RULES

DRAWS = [draw(seed) for seed in range(300)]


def test_seed_always_gives_the_same_draw():
    assert [draw(seed) for seed in range(9)] == DRAWS[:9]
    assert len({str(drawn) for drawn in DRAWS}) == len(DRAWS)
    assert draw(5, "core_v0.17.1").choice["tag"] == "core_v0.17.1"


def test_draws_obey_the_rules():
    gpu_only = " ".join(_RULES["cannot"].values()).split()
    for drawn in DRAWS:
        assert drawn.choice.keys() == FEATURES.keys()
        assert not [pair for pair in pairs(drawn.choice) if draws.forbidden(*pair)]
        names = [word for word in drawn.flags if word.startswith("--")]
        assert len(set(names)) == len(names)
        assert not [name for name in names for row in gpu_only if fnmatch(name, row)]
        struck = [fault["match"].get("iteration", 0) for fault in drawn.faults]
        assert all(0 <= at <= draws.ITERATIONS - 3 for at in struck)


@pytest.mark.slow
def test_package_accepts_every_draw():
    for drawn in DRAWS:
        found = judge([drawn.script, *drawn.flags, "--deadpool"], version=drawn.choice["tag"][6:])
        assert {each.level for each in found} <= {Level.SET}, (drawn.seed, found)
        parser = argparse.ArgumentParser()
        arguments.add_arguments(parser)
        arguments.settings_from(parser.parse_args(drawn.settings))


def test_draws_have_every_value_and_every_pattern_names_values():
    drawn = {word for each in DRAWS for word in map("=".join, each.choice.items())}
    known = {f"{name}={value}" for name, rows in FEATURES.items() for value in rows}
    assert drawn == known
    patterns = {word for rule in draws.NEVER for word in (rule["these"], rule["with"])}
    for pattern in " ".join(patterns).split():
        assert [value for value in known if fnmatch(value, pattern)], pattern


def chosen(number: int, candidates: int) -> Counter[draws.Pair]:
    drawn: Counter[draws.Pair] = Counter()
    for first in range(0, number * candidates, candidates):
        drawn += count([min_covered(range(first, first + candidates), drawn).choice])
    return drawn


def test_draws_cover_pairs_evenly():
    """They cover more pairs than as many random draws."""
    even, at_random = chosen(40, 8), count(drawn.choice for drawn in DRAWS[:40])
    assert len(even) > 1.05 * len(at_random)
    assert even.keys() <= set(draws.possible())
    wide = count(drawn.choice for drawn in DRAWS)
    assert len(wide) > 0.95 * len(draws.possible())


def test_min_covered_takes_the_draw_with_the_fewest_known_pairs():
    first = DRAWS[0]
    assert min_covered([0, 0], Counter()) == first
    assert min_covered([0, 1], count([first.choice] * 3)) == DRAWS[1]


def test_features_become_plain_unless_others_need_them():
    drawn = next(each for each in DRAWS if each.choice["router"] != "usual" and each.faults)
    with pytest.raises(ValueError, match="others of this draw need them"):
        without(drawn, ["experts"])
    plain = without(drawn, ["experts", "router", "recompute", *("first", "second", "third")])
    assert "--num-experts" not in plain.flags
    assert plain.faults == []
    first = {name: next(iter(FEATURES[name])) for name in FEATURES}
    assert without(drawn, FEATURES).choice == first


def test_smallest_keeps_only_the_parts_that_fail():
    parts, tried = [f"part {number}" for number in range(40)], 0

    def fails(left: Sequence[str]) -> bool:
        nonlocal tried
        tried += 1
        return {"part 3", "part 31"} <= set(left)

    assert smallest(parts, fails) == ["part 3", "part 31"]
    assert tried < 40
    assert smallest(parts, lambda left: True) == []
    assert smallest(parts, lambda left: len(left) == 40) == parts


def test_choices_are_written_and_read(tmp_path):
    drawn = [each.choice for each in DRAWS[:5]]
    draws.write_choices(tmp_path / "pairs.json", drawn)
    assert draws.read_choices(tmp_path / "pairs.json") == drawn


@pytest.mark.megatron_lm
@needs_megatron_lm
def test_megatron_accepts_the_flags_of_draws():
    drawn = [draw(each.seed, TAG) for each in DRAWS[:12]]
    answers = ask([Question([*_placed(each), "--deadpool"], 4) for each in drawn])
    assert [answer.error + answer.refused for answer in answers] == [""] * len(drawn)


def _placed(drawn: Draw) -> list[str]:
    return [word.format(run="run", data="data") for word in drawn.flags]
