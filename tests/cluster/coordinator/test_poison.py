"""Reports that make the coordinator's own code raise: refused and counted, and nothing ends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cluster.coordinator import stepping
from deadpool_megatron.cluster.coordinator.service import Coordinator
from deadpool_megatron.cluster.journal.journal import GONE, WRONG, note_node, open_journal
from deadpool_megatron.cluster.journal.requests import Request, Stage, Verb, newest
from deadpool_megatron.cluster.journal.terms import claim_term
from deadpool_megatron.cluster.link.peers import AgentPeer
from deadpool_megatron.cluster.machine import inputs
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout.schemes import ProtectionPlan
from deadpool_megatron.settings import Settings
from tests.cluster.journal.journal_steps import PipeWriter, coordinator
from tests.cluster.link.line import Line, play
from tests.cluster.link.test_orders_once import beginning
from tests.cluster.machine.rig import Rig, g, killed

_SEAT = {"slot": 0, "incarnation": 0}


def hear(directory: Path, scenario: Callable[[Coordinator, AgentPeer], None]) -> Coordinator:
    """A coordinator that hears node 0, and goes on until nothing is left to do."""

    async def live() -> Coordinator:
        journal = open_journal(Settings(), "run", directory / "journal")
        one = coordinator(lambda name: journal, directory, "run")
        writer: Any = PipeWriter(1)
        peer = one.peers.agents[0] = AgentPeer(0, "boot", writer, "host", 0.0)
        scenario(one, peer)
        for _ in range(20):
            await asyncio.sleep(0.005)
        return one

    return asyncio.run(live())


@pytest.mark.parametrize(
    "message",
    [
        {"t": "event", "event": {"kind": "of-a-newer-version", "epoch": 1}},
        {"t": "progress", "event": {"kind": "state-hash", "iteration": 1, "role": 0}},
        {"t": "member", **_SEAT, "m": {"t": "durable-request", "iteration": 3}},
        {"t": "member", **_SEAT, "m": {"t": "durable-request", "epoch": "x", "iteration": 3}},
        {"t": "member", **_SEAT, "m": {"t": "hello"}},
        {"t": "inventory", "inventory": {}},
    ],
    ids=lambda message: str(message)[:60],
)
def test_report_that_cannot_be_used_ends_nothing(
    tmp_path: Path, message: Mapping[str, Any]
) -> None:
    def scenario(one: Coordinator, peer: AgentPeer) -> None:
        one.peers._hand_over(peer, {**message, "n": 1}, one.peers._take)

    one = hear(tmp_path, scenario)
    assert one.peers.refusals == 1
    assert one.peers.taken(one.peers.agents[0]) == 1, "else its successor is told it again"
    assert not one._tasks


def test_a_successor_is_not_told_again_what_was_refused() -> None:
    """Else every coordinator would end, or count a refusal, at the same report."""

    async def scenario(line: Line) -> None:
        await beginning(line)
        office, refused = line.office, list[str]()

        def fails(*_: object) -> None:
            raise KeyError("a report of another version")

        office.agent_said = fails  # type: ignore[method-assign]
        office.refused = lambda who, why: refused.append(why)  # type: ignore[method-assign]
        line.link.send({"t": "report", "value": "poison"})
        await line.until("the refusal", lambda: refused)
        await line.until("its acknowledgement", lambda: not line.link._unacknowledged)
        following = line.take_over()
        await beginning(line)
        line.link.send({"t": "report", "value": "good"})
        await line.until("the next report", lambda: following.said)
        await asyncio.sleep(10.0)
        assert following.said == ["good"]
        assert len(refused) == 1

    play({}, scenario)


def warnings_of(one: Coordinator) -> list[str]:
    """Filled with what it warns of from now on."""
    warned, write = list[str](), one.files.write

    def note(event: Event) -> None:
        if event.data.get("level") == "warning":
            warned.append(str(event.data["text"]))
        write(event)

    one.files.write = note  # type: ignore[method-assign]
    return warned


@pytest.mark.parametrize("kind", [GONE, WRONG])
@pytest.mark.parametrize(
    ("note", "why"),
    [
        ('{"reason": "of a newer version"}', "KeyError"),
        ("", "DamagedEntry"),
        ("[1]", "not a JSON object"),
        ('{"cause": ' + "[" * 5000 + "]" * 5000 + "}", "recursion"),
    ],
    ids=["newer", "empty", "no-object", "nested"],
)
def test_a_note_on_a_node_that_is_not_understood_ends_no_coordinator(
    tmp_path: Path, kind: str, note: str, why: str
) -> None:
    """It is read when the term is claimed: each successor would use up one more."""
    rig = Rig(nodes=2, spares=0).run()
    journal = open_journal(Settings(), "run", tmp_path / "journal")
    journal.write("epoch", 1, rig.record.to_dict())
    (tmp_path / "journal" / f"{kind}-00000007.json").write_text(note)
    note_node(journal, kind, 8, "its agent has left", host="host8")
    warned: list[str] = []

    async def live() -> Coordinator:
        one = coordinator(lambda name: journal, tmp_path, "run")
        warnings = warnings_of(one)
        living = asyncio.create_task(one.run())
        while not warnings:
            assert not living.done()
            await asyncio.sleep(0)
        warned.extend(warnings)
        one.end(0)
        await living
        return one

    state = asyncio.run(live()).state
    assert [f"{kind} node 7" in line and why in line for line in warned] == [True], warned
    if kind == GONE:
        assert "its note in the journal is not understood" in state.fleet.gone[7]
        assert state.fleet.gone[8] == "its agent has left"
    else:
        assert state.fleet.wrong == {7, 8}
        assert state.fleet.wrong_hosts == {"host8"}
    assert journal.numbers("term") == [1]


NEWER = {"number": 1, "token": "a", "verb": "resize", "what": {}, "stage": "asked", "why": ""}
KNOWN = Request(2, "b", Verb.DRAIN, {"node": 1}, Stage.REFUSED, "it is gone").to_dict()


@pytest.mark.parametrize(
    ("entry", "kept", "why"),
    [
        ({"term": 1, "requests": [NEWER, KNOWN]}, 1, "a request is not understood and left out"),
        ({"term": 1, "requests": [KNOWN, KNOWN | {"stage": "put off"}]}, 1, "'put off' is not"),
        (
            {"term": 1, "requests": [KNOWN, KNOWN | {"what": {"node": 1, "ends": "2030-01-01"}}]},
            *(1, "could not convert string to float: '2030-01-01'"),
        ),
        ({"term": math.inf, "requests": []}, 0, "request entry 1: OverflowError"),
        ({"term": 1, "others": []}, 0, "request entry 1: KeyError"),
        ("damaged", 0, "request entry 1: DamagedEntry"),
    ],
    ids=lambda value: str(value)[:50],
)
async def test_a_request_of_a_newer_version_ends_no_coordinator(
    tmp_path: Path, entry: dict[str, Any] | str, kept: int, why: str
) -> None:
    """Each successor would find it, too; others go on being taken."""
    journal = open_journal(Settings(), "run", tmp_path / "journal")
    claim_term(journal, 1, "127.0.0.1", 1, None)
    if isinstance(entry, str):
        (tmp_path / "journal" / "request-00000001.json").write_text(entry)
    else:
        journal.write("request", 1, entry)
    warned: list[str] = []
    one = coordinator(lambda name: journal, tmp_path, "run")
    warnings = warnings_of(one)
    await one._commands.requests.begin()
    assert len(one.state.requests) == kept
    plan = {"plan": ProtectionPlan().to_dict(), "words": "copies"}
    answer = await one._commands.requests.ask(Verb.PROTECT, lambda: plan, "c")
    assert answer["ok"]
    warned.extend(warnings)
    one.files.close(5.0)
    assert any(why in line for line in warned), warned
    found = newest(journal)
    assert [one.token for one in found.requests] == ["b", "c"][2 - kept - 1 :]
    assert found.troubles == ()


def test_report_that_the_machine_fails_at_is_refused_and_ends_this_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state may be half changed; the successor is not told it again, and reads the journal."""
    ended, handled = list[BaseException](), list[inputs.Input]()
    monkeypatch.setattr(stepping, "_REFUSAL_SECONDS", 0.02)
    monkeypatch.setattr(stepping, "end_process", ended.append)

    def scenario(one: Coordinator, peer: AgentPeer) -> None:
        def fails(item: inputs.Input, _: float) -> Any:
            handled.append(item)
            raise KeyError("a mistake of ours")

        monkeypatch.setattr(one._stepper._machine, "handle", fails)
        hello = {"t": "member", **_SEAT, "m": {"t": "hello", "pid": 1}, "n": 1}
        one.peers._hand_over(peer, hello, one.peers._take)
        assert one.peers.taken(peer) == 1
        one.feed(inputs.Tick())

    assert hear(tmp_path, scenario).peers.refusals == 1
    assert len(handled) == len(ended) == 1


def test_beats_that_cannot_be_read_end_no_look(tmp_path: Path) -> None:
    def scenario(one: Coordinator, peer: AgentPeer) -> None:
        def broken(*_: object) -> None:
            raise TypeError("a beat of another version")

        del peer
        one._watchdog._hang = broken  # type: ignore[method-assign]
        one.spawn(one._watch())

    assert hear(tmp_path, scenario).peers.refusals == 1


@pytest.mark.parametrize(("loss", "is_told"), [("nan", True), ((1.5).hex(), False)])
def test_a_loss_that_is_not_finite_is_told_the_machine_however_late(
    tmp_path: Path, loss: str, is_told: bool
) -> None:
    """The epoch was closed, and its iteration kept; all that goes on from it is bad."""
    rig = Rig().run(4)
    rig.feed(killed(rig, 0))
    rig.closed(g(5))
    rig.journal()
    fed: list[inputs.Input] = []

    def scenario(one: Coordinator, _: AgentPeer) -> None:
        one.state = rig.state
        one.feed = fed.append  # type: ignore[method-assign]
        one._progressed(Event(Kind.STEP, 1, 1, 1, 5, data={"loss": loss}))

    hear(tmp_path, scenario)
    assert fed == ([inputs.NotFinite(1, 1, 1, 5, "loss", "nan")] if is_told else [])
