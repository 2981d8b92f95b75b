"""What a member takes its vault's word for, by itself."""

import os
import socket
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.layout.records import Generation, Seat
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault import member_connection, slot_store
from deadpool_megatron.vault.errors import Frozen, VaultError
from deadpool_megatron.vault.schemes.registry import scheme_of
from deadpool_megatron.vault.shm.segment import PartState, Segment, SlotState, own_name
from deadpool_megatron.vault.vault_client import SlotWriter, VaultClient, free_slot
from tests.common.wait import wait_for
from tests.vault.fake_network import QuickListener
from tests.vault.harness import commit, enter, make_layout, record_of


@pytest.fixture
def client(tmp_path):
    """In epoch 1, of which generation 6 is committed as it was right after its step."""
    client = VaultClient("", tmp_path, Seat(0, 0, 0), connect_seconds=1.0)
    commit(client, Generation(1, 6))
    return client


@pytest.mark.parametrize(
    ("generation", "boundary", "is_open"),
    [(5, "save", True), (6, "step", True), (6, "evaluation", False), (7, "step", False)],
)
def test_gate_opens_for_a_commit_up_to_its_boundary(client, generation, boundary, is_open):
    interrupt = os.eventfd(1, os.EFD_CLOEXEC)
    reports = {"on_wait": lambda _: None, "report_every_seconds": 9.0}
    gate = client.wait_committed(
        Generation(1, generation), boundary, interrupted=interrupt, **reports
    )
    os.close(interrupt)
    assert gate is is_open


def test_restored_generation_is_rewritten_in_its_epoch_only(client):
    client._restored = Generation(0, 4)
    with pytest.raises(VaultError, match="not registered"):
        client.begin(Generation(0, 4), 1)
    enter(client, 2)
    assert client.newest_committed is None
    with pytest.raises(VaultError, match="was not computed in epoch 2"):
        client.begin(Generation(0, 4), 2)


EMPTY, WRITING, FILLED, SEALED = SlotState
NOTHING = (EMPTY, 0, 0)


@pytest.mark.parametrize(
    ("slots", "floor", "chosen"),
    [
        ([(SEALED, 1, 5), NOTHING], (1, 5), 1),
        ([(SEALED, 1, 5), (WRITING, 1, 4)], (1, 5), 1),
        ([(SEALED, 1, 6), (SEALED, 1, 4), (SEALED, 1, 5)], (1, 6), 1),
        # What is committed is kept until the next one is.
        ([(SEALED, 1, 6), (SEALED, 1, 5)], (1, 5), None),
        ([(SEALED, 1, 6), (SEALED, 1, 4), (SEALED, 1, 5)], (1, 5), 1),
        # The newest that is sealed is kept, though a newer one is said to be committed.
        ([(SEALED, 1, 5), (FILLED, 1, 7)], (1, 7), None),
        # Of a closed epoch, and never sealed.
        ([(SEALED, 0, 5), (FILLED, 0, 6)], (0, 5), 1),
        # Nothing is known to be committed.
        ([(SEALED, 0, 6), (SEALED, 0, 5)], None, 1),
        ([(SEALED, 1, 6), (SEALED, 1, 5)], None, None),
    ],
)
def test_in_epoch_1(slots, floor, chosen):
    segment: Any = SimpleNamespace(
        slots=len(slots),
        layout=SimpleNamespace(role=0),
        state=lambda slot: slots[slot][0],
        generation=lambda slot: Generation(*slots[slot][1:]),
    )
    known = None if floor is None else Generation(*floor)
    if chosen is not None:
        assert free_slot(segment, 1, known) == chosen
        return
    with pytest.raises(VaultError, match="may be overwritten"):
        free_slot(segment, 1, known)


@pytest.mark.parametrize("is_closed", [False, True])
def test_writer_reports_a_reused_slot_unless_the_epoch_was_closed(tmp_path, is_closed):
    told: list[Any] = []
    segment = Segment.create(tmp_path / "own", make_layout(0), Seat(0, 0, 0), ["shard"])
    segment.mark_writing(0)
    segment.begin(0, Generation(1, 5), 1)
    writer = SlotWriter(told.append, segment, 0, Generation(1, 5), 1)
    segment.freeze(is_closed)
    segment.set_state(0, SlotState.EMPTY)
    with nullcontext() if is_closed else pytest.raises(VaultError, match="not that of"):
        writer.fill({"shard": 10})
    assert not told


class Vault:
    """A vault's side of the dialogue, in this process; ``received``: what members have said."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.path = directory, directory / "vault.sock"
        self.received: list[Mapping[str, Any]] = []
        self.start()

    def start(self) -> None:
        """The first one, or the next one after :meth:`stop`."""
        self.state = slot_store.SlotStore(scheme_of, 0, self.directory, Settings(), lambda _: None)
        self.members = member_connection.MemberConnections(self.state)
        seats = {role: Seat(0, 0, 0) for role in range(2)}
        self.state.adopt(record_of(1, seats=seats))
        self.listener = QuickListener(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(self.path))
        self.listener.listen()
        self.links: list[member_connection.LocalLink] = []
        self.server = member_connection.LocalServer(self.listener, self.talk)
        self.server.start()

    def talk(self, link: member_connection.LocalLink, stopping: threading.Event) -> None:
        self.links.append(link)
        receive = link.receive

        def hear(stopping: threading.Event) -> dict[str, Any] | None:
            message = receive(stopping)
            self.received.append(message or {"t": "end"})
            return message

        link.receive = hear  # type: ignore[method-assign]
        if (hello := hear(stopping)) is not None:
            member_connection.MemberConnection(self.state, self.members, link, hello).run(stopping)

    def stop(self) -> None:
        self.server.stop()
        self.listener.close()
        self.path.unlink()
        for link in self.links:
            link.close()

    def client(self, role: int = 0) -> VaultClient:
        """Of a member that has registered for a role in epoch 1, and has filled a slot."""
        client = VaultClient(str(self.path), self.directory, Seat(0, 0, 0), connect_seconds=20.0)
        client.register(make_layout(role, nbytes=100), 1)
        names = dict.fromkeys(("shard", "tail", "extras@step"), 10)
        client.begin(FIRST, 1).fill(names)
        return client


FIRST = Generation(1, 1)


@pytest.fixture
def vault(tmp_path):
    vault = Vault(tmp_path)
    yield vault
    vault.stop()


def test_nothing_is_appended_after_the_close(vault):
    """The slot has been promised as it is."""
    client = vault.client()
    vault.state.close(1)
    with pytest.raises(Frozen, match="epoch 1 has been closed"):
        client.append(FIRST, "extras@evaluation", b"more")
    own = vault.state.table.own(0, Seat(0, 0, 0))
    entries = [own.entry(slot, "extras@evaluation") for slot in range(own.slots)]
    assert [entry.state for entry in entries] == [PartState.ABSENT] * own.slots


class StillWaiting(Exception):
    """The test has seen enough."""


def wait(client: VaultClient, reports: int = 1) -> None:
    """At the gate, until it says so or so many reports were due."""
    due = [None] * (reports - 1)

    def report(waited: float) -> None:
        if not due:
            raise StillWaiting(waited)
        due.pop()

    interrupted = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        client.wait_committed(
            FIRST, "step", interrupted=interrupted, on_wait=report, report_every_seconds=0.05
        )
    finally:
        os.close(interrupted)


def test_a_vault_learns_that_training_waits_for_a_generation(vault):
    """From then on copies do not keep to their pace."""
    client = vault.client()
    with pytest.raises(StillWaiting):
        wait(client)
    wanted = {"t": "waiting", "epoch": 1, "generation": FIRST.to_list()}
    wait_for("the message", lambda: wanted in vault.received, 20.0)


def test_a_vault_that_cannot_use_the_slots_ends_the_wait(vault):
    """It was started again, and the file of the slots is gone: nothing will ever be committed."""
    client = vault.client()
    vault.stop()
    (vault.directory / own_name(0, Seat(0, 0, 0))).unlink()
    vault.start()
    with pytest.raises(VaultError, match="segment of role 0"):
        wait(client, 200)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("epoch", [0, 1, 2])
@pytest.mark.parametrize("kind", ["bad", "committed"])
def test_message_of_a_vault_counts_in_its_epoch(vault, kind, epoch, times):
    client = vault.client()
    about = {"generation": FIRST.to_list(), "part": "shard", "boundary": "step"}
    for _ in range(times):
        vault.links[-1].send({"t": kind, "epoch": epoch, **about})
    if epoch != 1:
        with pytest.raises(StillWaiting):
            wait(client)
    elif kind == "bad":
        with pytest.raises(VaultError, match="was damaged"):
            wait(client)
    else:
        wait(client)
        assert client.newest_committed == (FIRST, "step")
