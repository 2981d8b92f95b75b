"""``python -m deadpool_megatron.megatron_lm SCRIPT ARGS``: a script of Megatron-LM with the hooks.

``deadpool run ... -- pretrain_gpt.py ARGS --deadpool`` starts each training process this way. A
patched checkout has the hooks in its files; otherwise the same functions are checked and wrapped
here.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from deadpool_megatron.cluster.process.program import LOADED_PROGRAM
from deadpool_megatron.failures import ExitStatus
from deadpool_megatron.hookpoints import ALLOW_UNTESTED
from deadpool_megatron.megatron_lm.checkout import import_megatron


def main(argv: Sequence[str]) -> int:
    """Run the script; print a line and return 2 if this Megatron-LM does not accept the hooks."""
    if not argv:
        return _refuse("usage: python -m deadpool_megatron.megatron_lm SCRIPT ARGS")
    script = Path(argv[0])
    if not script.is_file():
        return _refuse(f"{script}: no such file")
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # roles share the cores
    try:
        import_megatron(script)
    except (ValueError, RuntimeError) as error:
        return _refuse(str(error))
    from deadpool_megatron.support import versions

    try:
        versions.check(versions.examine(), allow_untested=ALLOW_UNTESTED in argv)
        versions.install_points()
    except versions.UntestedMegatron as error:
        return _refuse(str(error))
    sys.argv = list(argv)
    LOADED_PROGRAM.note_source(f"script {script.name}", argv[0])
    runpy.run_path(str(script), run_name="__main__")
    return 0


def _refuse(line: str) -> int:
    print(f"deadpool: {line}", file=sys.stderr, flush=True)
    return ExitStatus.BAD_INPUT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
