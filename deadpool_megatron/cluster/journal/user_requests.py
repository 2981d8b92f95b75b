"""Requests of users, as the journal keeps it.

All requests that are open, and the newest that have ended, stand in one entry; each change writes
the next one. So a coordinator that takes over reads one entry, however many there were. It writes
one of its own before it takes any request: a coordinator that does not know yet that it was
superseded loses the race for its next entry, and nobody is told yes by it.
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
# So many of those that have ended are kept.
_KEPT = 16
_CHARACTERS = 300


class Verb(StrEnum):
    """The things that may be asked."""

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
    """``token``: chosen by who asks, equal when the same request is sent again. ``what``: by verb,
    JSON. ``why``: what it waits for, what came of it, or why it was refused. ``until``: when it has
    to be carried out, on the clock of the present coordinator (seconds); None: at any time.
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
        """The request, a stage further."""
        return replace(self, stage=stage, why=why)

    def in_words(self) -> str:
        """Return what was asked."""
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
        """``drain of node 1, under way: waits for a spare``."""
        return f"{self.in_words()}, {self.stage}{f': {self.why}' if self.why else ''}"

    def to_dict(self) -> dict[str, Any]:
        """JSON form, as the journal and users have it."""
        return {name: value for name, value in write(self).items() if name != "until"}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Request:
        """Inverse of :meth:`to_dict`. Raises LookupError, TypeError, ValueError or OverflowError
        for anything else, as of a newer version.
        """
        request: Request = read(Request, {**values, "until": None})
        what = request.what
        # What the machine relies on, and who reckons the moment by which a run has to end.
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
    """Return those to remember: all that are open, and the newest that have ended."""
    known = tuple(requests)
    ended = [request.number for request in known if not request.is_open]
    forgotten = set(ended[:-_KEPT])
    return tuple(request for request in known if request.number not in forgotten)


@dataclass(frozen=True)
class Found:
    """Content of the newest entry: its number, the term of who wrote it, the requests, and in lines
    for people what of them could not be understood. Zeros and nothing where there is none.
    """

    number: int = 0
    term: int = 0
    requests: tuple[Request, ...] = ()
    troubles: tuple[str, ...] = ()


def newest(journal: Journal) -> Found:
    """Return what the newest entry says. Raises JournalError when it cannot be read now.

    What is not understood is left out, for it would not be the next time: of an entry that is
    damaged, everything. An older one would have requests that are done by now carried out again.
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
    """Return what is written of them by the coordinator of a term."""
    return {"term": term, "requests": [request.to_dict() for request in requests]}
