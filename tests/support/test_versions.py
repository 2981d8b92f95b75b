"""Which Megatron-LM is refused, and that functions are marked wherever they are named."""

import json
import runpy

import pytest

from deadpool_megatron.hookpoints import points_of
from deadpool_megatron.support import versions
from tests.megatron_lm.harness.checkout import TAG, TAGS, UNTAGGED, checkout, needs_megatron_lm
from tests.megatron_lm.harness.parsing import in_checkout

VERSION = "0.16.1"


#: by tag: what its package_info.py says, and what the package index calls its newest releases
RELEASES = {
    "core_v0.16.1": ("0.16.1", ("0.16.0", "0.16.1")),
    "core_v0.17.1": ("0.17.1", ("0.17.1",)),
    "core_v0.18.2": ("0.18.2", ("0.18.2",)),
    "core_v0.19.0": ("0.19.1", ("0.19.0", "0.19.2")),
}


@pytest.mark.parametrize("tag", TAGS)
def test_a_release_is_tried_whatever_it_calls_itself(tag):
    """A core of the package index over the tree of a tag is not refused for its name alone."""
    itself, released = RELEASES[tag]
    assert {itself, *released} <= set(versions.TESTED)
    tree = checkout(tag)
    if tree is not None:
        info = runpy.run_path(str(tree / "megatron" / "core" / "package_info.py"))
        assert versions.released(info["__version__"]) in (itself, *released)


def test_the_commit_that_was_tried_is_the_one_of_the_tests():
    ((version, row),) = versions.COMMITS.items()
    assert f"main-{row['commit']}" == UNTAGGED
    tree = checkout(UNTAGGED)
    if tree is not None:
        assert versions.tree_version(tree) == version
        assert versions.source_hash(tree) == row["sources"]


@pytest.mark.full
@pytest.mark.megatron_lm
@needs_megatron_lm
def test_versions_find_all_points_of_the_checkout():
    (line,) = in_checkout("points")
    facts = json.loads(line)
    assert facts["version"] == facts["beside"]
    assert facts["version"] in versions.TESTED
    assert facts["troubles"] == []
    patched = all(facts["marked before"])
    assert len(facts["installed"]) == (0 if patched else len(points_of(TAG.removeprefix("core_v"))))
    assert facts["again"] == []
    assert all(facts["marked"])
    assert facts["all"]
