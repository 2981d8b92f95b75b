"""Messages become inputs; malformed ones raise what the caller refuses."""

from __future__ import annotations

from typing import Any

import pytest

from deadpool_megatron.cluster.link import protocol
from deadpool_megatron.cluster.machine import inputs
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout.records import BadPart, Generation, Inventory
from deadpool_megatron.preflight.judge import HostFacts

FACTS = HostFacts("host", versions={"torch": "2"}, gpus=8, open_files=1024)

JOIN = {
    "t": "join",
    "node": 2,
    "host": "h",
    "vault_port": 9,
    "domain": "d",
    "members": {"0": 1},
    "incarnations": {"0": 1, "1": 4},
    "epoch": 3,
    "closed": 2,
    "restored": {"0": 3},
    "facts": FACTS.to_dict(),
}


def said(**m: Any) -> dict[str, Any]:
    return {"t": "member", "slot": 1, "incarnation": 2, "m": m}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            said(t="fault", epoch=3, group="dp", operation="all_reduce", text="reset"),
            inputs.MemberFault(7, 1, 2, 3, "all_reduce in group dp: reset"),
        ),
        (
            said(t="not-finite", epoch=3, role=5, iteration=8, number="loss", value="nan"),
            inputs.NotFinite(3, 7, 5, 8, "loss", "nan"),
        ),
        (said(t="drained", epoch=3, clean=True), None),
        (
            {"t": "member-lost", "slot": 1, "incarnation": 2, "signal": 9, "last_line": "x"},
            inputs.MemberLost(7, 1, 2, signal=9, last_line="x"),
        ),
        (
            {"t": "inventory", "epoch": 3, "inventory": Inventory(7, 3).to_dict()},
            inputs.NodeInventory(Inventory(7, 3)),
        ),
        (
            {
                "t": "dumped",
                "generation": [1, 2],
                "boundary": "step",
                "files": [],
                "error": "",
                "damaged": [[3, [1, 2], "main"]],
            },
            inputs.Dumped(
                7,
                Generation(1, 2),
                "",
                "step",
                frozenset({BadPart(7, 3, Generation(1, 2), "main")}),
            ),
        ),
        ({"t": "something else"}, None),
    ],
)
def test_agents_messages(message: dict[str, Any], expected: inputs.Input | None) -> None:
    assert protocol.from_agent(7, message) == expected


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"t": "member"},
        said(t="fault", text="x"),
        said(t="restored", epoch="x", generation=[1, 4]),
        {
            "t": "dumped",
            "generation": [1, 2],
            "boundary": "",
            "error": "",
            "damaged": [[3, "main"]],
        },
        {"t": "inventory", "inventory": []},
        {"t": "facts", "facts": {**FACTS.to_dict(), "gpus": "many"}},
        {"t": "member-lost", "slot": 1, "incarnation": 2, "signal": "SIGNONE"},
    ],
)
def test_malformed_messages_raise(message: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        protocol.from_agent(7, message)


@pytest.mark.parametrize(
    ("event", "kind", "told"),
    [
        (Event(Kind.STEP, 2, iteration=5), "progress", inputs.StepReported(2, 5)),
        (
            Event(Kind.EXPOSED, 2, data={"seconds": 0.5}),
            "progress",
            inputs.PhaseReported(2, "reprotect", 0.5, exposed=0.5),
        ),
        (Event(Kind.COMMITTED, 2, role=1), "progress", None),
        (Event(Kind.CORRUPTION, 2, node=3, role=1), "event", None),
        (Event(Kind.LOG), "event", None),
    ],
)
def test_what_decisions_go_by_is_reported_and_events_only_tell(
    event: Event, kind: str, told: inputs.Input | None
) -> None:
    message = protocol.report_of(event)
    assert message == {"t": kind, "event": event.to_dict()}
    assert protocol.from_progress(event) == told


def test_join_says_what_a_new_coordinator_has_to_know() -> None:
    places = ({0: 1}, {0: 1, 1: 4}, 3, 2, {0: 3})
    joined = inputs.NodeJoined(2, "h", 9, "d", *places, facts=FACTS)
    assert protocol.join(JOIN) == joined


@pytest.mark.parametrize("node", [-1, 100_000_000, 1 << 64])
def test_a_node_whose_loss_could_not_be_noted_does_not_join(node: int) -> None:
    """The journal has names of eight digits, and is unreadable with one of another form."""
    with pytest.raises(ValueError, match="between 0 and 99999999"):
        protocol.join({**JOIN, "node": node})
    assert protocol.join({**JOIN, "node": 99_999_999}).node == 99_999_999, "as a replacement may"
