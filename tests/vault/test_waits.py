"""How long a vault waits, by a clock that the test turns: each wait has a bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from deadpool_megatron.layout.records import Generation, Restore, Source
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault import restore as restoring
from deadpool_megatron.vault.epoch_gate import VaultState
from deadpool_megatron.vault.replicate import Sender, Work
from deadpool_megatron.vault.schemes.scheme import Target
from deadpool_megatron.vault.transport import Channel
from tests.vault.harness import make_layout, record_of
from tests.vault.test_restore_guards import EXTRAS, LAYOUT, RESTORED, SHARDS, House

ANSWER_SECONDS = 5.0


class Clock:
    """Time passes only where somebody waits."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waits: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.waits.append(seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


class RefusedSender(Sender):
    """Brings nothing there, so many times; then all of it."""

    times = 0

    def _next(self) -> Work:
        return Generation(1, 1), []

    def _bring(self, _: Work) -> bool:
        self.times -= 1
        if self.times < 0:
            self._state.close(1)
        return self.times < 0


@pytest.mark.parametrize("times", [1, 200])
def test_what_a_node_refuses_is_offered_again_within_a_second(
    tmp_path: Path, clock: Clock, times: int
) -> None:
    """However often it was refused: what it lacks is not protected until then."""
    state = VaultState(0, tmp_path, Settings(), lambda _: None)
    state.adopt(record_of())
    state.pause = lambda epoch, seconds: clock.wait(seconds)  # type: ignore[method-assign]
    assert state.ledger is not None
    sender = RefusedSender(state, make_layout(0), Target(1), state.ledger.scheme)
    sender.times = times
    sender.run()
    assert len(clock.waits) == times
    assert clock.waits[0] < 0.1
    assert max(clock.waits) < 1.0
    assert clock.waits == sorted(clock.waits), "the longer it goes on, the less often"


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    for server in house.servers:
        server.stop()


def test_a_node_that_does_not_answer_is_waited_for_once(
    house: House, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once for each part: a restore has many of them."""
    house.keep(2, [*EXTRAS, *SHARDS])
    transport = house.states[0].transport
    assert transport is not None
    connect: Callable[[int, str, int], Channel] = transport.connect

    def connect_or_wait(node: int, host: str, port: int) -> Channel:
        if node == 1:
            clock.wait(ANSWER_SECONDS)
            raise TimeoutError("no answer")
        return connect(node, host, port)

    monkeypatch.setattr(transport, "connect", connect_or_wait)
    monkeypatch.setattr(restoring, "time", SimpleNamespace(monotonic=clock.monotonic))
    listed = dict.fromkeys((*EXTRAS, *SHARDS), (Source(1, 0), Source(2, 0)))
    obtainer = house.obtainer(Restore("memory", RESTORED, sources={0: listed}))
    assert set(obtainer.obtain(LAYOUT)) == {*EXTRAS, *SHARDS}
    assert clock.waits == [ANSWER_SECONDS]
