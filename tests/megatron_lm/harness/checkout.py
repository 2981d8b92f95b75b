"""Where Megatron-LM's own source is, for the tests that need it; no test downloads it."""

from __future__ import annotations

import os
import pickle
import platform
import uuid
from pathlib import Path

import pytest

TAG = "core_v0.16.1"
_VARIABLE = "MEGATRON_LM_DIR"
_EXTRACTED = Path("~/.cache/deadpool-megatron") / f"Megatron-LM-{TAG}"


def checkout() -> Path | None:
    """The tree that ``MEGATRON_LM_DIR`` names, else the extracted one; None: there is none.

    Tests read it and write only to copies.
    """
    named = os.environ.get(_VARIABLE)
    tree = Path(named) if named else _EXTRACTED.expanduser()
    return tree if (tree / "megatron" / "training" / "training.py").is_file() else None


needs_megatron_lm = pytest.mark.skipif(
    checkout() is None,
    reason=f"no Megatron-LM checkout: set {_VARIABLE} or extract {TAG} to"
    " ~/.cache/deadpool-megatron/Megatron-LM-core_v0.16.1",
)


# Of what loads a checkpoint that Megatron has written.
LOADS = pytest.mark.skipif(
    b"getattr" in pickle.dumps(uuid.SafeUUID.safe),
    reason=f"Python {platform.python_version()} pickles the members of an enum as getattr(), which"
    " torch.load refuses: stock Megatron does not load its own checkpoints either",
)
