"""The agent's supervision of its vault: restarts, lasting sockets, orders with deadlines.

The vault is started by exec, in its own process group and without a parent-death signal, because
its slots must survive this agent. A vault that does not obey in time is killed. Its replacement
gets the same slots and sockets, and the orders that the killed vault had to obey.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from deadpool_megatron.cluster.agent.options import AgentOptions
from deadpool_megatron.cluster.link.message_limits import is_reported
from deadpool_megatron.cluster.link.protocol import report_of
from deadpool_megatron.cluster.process.children import (
    ChildWatch,
    ProcessEnd,
    retry_shortage,
    start_child,
)
from deadpool_megatron.cluster.process.logs import LocalLogs, last_line
from deadpool_megatron.cluster.run_directory import directory as run_files
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.file_systems import HeldName
from deadpool_megatron.layout.records import EpochRecord, Generation, Inventory
from deadpool_megatron.settings import ENVIRONMENT_NAME
from deadpool_megatron.vault.control import VaultControl
from deadpool_megatron.vault.disk.pinned_snapshot import Snapshot
from deadpool_megatron.vault.errors import VaultError
from deadpool_megatron.vault.member_connection import listening_at
from deadpool_megatron.vault.memory import usable_bytes

VAULT_SOCKET = "vault.sock"
_STATUS_SECONDS = 1.0
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 5.0
_SHUTDOWN_SECONDS = 5.0
_SHORTAGE_SECONDS = 5.0
# This many failed starts in a row take about ten seconds.
_MAX_FAILED_STARTS = 8
_BACKLOG = 512
# Events of every role in every iteration.
_ROUTINE = (Kind.SEALED, Kind.COMMITTED)
_ERRORS = (VaultError, OSError, TimeoutError)


class VaultGivenUp(Exception):
    """The node has no vault and will not get another; the text is the reason."""


class VaultSupervisor:
    """Successive vault processes of one node. ``report`` sends a message to the coordinator.

    Every call that waits for the vault raises VaultGivenUp when no vault can be started.
    """

    def __init__(
        self,
        options: AgentOptions,
        report: Callable[[Mapping[str, Any]], None],
        listing_changed: Callable[[], None],
        logs: LocalLogs,
    ) -> None:
        self._options = options
        self._node, self._segments = options.node, options.segments
        self._settings = options.info.settings
        self._report = report
        self._listing_changed = listing_changed
        self._log_path = logs.log(f"node{options.node}-vault")
        hosts = (options.host, *options.more_hosts)
        self._tcp = [socket.create_server((host, 0), backlog=_BACKLOG) for host in hosts]
        self._listen()
        self._name = HeldName(self._segments / VAULT_SOCKET, self._listen)
        self._memory_bytes = usable_bytes(self._segments, self._settings.memory_bytes)
        self._watch: ChildWatch | None = None
        self._control: VaultControl | None = None
        self._ready = asyncio.Event()
        self._closed = 0
        self._record: EpochRecord | None = None
        self._shutting_down = False
        self._pause = _FIRST_PAUSE_SECONDS
        self.status: dict[str, Any] = {}

    def _listen(self) -> None:
        self._unix = listening_at(self._segments / VAULT_SOCKET)

    def facts(self) -> dict[str, int]:
        """Return facts for the coordinator: the TCP port at which other vaults reach this vault,
        the same after a restart, and the bytes for generations that the node had at its start.
        """
        return {
            "vault_port": int(self._tcp[0].getsockname()[1]),
            "memory_bytes": self._memory_bytes,
        }

    @property
    def pid(self) -> int:
        """Return the process id of the present vault, or of the last vault between two vaults."""
        assert self._watch is not None
        return self._watch.pid

    @property
    def living_pid(self) -> int | None:
        """Return the process id of a live vault. Return None between two vaults, as the id of the
        last vault may be that of any process by now."""
        return None if self._watch is None or self._watch.ending is not None else self._watch.pid

    async def start(self) -> None:
        """Start the first vault, or a replacement. Raises VaultGivenUp."""
        try:
            self._watch = await retry_shortage(self._start, _SHORTAGE_SECONDS)
        except OSError as error:
            raise VaultGivenUp(f"no vault can be started: {error}") from error

    async def _start(self) -> ChildWatch:
        # A former vault may have created the name again, with a socket that died with that vault.
        self._name.look()
        unix, tcp = self._unix.fileno(), [each.fileno() for each in self._tcp]
        places = ["--run-dir", str(self._options.run.path), "--segment-dir", str(self._segments)]
        sockets = ["--unix-fd", str(unix), "--tcp-fd", *map(str, tcp)]
        return start_child(
            ["-m", "deadpool_megatron.vault", "--node", str(self._node), *places, *sockets],
            self._ended,
            log=self._log_path,
            environment={ENVIRONMENT_NAME: self._settings.to_json()},
            sockets=(unix, *tcp),
        )

    async def supervise(self) -> None:
        """Connect to each vault, update it, watch it and start its replacement, for ever.
        Raises VaultGivenUp.
        """
        failed = 0
        while True:
            watch = self._watch
            assert watch is not None
            began = time.monotonic()
            try:
                await self._set_up()
            except _ERRORS as error:
                failed += 1
                self._log(f"vault of node {self._node} does not come up: {error}")
                if failed == _MAX_FAILED_STARTS:
                    reason = f"its vault does not come up, {failed} times in a row: {error}"
                    raise VaultGivenUp(reason) from error
                await self._reap(watch, "it does not come up")
            else:
                failed = 0
                self._ready.set()
            await self._follow(watch)
            self._ready.clear()
            if self._control is not None:
                await self._control.close()
                self._control = None
            if time.monotonic() - began > _LONGEST_PAUSE_SECONDS:
                self._pause = _FIRST_PAUSE_SECONDS
            await asyncio.sleep(self._pause)
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
            await self.start()
            self._listing_changed()

    async def close_epoch(self, epoch: int) -> None:
        """Close an epoch, if need be by a kill of the vault. Afterwards nothing of that epoch can
        be sealed here any more."""
        self._closed = max(self._closed, epoch)
        control = self._control
        if control is None:
            return  # a starting vault has no open epoch
        try:
            await control.close_epoch(epoch, self._settings.stage_seconds)
        except _ERRORS as error:
            await self._kill(f"epoch {epoch} was not closed: {error}")

    async def inventory(self, epoch: int) -> Inventory:
        """Return the node's inventory after a close. It is empty if two vaults in a row cannot
        report it, or no vault starts in time.

        A vault that is still starting is not killed, as its replacement would be as slow.
        """
        clock, stage = asyncio.get_running_loop().time, self._settings.stage_seconds
        deadline = clock() + 4 * stage
        reason = f"no inventory of epoch {epoch}"
        for _ in range(2):
            try:
                async with asyncio.timeout_at(deadline):
                    await self._ready.wait()
            except TimeoutError:
                self._log(f"{reason}: vault of node {self._node} is still starting")
                break
            assert self._control is not None
            limit = min(stage, deadline - clock())
            try:
                return await self._control.inventory(limit)
            except _ERRORS as error:
                if deadline - clock() < stage:
                    self._log(f"{reason}: {error}")
                    break  # too little time is left for a kill and a new vault
                await self._kill(f"{reason}: {error}")
        return Inventory(self._node, epoch)

    async def adopt(self, record: EpochRecord) -> None:
        """Open the record's epoch. A vault that fails at this is killed; its replacement adopts the
        record."""
        self._record = record
        if self._control is None:
            return  # supervise() sends the record when the vault is up
        try:
            await self._control.adopt(record, self._settings.close_seconds)
        except _ERRORS as error:
            await self._kill(f"epoch {record.epoch} was not adopted: {error}")

    async def dump(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Write a generation to disk, and return the report for the coordinator.

        Raises OSError, TimeoutError or VaultError.
        """
        try:
            directory = run_files.dump_directory(str(message["directory"]), self._options.run)
        except run_files.OutsideError as error:
            raise VaultError(str(error)) from error
        control = await self._connected()
        generation = Generation.from_list(message["generation"])
        limit = self._settings.first_step_seconds
        every = [Generation.from_list(values) for values in message.get("held", ())]
        return await control.dump(directory, generation, str(message["boundary"]), limit, every)

    async def take(self, name: str, iteration: int, deadline_seconds: float) -> list[Snapshot]:
        """Take a snapshot of a generation. Raises OSError, TimeoutError or VaultError."""
        control = await self._connected()
        return await control.take(name, iteration, deadline_seconds)

    async def shut_down(self, remove: bool) -> None:
        """End the vault (by an order if its slots must stay, else by a kill), and close the
        sockets."""
        self._shutting_down = True
        watch = self._watch
        if watch is not None and watch.ending is None:
            try:
                if self._control is None or remove:
                    raise ConnectionError("its state is not needed")
                await self._control.shutdown(remove, _SHUTDOWN_SECONDS)
                await asyncio.wait_for(watch.ended.wait(), _SHUTDOWN_SECONDS)
            except _ERRORS:
                try:
                    await self._reap(watch, "its agent ends")
                except VaultGivenUp as error:
                    print(f"node {self._node}: {error}", file=sys.stderr, flush=True)
        if self._control is not None:
            await self._control.close()
        for listener in self._tcp:
            listener.close()
        self._unix.close()

    async def _set_up(self) -> None:
        """Connect, and repeat the orders of the former vault: its last close and record."""
        path = self._segments / VAULT_SOCKET
        limit = self._settings.connect_seconds
        self._control = await self._unless_ended(VaultControl.connect(path, self._event, limit))
        if self._closed:
            await self._control.close_epoch(self._closed, limit)
        if self._record is not None and self._record.epoch > self._closed:
            await self._control.adopt(self._record, limit)

    async def _unless_ended(self, awaitable: Awaitable[VaultControl]) -> VaultControl:
        """Connect unless the vault ends: the listening socket, which outlives the vault, accepts
        connections to a dead vault too."""
        assert self._watch is not None
        connecting = asyncio.ensure_future(awaitable)
        ended = asyncio.ensure_future(self._watch.ended.wait())
        try:
            await asyncio.wait({connecting, ended}, return_when=asyncio.FIRST_COMPLETED)
            if connecting.done():
                return connecting.result()
            raise ConnectionError(f"it {self._watch.ending}")
        finally:
            connecting.cancel()
            ended.cancel()

    async def _follow(self, watch: ChildWatch) -> None:
        """Poll the vault's status until the vault ends."""
        while not watch.ended.is_set():
            control = self._control
            if control is not None and self._ready.is_set():
                try:
                    self.status = _select(await control.status(self._settings.node_silence_seconds))
                except TimeoutError:
                    await self._kill("it does not answer")
                except VaultError:
                    self._log(f"vault of node {self._node} did not report its status")
                except OSError as error:
                    # Either the vault is ending, which breaks the connection, too, or it lives and
                    # has stopped listening to other vaults: for it, its agent is gone.
                    await _wait_for_end(watch)
                    await self._kill(str(error))
            await _wait_for_end(watch)

    async def _connected(self) -> VaultControl:
        await asyncio.wait_for(self._ready.wait(), self._settings.connect_seconds)
        assert self._control is not None
        return self._control

    async def _kill(self, reason: str) -> None:
        watch = self._watch
        if watch is None or watch.ending is not None:
            return
        self._log(f"vault of node {self._node} is killed: {reason}")
        self._ready.clear()
        await self._reap(watch, reason)

    async def _reap(self, watch: ChildWatch, reason: str) -> None:
        """Kill a vault and wait for its end. Raises VaultGivenUp if the kernel does not release it,
        because a second vault must not be started on the same slots.
        """
        if not await watch.end(self._settings.stage_seconds):
            raise VaultGivenUp(
                f"its vault (process {watch.pid}) was killed, as {reason}, and did not end within"
                f" {self._settings.stage_seconds:g} s"
            )

    def _ended(self, ending: ProcessEnd) -> None:
        self._ready.clear()
        if self._shutting_down:
            return
        line = last_line(self._log_path) if ending.exit_code else ""
        self._event(Event(Kind.VAULT_LOST, data={"cause": f"{ending}: {line}".rstrip(": ")}))

    def _event(self, event: Event) -> None:
        roles = () if self._record is None else self._record.seats
        if event.kind in _ROUTINE and not is_reported(
            event.role or 0, event.iteration or 0, max(1, len(roles))
        ):
            return
        epoch = event.epoch or (0 if self._record is None else self._record.epoch)
        self._report(report_of(replace(event, node=self._node, epoch=epoch)))

    def _log(self, text: str) -> None:
        self._event(Event(Kind.LOG, data={"level": "warning", "text": text}))


async def _wait_for_end(watch: ChildWatch) -> None:
    """Wait for the end of a vault, at most until it is time for its next status."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(watch.ended.wait(), _STATUS_SECONDS)


def _select(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of the vault's status that is sent in every beat."""
    counters = {str(k): v for k, v in status.get("counters", {}).items()}
    return {
        "committed": {
            role: f"{generation[0]}:{generation[1]}@{boundary}"
            for role, (generation, boundary) in status.get("committed", {}).items()
        },
        "bytes": status.get("allocated_bytes", 0),
        **({"limit_bytes": status["limit_bytes"]} if status.get("limit_bytes") else {}),
        **counters,
    }
