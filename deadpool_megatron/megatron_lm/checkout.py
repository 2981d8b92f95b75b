"""The checkout of Megatron-LM that belongs to a script, imported on a GPU or with the stand-ins."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import torch

from deadpool_megatron.hookpoints import SCRIPT_VARIABLE
from deadpool_megatron.support.versions import tree_of


def import_megatron(script: Path) -> None:
    """Import ``megatron.training`` and ``megatron.core`` from the checkout of ``script``, whose own
    folder comes first on the path, as for any script.

    Raises ValueError or RuntimeError with one line if there is no checkout, or a package that
    Megatron-LM needs is missing. No module that imports Megatron may be loaded before.
    """
    checkout, own = tree_of(script), script.resolve().parent
    if torch.cuda.is_available():
        sys.path.insert(0, str(checkout))
        try:
            importlib.import_module("megatron.training")
        except ModuleNotFoundError as error:
            raise RuntimeError(f"{script}: Megatron-LM cannot be imported: {error}") from error
    else:
        from deadpool_megatron.megatron import stand_ins

        stand_ins.install_megatron_lm(checkout)
    if own != checkout:
        sys.path.insert(0, str(own))


def script_of_this_run() -> Path | None:
    """Return the script that the environment names; None if no Megatron-LM is to be imported
    ahead."""
    script = os.environ.get(SCRIPT_VARIABLE)
    return None if script is None else Path(script)
