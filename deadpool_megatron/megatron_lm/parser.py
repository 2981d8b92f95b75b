"""``python -m deadpool_megatron.megatron_lm.parser DIR``: the parser of a tree of Megatron-LM.

Reads the arguments of a script from each line of its input, as a JSON list. Prints the values that
the parser gives them, with defaults; or, under ``refused``, the reason why the parser refuses them.
Values are not validated, and no GPU is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

from deadpool_megatron.megatron_lm.checkout import import_megatron


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise ValueError."""
        raise ValueError(message)


def main(tree: Path) -> None:
    """Answer each line until the input ends."""
    with contextlib.redirect_stdout(sys.stderr):
        import_megatron(tree / "pretrain_gpt.py")
        from megatron.training import arguments

        parser: Any = arguments.add_megatron_arguments(_Parser(allow_abbrev=False))
    for line in sys.stdin:
        try:
            parsed: Any = vars(parser.parse_known_args(json.loads(line))[0])
        except (KeyError, ValueError) as error:  # KeyError: an enumeration lacks the name
            parsed = {"refused": str(error)}
        print(json.dumps(parsed, default=_to_text))


def _to_text(value: Any) -> str:
    return value.name if isinstance(value, enum.Enum) else str(value)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
