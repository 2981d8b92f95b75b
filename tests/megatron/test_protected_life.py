"""The life of a protected process with everything in it real: trainer, vault, communicators. Its
messages to the agent and its output are compared line by line, and states by their equality.

Expected are the files in lives/. A change that is meant changes them as well: with
``DEADPOOL_TEST_WRITE=1`` in the environment these tests write them again, and the difference is
read like that of any other file.
"""

import dataclasses
import queue
import re
import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from deadpool_megatron.cluster.link.member_link import MemberLink
from deadpool_megatron.cluster.process.member_place import MemberPlace
from deadpool_megatron.layout import records
from deadpool_megatron.layout.planner import RestoreQuery, choose_restore
from deadpool_megatron.layout.records import Generation, Restore, Seat
from deadpool_megatron.layout.schemes import plan_of_kind
from deadpool_megatron.member import session as session_module
from deadpool_megatron.member.session import Session
from deadpool_megatron.settings import Settings
from deadpool_megatron.trainer.__main__ import GptProgram
from deadpool_megatron.trainer.config import parse_args
from deadpool_megatron.wire import framing
from tests.common import lives
from tests.member.session_rig import SEAT, SECONDS, Rig
from tests.vault.fake_network import FakeNetwork
from tests.vault.local_node import LocalNode

LIVES = Path(__file__).parent / "lives"
_VOLATILE = re.compile(r"seconds|^(pid|n|host|started|bytes)$")
# Of what depends on the machine, or on how long something took.
_LEFT_OUT = {"gate-wait"}
_STATE = re.compile(r'"([0-9a-f]{12,64}|-?0x1\.[0-9a-f]+p[-+]\d+)"')
_TINY = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1"
    " --global-batch-size 2 --train-iters 4 --lr 1e-2 --lr-decay-style cosine --min-lr 1e-4"
    " --lr-warmup-iters 2 --seed 7 --eval-interval 2 --eval-iters 1 --save-interval 3"
    " --use-distributed-optimizer"
)
# Name -> how it is protected, and flags.
_RUNS = {
    "bf16": ("buddy", "--bf16"),
    "scaled": ("buddy", "--fp16 --initial-loss-scale 524288 --hysteresis 1"),
}


class Meeting(dict[str, bytes]):
    """The store of a run of one role."""

    def set(self, epoch: int, key: str, value: bytes) -> None:
        self[f"{epoch}/{key}"] = value

    def has(self, epoch: int, keys: Any) -> bool:
        return all(f"{epoch}/{key}" in self for key in keys)

    def wait(self, epoch: int, keys: Any, deadline_seconds: float) -> None:
        assert self.has(epoch, keys)

    def get(self, epoch: int, key: str, deadline_seconds: float) -> bytes:
        return self[f"{epoch}/{key}"]

    def close(self, epoch: int) -> None:
        """There is no waiting process."""


class Life(Rig):
    """The session of role 0 in a thread of its own; the test is its agent, and its node's."""

    def __init__(self, monkeypatch: Any, folder: Path, kind: str, flags: str) -> None:
        given = {"hash_interval": 1, "protection": kind}
        quick = {"close_seconds": 5.0, "beat_interval_seconds": 0.02}
        settings = dataclasses.replace(Settings(), **given, **quick)
        self.plan = plan_of_kind(kind, 1, 2)
        network = FakeNetwork()
        places = [folder / "deadpool-life" / f"node{number}" for number in range(2)]
        self.nodes = [LocalNode(network, n, place, settings) for n, place in enumerate(places)]
        monkeypatch.setenv("DEADPOOL_RUN_DIR", str(folder))
        monkeypatch.setattr(session_module.os, "_exit", self._exit)
        self.folder, self.flags = folder, flags
        self.lines: list[str] = []
        self.states: dict[str, str] = {}
        self.received: list[dict[str, Any]] = []
        self.settings = settings
        self.begin(SEAT)

    def begin(self, seat: Seat) -> None:
        """A process on a seat."""
        self.seat, settings = seat, self.settings
        self.socket, member = socket.socketpair()
        self.socket.settimeout(SECONDS)
        place = MemberPlace(*seat.to_list(), self.nodes[0].directory, self.nodes[0].socket_path)
        self.link = MemberLink(member, place, "run", settings)
        self.link.store = Meeting()  # type: ignore[assignment]
        self.session = Session(self.link, self.folder)
        self.ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self.expect("hello")

    def _run(self) -> None:
        try:
            torch.set_num_threads(1)
            self.session.run(
                GptProgram(
                    parse_args(f"{_TINY} {self.flags} --save {self.folder}/saves".split(), 1)
                )
            )
            self.ended.put(None)
        except BaseException as error:
            self.ended.put(error)

    def open(
        self, epoch: int, restore: Restore | None = None, seat: Seat | None = None, **more: Any
    ) -> None:
        """Send vaults and member the record of an epoch in which role 0 has its seat, or
        ``seat``."""
        seat = seat or self.seat
        nodes = {n: records.NodeAddress("fake", n, f"d{n}", n != seat.node) for n in range(2)}
        begins = restore or Restore("initial", Generation(epoch, 0))
        given = {"protection": self.plan, **more}
        made = records.EpochRecord(epoch, {0: seat}, nodes, begins, **given)
        for node in self.nodes:
            node.vault.adopt(made)
        self.order("record", record=made.to_dict())

    def restore(
        self,
        epoch: int,
        inventories: dict[int, records.Inventory],
        kept: dict[int, int],
        seat: Seat | None = None,
    ) -> None:
        """Open an epoch with what the coordinator would choose."""
        seats = {0: seat or self.seat}
        restore = choose_restore(RestoreQuery(epoch, range(1), inventories, seats, {0: SEAT}, kept))
        assert isinstance(restore, Restore), restore
        self.open(epoch, restore, seat)

    def expect(self, kind: str) -> dict[str, Any]:
        """Have checkpoints count until then, as the coordinator does."""
        while True:
            message = framing.receive(self.socket)
            if message["t"] != "beat":
                self.received.append(message)
            if message["t"] == "durable-request":
                shutil.rmtree(message["final"], ignore_errors=True)
                Path(message["temporary"]).rename(message["final"])
                self.order("durable-done", iteration=message["iteration"])
            if message["t"] == kind:
                return message
            assert message["t"] not in ("fault", "restore-failed"), message

    def dump_of(self, lineage: int, iteration: int) -> dict[str, Any]:
        """The order to write a generation."""
        about = {"generation": [lineage, iteration], "boundary": "evaluation", "held": []}
        return {"directory": str(self.folder / "dump"), **about}

    def leave(self, epoch: int) -> dict[int, records.Inventory]:
        """The epoch is closed; answers what the nodes hold."""
        self.close(epoch)
        self.expect("drained")
        found = {}
        for number, node in enumerate(self.nodes):
            node.vault.close_epoch(epoch)
            found[number] = node.vault.store.inventory()
        return found

    def show(self, heading: str, capfd: pytest.CaptureFixture[str]) -> None:
        """Record messages and output since the last call, with states numbered as they
        come."""
        self.lines.append(f"{heading}:")
        for message in self.received:
            text = lives.text(message, _VOLATILE)
            if not any(f'"{kind}"' in text for kind in _LEFT_OUT):
                self.lines.append(f"    {self._states_in(text)}")
        self.received.clear()
        for text in capfd.readouterr():
            printed = [line for line in text.splitlines() if "deadpool: gloo" not in line]
            self.lines += [f"    | {self._states_in(line)}" for line in printed]

    def _states_in(self, text: str) -> str:
        def label(found: re.Match[str]) -> str:
            return self.states.setdefault(found[1], f"<{len(self.states)}>")

        return _STATE.sub(label, text.replace(str(self.folder), "DIR"))

    def end(self) -> None:  # type: ignore[override]
        """Order the process to end, so that another could take its place."""
        self.order("stop", reason="over")
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()
        self.link.close()
        self.socket.close()
        if torch.distributed.is_initialized():
            GptProgram(parse_args([], 1)).drop_groups()
        self.session._communicators.uninstall()

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()


@pytest.mark.parametrize("name", _RUNS)
def test_a_life_is_as_it_was_before(monkeypatch, capfd, tmp_path, name):
    life = Life(monkeypatch, tmp_path, *_RUNS[name])
    try:
        life.open(1)
        first = str(tmp_path / "saves" / "iter_0000003")
        life.expect("done")
        life.show("it trains from the start", capfd)
        life.restore(2, life.leave(1), {1: 3})
        life.expect("done")
        life.nodes[0].vault._dump(life.dump_of(2, 4))
        life.leave(2)
        life.show("it continues from memory", capfd)
        life.open(3, Restore("durable", Generation(3, 3), "save", first), begins=True)
        life.expect("done")
        inventories = life.leave(3)
        life.show("it falls back to a checkpoint", capfd)
        life.end()
        life.begin(Seat(0, 0, 1))
        life.restore(4, inventories, {3: 3}, Seat(1, 0, 0))
        life.expect("warm")
        inventories = life.leave(4)
        life.show("another process waits", capfd)
        life.restore(5, inventories, {3: 3})
        life.expect("done")
        life.leave(5)
        life.show("it takes the role", capfd)
        life.open(6, Restore("dump", Generation(2, 4), "evaluation", str(tmp_path / "dump")))
        life.expect("done")
        life.leave(6)
        life.show("what vaults have written is restored", capfd)
        life.open(7, Restore("durable", Generation(4, 3), "save", f"{first}0"))
        life.expect("restore-failed")
        life.leave(7)
        life.show("there is no such checkpoint", capfd)
    finally:
        life.end()
        life.stop()
    lives.hold(LIVES / f"{name}.txt", life.lines)
