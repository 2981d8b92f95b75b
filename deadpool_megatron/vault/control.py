"""The agent's side of its vault: orders with deadlines, and the vault's events. For asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deadpool_megatron.events import Event
from deadpool_megatron.layout.records import EpochRecord, Generation, Inventory
from deadpool_megatron.vault.disk.pinned_snapshot import Snapshot
from deadpool_megatron.vault.errors import VaultError
from deadpool_megatron.wire import framing

_TAKE_GRACE_SECONDS = 10.0


class VaultControl:
    """One connection to the vault of this node, in one event loop.

    Every order raises VaultError when the vault refuses it, TimeoutError when no answer arrives in
    time, and ConnectionError when the vault has ended. Then connect again, to its successor.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_event: Callable[[Event], None],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._on_event = on_event
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._task = asyncio.get_running_loop().create_task(self._read(), name="vault-control")

    @staticmethod
    async def connect(
        socket_path: str | Path, on_event: Callable[[Event], None], deadline_seconds: float
    ) -> VaultControl:
        """Connect and wait until the vault answers. Raises OSError, TimeoutError or VaultError."""
        async with asyncio.timeout(deadline_seconds):
            reader, writer = await asyncio.open_unix_connection(str(socket_path))
            writer.write(framing.encode({"t": "agent"}))
            control = VaultControl(reader, writer, on_event)
            try:
                await control.status(deadline_seconds)
            except BaseException:
                await control.close()
                raise
        return control

    async def close_epoch(self, epoch: int, deadline_seconds: float) -> None:
        """Close an epoch. From then on no part of it is sealed on this node, and the inventory does
        not change."""
        await self._order("close", deadline_seconds, epoch=epoch)

    async def inventory(self, deadline_seconds: float) -> Inventory:
        """Return the parts that this node can produce; only after :meth:`close_epoch`."""
        return Inventory.from_dict(await self._order("inventory", deadline_seconds))

    async def adopt(self, record: EpochRecord, deadline_seconds: float) -> None:
        """Open the record's epoch; restore and re-protection continue in the background."""
        await self._order("adopt", deadline_seconds, record=record.to_dict())

    async def dump(
        self,
        directory: str | Path,
        generation: Generation,
        boundary: str,
        deadline_seconds: float,
        held: Sequence[Generation] = (),
    ) -> dict[str, Any]:
        """Write this node's parts of a generation. Return ``files``, their paths, and ``damaged``,
        the parts without intact bytes (:meth:`BadPart.to_list`). If ``held`` is not empty, write
        these generations instead, each to its own directory, and return only ``files``."""
        about = {"directory": str(directory), "generation": generation.to_list()}
        about |= {"boundary": boundary, "held": [other.to_list() for other in held]}
        return dict(await self._order("dump", deadline_seconds, **about))

    async def take(self, name: str, iteration: int, deadline_seconds: float) -> list[Snapshot]:
        """Pin a snapshot of an iteration of the open epoch; see :mod:`.disk.pinned_snapshot`."""
        # The vault's own limit expires first, and its error names the awaited event.
        about = {"name": name, "iteration": iteration, "limit_seconds": deadline_seconds}
        answer = await self._order("take", deadline_seconds + _TAKE_GRACE_SECONDS, **about)
        return [Snapshot.from_dict(snapshot) for snapshot in answer]

    async def status(self, deadline_seconds: float) -> dict[str, Any]:
        """Return counters and holdings: see ``Vault.status``."""
        return dict(await self._order("status", deadline_seconds))

    async def shutdown(self, remove: bool, deadline_seconds: float) -> None:
        """End the vault; with ``remove``, delete the node's segments and their directory."""
        await self._order("shutdown", deadline_seconds, remove=remove)

    async def close(self) -> None:
        """Close the connection; the vault continues to run."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _order(self, kind: str, deadline_seconds: float, **content: object) -> Any:
        if self._task.done():
            raise ConnectionError("the vault is gone")
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self._writer.write(framing.encode({"t": kind, "id": number, **content}))
            return await asyncio.wait_for(answer, deadline_seconds)
        except TimeoutError as error:
            raise TimeoutError(f"vault: no answer to {kind!r} in {deadline_seconds:g} s") from error
        finally:
            del self._answers[number]

    async def _read(self) -> None:
        try:
            while True:
                self._handle(await framing.read_frame(self._reader))
        except (framing.WireError, OSError) as error:
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(ConnectionError(f"the vault is gone: {error}"))

    def _handle(self, message: dict[str, Any]) -> None:
        if message["t"] == "event":
            self._on_event(Event.from_dict(message["event"]))
            return
        answer = self._answers.get(message["id"])
        if answer is None or answer.done():
            return  # the order has timed out
        if message["ok"]:
            answer.set_result(message["value"])
        else:
            answer.set_exception(VaultError.of(str(message["code"]), str(message["text"])))
