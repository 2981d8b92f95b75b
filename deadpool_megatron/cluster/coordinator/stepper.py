"""Inputs of the machine, one after the other."""

from __future__ import annotations

import asyncio
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from deadpool_megatron.cluster.link.peers import Peers
from deadpool_megatron.cluster.machine import inputs
from deadpool_megatron.cluster.machine.actions import Action
from deadpool_megatron.cluster.machine.machine import Machine

# After this time, other tasks of the loop run before the next input, so that agents are answered.
_TURN_SECONDS = 0.01
# If a report makes the machine fail, this process ends after this time. Until then its other tasks
# acknowledge the report, so that the next coordinator does not receive it again, and fail too.
_REFUSAL_SECONDS = 1.0


class Stepper:
    """Queue of the machine's inputs, in the coordinator's loop. After each input it calls
    ``carry_out(actions)``."""

    def __init__(
        self,
        machine: Machine,
        peers: Peers,
        carry_out: Callable[[list[Action]], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._machine, self._peers, self._carry_out, self._spawn = machine, peers, carry_out, spawn
        # Inputs, each with its sender, which is empty for inputs that no agent has sent.
        self._queue: deque[tuple[inputs.Input, str]] = deque()
        self._stepping = False
        self._is_over = False

    def feed(self, item: inputs.Input) -> None:
        """Give the machine an input and carry out its actions. An input that is fed during that
        waits in the queue.

        Raises the error if a report of a peer makes the machine fail. The machine is then unusable
        and gets no more inputs, and a new coordinator continues from the journal.
        """
        self._queue.append((item, self._peers.current_agent))
        if not self._stepping and not self._is_over:
            self._stepping = True
            self._take_queue()

    def _take_queue(self) -> None:
        """Handle the waiting inputs; let other tasks of the loop run in between."""
        until = time.monotonic() + _TURN_SECONDS
        while self._queue and not self._is_over:
            item, sender = self._queue.popleft()
            try:
                actions = self._machine.handle(item, time.monotonic())
            except Exception as error:
                if not sender:
                    end_process(error)
                self._is_over = True
                asyncio.get_running_loop().call_later(_REFUSAL_SECONDS, end_process, error)
                raise
            try:
                self._carry_out(actions)
            except Exception as error:
                end_process(error)
            if time.monotonic() > until:
                self._spawn(self._resume())
                return
        self._stepping = False

    async def _resume(self) -> None:
        try:
            self._take_queue()
        except Exception as error:
            self._peers.refuse_broken("an agent", "a report", error)

    def end(self) -> None:
        """Handle no more inputs."""
        self._is_over = True


def end_process(error: BaseException) -> NoReturn:
    """End this process after an error in its code; a new coordinator continues from the journal."""
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(1)
