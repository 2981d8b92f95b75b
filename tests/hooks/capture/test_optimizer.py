"""Norms and state by which a role is judged; how peers with the same state divide it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deadpool_megatron.hooks.capture.optimizer import ShardState, StepHooks, largest_value, pieces
from deadpool_megatron.settings import Settings, SettingsError
from deadpool_megatron.state.packing import Part


@pytest.mark.parametrize(
    ("answer", "groups", "judged"),
    [
        (
            (True, torch.tensor([2.0]), None),
            {"mtp": 4.0},
            [2.0, 4.0],
        ),  # parameters that the first leaves out
        ((False, math.inf, None), {}, []),  # skipped: how loss scaling looks for its scale
        ((True, None, None), {}, []),  # a role without parameters
        (None, {}, []),  # of a loop of one's own
    ],
)
def test_every_norm_of_an_applied_update_is_judged(
    answer: Any, groups: dict[str, float], judged: list[float]
) -> None:
    optimizer: Any = SimpleNamespace(
        step=lambda: answer, grad_norms_by_group=groups, chained_optimizers=[]
    )
    order = list[Any]()
    StepHooks(optimizer, lambda: order.append("gate"), [], [], order.append)
    assert optimizer.step() is answer
    assert order == ["gate", *judged]


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_one_number_of_a_state_that_is_not_finite_is_found(value: float) -> None:
    last = torch.zeros(3, 2, dtype=torch.bfloat16)
    others = [torch.empty(0), torch.tensor([2**30]), torch.tensor([-7.0])]
    parts = [Part("shard0", others, [0]), Part("shard1", [last], [0])]
    assert (largest_value(parts), largest_value([])) == (7.0, 0.0)
    last[2, 1] = value
    assert not math.isfinite(largest_value(parts))


@given(st.integers(0, 200), st.integers(1, 9))
def test_pieces_are_the_whole_as_even_as_can_be(size: int, count: int) -> None:
    whole = torch.arange(size)
    found = pieces(whole, count)
    assert torch.equal(torch.cat(found), whole)
    assert len(found) == count
    sizes = [one.numel() for one in found]
    assert max(sizes) - min(sizes) <= 1
    for one in found:
        one.fill_(-1)
    assert bool((whole == -1).all()), "pieces are views"


def shard_of(role: int, peers: int, holders: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The parts of one of so many data-parallel peers, without a distributed optimizer."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: role)
    ranks = list(range(peers))
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: ranks)
    name = "megatron.core.parallel_state.get_data_parallel_group"
    monkeypatch.setattr(name, lambda **_: "peers")
    weight = torch.nn.Parameter(torch.arange(100.0))
    adam = torch.optim.AdamW([weight], lr=0.5)
    weight.grad = torch.ones(100)
    adam.step()
    inner = SimpleNamespace(optimizer=adam, ddp_config=None)
    return ShardState(SimpleNamespace(chained_optimizers=[inner]), holders)


@pytest.mark.parametrize(
    ("peers", "holders", "wanted"),
    [
        (4, 2, [[0, 2], [1, 3], [0, 2], [1, 3]]),
        (5, 2, [[0, 2, 4], [1, 3], [0, 2, 4], [1, 3], [0, 2, 4]]),
        (6, 3, [[0, 2, 4], [1, 3, 5]] * 3),
        (3, 2, [[0, 1, 2]] * 3),
        (4, 0, [[0, 1, 2, 3]] * 4),
    ],
)
def test_each_piece_is_captured_by_as_many_as_hold_a_copy(
    peers: int, holders: int, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [shard_of(role, peers, holders, monkeypatch) for role in range(peers)]
    (whole,) = shard_of(0, peers, 0, monkeypatch).parts
    classes = len({tuple(one) for one in wanted})
    for state, roles in zip(states, wanted, strict=True):
        (part,) = state.parts
        assert list(part.replicas) == roles
        assert len(state.shared) == (classes > 1)
        # As many tensors at aligned places.
        assert part.nbytes <= whole.nbytes / classes + 64 * len(part.tensors)
    # One of each class has them all.
    firsts = [states[roles[0]].parts[0].tensors for roles in wanted[:classes]]
    for tensor, *found in zip(whole.tensors, *firsts, strict=True):
        assert torch.equal(torch.cat([one.view(-1) for one in found]), tensor.view(-1))


@pytest.mark.parametrize(
    "other", [{"protection": "recompute"}, {"persist_interval": 5}, {"persist_directory": "/x"}]
)
def test_what_needs_the_whole_state_of_a_role_is_refused(other: dict[str, Any]) -> None:
    assert Settings(share_snapshots="on", replicas=2).holders == 3
    assert Settings().holders == 0
    with pytest.raises(SettingsError, match="--deadpool-share-snapshots on"):
        Settings(share_snapshots="on", **other)
