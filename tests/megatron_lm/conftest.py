"""Trees of Megatron-LM that several tests share."""

import pytest

from deadpool_megatron import cli
from deadpool_megatron.megatron import stand_ins
from tests.megatron_lm.harness.runs import copy_tree

# Before a test of this process imports anything of Megatron, as some do.
stand_ins.install()


@pytest.fixture(scope="session")
def patched_tree(tmp_path_factory):
    """A copy of what training needs of the checkout, patched."""
    copy = tmp_path_factory.mktemp("patched") / "Megatron-LM"
    copy_tree(copy)
    assert cli.main(["patch", "apply", str(copy)]) == 0
    return copy


@pytest.fixture
def patched(patched_tree, monkeypatch):
    """The patched copy; what is compiled of it goes when it goes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(patched_tree.parent))
    return patched_tree
