"""Requests of users, as the journal keeps them.

A single entry has all open requests and the newest that have ended; each change writes the next
entry. So a coordinator that takes over reads a single entry, whatever their number. It writes an
entry of its own before it takes any request: a coordinator that does not know yet that it was
superseded loses the race for its next entry, and so accepts no request.
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
# Number of ended requests that are kept.
_KEPT = 16
_CHARACTERS = 300


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
    FAILED = "failed"  # the run has ended, its dump could not be written


@dataclass(frozen=True)
class Request:
    """A request. ``token``: chosen by the sender, equal when the same request is sent again.
    ``what``: by verb, JSON. ``why``: the reason for a wait, the result, or the reason of a refusal.
    ``until``: its deadline on the clock of the present coordinator (seconds); None: no deadline.
    """

    number: int
    token: str
    verb: Verb
    what: Mapping[str, Any]
    stage: Stage = Stage.ASKED
    why: str = ""
    until: float | None = None

    @property
    def is_open(self) -> bool:
        """Return whether its outcome is still to come."""
        return self.stage in (Stage.ASKED, Stage.UNDER_WAY)

    def at(self, stage: Stage, why: str = "") -> Request:
        """Return the request at another stage."""
        return replace(self, stage=stage, why=why)

    def in_words(self) -> str:
        """Return the content of the request as text."""
        match self.verb:
            case Verb.DRAIN:
                return f"drain of node {self.what['node']}"
            case Verb.PROTECT:
                return f"protection {self.what['words']}"
            case Verb.PERSIST:
                return f"checkpoint in {self.what['directory']}"
            case Verb.STOP:
                return "stop with a dump" if self.what["dump"] else "stop"

    def told(self) -> str:
        """Return a line such as ``drain of node 1, under way: waits for a spare``."""
        return f"{self.in_words()}, {self.stage}{f': {self.why}' if self.why else ''}"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form for the journal and for users."""
        return {name: value for name, value in write(self).items() if name != "until"}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Request:
        """Invert :meth:`to_dict`. Raises LookupError, TypeError, ValueError or OverflowError for
        anything else, such as the form of a newer version.
        """
        request: Request = read(Request, {**values, "until": None})
        what = request.what
        # Checks for the machine, and for the computation of the deadline of a run's end.
        request.in_words()
        if what.get("ends") is not None:
            float(what["ends"])
        match request.verb:
            case Verb.DRAIN:
                int(what["node"])
            case Verb.PROTECT:
                ProtectionPlan.from_dict(what["plan"])
            case Verb.STOP:
                str(what["reason"])
            case _:
                pass
        return request


def kept(requests: Iterable[Request]) -> tuple[Request, ...]:
    """Return the requests to keep: all open requests, and the newest that have ended."""
    known = tuple(requests)
    ended = [request.number for request in known if not request.is_open]
    forgotten = set(ended[:-_KEPT])
    return tuple(request for request in known if request.number not in forgotten)


@dataclass(frozen=True)
class Found:
    """Content of the newest entry: its number, its writer's term, the requests, and lines for
    people on requests that are not understood. Zeros and empty if there is no entry.
    """

    number: int = 0
    term: int = 0
    requests: tuple[Request, ...] = ()
    troubles: tuple[str, ...] = ()


def newest(journal: Journal) -> Found:
    """Return the content of the newest entry. Raises JournalError if it cannot be read now.

    Skips requests that are not understood, as a retry would not help, and all of a damaged entry.
    An older entry is no substitute: finished requests in it would be carried out again.
    """
    numbers = journal.numbers(KIND)
    if not numbers:
        return Found()
    number, requests, troubles = numbers[-1], list[Request](), list[str]()
    try:
        values = journal.read(KIND, number)
        term, listed = int(values["term"]), list(values["requests"])
    except (DamagedEntry, *DAMAGE) as error:
        why = f"earlier requests are not known, ask again: request entry {number}"
        return Found(number, troubles=(f"{why}: {type(error).__name__}: {error}",))
    for one in listed:
        try:
            requests.append(Request.from_dict(one))
        except DAMAGE as error:
            why = f"{type(error).__name__}: {error}"
            troubles.append(
                f"a request is not understood and is skipped ({why}): {one}"[:_CHARACTERS]
            )
    return Found(number, term, tuple(requests), tuple(troubles))


def entry(term: int, requests: Iterable[Request]) -> dict[str, Any]:
    """Return the entry that the coordinator of a term writes of the requests."""
    return {"term": term, "requests": [request.to_dict() for request in requests]}
