"""Answers to the commands of users, and to agents that want a node id."""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import signal
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from deadpool_megatron.cluster.coordinator.durable import export_directory
from deadpool_megatron.cluster.coordinator.options import Desk
from deadpool_megatron.cluster.coordinator.orders import Orders
from deadpool_megatron.cluster.coordinator.user_requests import UserRequests
from deadpool_megatron.cluster.journal.journal import JournalError, LostRace
from deadpool_megatron.cluster.journal.requests import Verb
from deadpool_megatron.cluster.machine.protection import memory_refusal
from deadpool_megatron.cluster.machine.requests import not_connected
from deadpool_megatron.cluster.machine.state.phases import Phase
from deadpool_megatron.layout import schemes
from deadpool_megatron.layout.sizing import refusal

# What of a run can be sent a signal, and which.
PARTS = ("node", "role", "vault", "agent", "coordinator")
SIGNALS = ("KILL", "STOP", "SEGV")

_KNOWN = ("status", "info", "attach", "kill", *Verb)
_STATUS_SECONDS = 1.0
# It may take this very process along: the answer goes first.
_KILL_SECONDS = 0.1


class Commands:
    """``requests`` takes those of users, ``orders`` go to agents, ``status()`` returns what users
    see of the run. Used from the coordinator's loop only.
    """

    def __init__(
        self,
        desk: Desk,
        requests: UserRequests,
        orders: Orders,
        status: Callable[[], Awaitable[dict[str, Any]]],
    ) -> None:
        options = desk.options
        self._requests = requests
        self._orders = orders
        self._info = options.info
        self._term = options.term
        self._journal = options.journal
        self._exports = export_directory(options.info.settings, options.run)
        self._state = desk.state
        self._status = status

    async def answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """``{"ok": True, ...}`` or ``{"ok": False, "error": line}``.

        Raises KeyError, TypeError or ValueError for a message that no command of ours sends.
        """
        command = message.get("command")
        match command:
            case "status":
                # What the one before was asked; with a journal that hangs, the rest is told.
                await self._requests.wait_until_known(_STATUS_SECONDS)
                term = {"term": self._term.number, **self._term.to_dict()}
                return {"ok": True, "status": {**await self._status(), "coordinator": term}}
            case "info":
                return {"ok": True, "info": self._info.to_dict()}
            case "attach":
                state, loop = self._state(), asyncio.get_running_loop()
                hostname, known = (
                    str(message.get("hostname", "")),
                    {*state.fleet.nodes, *state.fleet.gone},
                )
                return await loop.run_in_executor(None, self._attach, hostname, known)
            case "kill":
                return self._strike(message)
        if command not in set(Verb):
            return {"ok": False, "error": f"unknown command; known are {', '.join(_KNOWN)}"}
        verb, token = Verb(str(command)), str(message["token"])
        seconds = None if message.get("seconds") is None else float(message["seconds"])
        return await self._requests.ask(verb, lambda: self._what(verb, message), token, seconds)

    def _what(self, verb: Verb, message: Mapping[str, Any]) -> dict[str, Any] | str:
        """Return what is asked, or in a line why it cannot be."""
        match verb:
            case Verb.DRAIN:
                return {"node": int(message["node"])}
            case Verb.PROTECT:
                return self._plan(message)
            case Verb.PERSIST:
                directory = str(message.get("directory") or self._exports)
                if not Path(directory).is_absolute():
                    return f"{directory} is no absolute path"
                return {"directory": directory}
            case Verb.STOP:
                return {"dump": bool(message["dump"]), "reason": str(message["reason"])}

    def _strike(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a signal for a user who wants to see a run recover. It is an order and no request:
        one that a takeover crosses may be lost."""
        state, part, name = self._state(), str(message["part"]), str(message["signal"])
        later = functools.partial(asyncio.get_running_loop().call_later, _KILL_SECONDS)
        if part not in PARTS or name not in SIGNALS:
            raise ValueError(f"no such part or signal: {part}, {name}")
        if part == "coordinator":
            later(os.kill, os.getpid(), signal.Signals[f"SIG{name}"])
            return {"ok": True}
        if state.phase is Phase.GATHERING and state.record is not None:
            error = "the coordinator has just taken over, and waits for the agents: ask again"
            return {"ok": False, "again": True, "error": error}
        of = int(message["number"])
        seat = state.seats.get(of) if part == "role" else None
        why = "" if seat is not None else not_connected(state, of)
        if part == "role" and seat is None:
            why = f"there is no role {of} (there are 0 to {len(state.seats) - 1})"
        if why:
            return {"ok": False, "refused": why, "error": why}
        if seat is None:
            later(self._orders.strike, of, part, name)
        else:
            later(self._orders.strike, seat.node, part, name, seat.slot, seat.incarnation)
        return {"ok": True}

    def _plan(self, message: Mapping[str, Any]) -> dict[str, Any] | str:
        """Keys ``scheme``, ``group`` and ``every``; what is not given stays as it is."""
        state, settings = self._state(), self._info.settings
        plan = state.protection.plan
        if message.get("scheme") is not None:
            group = int(message.get("group") or settings.parity_group)
            plan = schemes.plan_of_kind(str(message["scheme"]), settings, plan.every, group)
        if message.get("every") is not None:
            plan = replace(plan, every=int(message["every"]))
        words = schemes.plan_in_words(plan)
        why = refusal(plan, len(state.fleet.nodes), settings, state.protection.plan)
        why = why or memory_refusal(plan, state, settings)
        if why:
            return f"{words} cannot be: {why}"
        if plan == state.protection.plan:
            return f"the run is protected by {words} already"
        return {"plan": plan.to_dict(), "words": words}

    def _attach(self, hostname: str, taken: Collection[int]) -> dict[str, Any]:
        """A number that no node of the run has had, nor will have. May block."""
        try:
            known = {*taken, *self._journal.numbers("node")}
            number = max(known | {self._info.nodes + self._info.spares - 1})
            # A journal takes an entry that is there already for our own: two agents of one host
            # that ask at the same time must not write the same.
            entry = {"hostname": hostname, "token": secrets.token_hex(8)}
            while True:
                number += 1
                try:
                    self._journal.write("node", number, entry)
                except LostRace:
                    continue  # it was handed out meanwhile, or by an earlier coordinator
                return {"ok": True, "node": number}
        except JournalError as error:
            return {"ok": False, "error": str(error)}
