"""Files of extras beside a checkpoint."""

import os

import pytest

from deadpool_megatron.cluster.run_directory.directory import found_in
from deadpool_megatron.vault.disk import extras_file
from tests.cluster.run_directory.test_found_checkpoints import taken


def test_save_without_extras_of_all_roles_is_not_found(tmp_path):
    checkpoint, saves = tmp_path / "iter_0000004", taken(tmp_path / "run", tmp_path)
    checkpoint.mkdir()
    os.utime(saves, (10, 10))
    for name in ("__0_0.distcp", ".metadata", "metadata.json"):
        (checkpoint / name).touch()
    assert found_in(saves)  # of a run that has left none
    extras_file.write(checkpoint, 0, 2, b"first")
    assert not found_in(saves)
    extras_file.write(checkpoint, 1, 2, b"second")
    assert found_in(saves)


def test_extras_fit_the_number_of_roles(tmp_path):
    assert extras_file.role_count(tmp_path) is None
    extras_file.write(tmp_path, 1, 2, b"second")
    assert extras_file.role_count(tmp_path) == 2
    assert extras_file.read(tmp_path, 1, 2) == b"second"
    assert extras_file.read(tmp_path, 1, 4) is None
    with pytest.raises(extras_file.ExtrasFileError, match="No such file"):
        extras_file.read(tmp_path, 0, 2)


@pytest.mark.parametrize("shard", ["__3_0.distcp", "mp_rank_00_001/model_optim_rng.pt"])
def test_extras_fit_the_shards_of_their_save(tmp_path, shard):
    """A run that leaves no extras has saved into the same directory."""
    (tmp_path / shard).parent.mkdir(exist_ok=True)
    (tmp_path / shard).touch()
    extras_file.write(tmp_path, 0, 1, b"first")
    assert extras_file.read(tmp_path, 0, 1) == b"first"
    written = extras_file.path_in(tmp_path, 0, 1).stat().st_mtime
    os.utime(tmp_path / shard, (written + 1, written + 1))
    assert extras_file.read(tmp_path, 0, 1) is None
