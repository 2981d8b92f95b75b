"""Cuts a launch configuration down to 4 or 8 roles of a CPU, by the tables in rules.toml. Pure.

Each kind of parallelism that it names stays, with two ranks.
"""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_RULES: dict[str, Any] = tomllib.loads((_HERE / "rules.toml").read_text())
_PATTERN, _STAGES = "--hybrid-layer-pattern", "--pipeline-model-parallel-size"
_PATTERNS = (_PATTERN, "--hybrid-override-pattern")
#: the flags of every configuration
COMMON = (_HERE / "common.args").read_text().split()
Flags = dict[str, list[str]]


@dataclass(frozen=True)
class Known:
    """A flag of Megatron-LM's parser. ``choices``: empty where it lists none."""

    choices: Sequence[str]
    takes_value: bool


@dataclass(frozen=True)
class Shrunk:
    """A configuration that a CPU trains. ``without``: flags that need a GPU or another version of
    Megatron-LM."""

    id: str
    script: str
    flags: str
    without: Sequence[str] = ()


def shrink(name: str, script: str, given: Mapping[str, Any], known: Mapping[str, Known]) -> Shrunk:
    """Cut down one configuration. ``known``: the flags of the Megatron-LM that will train it."""
    pattern = next((str(given[flag]) for flag in _PATTERNS if flag in given), "")
    scripts = _RULES["scripts"].items()
    script = next(to for wanted, to in scripts if pattern or fnmatch(script, wanted))
    kept: Flags = {_PATTERN: []} if "hybrid" in script else {"--num-layers": []}
    without: dict[str, None] = {}
    for flag, value in given.items():
        listed = value if isinstance(value, list) else [] if value is True else [value]
        missing, values = _left(flag, [str(each).strip("[]'") for each in listed], known, kept)
        without |= dict.fromkeys(missing)
        if values is not None:
            kept[_RULES["instead"].get(flag, flag)] = values
    complete(kept)
    layers = 4 if _STAGES in kept else 2
    if "M" in pattern:
        without["state spaces"] = None
    pattern = "|".join([_kinds(pattern, "--num-experts" in kept)] * (layers // 2))
    facts = {"layers": layers, "others": layers - 1, "pattern": pattern}
    arguments = [
        word for flag, values in kept.items() for word in (flag, *_cut(flag, values, facts))
    ]
    script = "multi_latent.py" if "--multi-latent-attention" in kept else script
    return Shrunk(name, script, " ".join(arguments), [*without])


def _left(
    flag: str, values: list[str], known: Mapping[str, Known], kept: Flags
) -> tuple[list[str], list[str] | None]:
    """Return the values of a flag with which a CPU can train; None: it is left out."""
    gone = [*_RULES["without"].values(), _RULES["hybrid"]["flags"] if _PATTERN in kept else ""]
    if flag in (*COMMON, *_PATTERNS) or _is_in(gone, flag, values):
        return [], None
    for reason, row in _RULES["cannot"].items():
        if _is_in([row], flag, values):
            return [reason], None
    if flag not in known:
        return [flag], None
    if rule := _RULES["only"].get(flag):
        left = [each for each in values if each in rule["can"].split()]
        if left != values:
            return [rule["what"]], left or rule.get("else", "").split() or None
    # The set has True where a value was not to be had.
    if known[flag].takes_value != bool(values) and flag not in _RULES["becomes"]:
        return [], None
    wrong = [f"{flag}={each}" for each in values if each not in (known[flag].choices or values)]
    return wrong, None if wrong else values


def _is_in(rows: Iterable[str], flag: str, values: Sequence[str]) -> bool:
    names = (flag, f"{flag}={' '.join(values)}")
    return any(fnmatch(name, row) for name in names for row in " ".join(rows).split())


def complete(kept: Flags) -> None:
    """Add what the flags ask for, and take away those whose own condition is not there."""
    for flag, more in _RULES["adds"].items():
        for each in more if flag in kept else ():
            added, *values = each.split()
            kept.setdefault(added, values)
    kept.setdefault("--eval-iters", ["0"])
    if "--train-samples" not in kept:
        kept.setdefault("--train-iters", [])
    gone = [flag for flag, other in _RULES["needs"].items() if other not in kept]
    gone += [flag for flag, other in _RULES["yields"].items() if other in kept]
    for flag in gone:
        kept.pop(flag, None)


def _cut(flag: str, values: list[str], facts: Mapping[str, object]) -> list[str]:
    """The values of a flag in the small run."""
    if flag in _RULES["most"]:
        return [str(max(0, min(int(values[0]), _RULES["most"][flag])))]
    new = _RULES["becomes"].get(flag)
    return values if new is None else new.format_map(facts).split()


def _kinds(pattern: str, has_experts: bool) -> str:
    """Return a short hybrid pattern with each kind of layer except state-space layers; it does not
    begin with a dash."""
    kinds = "".join(sorted({*pattern} & {*"*-E"})) or "*-"
    if has_experts and "E" not in kinds:
        kinds = kinds.replace("-", "E")
    return kinds if len(kinds) > 1 else kinds * 2
