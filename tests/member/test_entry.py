"""A restore that does not succeed, and a device that an interrupted step has left in error."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from deadpool_megatron.layout.records import Generation, Restore, Source
from deadpool_megatron.member.entry import RestoreFailed
from deadpool_megatron.platform.devices import CopyFailedError, CpuPlatform
from fake_nccl import KIND
from fake_nccl.fake import NAN_CHECK
from tests.comms.ranks import DEADLINE_SECONDS, Member, run
from tests.member.session_rig import BareEntry
from tests.vault.harness import cluster, make_layout


def test_a_place_that_cannot_be_reached_is_named_by_the_part_it_has(tmp_path):
    """The next restore does without it. Unnamed it is planned again, until the run is given up."""
    with cluster(tmp_path, 2, roles=1, restore_seconds=0.5) as running:
        here, gone = running.nodes
        gone.kill()
        gone.tcp.close()
        sources = {0: {"extras@step": (Source(1, 0),)}}
        record = running.record(2, Restore("memory", Generation(1, 3), sources=sources))
        here.adopt(record)
        seat = record.seats[0]
        client = here.client(seat)
        client.register(make_layout(0), 2)
        with pytest.raises(RestoreFailed, match="unreachable") as failed:
            BareEntry(
                generation=record.restore.generation,
                boundary="step",
                settings=here.settings,
                _vault=client,
                _link=SimpleNamespace(interrupt_fd=os.eventfd(0, os.EFD_CLOEXEC)),
                _built=SimpleNamespace(protection=SimpleNamespace(layout=make_layout(0))),
            )._restore_from_vault(record)
    assert failed.value.part == "extras@step"


def device_asserts(member: Member) -> bool:
    """A kernel that looks for what is no number has asserted, as on junk of an abort: this process
    has lost its device."""
    os.environ[NAN_CHECK] = "1"
    member.init("nccl")
    member.attach(0)
    platform = CpuPlatform()
    entry = BareEntry(_platform=platform, _built=None)
    assert entry.quiesce(1.0)
    value, copied = torch.tensor([torch.nan]), torch.zeros(1)
    waits = member.comms.stream_waits
    assert waits.begin()
    waits.end()
    dist.all_reduce(value)
    member.comms.interrupt(0)
    with pytest.raises(RuntimeError, match="device-side"):
        value.item()
    with pytest.raises(RuntimeError, match="device-side"):
        waits.read()
    with pytest.raises(CopyFailedError, match="device-side"):
        platform.catch_up(1.0)
    with pytest.raises(CopyFailedError, match="device-side"):
        platform.side_copy([copied], [value]).wait(DEADLINE_SECONDS)
    assert member.comms.drain(), "the communicators are gone"
    return not entry.quiesce(1.0)


@pytest.mark.slow
def test_a_device_in_error_is_found_before_anything_is_restored():
    assert run(1, device_asserts, kind=KIND)[0]
