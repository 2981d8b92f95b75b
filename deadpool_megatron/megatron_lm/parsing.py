"""``python -m deadpool_megatron.megatron_lm.parsing DIR``: the parser of a tree of Megatron-LM.

Reads the arguments of a script from each line of its input, as a list, and answers with what that
parser makes of them, defaults included; null where it takes them not. Nothing is validated, and no
GPU is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import json
import sys
from pathlib import Path
from typing import Any

from deadpool_megatron.megatron_lm.importing import import_megatron


def main(tree: Path) -> None:
    """Answer until the input ends."""
    with contextlib.redirect_stdout(sys.stderr):
        import_megatron(tree / "pretrain_gpt.py")
        from megatron.training import arguments

        made: Any = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    for line in sys.stdin:
        try:
            found: Any = vars(made.parse_known_args(json.loads(line))[0])
        except SystemExit:
            found = None
        print(json.dumps(found, default=_written))


def _written(value: Any) -> str:
    return value.name if isinstance(value, enum.Enum) else str(value)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
