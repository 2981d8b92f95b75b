"""Inputs of the coordinator's state machine; its output is in actions.

Plain frozen data. An input that names a member carries its incarnation, and one that belongs to an
epoch carries the epoch: the machine refuses what is stale. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deadpool_megatron.cluster.journal.user_requests import Request
from deadpool_megatron.failures import FailureKind
from deadpool_megatron.layout.records import BadPart, Generation, Inventory, RoleLayout
from deadpool_megatron.layout.schemes import ProtectionPlan
from deadpool_megatron.preflight.eligibility import HostFacts


class Input:
    """Base of all of them."""


@dataclass(frozen=True)
class Tick(Input):
    """Time has passed. Needed at least ten times a second: all deadlines are looked at here."""


@dataclass(frozen=True)
class NodeJoined(Input):
    """An agent connected, for the first time or because the coordinator is a new one.

    ``members``: local rank -> incarnation of what it runs already; ``incarnations``: local rank ->
    the highest that was ever started there. ``epoch``: of the record it has; ``closed``: the newest
    epoch it has closed (0: none); ``restored``: local rank -> the epoch that its member restored
    last;
    ``memory_bytes``: shared memory that it has for generations (0: not known); ``found``: what
    lay in its memory before it started, as long as it has adopted no record. ``returns``: what it
    holds outlives its agent, and another one may come with it. ``facts``: what it says about its
    host, None for nothing.
    """

    node: int
    host: str
    vault_port: int
    domain: str
    members: Mapping[int, int] = field(default_factory=dict)
    incarnations: Mapping[int, int] = field(default_factory=dict)
    epoch: int = 0
    closed: int = 0
    restored: Mapping[int, int] = field(default_factory=dict)
    memory_bytes: int = 0
    found: Inventory | None = None
    returns: bool = False
    facts: HostFacts | None = None


@dataclass(frozen=True)
class FactsReported(Input):
    """A node without a role, or one whose device has failed, has looked at its host again."""

    node: int
    facts: HostFacts


@dataclass(frozen=True)
class NodeLost(Input):
    """A verdict: connection closed, silent, or told to go. It never comes back under this id.

    ``silent_seconds``: how long before this verdict the last sign of life was. ``kind``: lost, cut
    or frozen.
    """

    node: int
    cause: str
    silent_seconds: float = 0.0
    kind: FailureKind = FailureKind.NODE_LOST


@dataclass(frozen=True)
class OfMember(Input):
    """Base of inputs about a member: its node, local rank (``slot``, as on the wire) and
    incarnation."""

    node: int
    slot: int
    incarnation: int


@dataclass(frozen=True)
class OfPlayer(OfMember):
    """Base of what only the player of a role in the open epoch may say."""

    epoch: int


@dataclass(frozen=True)
class MemberHello(OfMember):
    """The process runs."""

    pid: int = 0


@dataclass(frozen=True)
class MemberWarm(OfMember):
    """A member without a seat has built in detached mode and is parked."""


@dataclass(frozen=True)
class MemberRegistered(OfMember):
    """A member has built and its segment is known to its vault."""

    layout: RoleLayout


@dataclass(frozen=True)
class MemberLost(OfMember):
    """The process ended and was reaped, by itself (``exit_code``) or by ``signal``.

    ``ordered``: its agent killed it, which says nothing about the process itself.
    """

    exit_code: int | None = None
    signal: int | None = None
    last_line: str = ""
    ordered: bool = False


@dataclass(frozen=True)
class MemberSuspected(OfMember):
    """A verdict of liveness: frozen or out of touch. The machine has it killed and replaced."""

    cause: str
    silent_seconds: float = 0.0


@dataclass(frozen=True)
class RolesHung(Input):
    """A verdict: no progress of any role; ``roles`` (perhaps none) hold the others up. ``table``:
    who is where, as the HANG event tells it. ``still_seconds``: since the last progress."""

    epoch: int
    roles: tuple[int, ...]
    cause: str
    table: Mapping[str, Any]
    still_seconds: float = 0.0


@dataclass(frozen=True)
class MemberFault(OfPlayer):
    """Communication failed in a member. Mostly a consequence: a better cause has 0.5 s to come."""

    text: str


@dataclass(frozen=True)
class MemberRaised(OfPlayer):
    """A role has raised an exception, whose last line is ``text``. Its process ends within 0.5 s,
    unless the epoch is closed for a better cause."""

    text: str


@dataclass(frozen=True)
class NodeInventory(Input):
    """A node's vault closed the epoch and promises what is in here."""

    inventory: Inventory


@dataclass(frozen=True)
class Restored(OfPlayer):
    """The member has the state the record names and has agreed on it with its peers."""

    generation: Generation


@dataclass(frozen=True)
class NotRestored(OfPlayer):
    """No source of ``part`` gave good bytes; "" when it was not one part (peers' hashes differ).
    ``other_program``: the state is laid out for another model, or other flags."""

    part: str
    text: str
    other_program: bool = False


@dataclass(frozen=True)
class AuditFailed(OfPlayer):
    """Peers differ in ``what`` in ``iteration``, and hand no generation of it over. All ``roles``
    are wrong; if that is not ``certain``, at least one of them is."""

    iteration: int
    roles: tuple[int, ...]
    certain: bool
    what: str


@dataclass(frozen=True)
class PhaseReported(Input):
    """One member's or vault's part of a recovery; the longest of each phase counts. ``exposed``:
    how long after the loss a vault has re-protected what it owed."""

    epoch: int
    phase: str
    seconds: float
    exposed: float = 0.0


@dataclass(frozen=True)
class StepReported(Input):
    """Some role completed an iteration and its log lines were accepted."""

    epoch: int
    iteration: int


@dataclass(frozen=True)
class NotFinite(Input):
    """A role has found that an iteration is no good: ``number`` is what (see failures), ``value``
    in words: nan, inf or -inf. It goes no further.
    """

    epoch: int
    node: int | None
    role: int | None
    iteration: int
    number: str
    value: str


@dataclass(frozen=True)
class StackReported(Input):
    """A process that hung stood there; one line."""

    text: str


@dataclass(frozen=True)
class DurableValid(Input):
    """A checkpoint became valid; ``boundary``: the last moment after the iteration it includes;
    ``identity``: see :class:`Restore`."""

    iteration: int
    path: str
    boundary: str = "save"
    identity: str = field(default="", compare=False)


@dataclass(frozen=True)
class CheckpointsFound(Input):
    """The checkpoints were looked at; ``gone``: the paths at which there is none any more."""

    gone: frozenset[str]


@dataclass(frozen=True)
class Paused(OfPlayer):
    """The member stands still at the start of the iteration after ``iteration``."""

    iteration: int


@dataclass(frozen=True)
class PauseRefused(OfPlayer):
    """The member is already past the wanted iteration: it is in ``iteration`` + 1."""

    iteration: int


@dataclass(frozen=True)
class MemberDone(OfPlayer):
    """The role has completed the last iteration; it stays interruptible. ``early``: how far it has
    come, where the program ended before. ``unsaved``: the last checkpoint, and why it is none."""

    early: str = ""
    unsaved: str = ""


@dataclass(frozen=True)
class Asked(Input):
    """A user has asked, and the journal has it (or cannot be waited for)."""

    request: Request


@dataclass(frozen=True)
class RequestsFound(Input):
    """Requests that earlier coordinators were asked. ``restarted``: all processes of the run had
    ended, so what was open is over, unless agents come that were there before."""

    requests: tuple[Request, ...]
    restarted: bool = False


@dataclass(frozen=True)
class Exported(Input):
    """The checkpoint of a request: at ``path``, or empty with an ``error``."""

    number: int
    iteration: int
    path: str
    error: str = ""


@dataclass(frozen=True)
class DrainRequested(Input):
    """A slow node's roles are to be moved away."""

    node: int


@dataclass(frozen=True)
class ProtectionRequested(Input):
    """A measurement wants the state protected by ``plan``; ``why`` in words."""

    plan: ProtectionPlan
    why: str


@dataclass(frozen=True)
class JournalWritten(Input):
    """The record of this epoch is durable."""

    epoch: int


@dataclass(frozen=True)
class JournalFailed(Input):
    """The record of this epoch cannot be made durable (another coordinator's, or a full disk)."""

    epoch: int
    text: str


@dataclass(frozen=True)
class Dumped(Input):
    """A node wrote its part of the generation to disk, or could not (``error``); ``boundary``: its
    extras as they were after that, empty for all that it holds. ``damaged``: what it has no intact
    bytes of and has not written for that, of this generation or others."""

    node: int
    generation: Generation
    error: str = ""
    boundary: str = ""
    damaged: frozenset[BadPart] = frozenset()


@dataclass(frozen=True)
class DumpExported(Input):
    """The generation that was dumped is a checkpoint at ``path``; empty: it came to nothing."""

    generation: Generation
    path: str


@dataclass(frozen=True)
class Diverged(Input):
    """A replayed step gave other numbers than the first time."""

    text: str


@dataclass(frozen=True)
class DumpRequested(Input):
    """The user wants the state saved and the run ended, to continue from there in another run.

    ``seconds``: what is left until something else ends the run; None where nothing does.
    """

    reason: str
    seconds: float | None = None


@dataclass(frozen=True)
class UserStop(Input):
    """Interrupt from the user; ``keeps``: for the same command to continue from what is in
    memory."""

    reason: str = "interrupted"
    keeps: bool = False
