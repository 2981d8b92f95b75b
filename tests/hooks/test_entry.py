"""A restore that does not succeed, and a device that an interrupted step has left in error."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from deadpool_megatron.hooks import entry as entry_module
from deadpool_megatron.hooks.entry import EpochEntry, OtherModel, RestoreFailed
from deadpool_megatron.layout.records import EpochRecord, Generation, Restore, Seat, Source
from deadpool_megatron.platform.devices import CopyFailedError, CpuPlatform
from deadpool_megatron.settings import Settings
from fake_nccl import KIND
from fake_nccl.fake import NAN_CHECK
from tests.comms.ranks import DEADLINE_SECONDS, Member, run
from tests.hooks.session_rig import BareEntry
from tests.vault.harness import cluster, make_layout


def entry_of(vault: Any, restore: Restore, settings: Settings) -> BareEntry:
    """One that restores from this vault."""
    protection = SimpleNamespace(layout=make_layout(0))
    return BareEntry(
        generation=restore.generation,
        boundary=restore.boundary,
        settings=settings,
        _vault=vault,
        _link=SimpleNamespace(interrupt_fd=os.eventfd(0, os.EFD_CLOEXEC)),
        _built=SimpleNamespace(protection=protection, frozen=None),
    )


def test_a_place_that_cannot_be_reached_is_named_by_the_part_it_has(tmp_path: Path) -> None:
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
            entry_of(client, record.restore, here.settings)._restore_from_vault(record)
    assert failed.value.part == "extras@step"


def test_bytes_that_were_damaged_before_they_were_sealed_are_named_by_their_part() -> None:
    """Their checksums hold in all places, so what is older is tried next."""
    restore = Restore("memory", Generation(1, 3))
    sealed = SimpleNamespace(part=lambda _: b"\xcf" * 64, close=lambda: None)
    vault: Any = SimpleNamespace(restore=lambda *_, **__: sealed)
    record: Any = SimpleNamespace(epoch=2)
    with pytest.raises(RestoreFailed, match="not encoded extras") as failed:
        entry_of(vault, restore, Settings())._restore_from_vault(record)
    assert failed.value.part == "extras@step"


class Recorder:
    """A stand-in for what an entry uses: notes the calls, and answers with what is given."""

    def __init__(self, calls: list[str], name: str = "", **known: Any) -> None:
        self._calls, self._name, self._known = calls, name, known

    def __getattr__(self, name: str) -> Any:
        if name in self._known:
            return self._known[name]
        return Recorder(self._calls, f"{self._name}.{name}".lstrip("."))

    def __call__(self, *_: Any, **__: Any) -> Any:
        self._calls.append(self._name)
        return self


class Restoring(EpochEntry):
    """An entry all of whose parts are recorders."""

    def __init__(self, calls: list[str]) -> None:
        shard = Recorder(calls, "shard")
        protection = Recorder(calls, "protection", layout=make_layout(0))
        loop = Recorder(calls, "loop", counters={"iteration": 6}, loaded=None)
        known = {"shard": shard, "protection": protection, "loop": loop}
        self._built: Any = Recorder(calls, "built", **known)
        self._vault: Any = Recorder(calls, "vault", has_segment=lambda _: False)
        self._link: Any = Recorder(calls, "link")
        self._platform: Any = Recorder(calls, "platform", is_cuda=False)
        self.reports: Any = Recorder(calls, "reports")
        self.role, self._pristine = 0, b""
        for name in ("_load", "capture_extras", "_restore_from_vault"):
            setattr(self, name, Recorder(calls, name))
        self._find_room = lambda *_, **__: calls.append("_find_room") or []
        self._extras_beside = lambda _: calls.append("_extras_beside") or {}


@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        (
            "durable",
            "_find_room link.send protection.enter built.cleanup.forget decode restore"
            " restore_last built.frozen.forget _extras_beside _load shard.readopt capture_extras"
            " decode",
        ),
        ("initial", "_find_room link.send protection.enter built.cleanup.forget"),
        (
            "memory",
            "link.send protection.enter built.cleanup.forget _restore_from_vault protection.owe",
        ),
        (
            "dump",
            "_find_room link.send protection.enter built.cleanup.forget _restore_from_vault"
            " protection.owe",
        ),
    ],
)
def test_each_kind_of_restore_takes_its_steps_in_order(
    kind: str, calls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint comes over what was there after the build, the slots after the room for them.
    What a checkpoint has put in the place of packed tensors is moved back before a capture."""
    noted: list[str] = []
    monkeypatch.setattr(entry_module, "megatron_extras", Recorder(noted))
    monkeypatch.setattr(entry_module, "extras_codec", Recorder(noted))
    monkeypatch.setattr(entry_module, "dump_differs", lambda *_: "")
    seats = {0: Seat(0, 0, 0)}
    record = EpochRecord(3, seats, {}, Restore(kind, Generation(2, 5), "save", "/a"))
    restoring = Restoring(noted)
    restoring.restore(record, 0)
    assert noted == calls.split()
    from_slots = kind in ("memory", "dump")
    assert restoring.generation == (Generation(2, 5) if from_slots else Generation(3, 6))
    assert restoring.boundary == "save"


def test_a_dump_of_another_model_is_refused_before_anything_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(entry_module, "dump_differs", lambda *_: "other parts")
    noted: list[str] = []
    record = EpochRecord(3, {}, {}, Restore("dump", Generation(2, 5), "save", "/a"))
    with pytest.raises(OtherModel, match="other parts"):
        Restoring(noted).restore(record, 0)
    assert noted == []


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
def test_a_device_in_error_is_found_before_anything_is_restored() -> None:
    assert run(1, device_asserts, kind=KIND)[0]


def test_what_an_update_has_replaced_is_moved_back_before_it_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else of an optimizer that replaces its tensors the ones before the update are sealed."""
    whole = MagicMock(**{"settings.max_lag": 0, "settings.audit_interval": 0})
    taken_away = "refuse_unknown_state complete_state identify leave_template make_template"
    taken_away += " role_meaning role_layout statistics_span_the_world InterruptCleanup"
    for name in (*taken_away.split(), "model_config", "parallel_state", "dist"):
        monkeypatch.setattr(entry_module, name, MagicMock())
    monkeypatch.setattr(entry_module, "extras_room_bytes", lambda *_: 0)
    monkeypatch.setattr(entry_module, "large_frozen_weights", lambda _: [])
    monkeypatch.setattr(entry_module, "ShardState", lambda _: whole.shard)
    monkeypatch.setattr(entry_module, "Protection", lambda **_: whole.protection)
    monkeypatch.setattr(entry_module, "StepHooks", whole.hooks)
    EpochEntry._protect(whole, whole.loop)
    (_, _, before, after, _), _ = whole.hooks.call_args
    whole.reset_mock()
    for hook in (*before, *after):
        hook(0)
    order = ["protection.using", "shard.updated", "protection.updated"]
    assert [name for name, *_ in whole.mock_calls] == order
