"""Dies at each line of writing and announcing a decision, one after the other, and checks the rest.

``python -m tests.cluster.journal.journal_steps coordinator|journal PLACE DIRECTORY`` forks a child
for each line. In ``coordinator`` the child is a coordinator whose first epoch is to be recorded, up
to the announcement to its agents; in ``journal`` it writes one entry. Prints a JSON object
with how often each outcome was found. Fails with a traceback when a promise is broken.
"""

import asyncio
import json
import os
import socket
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from deadpool_megatron.cluster.coordinator import succession
from deadpool_megatron.cluster.coordinator.service import Coordinator
from deadpool_megatron.cluster.coordinator.succession import CoordinatorOptions
from deadpool_megatron.cluster.journal.journal import Journal, LostRace
from deadpool_megatron.cluster.journal.terms import claim_term
from deadpool_megatron.cluster.link.peers import AgentPeer
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.file_systems import TimedRead
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire.framing import FrameBuffer
from tests.cluster.link.streams import Stream

DIED = 9
NODES = 2
_TRACED = ("service.py", "journal.py", "peers.py", "framing.py")
# Pure, and many lines for each key of a record.
_UNTRACED = ("dumps_in_parts", "_short")
_ENTRY = {"text": "x" * 3000}


class Death:
    """Ends this process at the n-th line of the traced modules, in whichever thread."""

    def __init__(self, line: int) -> None:
        self._left = line

    def begin(self) -> None:
        threading.settrace(self._call)
        sys.settrace(self._call)

    def _call(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        del event, argument
        code = frame.f_code
        if Path(code.co_filename).name not in _TRACED or code.co_qualname.startswith(_UNTRACED):
            return None
        return self._line

    def _line(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        del frame, argument
        if event == "line":
            self._left -= 1
            if self._left == 0:
                os._exit(DIED)
        return self._line


class PipeWriter(Stream):
    """A stream that writes at once."""

    def __init__(self, handle: int) -> None:
        super().__init__()
        self._handle = handle

    def write(self, data: bytes) -> None:
        os.write(self._handle, data)


def in_child(task: Callable[[], None]) -> int:
    """Run it in a fork; answers the exit status."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            task()
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def write_entry(journal: Journal, line: int) -> None:
    Death(line).begin()
    journal.write("epoch", 1, _ENTRY)
    sys.settrace(None)


def step_journal(opened: Callable[[str], Journal]) -> Counter[str]:
    """An entry is whole or absent; the next writer can write it or read it."""
    found: Counter[str] = Counter()
    for line in range(1, 1000):
        name = str(line)
        code = in_child(partial(write_entry, opened(name), line))
        entry = opened(name).newest("epoch")
        assert entry in (None, (1, _ENTRY)), entry
        try:
            opened(name).write("epoch", 1, {"by": "the next"})
        except LostRace:
            assert entry, "nothing was there, and yet a race was lost"
        else:
            assert not entry, "an entry was replaced"
        found["whole" if entry else "absent"] += 1
        if code == 0:
            assert entry
            return found
        assert code == DIED, code
    raise AssertionError("the child never comes to its end")


def coordinator(opened: Callable[[str], Journal], directory: Path, name: str) -> Coordinator:
    """Return a coordinator that knows only the journal, as after a takeover."""
    run = RunDirectory(directory / name)
    info = RunInfo(
        run_id=name,
        world_size=NODES,
        nodes=NODES,
        spares=0,
        nproc_per_node=1,
        command=("x",),
        settings=Settings(),
    )
    if not run.path.exists():
        run.create(info)
    journal = opened(name)
    recovered = succession.look_up(journal, TimedRead(partial(succession.valid_checkpoints, run)))
    newest = journal.newest("term")
    number = 1 if newest is None else newest[0] + 1
    return Coordinator(
        CoordinatorOptions(
            run=run,
            info=info,
            secret=b"",
            host="127.0.0.1",
            listener=socket.socket(),
            term=claim_term(journal, number, "127.0.0.1", 1, None),
            journal=journal,
            recovered=recovered,
        )
    )


async def decide(service: Coordinator, pipes: list[int], line: int) -> None:
    """From the first agent to the announcement of epoch 1."""
    writers = [PipeWriter(pipe) for pipe in pipes]
    for node, writer in enumerate(writers):
        service.peers.agents[node] = AgentPeer(node, 1, writer, 0.0)  # type: ignore[arg-type]
        service.feed(ev.NodeJoined(node, "host", 1, f"rack{node}"))
    service.feed(ev.MemberHello(0, 0, 0))
    Death(line).begin()
    service.feed(ev.MemberHello(1, 0, 0))
    while service.tasks:
        await asyncio.wait(service.tasks)
    sys.settrace(None)


def announced(pipe: int) -> set[int]:
    """Return the epochs that an agent has received."""
    data = b""
    while piece := os.read(pipe, 1 << 16):
        data += piece
    return {m["record"]["epoch"] for m in FrameBuffer().feed(data) if m["t"] == "record"}


def step_coordinator(opened: Callable[[str], Journal], directory: Path) -> Counter[str]:
    """No agent receives an epoch that the next coordinator does not know; that can continue."""
    found: Counter[str] = Counter()
    for line in range(1, 2000):
        name = str(line)
        pipes = [os.pipe() for _ in range(NODES)]

        def live(name: str = name, line: int = line, ends: Any = pipes) -> None:
            service = coordinator(opened, directory, name)
            asyncio.run(decide(service, [end for _, end in ends], line))

        code = in_child(live)
        for _, end in pipes:
            os.close(end)
        received = [announced(pipe) for pipe, _ in pipes]
        for pipe, _ in pipes:
            os.close(pipe)
        journal = opened(name)
        decided = set(journal.numbers("epoch"))
        assert decided <= {1}
        for epochs in received:
            assert epochs <= decided, "announced, and not durable"
        successor = coordinator(opened, directory, name)
        known = successor.state.record
        assert (known is not None) == bool(decided)
        if decided:
            assert known is not None
            assert known.to_dict() == journal.read("epoch", 1)
        reached = sum(map(bool, received))
        found[f"{'whole' if decided else 'absent'}, {reached} reached"] += 1
        if code == 0:
            assert reached == NODES
            return found
        assert code == DIED, code
    raise AssertionError("the child never comes to its end")


def main() -> None:
    os.fsync = lambda handle: None  # nothing is to be proved about disks, and it takes its time
    part, directory = sys.argv[1], Path(sys.argv[2])

    def opened(name: str) -> Journal:
        (directory / "journals").mkdir(exist_ok=True)
        return Journal(directory / "journals" / name)

    found = step_journal(opened) if part == "journal" else step_coordinator(opened, directory)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
