"""Checkpoints that others can reach: none is written to or believed, an index runs nothing."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from deadpool_megatron.cli.storage.verify import verify_checkpoint
from deadpool_megatron.cluster.coordinator.new_checkpoint import DurableError, NewCheckpoint
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.layout.records import Generation, Restore
from deadpool_megatron.megatron.pretraining.megatron_checkpoints import StorageFaults
from deadpool_megatron.ownership import OwnershipError, check_checkpoint, make_private
from deadpool_megatron.vault.shm.slot_check import Verdict
from tests.security.users import ATTACKER, needs_root

Tamper = Callable[[Path], None]


def link(unfinished: Path) -> None:
    (unfinished / "__0_0.distcp").symlink_to("/dev/null")


def open_to_all(unfinished: Path) -> None:
    (unfinished / ".metadata").touch()
    (unfinished / ".metadata").chmod(0o666)


def open_to_all_further_down(unfinished: Path) -> None:
    """As in the older format, which has a folder for each rank."""
    (unfinished / "mp_rank_00").mkdir()
    (unfinished / "mp_rank_00" / "model_optim_rng.pt").touch()
    (unfinished / "mp_rank_00" / "model_optim_rng.pt").chmod(0o666)


def of_another_user(unfinished: Path) -> None:
    (unfinished / "common.pt").touch()
    os.chown(unfinished / "common.pt", ATTACKER, ATTACKER)


@pytest.mark.parametrize(
    "tamper",
    [link, open_to_all, open_to_all_further_down, pytest.param(of_another_user, marks=needs_root)],
)
def test_checkpoint_that_others_can_write_is_not_published(tmp_path, tamper):
    run, folder = RunDirectory(tmp_path / "run"), tmp_path / "shared"
    run.path.mkdir()
    for unfinished, give in (
        (folder / ".export-id-1.1", NewCheckpoint.publish),
        (folder / ".iter_0000004.epoch1", NewCheckpoint.make_valid),
    ):
        make_private(unfinished)
        tamper(unfinished)
        final = folder / "iter_0000004"
        restore = Restore("durable", Generation(1, 4), "save", str(final))
        with pytest.raises(DurableError, match=str(unfinished)):
            give(NewCheckpoint(unfinished, final, restore, run, "id"))
        assert not final.exists()
        with pytest.raises(OwnershipError):  # nor is it loaded
            check_checkpoint(unfinished)


def test_published_checkpoint_has_its_folders_mode_and_follows_no_links(tmp_path):
    run, folder, thesis = RunDirectory(tmp_path / "run"), tmp_path / "shared", tmp_path / "thesis"
    run.path.mkdir()
    folder.mkdir()
    folder.chmod(0o755)
    thesis.write_text("mine")
    (folder / ".latest_checkpointed_iteration.txt.new").symlink_to(thesis)
    (folder / "latest_checkpointed_iteration.txt").symlink_to(thesis)
    unfinished, final = folder / ".export-id-1.1", folder / "iter_0000004"
    make_private(unfinished)
    restore = Restore("durable", Generation(1, 4), "save", str(final))
    NewCheckpoint(unfinished, final, restore, run, "id").publish()
    assert final.stat().st_mode & 0o777 == 0o755
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert thesis.read_text() == "mine"


def test_save_into_a_directory_of_others_fails_before_it_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    directory = tmp_path / "iter_0000004"
    directory.mkdir()
    link(directory)
    faults = StorageFaults()
    faults.begin(directory)
    assert f"{directory / '__0_0.distcp'} is a link" in faults.forget()


@pytest.mark.parametrize("tamper", [open_to_all, pytest.param(of_another_user, marks=needs_root)])
def test_verify_unpickles_no_index_that_others_can_write(tmp_path, tamper):
    directory = tmp_path / "iter_0000004"
    make_private(directory)
    marker = tmp_path / "ran"
    (directory / ".metadata").write_bytes(pickle.dumps(_FileMaker(marker)))
    tamper(directory)
    (finding,) = verify_checkpoint(directory, lambda _: None)
    assert finding.verdict is Verdict.UNKNOWN
    assert not marker.exists()


class _FileMaker:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return Path.touch, (self._marker,)
