"""The end of a run whose directory is full, or hangs: nothing waits for it, nothing is lost."""

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
    """The agent of node 0: hears orders, and goes when it is told to stop."""

    def __init__(
        self, one: Coordinator, monkeypatch: pytest.MonkeyPatch, removes: list[bool]
    ) -> None:
        self.one = one
        self.removes = removes
        writer: Any = PipeWriter(os.open(os.devnull, os.O_WRONLY))
        one.peers.agents[0] = AgentPeer(0, "boot", writer, 0.0)
        one.feed(inputs.NodeJoined(0, "host", 1, "rack"))
        monkeypatch.setattr(one.peers, "send_all", self.hear)

    def hear(self, message: Mapping[str, Any]) -> None:
        if message["t"] == "stop":
            self.removes.append(bool(message["remove"]))
            del self.one.peers.agents[0]
            self.one.feed(inputs.NodeLost(0, "gone"))


def end(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    removes: list[bool],
    patience_seconds: float = 10.0,
    before: Callable[[Coordinator], None] = lambda one: None,
) -> tuple[int | None, float]:
    """Have a user end a run of one node; returns its exit status, and how long the loop stood
    still at most. ``removes`` gets an entry when the agent is told to stop.
    """

    async def live() -> tuple[int | None, float]:
        journal = Journal(directory / "journal")
        one = coordinator(lambda name: journal, directory, "run")
        one.run_end.patience_seconds = patience_seconds
        Agent(one, monkeypatch, removes)
        loop, longest = asyncio.get_running_loop(), 0.0
        before(one)
        one.feed(inputs.UserStop("enough"))
        last, limit = loop.time(), loop.time() + 20.0
        while not one.over.is_set():
            assert loop.time() < limit
            one.feed(inputs.Tick())
            await asyncio.sleep(0.01)
            longest, last = max(longest, loop.time() - last), loop.time()
        one.files.close(5.0)
        return one.exit_status, longest

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
    """For so long as it says, and as its user wants."""
    saves, removes, left = {(1, 20)}, list[bool](), list[int]()

    def save(one: Coordinator) -> None:
        one.checkpoints._saves = saves
        one.run_end.close_seconds = limit_seconds
        loop = asyncio.get_running_loop()
        if becomes_valid:
            loop.call_later(0.3, saves.clear)
        if stops:
            loop.call_later(0.3, one.feed, inputs.UserStop("at once"))

    monkeypatch.setattr(run_end, "_SILENT_SECONDS", 0.05)
    replace_writes(monkeypatch, lambda: left.append(len(saves)))
    status, _ = end(tmp_path, monkeypatch, removes, before=save)
    assert (status, removes, left) == (130, [True], [0 if becomes_valid else 1])
    what, said = "the checkpoint of iteration 20", lines(tmp_path)
    assert f"the run ends when this is valid, in {limit_seconds:g} s at most: {what}" in said
    assert (f"the run ends before this is valid, after 0 s: {what}" in said) != becomes_valid
    assert said.index("the run ends") < said.index("run-ended"), "its end is told when it has come"


@pytest.mark.parametrize(("is_loaded", "status"), [(False, 75), (True, 1)])
def test_loaded_checkpoint_is_no_progress_of_an_early_end(tmp_path, monkeypatch, is_loaded, status):
    """Else a chain of jobs would begin with it each time, and each would say that all is well."""
    ends, write = list[int](), run_files.RunFiles.write_result

    def note(files: run_files.RunFiles, finish: Finish, *more: Any) -> None:
        ends.append(finish.exit_status)
        write(files, finish, *more)

    def early(one: Coordinator) -> None:
        one.feed(inputs.DurableValid(4, "/K/4"))
        one.checkpoints.loaded |= {"/K/4"} if is_loaded else set()
        one.run_end.close_seconds = 0.1  # its agent stays
        monkeypatch.setattr(one.peers, "send_all", lambda message: None)
        one.run_end.finish(Finish(75, "at 4 of 40 iterations", is_early=True))

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
    (said,) = capfd.readouterr().err.splitlines()
    assert "(status 130: enough) was not written to" in said
    assert ("did not answer" if hangs else "Input/output error") in said
