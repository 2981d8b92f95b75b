"""Commands of users: the status of a run, requests to it, and numbers for new agents.

A request is journalled before its user gets a positive answer. This module writes the machine's
newest state of each request to the journal. A coordinator that takes over reads it from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import secrets
import signal
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.cluster.coordinator.context import Context
from deadpool_megatron.cluster.coordinator.new_checkpoint import export_directory
from deadpool_megatron.cluster.coordinator.progress import ReportedProgress
from deadpool_megatron.cluster.coordinator.watchdog import role_beats
from deadpool_megatron.cluster.journal import user_requests
from deadpool_megatron.cluster.journal.journal import JournalError, LostRace, write_with_retries
from deadpool_megatron.cluster.journal.user_requests import Request, Verb
from deadpool_megatron.cluster.link.peers import Peers
from deadpool_megatron.cluster.machine import inputs
from deadpool_megatron.cluster.machine.chosen_plan import memory_refusal
from deadpool_megatron.cluster.machine.membership import exposed_roles
from deadpool_megatron.cluster.machine.requests import not_connected, refusal
from deadpool_megatron.cluster.machine.state import Phase, State
from deadpool_megatron.layout import schemes
from deadpool_megatron.layout.memory_needs import refusal as plan_refusal
from deadpool_megatron.layout.ranks import rank_of
from deadpool_megatron.layout.records import NodeUse
from deadpool_megatron.layout.schemes import describe_plan

# The parts of a run that can be sent a signal, and the signals.
PARTS = ("node", "role", "vault", "agent", "coordinator")
SIGNALS = ("KILL", "STOP", "SEGV")

_KNOWN = ("status", "info", "attach", "kill", *Verb)
_STATUS_SECONDS = 1.0
# The signal may end this process too, so the answer is sent first.
_KILL_SECONDS = 0.1
# A stop does not wait longer: saving the state needs no journal, and may be the last chance.
_STOP_SECONDS = 1.0
# After this time the user must ask again; writes of earlier requests are still retried.
_ASK_SECONDS = 5.0
_PAUSE_SECONDS = 0.5
# A write in progress cannot be revoked. Only another write can correct it, by this coordinator.
_UNLESS = " (unless another coordinator takes over before the journal works again)"
# Share of the coordinator's time for descriptions of the run, however many users request them.
_SHARE_OF_TIME = 0.1


class Commands:
    """See the module text. For the coordinator's loop only."""

    def __init__(self, context: Context, describe: Callable[[], dict[str, Any]]) -> None:
        options = context.options
        self.requests = UserRequests(context)
        self._context = context
        self._info = options.info
        self._term = options.term
        self._journal = options.journal
        self._exports = export_directory(options.info.settings, options.run)
        self._status = PacedStatus(describe)

    async def answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``{"ok": True, ...}`` or ``{"ok": False, "error": line}``.

        Raises KeyError, TypeError or ValueError for a message that none of our commands sends.
        """
        command = message.get("command")
        match command:
            case "status":
                # The status includes requests to earlier coordinators, unless the journal hangs.
                await self.requests.wait_until_known(_STATUS_SECONDS)
                term = {"term": self._term.number, **self._term.to_dict()}
                return {"ok": True, "status": {**self._status.newest(), "coordinator": term}}
            case "info":
                return {"ok": True, "info": self._info.to_dict()}
            case "attach":
                fleet, hostname = self._context.state.fleet, str(message.get("hostname", ""))
                numbers = {*fleet.nodes, *fleet.removed}
                return await asyncio.to_thread(self._attach, hostname, numbers)
            case "kill":
                return self._send_signal(message)
        if command not in set(Verb):
            return {"ok": False, "error": f"unknown command; known are {', '.join(_KNOWN)}"}
        verb, token = Verb(str(command)), str(message["token"])
        seconds = None if message.get("seconds") is None else float(message["seconds"])
        return await self.requests.ask(verb, lambda: self._content(verb, message), token, seconds)

    def _content(self, verb: Verb, message: Mapping[str, Any]) -> dict[str, Any] | str:
        """Return the content of a request, or one line with the reason why it is refused."""
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
                options = {name: bool(message[name]) for name in ("dump", "keeps")}
                return {**options, "reason": str(message["reason"])}

    def _send_signal(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Order an agent to send a signal, so that a user can watch a recovery. The signal goes to
        the agent itself, to its vault, to all processes of its node, or to the process of a role.
        The order is not journalled: a takeover may lose it."""
        state, part, name = self._context.state, str(message["part"]), str(message["signal"])
        later = functools.partial(asyncio.get_running_loop().call_later, _KILL_SECONDS)
        if part not in PARTS or name not in SIGNALS:
            raise ValueError(f"no such part or signal: {part}, {name}")
        if part == "coordinator":
            later(os.kill, os.getpid(), signal.Signals[f"SIG{name}"])
            return {"ok": True}
        if state.phase is Phase.BOOTSTRAPPING and state.record is not None:
            error = "the coordinator has just taken over, and waits for the agents: ask again"
            return {"ok": False, "again": True, "error": error}
        number = int(message["number"])
        order: dict[str, Any] = {"t": "signal-part", "part": part, "signal": name}
        if part == "role":
            seats = {rank_of(role): seat for role, seat in state.seats.items()}
            if (seat := seats.get(number)) is None:
                return _refused(f"there is no role {number} (there are 0 to {len(seats) - 1})")
            number = seat.node
            order |= {"slot": seat.local_rank, "incarnation": seat.incarnation}
        elif reason := not_connected(state, number):
            return _refused(reason)
        later(self._context.peers.order, number, order)
        return {"ok": True}

    def _plan(self, message: Mapping[str, Any]) -> dict[str, Any] | str:
        """Return the plan for ``scheme``, ``group`` and ``every``; absent keys stay unchanged."""
        state, settings = self._context.state, self._info.settings
        plan = state.protection.plan
        if message.get("scheme") is not None:
            group = int(message.get("group") or settings.parity_group)
            plan = schemes.plan_of_kind(str(message["scheme"]), plan.every, group)
        if message.get("every") is not None:
            plan = replace(plan, every=int(message["every"]))
        text = schemes.format_plan(plan)
        reason = plan_refusal(plan, len(state.fleet.nodes), settings, state.protection.plan)
        reason = reason or memory_refusal(plan, state, settings)
        if reason:
            return f"{text} cannot be: {reason}"
        if plan == state.protection.plan:
            return f"the run is protected by {text} already"
        return {"plan": plan.to_dict(), "words": text}

    def _attach(self, hostname: str, numbers: Collection[int]) -> dict[str, Any]:
        """Return a new number for a node: no other node of the run has it, had it or will get it.
        ``numbers``: those of known nodes. May block."""
        try:
            used_numbers = {*numbers, *self._journal.numbers("node")}
            number = max(used_numbers | {self._info.nodes + self._info.spares - 1})
            # The token makes the entries of two agents of a host differ, as the journal takes an
            # equal entry for a repetition of the same write.
            entry = {"hostname": hostname, "token": secrets.token_hex(8)}
            while True:
                number += 1
                try:
                    self._journal.write("node", number, entry)
                except LostRace:
                    continue  # the number was given to another node at the same time, or earlier
                return {"ok": True, "node": number}
        except JournalError as error:
            return {"ok": False, "error": str(error)}


class UserRequests:
    """Requests of users: each is journalled before the user gets a positive answer, and then passed
    to the machine, which holds it and decides on it. For the coordinator's loop only.
    """

    def __init__(self, context: Context) -> None:
        options = context.options
        self._journal = options.journal
        self._term = options.term.number
        self._restarted = options.restarted
        self._retry_limit = options.info.settings.spare_timeout_seconds
        self._context = context
        self._entry = 0
        self._ready = asyncio.Event()
        self._ask_lock = asyncio.Lock()
        self._write_lock = asyncio.Lock()
        self._is_superseded = False
        # The requests in the journal, None where that is uncertain; and the requests that are
        # accepted but not known to the machine yet.
        self._noted: tuple[Request, ...] | None = ()
        self._pending: tuple[Request, ...] = ()

    async def begin(self) -> None:
        """Read the requests to earlier coordinators, and write an entry, after which the earlier
        coordinators can write no more entries."""
        while self._term > 1:
            try:
                newest = await asyncio.to_thread(user_requests.newest, self._journal)
                if newest.term > self._term:
                    self._context.superseded(f"term {newest.term} has begun")
                    return
                self._entry = newest.number + 1
                entry = user_requests.entry(self._term, newest.requests)
                await asyncio.to_thread(self._journal.write, user_requests.KIND, self._entry, entry)
            except LostRace:
                continue  # an earlier coordinator has just written another request
            except JournalError:
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            for trouble in newest.troubles:
                self._context.warn(trouble)
            self._noted = newest.requests
            self._context.feed(inputs.RequestsFound(_with_time_left(self._noted), self._restarted))
            break
        self._ready.set()

    async def wait_until_known(self, limit_seconds: float) -> bool:
        """Wait for the requests of earlier coordinators; return False at the limit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_seconds):
                await self._ready.wait()
        return self._ready.is_set()

    async def ask(
        self,
        verb: Verb,
        make_content: Callable[[], Mapping[str, Any] | str],
        token: str,
        seconds: float | None = None,
    ) -> dict[str, Any]:
        """Accept a request, and return it in its present state. A command may repeat a request with
        the same ``token``, but it is accepted only once.

        ``make_content()`` returns its content, or one line with the reason for a refusal; a plan of
        protection is made in another thread. ``seconds``: the time in which a run has to end.
        """
        limit_seconds = _STOP_SECONDS if verb is Verb.STOP else _ASK_SECONDS
        async with self._ask_lock:
            limit = time.monotonic() + limit_seconds
            is_known = await self.wait_until_known(limit_seconds)
            accepted = (*self._context.state.requests, *self._pending)
            earlier = next((request for request in accepted if request.token == token), None)
            if earlier is not None:
                return {"ok": True, "request": earlier.to_dict()}
            if not is_known and verb is not Verb.STOP:  # an earlier coordinator may have it
                return _not_now("the journal cannot be read")
            began = time.monotonic()
            # A plan is computed over all roles, which takes a second for tens of thousands. The
            # machine checks for changes in the meantime when it takes the request.
            if verb is Verb.PROTECT:
                content = await asyncio.to_thread(make_content)
            else:
                content = make_content()
            limit += time.monotonic() - began
            if isinstance(content, str):
                return _refused(content)
            if reason := refusal(self._context.state, verb, content):
                return _refused(reason)
            request = self._new(verb, content, token, seconds)
            error = await self._note(request, limit - time.monotonic()) if is_known else ""
            if error and verb is not Verb.STOP:
                return _not_now(error)
            failpoints.hit("coordinator.request")
            self._context.feed(inputs.RequestMade(request))
            self._forget_known()
            newest = (request for request in self._context.state.requests if request.token == token)
            return {"ok": True, "request": next(newest, request).to_dict()}

    def _forget_known(self) -> None:
        """Forget the pending requests that the machine knows by now."""
        known = {request.token for request in self._context.state.requests}
        self._pending = tuple(request for request in self._pending if request.token not in known)

    def note(self) -> None:
        """Journal the machine's requests after a change."""
        self._forget_known()
        self._context.spawn(self._write())

    def _new(
        self, verb: Verb, content: Mapping[str, Any], token: str, seconds: float | None
    ) -> Request:
        state, content = self._context.state, dict(content)
        number = max((r.number for r in (*state.requests, *self._pending)), default=0) + 1
        if verb is Verb.STOP:  # on the clock that all hosts share
            content["ends"] = None if seconds is None else time.time() + seconds
        until = None if seconds is None else time.monotonic() + seconds
        return Request(number, token, verb, content, until=until)

    async def _note(self, request: Request, seconds: float) -> str:
        """Return why the request could not be journalled in that time, empty if it was."""
        self._pending = (*self._pending, request)
        writing = asyncio.ensure_future(self._write())
        done, _ = await asyncio.wait({writing}, timeout=max(0.0, seconds))
        if done and not (error := writing.result()):
            return ""
        if request.verb is not Verb.STOP:
            self._pending = tuple(other for other in self._pending if other is not request)
            # The journal may have the request nevertheless, or get it later. Without another write,
            # the next coordinator would carry out a request that was refused.
            self._context.spawn(self._write())
        return error if done else "the journal does not answer"

    async def _write(self) -> str:
        """Return why the newest requests could not be written, empty if the journal has them."""
        async with self._write_lock:
            await self._ready.wait()
            while not self._is_superseded:
                newest = user_requests.prune((*self._context.state.requests, *self._pending))
                if newest == self._noted:
                    return ""
                number, self._noted = self._entry + 1, None
                try:
                    is_written = await self._put(number, user_requests.entry(self._term, newest))
                except LostRace:
                    # A write that waits for its turn must not take the next number.
                    self._is_superseded = True
                    self._context.superseded("another coordinator takes the requests")
                    break
                except JournalError as error:
                    return str(error)
                self._entry = number
                if is_written:
                    self._noted = newest
                    return ""
            return "another coordinator has taken over"

    async def _put(self, number: int, entry: Mapping[str, Any]) -> bool:
        """Write an entry. Return False if the number already has an entry of this coordinator, from
        a try that reported failure. Raises LostRace for an entry of another coordinator, and
        JournalError.

        No number is skipped, since after a gap two coordinators would write in parallel.
        """
        name = (user_requests.KIND, number)
        try:
            # Problems of the journal are reported by the writer of epoch records.
            await write_with_retries(self._journal, name, entry, self._retry_limit, lambda _: None)
        except LostRace:
            existing = await asyncio.to_thread(self._journal.read, *name)
            if existing.get("term") != self._term:
                raise
            return False
        return True


def _refused(reason: str) -> dict[str, Any]:
    return {"ok": False, "refused": reason, "error": reason}


def _not_now(error: str) -> dict[str, Any]:
    """Return the answer for a failing journal. It is no refusal, since the request may be accepted
    already, or when it is repeated."""
    reason = f"{error}: nothing was taken on{_UNLESS}, ask again"
    return {"ok": False, "again": True, "error": reason}


def _with_time_left(requests: tuple[Request, ...]) -> tuple[Request, ...]:
    """Return the requests with ``until``, the moment by which a run has to end, on this host's
    clock."""
    return tuple(
        replace(request, until=time.monotonic() + float(request.content["ends"]) - time.time())
        if request.content.get("ends") is not None
        else request
        for request in requests
    )


class PacedStatus:
    """The description of a run, which covers all roles. If it takes long to make, it is used again
    for some time. For the coordinator's loop.
    """

    def __init__(self, make: Callable[[], dict[str, Any]]) -> None:
        self._make = make
        self._description: dict[str, Any] = {}
        self._valid_until = 0.0

    def newest(self) -> dict[str, Any]:
        """Return the present description, or a recent description if renewal is too costly."""
        began = time.monotonic()
        if began >= self._valid_until:
            self._description = self._make()
            ended = time.monotonic()
            self._valid_until = ended + (ended - began) / _SHARE_OF_TIME
        return self._description


def describe(state: State, peers: Peers, progress: ReportedProgress) -> dict[str, Any]:
    """Return the present status: epoch, phase, waiting_for, iteration, roles (by rank), nodes,
    spares, failing (the failure of the current recovery), refusals, and more.
    """
    record, sizes = state.record, state.memory.sizes
    beats, current = role_beats(state, peers), state.recoveries.current
    failing, replicas = {}, list[int]()  # the present number of model replicas, and the full one
    if sizes is not None and len(sizes.replicas) > 1:
        replicas = [len(state.seats) // sizes.ranks_per_replica, sizes.replicas[-1]]
    if current is not None:
        failing = {"kind": current.kind, "cause": "; then ".join(current.causes)}
    roles: dict[str, Any] = {}
    for role, seat in sorted(state.seats.items()):
        beat = beats.get(role, {})
        roles[str(rank_of(role))] = {
            "seat": seat.to_list(),
            "section": beat.get("section", "unknown"),
            "iteration": beat.get("iteration"),
            "waiting": beat.get("waiting"),
            "own": beat.get("own"),
        }
    uses = {node: state.use_of(node) for node in state.fleet.nodes}
    nodes = {
        str(node): {
            "host": node_state.host,
            "domain": node_state.domain,
            "spare": node not in state.seats.nodes,
            "use": str(uses[node]),
            "restarts": node_state.restarts,
            "standing": str(node_state.judged.eligibility),
            "reasons": list(node_state.judged.reasons),
            "vault": {} if node not in peers.agents else peers.agents[node].vault,
        }
        for node, node_state in sorted(state.fleet.nodes.items())
    }
    return {
        "epoch": 0 if record is None else record.epoch,
        "phase": str(state.phase),
        "waiting_for": state.waiting_for(),
        "iteration": progress.last_iteration,
        "roles": roles,
        "model_replicas": replicas,
        "nodes": nodes,
        "spares": sorted(
            node for node, use in uses.items() if use in (NodeUse.SPARE, NodeUse.DRAINED)
        ),
        "members": {
            f"{node}.{local_rank}.{member.incarnation}": str(member.status)
            for (node, local_rank), member in sorted(state.fleet.members.items())
        },
        "failing": failing,
        "protection": "" if record is None else describe_plan(record.protection, record.replicas),
        "requests": [request.to_dict() for request in state.requests],
        "fewer_copies": sorted(map(rank_of, exposed_roles(state))),
        "refusals": peers.refusals,
        "diverged": progress.diverged,
    }
