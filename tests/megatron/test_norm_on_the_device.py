"""The proof of the slots where the host does not read the gradient norm, under NCCL's semantics."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deadpool_megatron.platform.devices import CpuPlatform
from fake_nccl import KIND
from fake_nccl.stream_order import order
from tests.comms.ranks import DEADLINE_SECONDS, Member, Ranks
from tests.member.protection_rig import Rig, Writer, generation

pytestmark = pytest.mark.slow


def norm_stays_there(member: Member) -> bool:
    member.init("nccl")
    member.attach(0)
    norm = torch.ones(1)
    if member.rank == 1:
        # Waits at its gate, as its generation is not committed.
        member.order("go").wait(DEADLINE_SECONDS)
        dist.all_reduce(norm)
        return norm.item() == 2.0
    platform: Any = CpuPlatform()
    rig = Rig(platform)
    rig.start()
    rig.settled()
    rig.vault.begin = only_after_the_norm(rig.vault.begin)  # type: ignore[method-assign]
    caught_up = platform.catch_up

    def catch_up(timeout_seconds: float) -> bool:
        if caught_up(timeout_seconds):
            return True
        member.send(("waits", None))
        assert member.order("told").wait(DEADLINE_SECONDS)
        return bool(caught_up(DEADLINE_SECONDS))

    platform.catch_up = catch_up
    rig.protection.announce(generation(1))
    rig.protection.gate()
    dist.all_reduce(norm)  # enqueued, and not read
    rig.protection.before_update(0)
    rig.protection.after_update(0)
    rig.protection.after_update(1)
    rig.protection.complete(b"1")
    return rig.settled()[-1] == generation(1)


def only_after_the_norm(begin: Callable[..., Writer]) -> Callable[..., Writer]:
    def begin_checked(*args: Any) -> Writer:
        unfinished = [work.name for work in order.after_current_thread() if not work.is_completed()]
        assert not unfinished, f"a slot is overwritten before the end of {unfinished}"
        return begin(*args)

    return begin_checked


def test_no_slot_is_overwritten_before_the_norm_of_all_roles():
    with Ranks(2, kind=KIND) as ranks:
        ranks.start(norm_stays_there)
        ranks.receive(0, "waits")
        ranks.send(1, "order", "go")
        ranks.send(0, "order", "told")
        assert all(ranks.results().values())
