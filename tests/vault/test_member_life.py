"""A member and its vault, word by word: what the one says, what the other's answers come to, and
what lies in the slots. The vault is played. Expected is the file lives/member.txt."""

import os
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deadpool_megatron.layout.records import Generation, Seat
from deadpool_megatron.vault.errors import VaultError
from deadpool_megatron.vault.member import VaultClient
from deadpool_megatron.vault.memory import Budget
from deadpool_megatron.vault.room import make_own, park  # noqa: F401 - in the file
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


class Life:
    """``lines``: what the member did, and what came of it. Each line is an expression."""

    def __init__(self, script: Sequence[str], _: Mapping[str, Any], directory: Path) -> None:
        path = str(directory / "vault.sock")
        self.directory, self.vault = directory, Played(path)
        self.member = VaultClient(path, directory, SEAT, connect_seconds=20.0)
        self.interrupt = os.eventfd(0, os.EFD_CLOEXEC)
        self.lines: list[str] = []
        self.slots = ""
        self.syncs = 0
        names = {name: getattr(self, name) for name in [*vars(self), *vars(Life)]}
        names = {**globals(), **names, "life": self}
        for line in script:
            self.do(line, names)
        self.vault.listener.close()
        os.close(self.interrupt)

    def do(self, what: str, names: dict[str, Any]) -> None:
        try:
            found = eval(what, names)
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
        self.lines += [what, *heard, f"    -> {came.replace(str(self.directory), 'DIR')}"]
        if (slots := self.held()) != self.slots:
            self.lines += slots.splitlines()
        self.slots = slots

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

    def restore(self, seconds: float = PATIENCE_SECONDS, **answer: Any) -> Any:
        self.vault.says["restore"] = [answer] if answer else []
        found = self.member.restore(
            *(LAYOUT, 2, Generation(1, 2), "step"),
            deadline_seconds=seconds,
            interrupted=self.interrupt,
        )
        parts = {name: bytes(found.part(name)).hex() for name in found.names}
        found.close()
        return parts, found.names

    def says(self, about: str, *answers: Mapping[str, Any]) -> None:
        self.vault.says[about] = [*answers]

    def hang_up(self) -> None:
        self.member.tell({"t": "bye"})
        wait_for("the vault to hang up", lambda: "bye" in self.vault.heard, PATIENCE_SECONDS)

    def made(self, layout: Any = LAYOUT) -> Segment:
        path = self.directory / own_name(layout.role, SEAT)
        make_own(path, layout, SEAT, Budget(self.directory))
        return Segment.open(path)


def test_a_member_says_what_it_said_before(tmp_path: Path) -> None:
    live: Any = lambda *life: Life(*life).lines  # noqa: E731
    lives.compare(Path(__file__).parent / "lives" / "member.txt", live, tmp_path)
