"""Imports Megatron-LM from the checkout that a script lies in, on a GPU or on the stand-ins."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import torch

from deadpool_megatron.support.versions import tree_of

#: the script, for processes that import everything before they know their command
SCRIPT_VARIABLE = "DEADPOOL_SCRIPT"


def import_megatron(script: Path) -> None:
    """Have ``megatron.training`` and ``megatron.core`` come from the checkout of ``script``, whose
    own folder comes first on the path, as for any script.

    Raises ValueError or RuntimeError with one line when there is none, or something that
    Megatron-LM needs is missing. Nothing of ours that imports Megatron may come before.
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
    """From the environment; None where nothing is to be imported ahead."""
    found = os.environ.get(SCRIPT_VARIABLE)
    return None if found is None else Path(found)
