"""Where Megatron-LM's own source is, for the tests that need it; no test downloads it."""

import os
import pickle
import platform
import uuid
from pathlib import Path

import pytest

#: supported, each with a patch set
TAGS = ("core_v0.16.1", "core_v0.17.1", "core_v0.18.2", "core_v0.19.0")
#: a commit of main without a tag: an archive of it, extracted as those of the tags are
UNTAGGED = "main-d98e8a64ddf3"
TREES = (*TAGS, UNTAGGED)
_TAG_VARIABLE = "MEGATRON_LM_TAG"
_TREE_VARIABLE = "MEGATRON_LM_DIR"


def _extracted(tag: str) -> Path:
    return Path(f"~/.cache/deadpool-megatron/Megatron-LM-{tag}").expanduser()


_newest = next((tag for tag in reversed(TAGS) if _extracted(tag).is_dir()), TAGS[-1])
#: the tag of all tests but :mod:`tests.megatron_lm.test_tags`: the newest checkout, unless the
#: variable names another
TAG = os.environ.get(_TAG_VARIABLE, _newest)


def checkout(tag: str = TAG) -> Path | None:
    """Return the extracted tree of ``tag``, or for :data:`TAG` that of ``MEGATRON_LM_DIR``, if
    there is any.

    Tests read it and write only to copies.
    """
    named = os.environ.get(_TREE_VARIABLE) if tag == TAG else None
    tree = Path(named).expanduser() if named else _extracted(tag)
    return tree if (tree / "megatron" / "training" / "training.py").is_file() else None


needs_megatron_lm = pytest.mark.skipif(
    checkout() is None,
    reason=f"no Megatron-LM checkout: set {_TREE_VARIABLE} or extract {TAG} to {_extracted(TAG)}",
)


# Of what loads a checkpoint that Megatron has written.
LOADS = pytest.mark.skipif(
    b"getattr" in pickle.dumps(uuid.SafeUUID.safe),
    reason=f"Python {platform.python_version()} pickles the members of an enum as getattr(), which"
    " torch.load refuses: stock Megatron does not load its own checkpoints either",
)
