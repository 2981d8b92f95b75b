"""Facts of a node about its host, sent when it joins and again later.

A node without a role, or at a site with a health command, checks its host again from time to time.
A separate process does that, since a driver or a file system may hang, and the agent must not.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from deadpool_megatron.cluster.agent.options import AgentOptions
from deadpool_megatron.cluster.process.children import run_child
from deadpool_megatron.layout.records import EpochRecord
from deadpool_megatron.preflight.eligibility import HostFacts

LOOK_SECONDS = 60.0
_LIMIT_SECONDS = 30.0


class NodeChecker:
    """Repeated checks of the host. ``send`` sends to the coordinator; ``record()`` returns the
    newest record that the node knows. Used from the agent's loop only.
    """

    def __init__(
        self,
        options: AgentOptions,
        send: Callable[[Mapping[str, Any]], None],
        record: Callable[[], EpochRecord | None],
    ) -> None:
        self._facts = options.facts
        self._options = options
        self._send = send
        self._record = record
        settings = options.info.settings
        self._limit_seconds = _LIMIT_SECONDS + settings.health_seconds
        health = ("--health-command", settings.health_command) if settings.health_command else ()
        limit = ("--health-seconds", str(settings.health_seconds))
        check = ("-m", "deadpool_megatron", "check", "--json")
        self._command = (*check, "--host", options.host, *health, *limit)
        self._tasks: set[asyncio.Task[None]] = set()

    def facts(self) -> dict[str, Any] | None:
        """Return the facts about the host for a join; None where checks are off."""
        return None if self._facts is None else self._facts.to_dict()

    async def run(self) -> None:
        """Check the host repeatedly, for ever; a fact that cannot be read keeps its value."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            command = self._options.info.settings.health_command
            if self._facts is not None and (command or self._is_spare()):
                await self.look()

    async def look(self) -> None:
        """Read the facts again, and send them."""
        try:
            # Notes of earlier runs are read only at the start, as their file system may be slow.
            noted = "" if self._facts is None else self._facts.noted
            self._facts = replace(await self._read(), noted=noted)
        except (OSError, TimeoutError, LookupError, TypeError, ValueError) as error:
            text = f"node {self._options.node}: its host was not looked at again: {error!r}"
            print(text, file=sys.stderr, flush=True)
            return
        self._send({"t": "facts", "facts": self.facts()})

    def ask_health(self) -> None:
        """Check again at once after a device failure, if the site has a health command."""
        if self._facts is not None and self._options.info.settings.health_command:
            task = asyncio.get_running_loop().create_task(self.look())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _is_spare(self) -> bool:
        """Return whether there is an epoch in which this node has no role."""
        record = self._record()
        seats = () if record is None else record.seats.values()
        return record is not None and all(seat.node != self._options.node for seat in seats)

    async def _read(self) -> HostFacts:
        log = self._options.segments / "host.json"
        line = await run_child(self._command, log, self._limit_seconds)
        return HostFacts.from_dict(json.loads(line)["facts"])
