"""Judges a command line of Megatron-LM as the start of a run does. Each flag is supported, set by
deadpool, accepted and never run (no CPU runs it), accepted by name (its source was read, it was
never run), not reviewed, or refused. The environment variables of this shell are judged as well.
Values of flags are checked with --megatron only, by its parser. Nothing is started, and no GPU is
needed.

examples:
  deadpool support -- pretrain_gpt.py --num-layers 32 --bf16 --tp-comm-overlap
  deadpool support --megatron Megatron-LM -- pretrain_gpt.py @my.args
  deadpool support --batch launches.jsonl   objects with id, script, flags (a value, a list of
                                            values, or true) and env, one a line

exit status: 0 no flag keeps a run from its start, or all of --batch was judged; 2 one does, or bad
input
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.failures import ExitStatus
from deadpool_megatron.support import findings
from deadpool_megatron.support.findings import SupportFinding
from deadpool_megatron.support.flags import Level
from deadpool_megatron.support.versions import tree_version

_SECONDS = 300.0
_VERDICTS = ("supported", "accepted", "allowed", "refused")
_TEXTS = {
    Level.SET: "set for you",
    Level.ACCEPTED: "never run",
    Level.READ: "to be allowed",
    Level.UNREAD: "not reviewed",
    Level.REFUSED: "refused",
}


@dataclass(frozen=True)
class _Case:
    """A command line with its environment."""

    id: str
    command: Sequence[str]
    environment: Mapping[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    text = "take the defaults from the parser of this checkout (default: from the table)"
    parser.add_argument("--megatron", type=Path, metavar="DIR", help=text)
    parser.add_argument("--batch", type=Path, metavar="FILE", help="judge many command lines")
    parser.add_argument("--json", action="store_true", help="one object a command line")


def run(args: argparse.Namespace) -> int:
    """Judge the command lines; return the exit status."""
    if bool(args.batch) == bool(args.command):
        raise CommandError("give either --batch FILE, or -- and the script with its arguments")
    tokens = [
        token
        for word in args.command
        for token in (Path(word[1:]).read_text().split() if word[:1] == "@" else [word])
    ]
    cases = _read(args.batch) if args.batch else [_Case("", tokens, os.environ)]
    judgements = _judge(cases, args.megatron)
    if args.json:
        for case, judgement in zip(cases, judgements, strict=True):
            print(json.dumps(_as_object(case, judgement)))
    elif args.batch:
        _print_table(cases, judgements)
    else:
        _print_case(judgements[0])
    is_refused = not args.batch and findings.refusal(judgements[0])
    return ExitStatus.BAD_INPUT if is_refused else 0


def _read(path: Path) -> list[_Case]:
    cases = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            row = json.loads(line)
            tokens = [str(row["script"])]
            for flag, value in row["flags"].items():
                values = value if isinstance(value, list) else [] if value is True else [value]
                tokens += [flag, *map(str, values)]
            environment = {name: str(value) for name, value in (row.get("env") or {}).items()}
            cases.append(_Case(str(row["id"]), tokens, environment))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CommandError(
                f"{path}, line {number}: an object with id, script, flags and env is expected"
            ) from error
    if not cases:
        raise CommandError(f"{path} has no command line")
    return cases


def _judge(cases: Sequence[_Case], tree: Path | None) -> list[list[SupportFinding]]:
    version = tree_version(tree)
    if tree is not None and not version:
        raise CommandError(f"{tree} is not a checkout of Megatron-LM")
    parsed = [None for _ in cases] if tree is None else _parse(cases, tree)
    return [
        findings.judge(case.command, args, version)
        # Gloo ignores the variables that are judged.
        + ([] if "gloo" in case.command else findings.judge_environment(case.environment))
        for case, args in zip(cases, parsed, strict=True)
    ]


def _parse(cases: Sequence[_Case], tree: Path) -> list[argparse.Namespace | None]:
    """Return the arguments that the parser of ``tree`` reads from each case, None for a case that
    it refuses. A refusal of a single case raises CommandError with the parser's reason."""
    parser = [sys.executable, "-P", "-m", "deadpool_megatron.megatron_lm.parser"]
    lines = "".join(json.dumps(list(case.command[1:])) + "\n" for case in cases)
    try:
        done = subprocess.run(
            [*parser, str(tree)], input=lines, capture_output=True, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"the parser of {tree} took over {_SECONDS:.0f} s") from error
    if done.returncode != 0:
        text = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise CommandError(f"the parser of {tree} cannot be had: {text}; leave --megatron out")
    answers = list(map(json.loads, done.stdout.splitlines()))
    if len(cases) == 1 and (reason := answers[0].get("refused")):
        raise CommandError(f"the parser of {tree} takes it not: {reason}")
    return [None if "refused" in each else argparse.Namespace(**each) for each in answers]


def _as_object(case: _Case, judgement: Sequence[SupportFinding]) -> dict[str, Any]:
    rows = [
        {"level": str(each.level), "shown": each.shown, "line": each.line, "allowed": each.allowed}
        | {"fork": each.is_from_fork}
        for each in judgement
    ]
    return {
        "id": case.id,
        "verdict": findings.verdict(judgement),
        "without_fork": findings.verdict(_without_fork(judgement)),
        "never_run": findings.never_run(judgement),
        "rows": rows,
    }


def _print_case(judgement: Sequence[SupportFinding]) -> None:
    for each in judgement:
        allowed = " (allowed here)" if each.allowed else ""
        print(f"{_TEXTS[each.level]}: {each.line}{allowed}")
    verdict, allowances = findings.verdict(judgement), findings.allowances(judgement)
    if verdict == "allowed" and allowances:
        verdict = f"needs {' '.join(allowances)}"
    if names := findings.never_run(judgement):
        verdict += f"; never run: {', '.join(names)}"
    print(f"verdict: {verdict}")


def _print_table(cases: Sequence[_Case], judgements: Sequence[Sequence[SupportFinding]]) -> None:
    verdicts = [findings.verdict(judgement) for judgement in judgements]
    for case, verdict, judgement in zip(cases, verdicts, judgements, strict=True):
        print(f"{verdict:9}  {case.id}  {'; '.join(each.shown for each in judgement)}".rstrip())
    counts = Counter(
        (_TEXTS[each.level] + " (a fork's)" * each.is_from_fork, each.shown)
        for judgement in judgements
        for each in judgement
    )
    print("\nblockers, and what was set:")
    for (level, shown), number in counts.most_common():
        print(f"{number:5}  {level}: {shown}")
    print()
    stock = [findings.verdict(_without_fork(judgement)) for judgement in judgements]
    for name, group in (("as they are", verdicts), ("without what only a fork has", stock)):
        shares = (f"{kind} {group.count(kind)}" for kind in _VERDICTS)
        print(f"{len(group)} configurations {name}: {', '.join(shares)}")


def _without_fork(judgement: Sequence[SupportFinding]) -> list[SupportFinding]:
    return [each for each in judgement if not each.is_from_fork]
