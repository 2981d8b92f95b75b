"""The per-node supervisor: starts members and the vault, watches them, passes orders and reports.

It runs in one asyncio loop; file system calls that may hang run in threads. The order of a close is
fixed: first the vault stops sealing, then the members are interrupted, then every seated member
leaves the epoch or is killed, and only then is the inventory taken and sent.

The loss of the coordinator changes nothing for training; the agent connects again, perhaps to the
successor. A node that is cut off from a live coordinator ends its members (fence.py), because the
coordinator is about to reassign their roles.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.cluster.agent.coordinator_address import CoordinatorAddress
from deadpool_megatron.cluster.agent.exporter import NodeExports
from deadpool_megatron.cluster.agent.fence import Fence
from deadpool_megatron.cluster.agent.members import Member, NodeMembers, wait_ended, wait_left
from deadpool_megatron.cluster.agent.node_checker import NodeChecker
from deadpool_megatron.cluster.agent.options import AgentOptions, device_environment, member_spec
from deadpool_megatron.cluster.agent.stacks import StackReporter
from deadpool_megatron.cluster.agent.standby_supervisor import StandbySupervisor
from deadpool_megatron.cluster.agent.vault_process import VaultGivenUp, VaultSupervisor
from deadpool_megatron.cluster.journal.terms import claim_order
from deadpool_megatron.cluster.link.agent_link import CoordinatorLink, CoordinatorLost, first_of
from deadpool_megatron.cluster.link.rendezvous import StoreRelay
from deadpool_megatron.cluster.process.children import ProcessEnd, retry_shortage, run_child
from deadpool_megatron.cluster.process.fork_server import Starter, StartError
from deadpool_megatron.cluster.process.logs import Files, LocalLogs
from deadpool_megatron.cluster.process.posix import Orphans
from deadpool_megatron.cluster.run_directory.cleanup import listing, remove_segments
from deadpool_megatron.cluster.run_directory.orphaned_slots import NodeTaken, held_names
from deadpool_megatron.failures import ExitStatus, FailureKind, kind_of_end
from deadpool_megatron.layout.records import EpochRecord, Generation, Inventory, Restore, Seat
from deadpool_megatron.ownership import OwnershipError
from deadpool_megatron.vault.disk.dump import incarnations
from deadpool_megatron.vault.errors import VaultError
from deadpool_megatron.wire.auth import AuthenticationError

_FLUSH_SECONDS = 2.0
_NAMES_SECONDS = 10.0
# The first coordinator may need this long to start on a busy host; then its absence is reported.
_TROUBLE_SECONDS = 10.0


class AgentParts:
    """The parts of an agent, which call it back. ``starter`` and ``files`` replace the default
    parts. For the agent's loop.
    """

    def __init__(
        self,
        options: AgentOptions,
        agent: Agent,
        starter: Starter | None = None,
        files: Files | None = None,
    ) -> None:
        node, run, info, segments = options.node, options.run, options.info, options.segments
        self.fence = Fence(info.settings)
        self.logs = LocalLogs(options.logs)
        self.files = files or Files(options.logs, run.logs, run.check_own)
        self.standby: StandbySupervisor | None = None
        if options.standby:
            log = self.logs.log(f"node{node}-standby")
            on_look, on_over = self.fence.record_read, agent.run_over
            self.standby = StandbySupervisor(options.standby, log, on_look, on_over)
        address = CoordinatorAddress(
            run,
            options.fixed_address,
            from_standby=lambda: None if self.standby is None else self.standby.address,
        )
        self.link = CoordinatorLink(
            address.newest,
            options.secret,
            info.run_id,
            info.settings,
            agent.first_message,
            agent.take_order,
            self.fence.record_contact,
        )
        send = self.link.send
        of_local_rank = partial(device_environment, options)
        starter = starter or Starter(options.server, options.modules, of_local_rank)
        spec = partial(member_spec, options)
        self.members = NodeMembers(node, spec, starter, info.settings, agent, send)
        self.members.incarnations |= incarnations(node, segments)
        self.store = StoreRelay(send)
        self.stacks = StackReporter(node, lambda: agent.record, send)
        self.vault = VaultSupervisor(options, send, agent.write_listing, self.logs)
        self.checker = NodeChecker(options, send, lambda: agent.sent_record)
        self.exports = NodeExports(options, self.vault.take, self.logs, send)
        self.names = held_names(run, info.run_id, node, segments)


class Agent:
    """The supervisor of one node (see the module text); :meth:`run` is its whole life. Created and
    used in one loop. ``found``: the slots that were in memory before the first vault started.
    """

    def __init__(
        self,
        options: AgentOptions,
        found: Inventory | None = None,
        make_parts: Callable[[AgentOptions, Agent], AgentParts] = AgentParts,
    ) -> None:
        self._options, self._found = options, found
        self._node, self._segments = options.node, options.segments
        self._settings = options.info.settings
        self.record: EpochRecord | None = None
        # The record sent to members; a node that joined late is in no record yet.
        self.sent_record: EpochRecord | None = None
        self._restore = Restore("initial", Generation(0, 0))
        # The newest closed epoch, and the id of the coordinator process that has sent a welcome.
        self._closed, self._boot = 0, ""
        self._inventory: dict[str, Any] | None = None
        self._own_boot = secrets.token_hex(8)  # agents in containers may have equal pids
        self._link_task: asyncio.Task[None] | None = None
        self._exit_code = 0
        # Why the agent ends, and whether it removes the slots.
        self._ending: tuple[str, bool] | None = None
        self._stopping, self._member_left = asyncio.Event(), asyncio.Event()
        self._orders: asyncio.Queue[Coroutine[Any, Any, None]] = asyncio.Queue()
        self._names_checked_at, self._began, self._shown_trouble = 0.0, time.monotonic(), ""
        parts = make_parts(options, self)
        self._link, self._standby, self._cut_limit = parts.link, parts.standby, parts.fence
        self._members, self._stacks, self._store = parts.members, parts.stacks, parts.store
        self._vault, self._exports, self._checker = parts.vault, parts.exports, parts.checker
        self._logs, self._files, self._names = parts.logs, parts.files, parts.names
        self._departure = Departure(options, partial(self._end, "agent got SIGTERM", True))

    async def run(self) -> int:
        """Serve until the run is over, and return the exit status of the agent."""
        try:
            if self._standby is not None:
                self._standby.begin(self._options.launcher_fd, self._launcher_gone)
            await self._vault.start()
            self.write_listing()
            # Shielded, so that the last reports are acknowledged while everything else shuts down.
            # After the first contact, the fence or the launcher ends a node that has lost contact
            # earlier than this limit.
            limit = max(self._settings.spare_timeout_seconds, 3 * self._settings.connect_seconds)
            self._link_task = asyncio.create_task(self._link.run(limit))
            await first_of(
                asyncio.shield(self._link_task),
                self._vault.supervise(),
                self._work(),
                self._checker.run(),
                self._tick(),
                self._stopping.wait(),
            )
        except (CoordinatorLost, AuthenticationError) as error:
            self._fence(str(error), keep=True)
        except VaultGivenUp as error:
            self._link.send({"t": "given-up", "why": str(error)})
            self._fence(str(error), keep=True)
        finally:
            await self._shut_down()
        return self._departure.status(self._exit_code)

    # Orders of the coordinator.

    def first_message(self) -> dict[str, Any]:
        """Return the message with which the agent joins."""
        return {
            "t": "join",
            "node": self._node,
            "boot": self._own_boot,
            "host": self._options.host,
            **self._vault.facts(),
            "domain": self._options.domain,
            "returns": self._options.launcher_fd is None,
            "members": {
                str(m.local_rank): m.incarnation for m in self._members.by_local_rank.values()
            },
            "incarnations": {str(s): i for s, i in self._members.incarnations.items()},
            "epoch": 0 if self.record is None else self.record.epoch,
            "told": 0 if self.sent_record is None else self.sent_record.epoch,
            "closed": self._closed,
            "restored": self._members.restored(),
            "found": self._found.to_dict() if self._found and not self.record else None,
            "facts": self._checker.facts(),
        }

    def take_order(self, message: Mapping[str, Any]) -> None:
        """Carry out an order of the coordinator, or queue it."""
        kind = message.get("t")
        if kind == "welcome":
            self._welcome(message)
        elif kind == "start":
            self._orders.put_nowait(self._start(message))
        elif kind == "close":
            self._order_close(int(message["epoch"]), str(message["cause"]))
        elif kind == "restore":  # this node's part of the record that follows
            self._restore = Restore.from_dict(message["restore"])
        elif kind == "record":
            record = EpochRecord.from_dict(message["record"])
            self._orders.put_nowait(self._adopt(replace(record, restore=self._restore)))
        elif kind == "store":
            self._store.from_coordinator(message)
        elif kind == "dump":
            self._orders.put_nowait(self._dump(dict(message)))
        elif kind == "kill":
            self._stacks.kill_by_order(message, self._members.find(message))
        elif str(kind).startswith("export-"):
            self._exports.order(message)
        elif kind in ("pause", "durable-done"):
            self._members.send_all(message)
        elif kind == "signal-part":
            self._members.signal_part(message, self._vault.living_pid)
        elif kind == "stop" and message.get("dropped"):
            self._fence(f"given up: {message.get('reason')}", code=ExitStatus.EXCLUDED)
        elif kind == "stop":
            self._end(str(message.get("reason", "")), bool(message.get("remove", True)))
        elif kind == "refused":
            code = ExitStatus.EXCLUDED if message.get("left_out") else ExitStatus.FENCED
            self._fence(f"refused by the coordinator: {message.get('why')}", code=code)

    def _welcome(self, message: Mapping[str, Any]) -> None:
        boot = str(message["boot"])
        if boot != self._boot:
            # Before the first welcome there is nothing to repeat: the link still has all reports.
            if self._boot:
                within = float(message.get("repeat_seconds", 0.0))
                self._members.repeat(lambda: self._closed, within)
                self._exports.drop()  # a new coordinator does not know of any export
            else:
                print(f"agent of node {self._node} joined the run", file=sys.stderr, flush=True)
            self._boot = boot
        self._store.repeat()
        closed = int(message.get("closed", 0))
        if self.record is not None and closed >= self.record.epoch:
            self._order_close(closed, str(message.get("cause", "")))

    async def _work(self) -> None:
        """Carry out orders one after the other, so that a close never overtakes the record of its
        epoch."""
        while True:
            await (await self._orders.get())

    async def _start(self, message: Mapping[str, Any]) -> None:
        self._keep_names()
        provisional = message["provisional_roles"]
        for text, incarnation in sorted(message["slots"].items()):
            local_rank = int(text)
            old = self._members.by_local_rank.get(local_rank)
            if old is not None:
                if old.incarnation >= int(incarnation):
                    continue
                old.kill("replaced by order of the coordinator")
                if not await wait_ended([old], self._settings.close_seconds):
                    continue
            role = int(provisional.get(text, local_rank))
            try:
                start = partial(self._members.start, local_rank, int(incarnation), role)
                await retry_shortage(start, self._settings.close_seconds / 2)
            except (StartError, OSError) as error:
                self._members.report_lost(
                    local_rank, int(incarnation), {"exit_code": 1}, str(error)
                )
        self.write_listing()

    def _order_close(self, epoch: int, cause: str) -> None:
        """Queue the close of an epoch. If the epoch is closed already, send the inventory at once,
        as a new coordinator may order the close while a dump holds up the queue."""
        if epoch <= self._closed:
            self._send_inventory(epoch)
        else:
            self._orders.put_nowait(self._close(epoch, cause))

    async def _close(self, epoch: int, cause: str) -> None:
        if epoch <= self._closed:
            self._send_inventory(epoch)  # closed by an earlier order in the queue
            return
        failpoints.hit("agent.close", epoch=epoch)
        self._closed, self._inventory = epoch, None
        self._store.enter(0)
        await self._vault.close_epoch(epoch)
        self._members.send_all({"t": "close", "epoch": epoch, "cause": cause})
        # Every member with a seat must leave the epoch; otherwise it is killed and reaped.
        seats = set() if self.record is None else set(self.record.seats.values())
        seated = [
            member
            for member in self._members.by_local_rank.values()
            if Seat(self._node, member.local_rank, member.incarnation) in seats
        ]
        await wait_left(seated, epoch, self._member_left, self._settings)
        self._inventory = (await self._vault.inventory(epoch)).to_dict()
        failpoints.hit("agent.inventory", epoch=epoch)
        self._send_inventory(epoch)

    def _send_inventory(self, epoch: int) -> None:
        if self._inventory is not None and self._inventory["epoch"] == epoch:
            self._link.send({"t": "inventory", "epoch": epoch, "inventory": self._inventory})

    async def _adopt(self, record: EpochRecord) -> None:
        newest = 0 if self.record is None else self.record.epoch
        if record.epoch <= max(self._closed, newest):
            return
        if self._standby is not None:
            info = self._options.info
            run = (record, info.nodes, info.spares, self._node)
            self._standby.place(partial(claim_order, *run))
        if self._node not in record.nodes and self.record is not None:
            self._fence(f"epoch {record.epoch} continues without this node")
            return
        self.sent_record = record
        self._closed = max(self._closed, record.epoch - 1)  # older epochs need no close any more
        if self._node in record.nodes:  # else this node joined after the decision
            failpoints.hit("agent.record", epoch=record.epoch)
            self.record = record
            self._store.enter(record.epoch)
            await self._vault.adopt(record)
        self._members.send_all({"t": "record", "record": record.to_dict()})

    async def _dump(self, message: dict[str, Any]) -> None:
        request = {key: message[key] for key in ("generation", "boundary")}
        answer = {"t": "dumped", **request, "files": [], "error": ""}
        try:
            answer |= await self._vault.dump(message)
        except (OSError, TimeoutError, VaultError) as error:
            answer["error"] = str(error) or type(error).__name__
        self._link.send(answer)

    # Reports of members (see MemberObserver).

    def member_reported(self, member: Member, message: dict[str, Any]) -> None:
        """Forward a member's message to the store or the coordinator."""
        kind = message.get("t")
        if kind == "hello":
            if self.sent_record is not None and self.sent_record.epoch > self._closed:
                member.send({"t": "record", "record": self.sent_record.to_dict()})
            self._members.prepare(member.local_rank)
        elif kind == "drained":
            self._member_left.set()
        take = self._store.from_member if kind == "store" else self._members.pass_on
        take(member, message)

    def member_frozen(self, member: Member, silent_seconds: float) -> None:
        """Report a frozen member, ask it for its stacks, and kill it."""
        self._members.report_frozen(member, silent_seconds)
        self._stacks.kill(member, "frozen")

    def member_ended(self, member: Member, ending: ProcessEnd, cause: str, ordered: bool) -> None:
        """Report a reaped member, unless it left because the run is over."""
        self._members.remove(member)
        self._files.finish_log(member.log)
        self._member_left.set()
        if self._ending is None:
            how = {"exit_code": ending.exit_code, "signal": ending.signal, "ordered": ordered}
            self._members.report_lost(member.local_rank, member.incarnation, how, cause)
            self.write_listing()
            if kind_of_end(cause) is FailureKind.DEVICE_ERROR:
                self._checker.ask_health()

    def _facts_for_users(self) -> dict[str, Any]:
        """Return the facts about this node that the coordinator shows to users."""
        return {"members": self._members.beats(), "vault": self._vault.status}

    async def _tick(self) -> None:
        orphans = Orphans() if os.getpid() == 1 else None
        while True:
            if orphans is not None:
                orphans.reap()
            if time.monotonic() - self._names_checked_at > _NAMES_SECONDS:
                self._keep_names()
            self._members.check()
            self._logs.trim()
            if self._link.beat_is_due:
                self._link.beat(self._facts_for_users)
            self._look_for_cut(time.monotonic())
            # Half of the setting, as the period that the coordinator orders may not be a multiple.
            await asyncio.sleep(self._settings.beat_interval_seconds / 2)

    def _keep_names(self) -> None:
        """Restore names in shared memory that another program has removed: processes find their
        logs and their vault by these names. The vault reports the removal."""
        self._names_checked_at = time.monotonic()
        try:
            for name in self._names:
                name.look()
        except (OSError, OwnershipError, NodeTaken) as error:
            self._fence(f"its names in shared memory were removed, and cannot be created: {error}")

    # Contact with the coordinator.

    def _look_for_cut(self, now: float) -> None:
        silent = self._cut_limit.silent_seconds(now)
        if self._standby is not None:
            self._standby.contact(self._link.connected and silent <= self._link.contact_seconds)
        self._look_for_coordinator(now)
        verdict = "" if self._options.launcher_fd is not None else self._cut_limit.verdict(now)
        if verdict and self._ending is None:
            self._fence(verdict, keep=True)

    def _look_for_coordinator(self, now: float) -> None:
        """Before the first contact, print the obstacle early. End the agent if the node's own
        standby cannot claim a term, because another start would not help."""
        waited, standby = now - self._began, self._standby
        if self._boot or standby is None or waited < _TROUBLE_SECONDS:
            return
        trouble = standby.trouble or (self._link.trouble if standby.address else "")
        if standby.trouble and standby.address is None and waited > self._settings.connect_seconds:
            reason = f"no coordinator for {self._settings.connect_seconds:g} s: {trouble}"
            self._fence(reason, keep=True, code=ExitStatus.BAD_INPUT)
        elif trouble and trouble != self._shown_trouble:
            self._shown_trouble = trouble
            text = f"agent of node {self._node} waits for a coordinator: {trouble}"
            print(text, file=sys.stderr, flush=True)

    def run_over(self, keeps_slots: bool) -> None:
        """End the agent, as the result of the run is written, if it is not connected: the
        coordinator's order to stop may have been lost."""
        if not self._link.connected:
            self._end("the run is over", not keeps_slots)

    # Beginning and end.

    def write_listing(self) -> None:
        """List the processes of the node in the run directory."""
        members = self._members.by_local_rank.values()
        listed = {member.local_rank: (member.pid, member.incarnation) for member in members}
        text = listing(self._vault.pid, listed, self._segments)
        self._files.replace(self._options.run.node(self._node), text)

    def _launcher_gone(self) -> None:
        # Otherwise the coordinator would see its nodes leave, and end the run for lack of nodes.
        self._link.supersede("the launcher is gone")
        self._fence("the launcher is gone", keep=True)

    def _fence(self, reason: str, *, keep: bool = False, code: int = ExitStatus.FENCED) -> None:
        """End at once, as no process relies on this node. ``keep``: the slots may be needed
        later."""
        if self._ending is None:
            for member in self._members.by_local_rank.values():
                member.kill(reason)
        if not self._exit_code:
            self._exit_code = code
            print(f"agent of node {self._node} ends: {reason}", file=sys.stderr, flush=True)
        restarts = self._options.keeps_slots and code != ExitStatus.EXCLUDED
        self._end(reason, not (keep or (restarts and not self._departure.is_ordered)))

    def _end(self, reason: str, remove: bool) -> None:
        if self._ending is None:
            self._ending = (reason, remove)
            self._members.send_all({"t": "stop", "reason": reason})
        self._stopping.set()

    async def _shut_down(self) -> None:
        """End the members (first in order, then by kill), the vault and the shared memory."""
        reason, remove = self._ending or ("agent failed", False)
        self._ending = (reason, remove)
        members = list(self._members.by_local_rank.values())
        if self._exit_code or not await wait_ended(members, self._settings.drain_seconds):
            for member in members:
                member.kill(reason)
            await wait_ended(members, self._settings.close_seconds)
        self._members.close()
        # Reports of completed iterations count even if the run no longer needs this node.
        may_arrive = self._link.connected or (self._options.launcher_fd is None and self._exit_code)
        await self._link.flush(_FLUSH_SECONDS if may_arrive else 0.0)
        if self._link_task is not None:
            self._link_task.cancel()
        self._link.close()
        await self._exports.close()
        await self._vault.shut_down(remove)
        if self._standby is not None:
            # A run that continues without this node needs another coordinator now.
            continues = self._exit_code or self._departure.exit_status
            grace = 0.0 if continues else 2 * self._settings.close_seconds
            await self._standby.close(grace)
        self._files.replace(self._options.run.node(self._node), None)
        await self._files.close(_FLUSH_SECONDS)
        if remove:
            remove_segments(self._segments)


class Departure:
    """The handler of SIGTERM: it first drains the node, if the options give it time for that.
    ``end()`` ends the agent. For the agent's loop only."""

    def __init__(self, options: AgentOptions, end: Callable[[], None]) -> None:
        self._options, self._end = options, end
        self._drain: asyncio.Task[None] | None = None
        self.exit_status = 0
        self.is_ordered = False
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._terminate)

    def status(self, exit_code: int) -> int:
        """Return the exit status of an agent; ``exit_code`` is its own reason to end, or 0. After
        SIGTERM the status is TERMINATED, so that no agent is started again in its place."""
        is_ordered = exit_code and self.is_ordered
        return ExitStatus.TERMINATED if is_ordered else exit_code or self.exit_status

    def _terminate(self) -> None:
        self.is_ordered = True
        if self._drain is not None or not self._options.leave_seconds:
            self._end()
            return
        self.exit_status = ExitStatus.TERMINATED
        self._drain = asyncio.get_running_loop().create_task(self._drain_and_end())

    async def _drain_and_end(self) -> None:
        options = self._options
        drain = ("drain", str(options.run.path), "--wait", "--node", str(options.node))
        try:
            log = options.segments / "drain.txt"
            result = (
                await run_child(["-m", "deadpool_megatron", *drain], log, options.leave_seconds)
                or "it was drained"
            )
        except (OSError, TimeoutError) as error:
            result = f"its roles have not moved: {error!r}"
        text = f"agent of node {options.node} got SIGTERM: {result}"
        print(text, file=sys.stderr, flush=True)
        self._end()
