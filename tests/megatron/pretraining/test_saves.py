"""Saves of pretrain_gpt.py, and the same numbers on every role after a fall back to one."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deadpool_megatron.megatron.pretraining.megatron_checkpoints import (
    Saves,
    StorageFaults,
    unusable_reason,
)

WHOLE = SimpleNamespace(
    no_save_optim=False,
    no_save_rng=False,
    ckpt_format="torch_dist",
    context_parallel_size=1,
    num_distributed_optimizer_instances=1,
    num_experts=None,
    tensor_model_parallel_size=2,
    expert_tensor_parallel_size=None,
    optimizer="adam",
    fp8_param_gather=False,
)
SHARED: list[dict[str, object]] = [
    {"context_parallel_size": 2},
    {"num_distributed_optimizer_instances": 2},
    {"num_experts": 4, "expert_tensor_parallel_size": 1},
    {"optimizer": "muon"},
    {"fp8_param_gather": True},
]


def given(**changes: object) -> Any:
    return SimpleNamespace(**{**vars(WHOLE), **changes})


@pytest.mark.parametrize("name", ["no_save_optim", "no_save_rng"])
@pytest.mark.parametrize("ckpt_format", ["torch_dist", "torch"])
def test_without_some_of_the_state_none_counts(name: str, ckpt_format: str) -> None:
    assert not unusable_reason(given(ckpt_format=ckpt_format))
    assert unusable_reason(given(ckpt_format=ckpt_format, **{name: True}))


@pytest.mark.parametrize("changes", SHARED, ids=str)
def test_files_with_several_writers_do_not_count(changes: dict[str, object]) -> None:
    assert unusable_reason(given(ckpt_format="torch", **changes))
    assert not unusable_reason(given(**changes))


def test_what_does_not_count_is_announced_to_nobody_and_told_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    training: Any = ModuleType("megatron.training")
    training.get_args = lambda: given(no_save_rng=True)
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    announced: list[int] = []
    told: list[str] = []
    saves = Saves(lambda _, number, __: announced.append(number), lambda _, why: told.append(why))
    count = saves._count
    for number in (4, 8):
        count(tmp_path, number)
    assert (announced, len(told)) == ([], 1)
    training.get_args = given
    count(tmp_path, 12)
    assert (announced, len(told)) == ([12], 1)


def test_an_error_of_any_role_is_known_before_the_tracker_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    theirs, entered = "", []

    def gathered(found: list[str], own: str) -> None:
        found[:] = [own, theirs]

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
    theirs = "no room"
    with faults.written_by_many():
        dist.barrier()
        with faults._opening(open)(tmp_path / "tracker.txt", "w") as tracker:
            tracker.write("4")
    assert (faults.forget(), (tmp_path / "tracker.txt").exists()) == (theirs, False)
    assert (dist.barrier, torch.save) == unchanged
