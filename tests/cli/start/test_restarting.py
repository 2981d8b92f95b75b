"""A run that is started again goes on with the slots that are left of it, as they are."""

import os
import shutil
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron import cli
from deadpool_megatron.cli.start import restarting
from deadpool_megatron.cluster.run_directory import cleanup
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, segment_root, write_json
from deadpool_megatron.events import Event, EventLog, Kind, to_line
from deadpool_megatron.layout.records import Generation, Restore
from deadpool_megatron.settings import Settings
from tests.cli.start.refused import RUN_ID, old_run, run_arguments
from tests.cli.told import CarryOut, Complain

pytestmark = pytest.mark.usefixtures("nothing_starts")


def test_what_the_run_is_stays_this_users_and_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure neither a start nor --resume could do without it."""
    run, synced, fsync = old_run(tmp_path / "old"), list[Path](), os.fsync
    path = run.path / "run.json"
    assert path.stat().st_mode & 0o777 == 0o600

    def note(handle: int) -> None:
        fsync(handle)
        synced.append(Path(f"/proc/self/fd/{handle}").readlink())

    monkeypatch.setattr(os, "fsync", note)
    restarting.begin(run, restarting.Restart(run.read_run(), (0, 1)))
    assert path.stat().st_mode & 0o777 == 0o600
    (temporary, directory) = synced
    assert (temporary.parent, directory) == (run.path, run.path)
    assert temporary.name.startswith(".run.json.")


def test_recipes_of_another_command_go_though_the_first_try_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be many, on a slow file system."""
    run = old_run(tmp_path / "old")
    run.templates.mkdir()
    other = restarting.Restart(replace(run.read_run(), command=("x.py", "--seed", "2")), (0, 1))

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(restarting.shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            restarting.begin(run, other)
    restarting.begin(run, other)
    assert not run.templates.exists()


@pytest.fixture(name="left")
def _left(tmp_path: Path) -> Iterator[RunDirectory]:
    """A run whose processes have all died; a slot of it is still in memory."""
    run = old_run(tmp_path / "old")
    run_id = run.read_run().run_id
    os.close(cleanup.claim_segments(run, run_id))
    run.segments(run_id, 0).mkdir()
    (run.segments(run_id, 0) / "own-0.0.0.0.seg").touch()
    yield run
    shutil.rmtree(segment_root(run_id))


def with_settings(run: RunDirectory, **values: Any) -> None:
    """The run was started with these."""
    info = run.read_run()
    write_json(
        run.path / "run.json", replace(info, settings=replace(info.settings, **values)).to_dict()
    )


@pytest.mark.parametrize(
    ("more", "other"),
    [
        (("--deadpool-max-lag", "1"), "--deadpool-max-lag 0, not 1"),
        (("--deadpool-extras-room-mb", "1.5"), "--deadpool-extras-room-mb 0, not 1.5"),
    ],
)
def test_a_run_started_again_on_its_slots_keeps_what_they_were_made_with(
    more: tuple[str, ...], other: str, left: RunDirectory, complain: Complain
) -> None:
    """New processes are given slots like the old ones before they say what they need: with a lag
    they found none to write to, and larger extras did not fit."""
    line = complain(*run_arguments(left.path, *more))
    assert f"the run in {left.path} has {other}, which its slots in memory were made with" in line
    assert line.endswith(f"'deadpool run --resume {left.path} --run-dir NEW'")
    assert left.read_run().settings == Settings(close_seconds=0.2)


def test_a_run_whose_directory_was_removed_is_not_begun_anew_without_a_word(
    left: RunDirectory, complain: Complain
) -> None:
    shutil.rmtree(left.path)
    line = complain(*run_arguments(left.path))
    assert (
        f"run {RUN_ID} has its state in memory, and its directory {left.path} was removed" in line
    )
    with pytest.raises(AssertionError, match="the launcher was reached"):
        cli.main(run_arguments(left.path, "--from-scratch"))


def test_what_a_run_can_go_on_from_is_not_removed_without_a_word(
    left: RunDirectory, complain: Complain, carry_out: CarryOut, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = left.segments(RUN_ID, 0) / "own-0.0.0.0.seg"
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    line = complain("clean", str(left.path))
    assert line.startswith(f"deadpool clean: run {RUN_ID} holds 0.0 MiB in memory")
    assert line.endswith("with --yes")
    status, out, _ = carry_out("clean")
    assert (status, "left alone" in out) == (0, True)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: "")
    assert cli.main(["clean", str(left.path)]) == 0
    assert segment.exists()
    monkeypatch.setattr("builtins.input", lambda _: "y")
    assert cli.main(["clean", str(left.path)]) == 0
    assert not segment.exists()
    segment_root(RUN_ID).mkdir(mode=0o700)  # for the fixture


def test_nothing_starts_from_nothing_by_itself(tmp_path: Path, complain: Complain) -> None:
    run = old_run(tmp_path / "old")
    log = EventLog(run.events, 1)
    for k in (1, 2, 3):
        log.append(to_line(Event(Kind.STEP, 1, iteration=k, data={})))
    line = complain(*run_arguments(run.path))
    assert "has finished 3 iterations, and nothing is left of them" in line
    saved = tmp_path / "iter_0000002"
    write_json(run.latest, Restore("durable", Generation(1, 2), path=str(saved)).to_dict())
    assert "nothing is left" in complain(*run_arguments(run.path)), "it is gone"
    for more in (("--from-scratch",), ()):
        if not more:
            saved.mkdir()
            (saved / ".metadata").touch()
        with pytest.raises(AssertionError, match="the launcher was reached"):
            cli.main([*run_arguments(run.path, *more)])
        assert run.read_run().finished == 3
        assert run.read_run().from_scratch == bool(more)


@pytest.mark.usefixtures("imports_nothing")
def test_an_agent_cannot_ask_for_other_slots_than_its_run_has(
    tmp_path: Path, complain: Complain
) -> None:
    """It took those of the run and said nothing. What other hosts hold is not to be seen here."""
    run = old_run(tmp_path / "old")
    with_settings(run, max_lag=1, extras_room_mb=2.0)
    start = ("agent", "--run-dir", str(run.path), "--node-id", "0", "--preload", "")
    line = complain(*start, "--deadpool-max-lag", "0")
    assert f"the run in {run.path} has --deadpool-max-lag 1, not 0" in line
    assert line.endswith(f"'deadpool agent --resume {run.path} --run-dir NEW'")
    line = complain(*start, "--deadpool-extras-room-mb", "3")
    assert "has --deadpool-extras-room-mb 2, not 3" in line
    for fits in ((), ("--deadpool-max-lag", "1"), ("--deadpool-set", "full-every=3")):
        assert "so far it is good" in complain(*start, *fits)


@pytest.mark.usefixtures("imports_nothing")
def test_slots_that_are_left_do_not_keep_their_agent_from_coming_back(
    left: RunDirectory, complain: Complain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else has to fit in beside them."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(64, 64, 0))
    start = ("agent", "--run-dir", str(left.path), "--node-id", "0", "--preload", "")
    assert "so far it is good" in complain(*start)
    (left.segments(RUN_ID, 0) / "own-0.0.0.0.seg").unlink()
    assert "0 MiB free" in complain(*start)


@pytest.mark.parametrize("kept", [True, False])
def test_an_agent_of_a_run_that_ended_with_its_slots_says_how_they_go_on(
    kept: bool, left: RunDirectory, complain: Complain
) -> None:
    """As a start with a slip in its command leaves it; its reason names the launcher's way."""
    write_json(left.final, {"exit_status": 2, "reason": "", "slots_kept": kept})
    line = complain("agent", "--run-dir", str(left.path), "--node-id", "0")
    resume = f"'deadpool agent --resume {left.path} --run-dir NEW'"
    told = f"; its state in memory continues in a new directory: {resume}" if kept else ""
    assert line.endswith(f"the run in {left.path} is over{told}")
