"""``deadpool clean`` among files of other users: it removes only the caller's."""

import fcntl
import json
import os
import subprocess
from pathlib import Path

import pytest

from deadpool_megatron import cli
from deadpool_megatron.cli.storage import clean as _loaded_as_root  # noqa: F401
from deadpool_megatron.cluster.run_directory import cleanup, directory
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.settings import Settings
from tests.security.users import ATTACKER, VICTIM, as_user, needs_root

pytestmark = needs_root
RUN, OTHER = "0123abcd", "4567cdef"


def info_of(run_id: str) -> RunInfo:
    """Return a run of one node."""
    return RunInfo(run_id, 1, 1, 0, 1, ("x.py",), Settings())


def make_run(path: Path, run_id: str) -> None:
    """Make a run of the calling user with a segment in memory, without a live process."""
    run = RunDirectory(path)
    assert run.create(info_of(run_id))
    os.close(cleanup.claim_segments(run, run_id))
    (directory.segment_root(run_id) / "node0").mkdir(mode=0o700)


def plant(root: Path, run_directory: Path, **changed: object) -> None:
    """Make shared memory of an attacker that names a run directory of his."""
    run_directory.mkdir(mode=0o755)
    values = {**info_of(RUN).to_dict(), **changed}
    (run_directory / "run.json").write_text(json.dumps(values))
    (run_directory / "run.json").chmod(0o644)
    root.mkdir(mode=0o755)
    owner = {"run_dir": str(run_directory), "run_id": root.name.removeprefix("deadpool-")}
    (root / "owner.json").write_text(json.dumps(owner))
    (root / "owner.json").chmod(0o644)


def test_clean_keeps_a_live_run_that_a_decoy_names(place):
    environment = {**os.environ, directory.ENVIRONMENT_RUN_ID: RUN}
    alive = subprocess.Popen(["/bin/sleep", "600"], user=VICTIM, group=VICTIM, env=environment)
    try:
        as_user(VICTIM, lambda: make_run(place / "run", RUN))
        as_user(ATTACKER, lambda: plant(place / f"deadpool-{OTHER}", place / "decoy"))
        assert as_user(VICTIM, lambda: cli.main(["clean"])) == "0"
        assert alive.poll() is None
        assert (place / f"deadpool-{RUN}" / "node0").exists()
    finally:
        alive.kill()
        alive.wait()


def test_clean_ignores_a_decoy_with_a_path_as_run_id(place):
    thesis = place / "home" / "thesis"

    def write() -> None:
        thesis.mkdir(parents=True, mode=0o755)
        (thesis / "text").write_text("years of work")

    as_user(VICTIM, write)
    as_user(
        ATTACKER,
        lambda: plant(place / f"deadpool-{OTHER}", place / "decoy", run_id="0/../home/thesis"),
    )
    as_user(ATTACKER, lambda: (place / "deadpool-0").mkdir())
    assert as_user(VICTIM, lambda: cli.main(["clean"])) == "0"
    assert (thesis / "text").exists()


@pytest.mark.parametrize("run_id", ["0/../home", "..", "", "0123ABCD", "0123abcde", "0123abcd\n"])
def test_run_info_refuses_bad_run_ids(run_id):
    with pytest.raises(ValueError, match="run id"):
        RunInfo.from_dict({**info_of(RUN).to_dict(), "run_id": run_id})


def test_clean_skips_runs_of_other_users(place):
    as_user(ATTACKER, lambda: make_run(place / "theirs", RUN))
    as_user(VICTIM, lambda: make_run(place / "ours", OTHER))
    assert as_user(VICTIM, lambda: cli.main(["clean"])) == "0"
    assert not (place / f"deadpool-{OTHER}").exists()
    assert (place / f"deadpool-{RUN}" / "node0").exists()


def test_clean_keeps_a_run_directory_that_another_run_uses_now(place):
    """Its listings name processes of the new run."""
    as_user(VICTIM, lambda: make_run(place / "run", RUN))

    def begin_another() -> None:
        values = info_of(OTHER).to_dict()
        (place / "run" / "run.json").write_text(json.dumps(values))
        agent = os.getppid()
        listing = {"agent": agent, "started": {str(agent): None}, "members": {}}
        (place / "run" / "nodes" / "0.json").write_text(json.dumps(listing))

    as_user(VICTIM, begin_another)
    assert as_user(VICTIM, lambda: cli.main(["clean"])) == "0"
    assert not (place / f"deadpool-{RUN}").exists()
    assert (place / "run" / "nodes" / "0.json").exists()


def test_clean_ignores_a_run_directory_that_another_user_has_replaced(place):
    as_user(VICTIM, lambda: make_run(place / "run", RUN))
    (place / "run").rename(place / "moved")

    def make() -> None:
        (place / "run").mkdir(mode=0o755)
        values = {**info_of(RUN).to_dict(), "run_id": OTHER}
        (place / "run" / "run.json").write_text(json.dumps(values))

    as_user(ATTACKER, make)
    as_user(VICTIM, lambda: make_run(place / "other", OTHER))
    alive = Path(as_user(VICTIM, lambda: cleanup.run_files.segment_root(OTHER)))

    def clean() -> int:
        held = os.open(alive / "owner.json", os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_SH)
        return cli.main(["clean"])

    assert as_user(VICTIM, clean) == "0"
    assert alive.exists()
    assert not (place / f"deadpool-{RUN}").exists()
