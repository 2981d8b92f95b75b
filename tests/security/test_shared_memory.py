"""Shared memory under names that can be guessed: another user has made them first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deadpool_megatron.cluster.run_directory import cleanup, directory, slots
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.layout.records import PartInfo, RoleLayout
from deadpool_megatron.ownership import OwnershipError
from deadpool_megatron.vault.shm.segment import Segment, copy_name
from tests.security.test_clean import RUN, make_run
from tests.security.users import ATTACKER, VICTIM, as_user, needs_root


def refusal(function: object) -> str:
    """The line with which it refuses."""
    assert callable(function)
    try:
        function()
    except OwnershipError as error:
        return str(error)
    return ""


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777])
def test_a_directory_that_another_user_made_first(place: Path, mode: int) -> None:
    root = directory.segment_root(RUN)

    def take_the_name() -> None:
        root.mkdir()
        (root / "node0").mkdir()
        for path in (root, root / "node0"):
            path.chmod(mode)

    as_user(ATTACKER, take_the_name)
    run = RunDirectory(place / "run")
    claimed = as_user(VICTIM, lambda: refusal(lambda: cleanup.claim_segments(run, RUN)))
    assert "not a directory of this user alone" in claimed
    if mode == 0o777:
        locked = as_user(VICTIM, lambda: refusal(lambda: slots.claim(root / "node0", 0)))
        assert "not a directory of this user alone" in locked
    assert as_user(VICTIM, lambda: cleanup.node_directories(RUN)) == "[]"
    assert as_user(VICTIM, lambda: cleanup.is_held(RUN)) == "False"
    as_user(VICTIM, lambda: cleanup.clean_run(run, RUN))
    assert (root / "node0").exists()


@needs_root
def test_a_link_to_a_directory_of_ours(place: Path) -> None:
    as_user(VICTIM, lambda: make_run(place / "run", RUN))
    held = directory.segment_root(RUN)
    other = directory.segment_root("89abcdef")
    as_user(ATTACKER, lambda: other.symlink_to(held))
    run = RunDirectory(place / "other")
    assert as_user(VICTIM, lambda: refusal(lambda: cleanup.claim_segments(run, "89abcdef")))
    as_user(VICTIM, lambda: cleanup.clean_run(run, "89abcdef"))
    assert (held / "node0").exists()


def test_a_segment_is_made_anew_whatever_has_its_temporary_name(tmp_path: Path) -> None:
    layout = RoleLayout(0, (PartInfo("shard", 4096, (0,)),), (0,), 2, "hash")
    path = tmp_path / copy_name(0)
    outside = tmp_path / "outside"
    outside.write_bytes(b"not to be touched")
    (tmp_path / f".{path.name}.{os.getpid()}").symlink_to(outside)
    segment = Segment.create(path, layout, None, ())
    segment.data(0, "shard")[:4] = b"mine"
    assert outside.read_bytes() == b"not to be touched"
    assert not path.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_segment_that_is_a_link_is_not_opened(tmp_path: Path) -> None:
    layout = RoleLayout(0, (PartInfo("shard", 4096, (0,)),), (0,), 2, "hash")
    Segment.create(tmp_path / "away", layout, None, ())
    (tmp_path / copy_name(0)).symlink_to(tmp_path / "away")
    with pytest.raises(OSError, match="symbolic links"):
        Segment.open(tmp_path / copy_name(0))
