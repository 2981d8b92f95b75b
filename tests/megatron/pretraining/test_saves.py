"""Errors of the file system in saves of pretrain_gpt.py."""

import torch
import torch.distributed as dist

from deadpool_megatron.megatron.pretraining.megatron_checkpoints import StorageFaults


def test_an_error_of_any_role_is_known_before_the_tracker_is_written(monkeypatch, tmp_path):
    remote, entered = "", []

    def gathered(found: list[str], own: str) -> None:
        found[:] = [own, remote]

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gathered)
    monkeypatch.setattr(dist, "barrier", lambda: entered.append(1))
    unchanged = dist.barrier, torch.save
    faults = StorageFaults()
    faults.tolerated = True
    with faults.written_by_many():
        torch.save({}, tmp_path / "model.pt")
        dist.barrier()
    assert (faults.forget(), entered) == ("", [1])
    with faults.written_by_many():
        torch.save({}, tmp_path / "not there" / "model.pt")
        torch.save({}, tmp_path / "optimizer.pt")
        dist.barrier()
    assert "not there" in faults.forget()
    assert not (tmp_path / "optimizer.pt").exists()
    remote = "no room"
    with faults.written_by_many():
        dist.barrier()
        with faults._opening(open)(tmp_path / "tracker.txt", "w") as tracker:
            tracker.write("4")
    assert (faults.forget(), (tmp_path / "tracker.txt").exists()) == (remote, False)
    assert (dist.barrier, torch.save) == unchanged
