"""Explains the code of a failure in lines, reports and notices: its evidence, and your response.
Without a code it prints all of them, the text of docs/codes.md.

examples:
  deadpool explain node-lost

exit status: 0 explained, 2 no such code
"""

from __future__ import annotations

import argparse

from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.failures import MEANINGS

_HEAD = """\
# Codes of failures

The output of `deadpool explain`. [failures.md](failures.md) describes how a run handles each kind.

| code | meaning | evidence | what to do |
| --- | --- | --- | --- |"""


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
    elif (meaning := MEANINGS.get(args.code.lower())) is None:
        raise CommandError(f"no code {args.code!r}; there are: {', '.join(MEANINGS)}")
    else:
        print(f"{args.code}: {meaning.called}")
        print(f"  evidence    {meaning.noticed}\n  what to do  {meaning.to_do or 'nothing'}")
    return 0
