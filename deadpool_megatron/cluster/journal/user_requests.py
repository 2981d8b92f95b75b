"""Requests of users, as the journal keeps them.

A single entry has all open requests and the newest that have ended; each change writes the next
entry. So a coordinator that takes over reads a single entry, however many requests there were. It
writes an entry of its own before it accepts any request. Therefore a former coordinator that does
not know yet that it was superseded loses the race for its next entry, and accepts no request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from deadpool_megatron.cluster.journal.journal import DamagedEntry, Journal
from deadpool_megatron.events import DAMAGE
from deadpool_megatron.layout.schemes import ProtectionPlan
from deadpool_megatron.wire.forms import read, write

KIND = "request"
# This many ended requests are kept.
_MAX_ENDED = 16
_CHARACTERS = 300
# Names of fields in the journal and in a status, where they differ.
_KEYS = {"content": "what", "reason": "why"}


class Verb(StrEnum):
    """The kinds of requests."""

    DRAIN = "drain"
    PROTECT = "protect"
    PERSIST = "persist"
    STOP = "stop"


class Stage(StrEnum):
    """The state of a request."""

    ASKED = "asked"
    UNDER_WAY = "under way"
    DONE = "done"
    REFUSED = "refused"
    FAILED = "failed"  # the run has ended, but its dump could not be written


@dataclass(frozen=True)
class Request:
    """A request. ``token``: chosen by the sender, equal when the same request is sent again.
    ``content``: JSON values that depend on the verb. ``reason``: the reason of a wait or refusal,
    or the result. ``until``: its deadline on the clock of the present coordinator (seconds); None:
    no deadline.
    """

    number: int
    token: str
    verb: Verb
    content: Mapping[str, Any]
    stage: Stage = Stage.ASKED
    reason: str = ""
    until: float | None = None

    @property
    def is_open(self) -> bool:
        """Return whether the outcome of the request is still to come."""
        return self.stage in (Stage.ASKED, Stage.UNDER_WAY)

    def at(self, stage: Stage, reason: str = "") -> Request:
        """Return the request at another stage."""
        return replace(self, stage=stage, reason=reason)

    def describe(self) -> str:
        """Return the content of the request as text."""
        match self.verb:
            case Verb.DRAIN:
                return f"drain of node {self.content['node']}"
            case Verb.PROTECT:
                return f"protection {self.content['words']}"
            case Verb.PERSIST:
                return f"checkpoint in {self.content['directory']}"
            case Verb.STOP:
                return "stop with a dump" if self.content["dump"] else "stop"

    def to_line(self) -> str:
        """Return a line such as ``drain of node 1, under way: waits for a spare``."""
        return f"{self.describe()}, {self.stage}{f': {self.reason}' if self.reason else ''}"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form for the journal and for users."""
        values = write(self)
        del values["until"]
        return {_KEYS.get(name, name): value for name, value in values.items()}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Request:
        """Invert :meth:`to_dict`. Raises LookupError, TypeError, ValueError or OverflowError for
        anything else, such as the form of a newer version.
        """
        named = {**values, **{name: values[key] for name, key in _KEYS.items()}}
        request: Request = read(Request, {**named, "until": None})
        content = request.content
        # These conversions raise now for content that would fail later, in the machine.
        request.describe()
        if content.get("ends") is not None:
            float(content["ends"])
        match request.verb:
            case Verb.DRAIN:
                int(content["node"])
            case Verb.PROTECT:
                ProtectionPlan.from_dict(content["plan"])
            case Verb.STOP:
                str(content["reason"])
        return request


def prune(requests: Iterable[Request]) -> tuple[Request, ...]:
    """Return the requests to keep: all open requests, and the newest that have ended."""
    known = tuple(requests)
    ended_numbers = [request.number for request in known if not request.is_open]
    forgotten = set(ended_numbers[:-_MAX_ENDED])
    return tuple(request for request in known if request.number not in forgotten)


@dataclass(frozen=True)
class NewestEntry:
    """Content of the newest entry: its number, its writer's term, the requests, and a line for
    people about each request that is not understood. Without an entry all fields are 0 or empty.
    """

    number: int = 0
    term: int = 0
    requests: tuple[Request, ...] = ()
    troubles: tuple[str, ...] = ()


def newest(journal: Journal) -> NewestEntry:
    """Return the content of the newest entry. Raises JournalError if it cannot be read now.

    Requests that are not understood are skipped, as a retry would not help, and so is a damaged
    entry. An older entry is no substitute: requests that have ended since would be carried out
    again.
    """
    numbers = journal.numbers(KIND)
    if not numbers:
        return NewestEntry()
    number, requests, troubles = numbers[-1], list[Request](), list[str]()
    try:
        values = journal.read(KIND, number)
        term, entries = int(values["term"]), list(values["requests"])
    except (DamagedEntry, *DAMAGE) as error:
        reason = f"earlier requests are not known, ask again: request entry {number}"
        return NewestEntry(number, troubles=(f"{reason}: {type(error).__name__}: {error}",))
    for values in entries:
        try:
            requests.append(Request.from_dict(values))
        except DAMAGE as error:
            reason = f"{type(error).__name__}: {error}"
            troubles.append(
                f"a request is not understood and is skipped ({reason}): {values}"[:_CHARACTERS]
            )
    return NewestEntry(number, term, tuple(requests), tuple(troubles))


def entry(term: int, requests: Iterable[Request]) -> dict[str, Any]:
    """Return the entry with these requests for the coordinator of a term to write."""
    return {"term": term, "requests": [request.to_dict() for request in requests]}
