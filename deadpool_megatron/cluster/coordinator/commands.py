"""Answers to the commands of users, and to agents that want a node id."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from deadpool_megatron.cluster.coordinator.options import CoordinatorOptions
from deadpool_megatron.cluster.journal import wanted
from deadpool_megatron.cluster.journal.entries import JournalError, LostRace
from deadpool_megatron.cluster.machine import inputs, plans
from deadpool_megatron.cluster.machine.state import State
from deadpool_megatron.layout import schemes

_KNOWN = ("status", "drain", "stop", "dump", "persist", "info", "attach", "protect")


class Commands:
    """``state()`` answers the machine's present state, ``status()`` what users see of it; ``feed``
    takes what a command asks of the machine, ``persist`` where to export to, ``dump`` why the run
    has to end, and in how many seconds. Used from the coordinator's loop only.
    """

    def __init__(
        self,
        options: CoordinatorOptions,
        state: Callable[[], State],
        status: Callable[[], dict[str, Any]],
        feed: Callable[[inputs.Input], None],
        persist: Callable[[str], dict[str, Any]],
        dump: Callable[[str, float | None], Awaitable[None]],
    ) -> None:
        self._persist = persist
        self._dump = dump
        self._info = options.info
        self._term = options.term
        self._journal = options.journal
        self._state = state
        self._status = status
        self._feed = feed

    async def answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """``{"ok": True, ...}`` or ``{"ok": False, "error": line}``.

        Raises KeyError, TypeError or ValueError for a message that no command of ours sends.
        """
        match message.get("command"):
            case "status":
                term = {"term": self._term.number, **self._term.to_dict()}
                return {"ok": True, "status": {**self._status(), "coordinator": term}}
            case "info":
                return {"ok": True, "info": self._info.to_dict()}
            case "attach":
                return self._attach(str(message.get("hostname", "")))
            case "stop":
                reason = str(message.get("reason", "stopped by command"))
                self._feed(inputs.UserStop(reason))
                return {"ok": True}
            case "dump":
                seconds = message.get("seconds")
                seconds = None if seconds is None else float(seconds)
                await self._dump(str(message["reason"]), seconds)
                return {"ok": True}
            case "persist":
                return self._persist(str(message.get("directory", "")))
            case "drain":
                return self._drain(int(message["node"]))
            case "protect":
                return self._protect(message)
        return {"ok": False, "error": f"unknown command; known are {', '.join(_KNOWN)}"}

    def _drain(self, node: int) -> dict[str, Any]:
        nodes = self._state().nodes
        if node not in nodes:
            known = ", ".join(map(str, sorted(nodes)))
            return {"ok": False, "error": f"node {node} is not connected (there are: {known})"}
        self._feed(inputs.DrainRequested(node))
        return {"ok": True}

    def _protect(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Keys ``scheme``, ``group`` and ``every``; what is not given stays as it is."""
        state, settings = self._state(), self._info.settings
        plan = state.protection
        if message.get("scheme") is not None:
            group = int(message.get("group") or settings.parity_group)
            plan = schemes.uniform(str(message["scheme"]), settings, plan.every, group)
        if message.get("every") is not None:
            plan = replace(plan, every=int(message["every"]))
        words = schemes.plan_in_words(plan)
        why = plans.refusal(plan, len(state.nodes), settings, state.protection)
        why = why or plans.memory_refusal(plan, state, settings)
        if why:
            return {"ok": False, "error": f"{words} cannot be: {why}"}
        if plan == state.protection:
            return {"ok": False, "error": f"the run is protected by {words} already"}
        try:
            wanted.note(self._journal, plan, state.epoch)
        except JournalError as error:
            return {"ok": False, "error": str(error)}
        self._feed(inputs.ProtectionRequested(plan, wanted.WHY))
        return {"ok": True, "plan": words}

    def _attach(self, hostname: str) -> dict[str, Any]:
        """A number that no node of the run has had, nor will have."""
        state = self._state()
        try:
            known = {*state.nodes, *state.gone, *self._journal.numbers("node")}
            number = max(known | {self._info.nodes + self._info.spares - 1})
            while True:
                number += 1
                try:
                    self._journal.write("node", number, {"hostname": hostname})
                except LostRace:
                    continue  # an earlier coordinator handed it out
                return {"ok": True, "node": number}
        except JournalError as error:
            return {"ok": False, "error": str(error)}
