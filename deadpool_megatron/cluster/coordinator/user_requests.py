"""Requests of users: journalled before anybody is told yes, then the machine's.

The machine holds them and says what becomes of them; here its newest word is written to the
journal, and read from there when a coordinator takes over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.cluster.coordinator.options import Desk
from deadpool_megatron.cluster.journal import requests
from deadpool_megatron.cluster.journal.journal import JournalError, LostRace, write_patiently
from deadpool_megatron.cluster.journal.requests import Request, Verb
from deadpool_megatron.cluster.machine import inputs
from deadpool_megatron.cluster.machine.requests import refusal

# To save the state needs no journal, and may be the last chance: it is not waited for longer.
_STOP_SECONDS = 1.0
# A user is told no after that; the journal goes on being tried for what was taken before.
_ASK_SECONDS = 5.0
_PAUSE_SECONDS = 0.5
# A write under way cannot be called back, only followed by another one.
_UNLESS = " (unless another coordinator takes over before the journal works again)"


class UserRequests:
    """See the module text. For the coordinator's loop only."""

    def __init__(self, desk: Desk) -> None:
        options = desk.options
        self._journal = options.journal
        self._term = options.term.number
        self._restarted = options.restarted
        self._patience = options.info.settings.spare_timeout_seconds
        self._desk = desk
        self._entry = 0
        self._ready = asyncio.Event()
        self._asking = asyncio.Lock()
        self._writing = asyncio.Lock()
        self._is_superseded = False
        # As the journal has them, None where that is not sure; taken, but not known to the machine
        # yet.
        self._noted: tuple[Request, ...] | None = ()
        self._coming: tuple[Request, ...] = ()

    async def begin(self) -> None:
        """Learn what earlier coordinators were asked, and have them write no more of it."""
        loop = asyncio.get_running_loop()
        while self._term > 1:
            try:
                found = await loop.run_in_executor(None, requests.newest, self._journal)
                if found.term > self._term:
                    self._desk.step_down(f"term {found.term} has begun")
                    return
                self._entry = found.number + 1
                entry = requests.entry(self._term, found.requests)
                await loop.run_in_executor(
                    None, self._journal.write, requests.KIND, self._entry, entry
                )
            except LostRace:
                continue  # an earlier one has just taken another
            except JournalError:
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            for trouble in found.troubles:
                self._desk.warn(trouble)
            self._noted = found.requests
            self._desk.feed(inputs.RequestsFound(_with_time_left(self._noted), self._restarted))
            break
        self._ready.set()

    async def wait_until_known(self, limit_seconds: float) -> bool:
        """Return whether those of earlier coordinators are known, as soon as they are."""
        try:
            async with asyncio.timeout(limit_seconds):
                await self._ready.wait()
        except TimeoutError:
            return False
        return True

    async def ask(
        self,
        verb: Verb,
        what: Callable[[], Mapping[str, Any] | str],
        token: str,
        seconds: float | None = None,
    ) -> dict[str, Any]:
        """Return the request as it is now; the command sends it again and again, it is taken once.

        ``what()``: what is asked, or in a line why it cannot be; for a plan of protection it is
        called in another thread. ``seconds``: in which a run has to end.
        """
        patience = _STOP_SECONDS if verb is Verb.STOP else _ASK_SECONDS
        async with self._asking:
            limit = time.monotonic() + patience
            is_known = await self.wait_until_known(patience)
            taken = (*self._desk.state().requests, *self._coming)
            known = next((one for one in taken if one.token == token), None)
            if known is not None:
                return {"ok": True, "request": known.to_dict()}
            if not is_known and verb is not Verb.STOP:  # an earlier one may have taken it
                return _not_now("the journal cannot be read")
            began = time.monotonic()
            wanted = await self._reckoned(what) if verb is Verb.PROTECT else what()
            limit += time.monotonic() - began
            why = wanted if isinstance(wanted, str) else refusal(self._desk.state(), verb, wanted)
            if isinstance(wanted, str) or why:
                return {"ok": False, "refused": why, "error": why}
            request = self._new(verb, wanted, token, seconds)
            error = await self._note(request, limit - time.monotonic()) if is_known else ""
            if error and verb is not Verb.STOP:
                return _not_now(error)
            failpoints.hit("coordinator.request")
            self._take(request)
            newest = (one for one in self._desk.state().requests if one.token == token)
            return {"ok": True, "request": next(newest, request).to_dict()}

    async def _reckoned(
        self, what: Callable[[], Mapping[str, Any] | str]
    ) -> Mapping[str, Any] | str:
        """Return what is asked of the plan, reckoned over all roles: of tens of thousands that is a
        second. It continues from the plan in force, so it is reckoned again if that has changed
        meanwhile; what else has changed the machine looks at when it takes the request.
        """
        while True:
            plan = self._desk.state().protection.plan
            wanted = await asyncio.to_thread(what)
            if self._desk.state().protection.plan == plan:
                return wanted

    def _take(self, request: Request) -> None:
        """Give the machine what the journal has."""
        self._desk.feed(inputs.Asked(request))
        self._forget_known()

    def _forget_known(self) -> None:
        """Forget those that the machine has taken, at once or a moment later."""
        known = {request.token for request in self._desk.state().requests}
        self._coming = tuple(one for one in self._coming if one.token not in known)

    def note(self) -> None:
        """The machine has another word on its requests: into the journal with it."""
        self._forget_known()
        self._desk.spawn(self._write())

    def _new(
        self, verb: Verb, what: Mapping[str, Any], token: str, seconds: float | None
    ) -> Request:
        state, what = self._desk.state(), dict(what)
        number = max((r.number for r in (*state.requests, *self._coming)), default=0) + 1
        if verb is Verb.STOP:  # on the clock that all hosts share
            what["ends"] = None if seconds is None else time.time() + seconds
        until = None if seconds is None else time.monotonic() + seconds
        return Request(number, token, verb, what, until=until)

    async def _note(self, request: Request, seconds: float) -> str:
        """Return why the request could not be journalled in that time, empty if it was."""
        self._coming = (*self._coming, request)
        writing = asyncio.ensure_future(self._write())
        done, _ = await asyncio.wait({writing}, timeout=max(0.0, seconds))
        if done and not (error := writing.result()):
            return ""
        if request.verb is not Verb.STOP:
            self._coming = tuple(one for one in self._coming if one is not request)
            # The journal may have it all the same, or will: then the next coordinator would carry
            # out what its user was refused.
            self._desk.spawn(self._write())
        return error if done else "the journal does not answer"

    async def _write(self) -> str:
        """Return why the newest could not be written, empty if it was, or has been already."""
        async with self._writing:
            await self._ready.wait()
            while not self._is_superseded:
                newest = requests.kept((*self._desk.state().requests, *self._coming))
                if newest == self._noted:
                    return ""
                number, self._noted = self._entry + 1, None
                try:
                    is_written = await self._put(number, requests.entry(self._term, newest))
                except LostRace:
                    # Whoever waits for its turn to write must not take the number behind that.
                    self._is_superseded = True
                    self._desk.step_down("another coordinator takes the requests")
                    break
                except JournalError as error:
                    return str(error)
                self._entry = number
                if is_written:
                    self._noted = newest
                    return ""
            return "another coordinator has taken over"

    async def _put(self, number: int, entry: Mapping[str, Any]) -> bool:
        """Write an entry; return False where that number has one of ours, of a try that failed and
        was carried out all the same. Raises LostRace when it has another's, and JournalError.

        No number is left out: behind the gap two coordinators would write side by side.
        """
        name = (requests.KIND, number)
        try:
            await write_patiently(self._journal, name, entry, self._patience, _ignore)
        except LostRace:
            there = await asyncio.to_thread(self._journal.read, *name)
            if there.get("term") != self._term:
                raise
            return False
        return True


def _not_now(error: str) -> dict[str, Any]:
    """Return what is answered in trouble with the journal: no refusal, the same request may be
    taken yet, or has been."""
    why = f"{error}: nothing was taken on{_UNLESS}, ask again"
    return {"ok": False, "again": True, "error": why}


def _with_time_left(found: tuple[Request, ...]) -> tuple[Request, ...]:
    """Return them with the moment by which a run has to end, on this host's clock."""
    return tuple(
        replace(one, until=time.monotonic() + float(one.what["ends"]) - time.time())
        if one.what.get("ends") is not None
        else one
        for one in found
    )


def _ignore(_: str) -> None:
    """Whoever writes epochs to this journal tells of its troubles."""
