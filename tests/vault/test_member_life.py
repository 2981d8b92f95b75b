"""A member and its vault, word by word: what the one says, what the other's answers come to, and
what lies in the slots. The vault is played. Expected is the file lives/member.txt."""

import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.layout.records import Generation, Seat
from deadpool_megatron.vault.errors import VaultError
from deadpool_megatron.vault.member import VaultClient
from deadpool_megatron.vault.memory import Budget
from deadpool_megatron.vault.room import make_own, park
from deadpool_megatron.vault.shm.segment import PartState, Segment, SlotState, own_name
from deadpool_megatron.wire import framing
from tests.common import lives
from tests.common.waiting import PATIENCE_SECONDS, wait_for
from tests.vault.harness import make_layout

LAYOUT = make_layout(3, nbytes=40)
OTHER = make_layout(4, nbytes=40)
SEAT = Seat(0, 0, 1)
REGISTERED = {"t": "registered"}


class Played:
    """The vault. ``says``: kind of a message -> what it answers; it hangs up after "bye"."""

    def __init__(self, path: str) -> None:
        self.heard: list[str] = []
        self.says: dict[str, list[Mapping[str, Any]]] = {}
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while self.listener.fileno() >= 0:
            try:
                link, _ = self.listener.accept()
                with link:
                    while (message := framing.receive(link))["t"] != "bye":
                        for answer in self.says.get(message["t"], ()):
                            framing.send(link, answer)
                        self.heard.append(str(message))
                self.heard.append("bye")
            except (framing.ConnectionClosed, OSError):
                continue


@pytest.fixture
def life(tmp_path: Path) -> Iterator["Life"]:
    found = Life(tmp_path)
    yield found
    found.vault.listener.close()
    os.close(found.interrupt)


class Life:
    """``lines``: what the member did, and what came of it."""

    def __init__(self, directory: Path) -> None:
        path = str(directory / "vault.sock")
        self.directory, self.vault = directory, Played(path)
        self.member = VaultClient(path, directory, SEAT, connect_seconds=20.0)
        self.interrupt = os.eventfd(0, os.EFD_CLOEXEC)
        self.lines: list[str] = []
        self.slots = ""
        self.syncs = 0

    def do(self, what: str, act: Callable[[], Any]) -> Any:
        found = None
        try:
            found = act()
            came = found.hex(" ") if isinstance(found, memoryview) else str(found)
        except (VaultError, OSError) as error:
            came = f"{type(error).__name__}: {error}"
        if self.member._link is not None:
            self.syncs += 1
            self.member.tell({"t": "sync", "n": self.syncs})
            last = str({"t": "sync", "n": self.syncs})
            wait_for(
                f"the vault to hear of {what}", lambda: last in self.vault.heard, PATIENCE_SECONDS
            )
        heard = [f"    said {one}" for one in self.vault.heard if "sync" not in one]
        self.vault.heard.clear()
        self.lines += [what, *heard, f"    -> {re.sub('at 0x.*', '', came)}"]
        if (slots := self.held()) != self.slots:
            self.lines += slots.splitlines()
        self.slots = slots
        return found

    def held(self) -> str:
        """What each slot says, and the files."""
        files = sorted(p.name.replace(str(os.getpid()), "PID") for p in self.directory.iterdir())
        found = [f"    files {files}"]
        segment = self.member._segment
        for slot in range(segment.slots) if segment else ():
            parts = {
                name: f"{one.state.name} {one.nbytes} in {one.epoch}"
                for name in (part.name for part in LAYOUT.parts)
                if (one := segment.entry(slot, name)).state is not PartState.ABSENT
            }
            of = segment.generation(slot), segment.epoch(slot)
            generation = f"{of[0].lineage}:{of[0].iteration} in {of[1]}"
            found.append(f"    slot {slot} {segment.state(slot).name} {generation} {parts}")
        return "\n".join(found)

    def wait(self, iteration: int, boundary: str = "step", epoch: int = 1) -> bool:
        generation = Generation(epoch, iteration)

        def give_up(seconds: float) -> None:
            if seconds > PATIENCE_SECONDS or not self.vault.says.get("waiting"):
                os.eventfd_write(self.interrupt, 1)

        often = {"on_wait": give_up, "report_every_seconds": 0.01}
        found = self.member.wait_committed(
            generation, boundary, interrupted=self.interrupt, **often
        )
        if not found:
            os.eventfd_read(self.interrupt)
        return found

    def write(self, iteration: int, epoch: int = 1, lineage: int = 0) -> None:
        writer = self.member.begin(Generation(lineage or epoch, iteration), epoch)
        writer.part("shard")[:4] = bytes([iteration] * 4)
        writer.fill({"shard": 4, "extras@step": 2})

    def seal(self, slot: int) -> None:
        segment = Segment.open(self.directory / own_name(3, SEAT))
        for filled in segment.filled(segment.epoch(slot)):
            for name, (entry, _) in filled.parts.items() if filled.slot == slot else ():
                segment.seal_part(slot, name, entry.nbytes, 7, entry.epoch)
        segment.set_state(slot, SlotState.SEALED)


def test_a_member_says_what_it_said_before(life: Life) -> None:
    do, member, vault = life.do, life.member, life.vault
    path, budget = life.directory / own_name(3, SEAT), Budget(life.directory)
    do("write before it has a role", lambda: life.write(1))
    do("no views", lambda: len(member.slot_views(["shard"])))
    park(life.directory, OTHER, Seat(0, 0, 0), budget)
    do("park", lambda: member.park(LAYOUT))
    do("views", lambda: [len(one) for one in member.slot_views(["shard", "tail"])])
    vault.says["member"] = [{"t": "unregistered", "text": "no room", "code": "no-room"}]
    do("register in vain", lambda: member.register(LAYOUT, 1))
    os.eventfd_write(life.interrupt, 1)
    vault.says["member"] = []
    do("interrupted", lambda: member.register(LAYOUT, 1, life.interrupt))
    os.eventfd_read(life.interrupt)
    vault.says["member"] = [REGISTERED]
    do("has slots", lambda: member.has_segment(3))
    make_own(path, LAYOUT, SEAT, budget)
    do("register", lambda: member.register(LAYOUT, 1))
    do("has slots", lambda: member.has_segment(3))
    do("rehearsed", lambda: member.rehearsed(True))
    do("write 1", lambda: life.write(1))
    do("not sealed", lambda: member.sealed_part(Generation(1, 1), "shard"))
    do("append", lambda: member.append(Generation(1, 1), "extras@save", b"abc"))
    life.seal(0)
    do("sealed", lambda: member.sealed_part(Generation(1, 1), "shard"))
    do("append again", lambda: member.append(Generation(1, 1), "extras@save", b"abc"))
    do("append to another", lambda: member.append(Generation(1, 9), "extras@save", b"abc"))
    do("wait in vain", lambda: life.wait(1))
    told = {"t": "committed", "epoch": 1, "generation": [1, 1], "boundary": "step"}
    vault.says["waiting"] = [told]
    do("wait", lambda: life.wait(1))
    do("for less", lambda: life.wait(0, "save"))
    vault.says["waiting"] = []
    do("for more", lambda: life.wait(1, "save"))
    do("newest", lambda: member.newest_committed)
    do("write 2", lambda: life.write(2))
    do("begin 3, no slot", lambda: life.write(3))
    life.seal(1)
    vault.says["waiting"] = [told | {"generation": [1, 2]}, told]
    do("wait", lambda: life.wait(2))
    writer = do("begin 3", lambda: member.begin(Generation(1, 3), 1))
    do("abandon it", writer.abandon)
    do("fill it", lambda: writer.fill({"shard": 4}))
    do("of another epoch", lambda: life.write(3, 2, 1))
    vault.says["waiting"] = [{"t": "bad", "epoch": 1, "generation": [1, 3], "part": "tail"}]
    do("damaged", lambda: life.wait(3))
    do("ended", member.ended)
    writer = do("begin 4", lambda: member.begin(Generation(1, 4), 1))
    segment = Segment.open(path)
    segment.freeze(True)
    do("filled at the close", lambda: writer.fill({"shard": 4}))
    do("begin while closed", lambda: life.write(5))
    do("append while closed", lambda: member.append(Generation(1, 2), "extras@test", b""))
    segment.freeze(False)

    def restore(**answer: Any) -> Any:
        vault.says["restore"] = [answer]
        found = member.restore(
            *(LAYOUT, 2, Generation(1, 2), "step"), deadline_seconds=60, interrupted=life.interrupt
        )
        parts = {name: bytes(found.part(name)).hex() for name in found.names}
        found.close()
        return parts, found.names

    tried = [[1, 3, "gone"], [2, 1 << 33, "stale"]]
    do("unavailable", lambda: restore(t="unavailable", part="tail", tried=tried))
    do("another answer", lambda: restore(t="failed", text="epoch over"))
    place = [path.name, segment.offset(1, "shard"), 4]
    do("restore", lambda: restore(t="restored", parts={"shard": place}))
    other = Segment.create(life.directory / "copy-3.seg", LAYOUT, None, ["tail"])
    there = ["copy-3.seg", other.offset(0, "tail"), 3]
    do("from two files", lambda: restore(t="restored", parts={"shard": place, "tail": there}))
    do("older epoch", lambda: life.write(3))
    do("not of it", lambda: life.write(3, 2, 1))
    do("lost parts of what it began with", lambda: life.write(2, 2, 1))
    do("write", lambda: life.write(3, 2))
    do("stale commit", lambda: member.newest_committed)
    do("it is written over by nobody", lambda: life.write(4, 2))
    vault.says["waiting"] = [{"t": "unregistered", "text": "another layout"}]
    do("a new vault", lambda: life.wait(3, "step", 2))
    member.tell({"t": "bye"})
    wait_for("the vault to hang up", lambda: "bye" in vault.heard, PATIENCE_SECONDS)
    vault.says["member"], vault.says["waiting"] = [REGISTERED], []
    do("a vault that was started again", lambda: life.wait(4, "step", 2))
    vault.says["member"] = [REGISTERED]
    make_own(life.directory / own_name(4, SEAT), OTHER, SEAT, budget)
    do("another role", lambda: member.register(OTHER, 3))
    do("close", member.close)
    lives.hold(Path(__file__).parent / "lives" / "member.txt", life.lines)
