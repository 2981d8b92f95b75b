"""A member's end of the store, with an agent that does nothing by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from deadpool_megatron.cluster.member.store import MemberStore, StoreError
from deadpool_megatron.wire.store import MAXIMUM_KEY_CHARACTERS, MAXIMUM_VALUE_BYTES, pack

SECONDS = 20.0


class Line:
    """Remembers what the member sends."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.asked = threading.Event()
        self.store = MemberStore(self.send)

    def send(self, message: Any) -> None:
        self.sent.append(dict(message))
        self.asked.set()


@pytest.fixture
def line() -> Line:
    return Line()


def in_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """Starts the call; the answer waits for its result or raises what it raised."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except StoreError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result() -> Any:
        thread.join(SECONDS)
        (value,) = found
        if isinstance(value, StoreError):
            raise value
        return value

    return result


def test_a_value_is_waited_for_and_its_folder_is_asked_for_once(line: Line) -> None:
    result = in_thread(lambda: line.store.get(3, "world/1", SECONDS))
    assert line.asked.wait(SECONDS)
    line.store.take(pack(3, {"world/0": "AA==", "world/1": "AQ=="}))
    assert result() == b"\1"
    assert line.store.get(3, "world/0", 0.0) == b"\0"
    assert not line.store.has(3, ["world/2"])
    assert line.sent == [pack(3, {}, ["world"])]


def test_the_own_value_is_there_at_once(line: Line) -> None:
    line.store.set(3, "world/0", b"me")
    assert line.store.get(3, "world/0", 0.0) == b"me"
    assert line.sent == [pack(3, {"world/0": "bWU="})]


def test_a_close_ends_a_wait_at_once_and_the_epoch_for_ever(line: Line) -> None:
    result = in_thread(lambda: line.store.wait(3, ["world/1"], 10 * SECONDS))
    assert line.asked.wait(SECONDS)
    line.store.close(3)
    with pytest.raises(StoreError, match="epoch 3 is closed"):
        result()
    with pytest.raises(StoreError, match="epoch 3 is closed"):
        line.store.set(3, "world/0", b"late")
    line.store.set(4, "world/0", b"new")
    with pytest.raises(StoreError, match="epoch 3 is closed"):
        line.store.has(3, ["world/0"])
    assert [message["epoch"] for message in line.sent] == [3, 4]


def test_values_of_another_epoch_are_dropped(line: Line) -> None:
    line.store.has(4, ["world/1"])
    line.store.take(pack(3, {"world/1": "AA=="}))
    line.store.take(pack(5, {"world/1": "AA=="}))
    assert not line.store.has(4, ["world/1"])
    line.store.close(4)
    line.store.take(pack(4, {"world/1": "AA=="}))
    with pytest.raises(StoreError):
        line.store.get(4, "world/1", 0.0)


def test_the_deadline_names_the_key(line: Line) -> None:
    with pytest.raises(StoreError, match="nobody wrote 'world/1' within 0 s"):
        line.store.wait(3, ["world/1"], 0.0)


def test_what_is_too_large_is_refused_before_it_is_sent(line: Line) -> None:
    with pytest.raises(StoreError, match="over the limit"):
        line.store.set(3, "key", bytes(MAXIMUM_VALUE_BYTES + 1))
    with pytest.raises(StoreError, match="over the limit"):
        line.store.set(3, "k" * (MAXIMUM_KEY_CHARACTERS + 1), b"")
    assert line.sent == []
