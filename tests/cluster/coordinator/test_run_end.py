"""The end of a run, also with a directory that is full or hangs."""

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cluster.coordinator import files as run_files, run_end
from deadpool_megatron.cluster.coordinator.service import Coordinator
from deadpool_megatron.cluster.journal.journal import Journal
from deadpool_megatron.cluster.link.peers import AgentPeer
from deadpool_megatron.cluster.machine import inputs
from deadpool_megatron.cluster.machine.actions import Finish
from deadpool_megatron.cluster.run_directory.directory import write_json
from tests.cluster.journal.journal_steps import PipeWriter, coordinator

FINAL = "final.json"


class Agent:
    """The agent of node 0, which leaves at the order to stop."""

    def __init__(
        self, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch, removes: list[bool]
    ) -> None:
        self.coordinator = coordinator
        self.removes = removes
        writer: Any = PipeWriter(os.open(os.devnull, os.O_WRONLY))
        coordinator.peers.agents[0] = AgentPeer(0, "boot", writer, 0.0)
        coordinator.feed(inputs.NodeJoined(0, "host", 1, "rack"))
        monkeypatch.setattr(coordinator.peers, "send_all", self.receive)

    def receive(self, message: Mapping[str, Any]) -> None:
        if message["t"] == "stop":
            self.removes.append(bool(message["remove"]))
            del self.coordinator.peers.agents[0]
            self.coordinator.feed(inputs.NodeLost(0, "gone"))


def end(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    removes: list[bool],
    patience_seconds: float = 10.0,
    before: Callable[[Coordinator], None] = lambda _: None,
) -> tuple[int | None, float]:
    """Have a user end a run of one node; return its exit status, and the longest pause of the loop.
    ``removes`` gets an entry when the agent is ordered to stop.
    """

    async def live() -> tuple[int | None, float]:
        journal = Journal(directory / "journal")
        run = coordinator(lambda name: journal, directory, "run")
        run.run_end.patience_seconds = patience_seconds
        Agent(run, monkeypatch, removes)
        loop, longest = asyncio.get_running_loop(), 0.0
        before(run)
        run.feed(inputs.UserStop("enough"))
        last, limit = loop.time(), loop.time() + 20.0
        while not run.over.is_set():
            assert loop.time() < limit
            run.feed(inputs.Tick())
            await asyncio.sleep(0.01)
            longest, last = max(longest, loop.time() - last), loop.time()
        run.files.close(5.0)
        return run.exit_status, longest

    return asyncio.run(live())


def replace_writes(monkeypatch: pytest.MonkeyPatch, of_final: Callable[[], None]) -> None:
    def write(path: Path, values: Mapping[str, Any], *, lasting: bool = False) -> None:
        if path.name == FINAL:
            of_final()
        write_json(path, values, lasting=lasting)

    monkeypatch.setattr(run_files.run_files, "write_json", write)
    monkeypatch.setattr(run_end, "_PAUSE_SECONDS", 0.05)


def lines(directory: Path) -> str:
    return "".join(path.read_text() for path in sorted((directory / "run").glob("events*")))


@pytest.mark.parametrize(
    ("becomes_valid", "limit_seconds", "stops"),
    [(True, 10.0, False), (False, 0.3, False), (False, 10.0, True)],
)
def test_run_end_waits_for_pending_checkpoints(
    tmp_path, monkeypatch, becomes_valid, limit_seconds, stops
):
    """Up to its limit, and only as long as its user wants."""
    saves, removes, left = {(1, 20)}, list[bool](), list[int]()

    def save(run: Coordinator) -> None:
        run.checkpoints._saves = saves
        run.run_end.close_seconds = limit_seconds
        loop = asyncio.get_running_loop()
        if becomes_valid:
            loop.call_later(0.3, saves.clear)
        if stops:
            loop.call_later(0.3, run.feed, inputs.UserStop("at once"))

    monkeypatch.setattr(run_end, "_SILENT_SECONDS", 0.05)
    replace_writes(monkeypatch, lambda: left.append(len(saves)))
    status, _ = end(tmp_path, monkeypatch, removes, before=save)
    assert (status, removes, left) == (130, [True], [0 if becomes_valid else 1])
    pending, text = "the checkpoint of iteration 20", lines(tmp_path)
    assert f"the run ends when this is valid, in {limit_seconds:g} s at most: {pending}" in text
    assert (f"the run ends before this is valid, after 0 s: {pending}" in text) != becomes_valid
    assert text.index("the run ends") < text.index("run-ended")


@pytest.mark.parametrize(("is_loaded", "status"), [(False, 75), (True, 1)])
def test_loaded_checkpoint_is_no_progress_of_an_early_end(tmp_path, monkeypatch, is_loaded, status):
    """Otherwise each job of a chain would begin with it, and report success."""
    ends, write = list[int](), run_files.RunFiles.write_result

    def note(files: run_files.RunFiles, finish: Finish, *more: Any) -> None:
        ends.append(finish.exit_status)
        write(files, finish, *more)

    def early(run: Coordinator) -> None:
        run.feed(inputs.DurableValid(4, "/K/4"))
        run.checkpoints.loaded |= {"/K/4"} if is_loaded else set()
        run.run_end.close_seconds = 0.1  # its agent stays
        monkeypatch.setattr(run.peers, "send_all", lambda message: None)
        run.run_end.finish(Finish(75, "at 4 of 40 iterations", is_early=True))

    monkeypatch.setattr(run_files.RunFiles, "write_result", note)
    end(tmp_path, monkeypatch, [], before=early)
    assert status in ends


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, True])
def test_result_that_cannot_be_written_is_reported_in_a_clear_line(
    tmp_path, monkeypatch, capfd, hangs
):
    release, removes = threading.Event(), list[bool]()

    def broken() -> None:
        if hangs:
            release.wait(20.0)
        raise OSError(errno.EIO, "Input/output error")

    replace_writes(monkeypatch, broken)
    timer = threading.Timer(1.5, release.set)
    timer.start()
    status, longest = end(tmp_path, monkeypatch, removes, patience_seconds=0.5)
    release.set()
    timer.cancel()
    assert (status, removes) == (130, [False]), "its memory is all there is left"
    assert longest < 1.0, "the loop waited for the disk"
    (line,) = capfd.readouterr().err.splitlines()
    assert "(status 130: enough) was not written to" in line
    assert ("did not answer" if hangs else "Input/output error") in line
