"""Explains the code of a failure in lines, reports and notices: its evidence, and your response.
Without a code it prints a table of all of them.

examples:
  deadpool explain node-lost

exit status: 0 explained, 2 no such code
"""

from __future__ import annotations

import argparse

from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.failures import MEANINGS

# Codes of 0.6, to be removed in the version after 0.7.
_RENAMED = {"drained": "planned", "left-out": "excluded"}
_HEAD = "| code | meaning | evidence | what to do |\n| --- | --- | --- | --- |"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("code", nargs="?", metavar="CODE", help="such as node-lost (default: all)")


def run(args: argparse.Namespace) -> int:
    """Carry out ``deadpool explain``. Raises CommandError."""
    if args.code is None:
        rows = [
            f"| `{code}` | {row.called} | {row.noticed} | {row.to_do or 'nothing'} |"
            for code, row in MEANINGS.items()
        ]
        print("\n".join([_HEAD, *rows]))
        return 0
    code = args.code.lower()
    if code in _RENAMED:
        print(f"since 0.7 {code} is {_RENAMED[code]}")
        code = _RENAMED[code]
    if code not in MEANINGS:
        raise CommandError(f"no code {args.code!r}; there are: {', '.join(MEANINGS)}")
    meaning = MEANINGS[code]
    print(f"{code}: {meaning.called}")
    print(f"  evidence    {meaning.noticed}\n  what to do  {meaning.to_do or 'nothing'}")
    return 0
