"""Draws whole configurations from a seed: a value of each feature of features.toml, of which no two
are in never.toml, and when the faults strike. Pure.

A draw follows from its seed alone. Seeds are chosen for even coverage: of the next candidates that
whose pairs of values were drawn least (:func:`min_covered`).
"""

import itertools
import json
import random
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from tests.reach.shrink import COMMON, Flags, complete

_HERE = Path(__file__).parent
ROLES, ITERATIONS = 4, 16
#: by feature and value
FEATURES: dict[str, dict[str, dict[str, Any]]] = {
    feature: {name: row if isinstance(row, dict) else {"flags": row} for name, row in rows.items()}
    for feature, rows in tomllib.loads((_HERE / "features.toml").read_text()).items()
}
NEVER = tomllib.loads((_HERE / "never.toml").read_text())["never"]
_FAULTS = ("first", "second", "third")
# A fall-back needs a durable checkpoint: the second, for any interval.
_LATE = 12
Choice = Mapping[str, str]
Pair = tuple[str, str]


@dataclass(frozen=True)
class Draw:
    """A configuration and its faults. ``choice``: the value of each feature; ``moment``: the
    iteration after which a request or signal comes; ``pick``: the node that it concerns."""

    seed: int
    choice: Choice
    faults: Sequence[Mapping[str, Any]] = ()
    moment: int = 0
    pick: int = 0

    @property
    def script(self) -> str:
        """The script of Megatron-LM, or its replacement in tests/reach."""
        return next(
            (row["script"] for row in _rows(self.choice) if "script" in row), "pretrain_gpt.py"
        )

    @property
    def flags(self) -> list[str]:
        """All flags of the program, each once; ``{run}`` and ``{data}`` stay in them."""
        text = " ".join(row.get("flags", "") for row in _rows(self.choice)).format_map(
            _facts(self.seed, self.choice)
        )
        kept = by_flag(text.split())
        complete(kept)
        common = by_flag(COMMON)
        for replaced in ("--mock-data", "--split"):
            del common[replaced]
        return [word for flag, values in (common | kept).items() for word in (flag, *values)]

    @property
    def settings(self) -> list[str]:
        """The options of ``deadpool run``."""
        return " ".join(row.get("settings", "") for row in _rows(self.choice)).split()

    @property
    def nodes(self) -> int:
        """How many there are at the start."""
        return int(FEATURES["hosts"][self.choice["hosts"]]["nodes"])

    @property
    def spares(self) -> int:
        """How many nodes wait."""
        return int(FEATURES["spares"][self.choice["spares"]]["spares"])


def draw(seed: int, tag: str = "") -> Draw:
    """Return the draw of a seed. ``tag``: replaces that of the seed."""
    dice = random.Random(seed)
    fixed = {"tag": tag} if tag else {}
    choice = None
    while choice is None:
        choice = _choose(dice, fixed)
    strikes = _strikes(dice, choice)
    moment, pick = dice.randrange(3, ITERATIONS - 4), dice.randrange(ROLES)
    return Draw(seed, choice, strikes, moment, pick)


def without(drawn: Draw, names: Iterable[str]) -> Draw:
    """Return the draw with the first value, which is the plainest, of these features. Raises
    ValueError if other features need the present values."""
    plain = {name: next(iter(FEATURES[name])) for name in names}
    choice = {**drawn.choice, **plain}
    if any(forbidden(*pair) for pair in pairs(choice)):
        raise ValueError(f"{', '.join(plain)}: others of this draw need them")
    faults = [fault for fault in drawn.faults if fault["id"] not in plain]
    return replace(drawn, choice=choice, faults=faults)


def pairs(choice: Choice) -> list[Pair]:
    """Every two values that this draw has together."""
    return list(itertools.combinations(sorted(map("=".join, choice.items())), 2))


@cache
def possible() -> list[Pair]:
    """Return all pairs of values that never.toml permits."""
    values = [[f"{name}={value}" for value in rows] for name, rows in FEATURES.items()]
    both = itertools.combinations(values, 2)
    found = (tuple(sorted(pair)) for two in both for pair in itertools.product(*two))
    return sorted(pair for pair in found if not forbidden(*pair))


def forbidden(*pair: str) -> str:
    """Return the reason why two values do not go together; empty if they do."""
    return _barred().get(frozenset(pair), "")


@cache
def _barred() -> dict[frozenset[str], str]:
    values = [f"{name}={value}" for name, rows in FEATURES.items() for value in rows]
    return {
        frozenset((these, those)): rule["why"]
        for rule in NEVER
        for these in values
        if _is_among(these, rule["these"])
        for those in values
        if _is_among(those, rule["with"])
    }


def min_covered(seeds: Iterable[int], drawn: Mapping[Pair, int], tag: str = "") -> Draw:
    """Return the draw of the seed whose pairs were drawn least; of equal draws the first."""

    def weight(candidate: Draw) -> float:
        return sum(4.0 ** -drawn.get(pair, 0) for pair in pairs(candidate.choice))

    return max((draw(seed, tag) for seed in seeds), key=weight)


def count(choices: Iterable[Choice]) -> Counter[Pair]:
    """Count how often each pair was drawn."""
    return Counter(pair for choice in choices for pair in pairs(choice))


def read_choices(path: Path) -> list[Choice]:
    """Read earlier draws, each as the values of its features. Raises ValueError for a file of
    another form."""
    try:
        rows = json.loads(path.read_text())["draws"]
        return [dict(pair.split("=") for pair in row.split()) for row in rows]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(f"{path} is no table of pairs: name a new file") from None


def write_choices(path: Path, choices: Sequence[Choice]) -> None:
    """Write a line for each draw, and the number of pairs that they cover."""
    rows = ",\n".join(json.dumps(" ".join(map("=".join, row.items()))) for row in choices)
    drawn = count(choices)
    facts = {"possible": len(possible()), "drawn": len(drawn.keys() & set(possible()))}
    path.write_text(f'{{"pairs": {json.dumps(facts)}, "draws": [\n{rows}\n]}}\n')


def _choose(dice: random.Random, fixed: Choice) -> Choice | None:
    """Choose a value of each feature, in a random order so that none is restricted by the others
    more often than it restricts them; None: a feature was left without a value."""
    taken = dict(fixed)
    for name in dice.sample(list(FEATURES), len(FEATURES)):
        if name not in taken:
            held = [f"{other}={value}" for other, value in taken.items()]
            free = [v for v in FEATURES[name] if not any(forbidden(f"{name}={v}", h) for h in held)]
            if not free:
                return None
            taken[name] = dice.choice(free)
    return {name: taken[name] for name in FEATURES}


def _strikes(dice: random.Random, choice: Choice) -> list[dict[str, Any]]:
    """Return the plan of faults (failpoints.py): at most one of each of three, in later and later
    iterations."""
    found, at = [], 1
    for name in _FAULTS:
        row = FEATURES[name][choice[name]]
        at = dice.randrange(at + 1, at + 4)
        role, other = dice.sample(range(ROLES), 2)
        if "point" in row:
            match = {"role": other if row.get("other") else role}
            moment = _LATE if row.get("late") else at
            match |= {} if row.get("free") else {"iteration": moment}
            rest = {key: row[key] for key in ("nth", "nodes", "signal") if key in row}
            entry = {"id": name, "point": row["point"], "match": match, "target": row["target"]}
            found.append(entry | rest)
    return found


def _facts(seed: int, choice: Choice) -> dict[str, Any]:
    """Return the values of the names in braces."""
    row = FEATURES["layout"][choice["layout"]]
    unit = FEATURES["length"][choice["length"]]["unit"]
    batch = row["dp"] * FEATURES["batch"][choice["batch"]]["micro"]
    length = ITERATIONS * (batch if unit == "samples" else 1)
    return {
        "layers": row.get("layers", 4),
        "mtp": "m" * (choice["heads"] == "more"),
        "batch": batch,
        "half": batch // 2,
        "ramp": 3 * batch,
        "seed": seed % 9999 + 1,
        "unit": unit,
        "length": length,
        "warm": length // 4,
        "part": length * 3 // 4,
        "run": "{run}",
        "data": "{data}",
    }


def _rows(choice: Choice) -> list[Mapping[str, Any]]:
    sizes = (
        "--num-layers {layers} --global-batch-size {batch} --train-{unit} {length} --seed {seed}"
    )
    return [{"flags": sizes}, *(FEATURES[name][value] for name, value in choice.items())]


def by_flag(arguments: Sequence[str]) -> Flags:
    """Return the values of each flag; of a repeated flag the last."""
    kept: Flags = {}
    for word in arguments:
        if word.startswith("--"):
            kept[flag := word] = []
        else:
            kept[flag].append(word)
    return kept


def _is_among(value: str, patterns: str) -> bool:
    return any(fnmatch(value, pattern) for pattern in patterns.split())
