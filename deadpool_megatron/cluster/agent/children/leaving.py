"""The leaving of an agent that is told to end (SIGTERM), as when a pod is evicted.

With a grace period its node is drained first, by the request that ``deadpool drain`` sends: its
roles move to a spare, and nothing is computed again. Without one, after it, or at a second signal,
the agent ends.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable

from deadpool_megatron.cluster.agent.children.starting import start_child
from deadpool_megatron.cluster.agent.options import AgentOptions

# As a shell says of a command that SIGTERM ended: to schedulers this is no success.
EXIT_TERMINATED = 128 + signal.SIGTERM


class Leaving:
    """Takes the signal from now on; ``end()`` has the agent end. For the agent's loop only."""

    def __init__(self, options: AgentOptions, end: Callable[[], None]) -> None:
        self._options, self._end = options, end
        self._drain: asyncio.Task[None] | None = None
        self.exit_status = 0
        self.is_told = False
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._told)

    def status(self, exit_code: int) -> int:
        """Returns the exit status of an agent that ends for a reason of its own (``exit_code``), or
        for none. One that is told to end as well does not come back, as if it were only fenced."""
        return EXIT_TERMINATED if exit_code and self.is_told else exit_code or self.exit_status

    def _told(self) -> None:
        self.is_told = True
        if self._drain is not None or not self._options.leave_seconds:
            self._end()
            return
        self.exit_status = EXIT_TERMINATED
        self._drain = asyncio.get_running_loop().create_task(self._drain_and_end())

    async def _drain_and_end(self) -> None:
        try:
            said = await self._ask_for_drain()
        except (OSError, TimeoutError) as error:
            said = f"its roles have not moved: {error!r}"
        text = f"agent of node {self._options.node} got SIGTERM: {said}"
        print(text, file=sys.stderr, flush=True)
        self._end()

    async def _ask_for_drain(self) -> str:
        options = self._options
        answer = options.segments / "drain.txt"
        command = ("deadpool_megatron", "drain", str(options.run.path), "--wait")
        node = ("--node", str(options.node))
        run_id = options.info.run_id
        child = start_child((*command, *node), options.run, run_id, answer, lambda _: None, {})
        try:
            await asyncio.wait_for(child.ended.wait(), options.leave_seconds)
        finally:
            child.kill()
        *_, line = answer.read_text().splitlines() or ["it was drained"]
        return line
