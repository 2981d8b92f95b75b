"""Whose files and directories are believed."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from deadpool_megatron import ownership
from deadpool_megatron.cluster.run_directory.directory import read_json
from deadpool_megatron.events import EventTail
from deadpool_megatron.ownership import OwnershipError
from tests.security.users import ATTACKER, common_directory, given_to, needs_root

MATE = 4242


@pytest.mark.parametrize("mode", [0o775, 0o777, 0o1777, 0o720])
def test_what_others_may_write_to_is_not(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(OwnershipError, match="chmod go-w"):
        ownership.check_directory(tmp_path)


@pytest.mark.parametrize("way", ["named/../other", "named/leads-out"])
def test_a_trusted_directory_is_where_it_is_not_how_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    (tmp_path / "named").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other").chmod(0o777)
    (tmp_path / "named" / "leads-out").symlink_to(tmp_path / "other")
    monkeypatch.setenv(ownership.TRUSTED, str(tmp_path / "named"))
    with pytest.raises(OwnershipError):
        ownership.check_directory(tmp_path / way)


@pytest.mark.timeout(20)
def test_a_pipe_of_others_keeps_nobody_who_only_looks(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    with pytest.raises(OSError, match="not a file"):
        read_json(tmp_path / "events.jsonl")
    with pytest.raises(OSError, match="not a file"):
        EventTail(tmp_path / "events.jsonl").poll()


@pytest.fixture
def team() -> Iterator[Path]:
    """A directory in one where everybody may make his own: nothing above keeps others out."""
    with common_directory() as common:
        path = common / "team"
        path.mkdir(mode=0o700)
        yield path


@pytest.mark.parametrize(
    ("mode", "is_told"),
    [(0o2775, True), (0o777, True), (0o3775, False), (0o1777, False), (0o755, False)],
)
def test_who_may_write_above_is_told_but_does_not_keep_a_run_from_starting(
    team: Path, mode: int, is_told: bool
) -> None:
    """Directories of a team are writable for its group; the sticky bit keeps what is in them."""
    run = team / "runs" / "first"
    run.mkdir(mode=0o700, parents=True)
    run.parent.chmod(0o755)
    team.chmod(mode)
    ownership.check_directory(run)
    why = ownership.danger_above(run)
    assert (f"who may write to {team} " in why and f"in place of {run}" in why) == is_told
    assert bool(why) == is_told
    assert ownership.danger_above(team / "not" / "there") == why.replace(
        str(run), str(team / "not" / "there")
    )


def test_what_lies_where_nobody_else_can_enter_is_out_of_reach(team: Path) -> None:
    team.chmod(0o755)
    runs = team / "home" / "runs"
    runs.mkdir(parents=True)
    runs.chmod(0o775)
    (team / "home").chmod(0o700)
    assert ownership.danger_above(runs / "first") == ""
    (team / "home").chmod(0o710)
    assert f"who may write to {runs} " in ownership.danger_above(runs / "first")
    (team / "home").chmod(0o700)
    team.chmod(0o775)
    assert f"who may write to {team} " in ownership.danger_above(runs / "first")


def test_a_link_that_others_could_replace_is_told(team: Path) -> None:
    (team / "closed" / "first").mkdir(parents=True)
    (team / "closed").chmod(0o755)
    team.chmod(0o755)
    links = team / "links"
    links.mkdir()
    links.chmod(0o775)
    (links / "here").symlink_to(team / "closed")
    assert f"who may write to {links} " in ownership.danger_above(links / "here" / "first")
    assert ownership.danger_above(team / "closed" / "first") == ""
    (team / "back").symlink_to(links)
    (links / "second").mkdir()
    assert f"who may write to {team / 'back'} " in ownership.danger_above(team / "back" / "second")


@needs_root
def test_a_directory_above_that_belongs_to_another_user_is_told(
    team: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    team.chmod(0o755)
    run = team / "run"
    run.mkdir(mode=0o700)
    assert ownership.danger_above(run) == ""
    os.chown(team, MATE, MATE)
    why = f"user {MATE}, whose directory {team} is, can put another directory in place of {run}"
    assert ownership.danger_above(run) == why
    monkeypatch.setenv(ownership.TRUSTED, str(team))
    assert ownership.danger_above(run) == ""


@needs_root
def test_other_users_directories_are_not(tmp_path: Path) -> None:
    given_to(ATTACKER, tmp_path)
    with pytest.raises(OwnershipError, match=f"belongs to user {ATTACKER}"):
        ownership.check_directory(tmp_path)


@needs_root
def test_a_link_of_another_user_is_not_followed(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.mkdir(mode=0o700)
    link.symlink_to(target)
    ownership.check_directory(link)  # our own
    given_to(ATTACKER, link)
    with pytest.raises(OwnershipError, match="belongs to user"):
        ownership.check_directory(link)


@needs_root
def test_directories_that_the_user_trusts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, beside = tmp_path / "shared", tmp_path / "shared-not"
    for path in (shared, beside):
        path.mkdir()
        path.chmod(0o775)
        given_to(ATTACKER, path)
    monkeypatch.setenv(ownership.TRUSTED, f"/nowhere:{shared}")
    ownership.check_directory(shared)
    ownership.check_directory(shared / "not there")
    with pytest.raises(OwnershipError):
        ownership.check_directory(beside)


def test_private_directories(tmp_path: Path) -> None:
    ownership.make_private(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    ownership.make_private(tmp_path / "new")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)  # whatever the umask
    (tmp_path / "link").symlink_to(tmp_path / "new")
    for name in ("open", "link"):
        with pytest.raises(OwnershipError, match="of this user alone"):
            ownership.make_private(tmp_path / name)
    assert not ownership.is_private(tmp_path / "absent")


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    for mode, secret, fits in (
        (0o600, True, True),
        (0o640, True, False),
        (0o644, False, True),
        (0o664, False, False),
    ):
        path.chmod(mode)
        if fits:
            os.close(ownership.open_own(path, secret=secret))
        else:
            with pytest.raises(OwnershipError, match="by others: chmod 600"):
                ownership.open_own(path, secret=secret)
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("link", "pipe"):
        with pytest.raises(OwnershipError):
            ownership.open_own(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        ownership.open_own(tmp_path / "absent")


@needs_root
def test_files_of_another_user(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    path.chmod(0o600)
    given_to(ATTACKER, path)
    with pytest.raises(OwnershipError, match="belongs to user"):
        ownership.open_own(path)
