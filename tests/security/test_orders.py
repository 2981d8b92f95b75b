"""Shared memory of another user: a run neither uses nor removes it; see calls/ for orders."""

import pytest

from deadpool_megatron.cluster.run_directory import cleanup, directory, orphaned_slots as slots
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.ownership import OwnershipError
from tests.security.test_clean import RUN, make_run
from tests.security.users import ATTACKER, VICTIM, as_user, needs_root


def refusal(function: object) -> str:
    """Return the error of a refusal."""
    assert callable(function)
    try:
        function()
    except OwnershipError as error:
        return str(error)
    return ""


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777])
def test_run_avoids_directory_of_another_user(place, mode):
    root = directory.segment_root(RUN)

    def take_name() -> None:
        root.mkdir()
        (root / "node0").mkdir()
        for path in (root, root / "node0"):
            path.chmod(mode)

    as_user(ATTACKER, take_name)
    run = RunDirectory(place / "run")
    as_user(VICTIM, lambda: cleanup.claim_segments(run, RUN))  # under another name
    as_user(ATTACKER, lambda: (place / f"deadpool-{RUN}.0").mkdir(mode=mode))
    (own,) = {path for path in place.glob(f"deadpool-{RUN}.*") if path.stat().st_uid == VICTIM}
    assert as_user(VICTIM, lambda: directory.segment_root(RUN)) == str(own)
    assert as_user(VICTIM, lambda: cleanup.runs_in_memory()) == str({RUN: run.path})
    if mode == 0o777:
        locked = as_user(VICTIM, lambda: refusal(lambda: slots.claim(root / "node0", 0)))
        assert "not a directory of this user alone" in locked
    assert as_user(VICTIM, lambda: cleanup.node_directories(RUN)) == "[]"
    assert as_user(VICTIM, lambda: cleanup.is_held(RUN)) == "False"
    as_user(VICTIM, lambda: cleanup.clean_run(run, RUN))
    assert (root / "node0").exists()
    assert not own.exists()


@needs_root
def test_run_avoids_link_of_another_user(place):
    as_user(VICTIM, lambda: make_run(place / "run", RUN))
    held, other = place / f"deadpool-{RUN}", place / "deadpool-89abcdef"
    as_user(ATTACKER, lambda: other.symlink_to(held))
    run = RunDirectory(place / "other")
    assert as_user(VICTIM, lambda: directory.segment_root("89abcdef").name) != other.name
    as_user(VICTIM, lambda: cleanup.clean_run(run, "89abcdef"))
    assert (held / "node0").exists()
