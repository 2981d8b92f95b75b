"""The whole life of a standby: its reports, waits and claims; see lives/."""

import contextlib
import json
import socket
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.cluster.coordinator import standby
from deadpool_megatron.cluster.coordinator.standby import Standby, StandbyOptions
from deadpool_megatron.cluster.journal import terms
from deadpool_megatron.cluster.journal.journal import Journal, JournalError, LostRace
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire.framing import FrameBuffer, encode
from tests.common import lives

PATH = Path(__file__).parent / "lives" / "standby.txt"


class World:
    """A standby, its journal, its agent and time; each line of the script is a pause of it."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch, **options: int) -> None:
        self.lines: list[str] = []
        self._patch, self._directory, self._now, self._input = patch, directory, 1000.0, b""
        self._coordinator: Exception | None = None
        self._run, self.journal = RunDirectory(directory), Journal(directory / "journal")
        self._agent, connection = socket.socketpair()
        self._agent.setblocking(False)
        self._reports, self._held = FrameBuffer(), b""
        ended = options.get("ended_term", 0)
        info = RunInfo("id", 2, 2, 1, 1, ("x",), Settings(), ended_term=ended)
        place = (self._run, info, b"", options["node"], "h", self._listen, connection)
        patch.setattr(standby.time, "monotonic", lambda: self._now)
        patch.setattr(standby, "readable", self._pause)
        patch.setattr(standby.auth, "connect", self._connect)
        patch.setattr(standby.sys, "stderr", SimpleNamespace(write=self._print, flush=int))
        self._standby = Standby(StandbyOptions(*place), self.journal)
        if options.get("term"):
            terms.claim_term(self.journal, 1, "h1", 9, 1)
            self.journal.write_heartbeat(terms.sign(1, 0))

    def _listen(self) -> Any:
        self._note("it listens")
        close = partial(self._note, "it does not listen any more")
        return SimpleNamespace(getsockname=lambda: ("h", 4000), close=close)

    @contextlib.contextmanager
    def _connect(self, address: tuple[str, int], *_: object) -> Iterator[None]:
        self._note(f"it knocks at {address}")
        if self._coordinator is not None:
            raise self._coordinator
        raise TimeoutError("no answer")
        yield

    def _print(self, text: str) -> None:
        self._note(f"prints: {text}") if text.strip() else None

    def _note(self, text: str) -> None:
        with contextlib.suppress(BlockingIOError):
            reports = self._reports.feed(self._agent.recv(1 << 16))
            self.lines += [f"    says {json.dumps(report)}" for report in reports]
        self.lines.append(f"    {text}")

    def _pause(self, _: int, seconds: float) -> bool:
        self._note(f"it looks again in {seconds:.2f} s")
        command = next(self._script, "gone")
        if command != "gone":
            self.lines.append(command)
        name, _, value = command.partition(": ")
        match name:
            case "wait":
                self._now = round(self._now + float(value or seconds), 2)
                return False
            case "sign":
                self._now = round(self._now + 0.2, 2)
                self.journal.write_heartbeat(value)
                return False
            case "claim":
                number = int(value)
                terms.claim_term(self.journal, number, f"h{number}", 9, number)
                return False
            case "journal":
                error = {"race": LostRace("another"), "broken": JournalError("disk is away")}
                if value == "mended":
                    self._patch.setattr(Journal, "read_heartbeat", self._last_beat)
                    return False
                self._last_beat = Journal.read_heartbeat
                name = "read_heartbeat" if value == "broken" else "write"
                self._patch.setattr(Journal, name, self._raise(error[value]))
                return False
            case "entry":
                (self._directory / "journal" / "term-00000002.json").write_text(value)
                return False
            case "orders":  # the last number of bytes comes later
                *orders, late = json.loads(value)
                whole = self._held + b"".join(map(encode, orders))
                sent = len(whole) - late
                self._held = whole[sent:]
                self._agent.sendall(whole[:sent])
                return True
            case "coordinator":
                self._coordinator = ConnectionRefusedError() if value == "dead" else None
                return False
            case "result":
                self._run.final.write_text(value)
                return False
        assert command == "gone", command
        self._agent.shutdown(socket.SHUT_WR)
        return True

    def _raise(self, error: Exception) -> Any:
        def fails(*_: object) -> None:
            raise error

        return fails

    def live(self, script: Sequence[str]) -> list[str]:
        self._script = iter(script)
        claimed = self._standby.watch()
        self._note(f"was in touch: {self._standby.was_in_touch}")
        if claimed is not None:
            beat = self.journal.read_heartbeat()
            self._note(f"sign: {beat}, terms {self.journal.numbers('term')}")
        return self.lines


def live(script: Sequence[str], options: dict[str, Any], directory: Path) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        return World(directory, patch, **options).live(script)


def test_a_life_is_as_it_was_before(tmp_path):
    lives.compare(PATH, live, tmp_path)
