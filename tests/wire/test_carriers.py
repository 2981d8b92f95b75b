"""Each kind of message that carries an epoch is delivered late, early and twice to its receiver.

The tests are those of the rooms. Here is the table of them, which a new kind has to be in.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from deadpool_megatron.cluster.coordinator.orders import _NAMES
from deadpool_megatron.cluster.link.protocol import _OF_AGENTS, OF_MEMBERS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "deadpool_megatron"
_MACHINE = "tests/simulated/late.py::feed_stale", "tests/simulated/world.py::feed"
_SAVES = "tests/cluster/coordinator/test_checkpoints_life.py::test_a_life_is_as_it_was_before"
_AGENT = "tests/cluster/agent/test_life.py::test_agent_lives_as_recorded"
_LINK = "tests/cluster/link/test_member_link.py::test_orders_reach_their_handlers_in_their_epoch"
_STORE = "tests/cluster/test_calls.py::test_calls_are_answered_as_before"
_VAULT = (
    "tests/vault/test_epochs.py::test_a_message_of_another_epoch_changes_nothing",
    "tests/vault/test_epochs.py::test_a_message_that_comes_twice_counts_once",
)
_MEMBER = "tests/vault/test_member.py::test_message_of_a_vault_counts_in_its_epoch"
_JOIN = "tests/cluster/machine"
TESTS: dict[str, tuple[str, ...]] = {
    # To the coordinator.
    **dict.fromkeys(
        ("audit-failed", "done", "fault", "inventory", "not-finite", "paused", "pause-refused"),
        _MACHINE,
    ),
    **dict.fromkeys(("phase", "raised", "restored", "restore-failed", "size-failed"), _MACHINE),
    "durable-request": (_SAVES,),
    "join": (
        f"{_JOIN}/bootstrapping/test_takeover.py::test_epoch_closed_by_an_agent_is_not_open",
        f"{_JOIN}/test_lives.py::test_life_is_as_recorded",
    ),
    # To agents, from there to members, and from members to their agent.
    "close": (_AGENT, _LINK),
    "record": (_AGENT, _LINK),
    "pause": (_LINK,),
    "store": (_STORE,),
    "drained": (_AGENT,),
    # Between a vault, its member and other vaults.
    **dict.fromkeys(("ended", "fetch", "put", "restore", "waiting"), _VAULT),
    **dict.fromkeys(("bad", "committed"), (_MEMBER,)),
}


def kinds_in_source() -> Iterator[str]:
    """Of messages that are written out in the package with an epoch in them, or a record."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Dict):
                pairs = zip(node.keys, node.values, strict=True)
                values = {key.value: value for key, value in pairs if isinstance(key, ast.Constant)}
                kind = values.get("t")
                if {"epoch", "record"} & values.keys() and isinstance(kind, ast.Constant):
                    yield str(kind.value)
        if path.is_relative_to(PACKAGE / "member"):  # RoleReports.send() adds the present epoch
            yield from re.findall(r"\.send\(\s*\"([a-z-]+)\"", path.read_text())


def kinds_in_tables() -> Iterator[str]:
    """Of orders and reports that are written and read by their dataclass."""
    for name, kind in {**{n: k for k, n in _NAMES.items()}, **_OF_AGENTS, **OF_MEMBERS}.items():
        if "epoch" in {field.name for field in fields(kind)}:
            yield name


def test_each_kind_that_carries_an_epoch_has_its_row():
    assert {*kinds_in_source(), *kinds_in_tables()} == TESTS.keys() - {"committed"}


@pytest.mark.parametrize("test", sorted({test for row in TESTS.values() for test in row}))
def test_each_row_names_an_existing_test(test):
    file, name = test.split("::")
    assert re.search(rf"(?:def|import) {name}\b", (ROOT / file).read_text())
