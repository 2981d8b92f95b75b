"""The machine is entered once at a time: inputs in order, each with what comes out of it.

What may go over all roles of a large run is worked out in a thread, so that beats are acknowledged
meanwhile; inputs that come then wait for it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

from deadpool_megatron.cluster.link.peers import Peers
from deadpool_megatron.cluster.machine import inputs
from deadpool_megatron.cluster.machine.actions import Action
from deadpool_megatron.cluster.machine.machine import Machine
from deadpool_megatron.cluster.machine.state.phases import (
    Closing,
    Heard,
    Opening,
    Pausing,
    Phase,
    Rejoining,
)
from deadpool_megatron.cluster.machine.state.state import State

T = TypeVar("T")
# With fewer every input takes a few tens of milliseconds at most.
_MANY_ROLES = 1024
# After so long beats are acknowledged before the next of the inputs that have waited.
_TURN_SECONDS = 0.01


class Stepper:
    """Used from the coordinator's loop. ``took(before, actions)``: after each input, with the state
    before it.
    """

    def __init__(
        self,
        machine: Machine,
        state: State,
        peers: Peers,
        took: Callable[[State, list[Action]], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self.state = state
        self._machine, self._peers, self._took, self._spawn = machine, peers, took, spawn
        # With who has said it.
        self._queue: deque[tuple[inputs.Input, str]] = deque()
        self._stepping = False
        self._is_over = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="machine")

    def feed(self, item: inputs.Input) -> None:
        """Give the machine an input and carry out what comes out; never enters it twice. Raises
        what the machine raises at a report of a peer: such a step has changed nothing.
        """
        self._queue.append((item, self._peers.hearing))
        if not self._stepping and not self._is_over:
            self._stepping = True
            if (refused := self._take_queue()) is not None:
                raise refused

    def _take_queue(self) -> Exception | None:
        """Handle what waits, up to what may take long; others have their turn in between. Returns
        the first error at a report.
        """
        refused: Exception | None = None
        until = time.monotonic() + _TURN_SECONDS
        while self._queue and not self._is_over:
            item, who = self._queue.popleft()
            now = time.monotonic()
            if goes_far(self.state, item, now):
                self._spawn(self._step_aside(item, who, now))
                return refused
            before = self.state
            try:
                self.state, actions = self._machine.step(before, item, now)
            except Exception as error:
                if not who:
                    end_process(error)
                refused = refused or error
                continue
            self._carry_out(before, actions)
            if time.monotonic() > until:
                self._spawn(self._go_on())
                return refused
        self._stepping = False
        return refused

    async def _go_on(self) -> None:
        if (refused := self._take_queue()) is not None:
            self._peers.refuse_broken("an agent", "a report", refused)

    async def _step_aside(self, item: inputs.Input, who: str, now: float) -> None:
        before = self.state
        try:
            stepped = await self.aside(self._machine.step, before, item, now)
        except Exception as error:
            if not who:
                end_process(error)
            self._peers.refuse_broken(who, type(item).__name__, error)
        else:
            if not self._is_over:
                self.state, actions = stepped
                # What follows from it is refused with it.
                self._peers.hearing = who
                self._carry_out(before, actions)
                self._peers.hearing = ""
        await self._go_on()

    def _carry_out(self, before: State, actions: list[Action]) -> None:
        try:
            self._took(before, actions)
        except Exception as error:
            end_process(error)

    async def aside(self, work: Callable[..., T], *arguments: object) -> T:
        """Returns what ``work`` returns, which is done in the one thread for what takes long."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, work, *arguments)

    def end(self) -> None:
        """Nothing more is handled."""
        self._is_over = True

    def close(self) -> None:
        """Give the thread back."""
        self._worker.shutdown(wait=False, cancel_futures=True)


def end_process(error: BaseException) -> NoReturn:
    """A mistake of ours: end at once, a new coordinator continues from the journal."""
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(1)


def goes_far(state: State, event: inputs.Input, now: float) -> bool:
    """Returns whether handling the input may take long; False is certain to be short.

    Most inputs are one of thousands of their kind, and only the last one of these leads further.
    """
    roles, doing, fleet = len(state.seats), state.doing, state.fleet
    if roles < _MANY_ROLES:
        return False
    gathering = doing.phase is Phase.GATHERING
    match event:
        case inputs.Tick():
            late = doing.deadline is not None and now >= doing.deadline
            suspicion = state.blame.suspicion
            # They have their deadlines as well, which all have at the start.
            many = len(fleet.members.building) >= _MANY_ROLES
            return many or late or (suspicion is not None and now >= suspicion.until)
        case inputs.NodeJoined():
            known = state.seats.nodes if state.record is None else state.record.nodes
            return not gathering or len(fleet.nodes) + len(fleet.gone) + 1 >= len(known)
        case inputs.NodeInventory():
            return not isinstance(doing, Closing) or len(doing.awaited) <= 1
        case inputs.MemberHello():
            places = state.seats.role_by_place
            others = (one for one in fleet.members.starting if one != (event.node, event.slot))
            return gathering and not any(place in places for place in others)
        case inputs.MemberRegistered():
            known_roles = state.memory.layouts
            return len(known_roles) + 1 >= roles and event.layout.role not in known_roles
        case inputs.Restored():
            # After a takeover every role says it again.
            is_awaited = isinstance(doing, Rejoining | Opening)
            return is_awaited and len(state.restored) + 1 >= roles
        case inputs.MemberDone():
            return isinstance(doing, Heard) and len(doing.done) + 1 >= roles
        case inputs.Paused():
            if not isinstance(doing, Pausing):
                return True
            return len(doing.order.paused) + len(doing.done) + 1 >= roles
        case inputs.MemberWarm():
            # What waits for a process is looked for among all roles; every one says it again after
            # a takeover.
            record = state.record
            return bool(fleet.drains) or (
                record is not None
                and (bool(record.fewer_copies) or state.protection.plan != record.protection)
            )
        case inputs.StepReported():
            return state.recoveries.current is not None
        case inputs.FactsTold() | inputs.PhaseReported() | inputs.Exposed() | inputs.StackTaken():
            return False
        case _:
            return True
