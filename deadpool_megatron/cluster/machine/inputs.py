"""Inputs of the coordinator's state machine; its output is in actions.

Plain frozen data. An input about a member carries its incarnation, and an input of an epoch carries
the epoch: the machine refuses stale inputs. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deadpool_megatron.cluster.journal.user_requests import Request
from deadpool_megatron.failures import FailureKind, process_name
from deadpool_megatron.layout.records import BadPart, Generation, Inventory, RoleLayout
from deadpool_megatron.layout.schemes import ProtectionPlan
from deadpool_megatron.layout.sizes import Sizes
from deadpool_megatron.preflight.eligibility import HostFacts


class Input:
    """Base class of all inputs."""


@dataclass(frozen=True)
class Tick(Input):
    """The passage of time, at least ten times a second: all deadlines are checked here."""


@dataclass(frozen=True)
class NodeJoined(Input):
    """The connection of an agent, for the first time or to a new coordinator.

    ``members``: local rank -> incarnation of its running process; ``incarnations``: local rank ->
    the highest that was ever started there. ``epoch``: the epoch of the agent's record; ``closed``:
    the newest epoch that it has closed (0: none); ``restored``: local rank -> the epoch that the
    member there restored last; ``memory_bytes``: the node's shared memory for generations (0: not
    known); ``found``: the node's memory as the agent found it at its start, None once it has
    adopted a record. ``returns``: the data outlives the agent, and another agent may return with
    it. ``facts``: the agent's report about its host, if any.
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
    """A repeated health check of a node without a role, or of a node with a failed device."""

    node: int
    facts: HostFacts


@dataclass(frozen=True)
class NodeLost(Input):
    """A verdict on a node: its connection closed, it is silent, or it was ordered to leave. This
    node id never comes back.

    ``silent_seconds``: time from the last sign of life to this verdict. ``kind``: lost, cut or
    frozen.
    """

    node: int
    cause: str
    silent_seconds: float = 0.0
    kind: FailureKind = FailureKind.NODE_LOST


@dataclass(frozen=True)
class AgentEnded(Input):
    """A proof that the agent of a node has ended; it counts while the node is awaited after a
    takeover."""

    node: int


@dataclass(frozen=True)
class OfMember(Input):
    """Base of inputs about a member: its node, local rank and incarnation."""

    node: int
    local_rank: int
    incarnation: int

    @property
    def place(self) -> tuple[int, int]:
        """Return the node and local rank."""
        return self.node, self.local_rank

    @property
    def process(self) -> str:
        """Return the process as text."""
        return process_name(self.node, self.local_rank, self.incarnation)


@dataclass(frozen=True)
class FromRole(OfMember):
    """Base of inputs that only a process with a role in the open epoch may send."""

    epoch: int


@dataclass(frozen=True)
class MemberHello(OfMember):
    """The first message of a process that runs."""

    pid: int = 0


@dataclass(frozen=True)
class MemberWarm(OfMember):
    """The report of a member without a seat that it has built detached and is parked."""


@dataclass(frozen=True)
class MemberRegistered(OfMember):
    """The report of a member that it has built, and that its vault knows its segment. ``sizes``:
    the sizes that the program can have, None if the member does not know them."""

    layout: RoleLayout
    sizes: Sizes | None = None


@dataclass(frozen=True)
class MemberLost(OfMember):
    """The end of a reaped process: it exited with ``exit_code``, or died of ``signal``.

    ``ordered``: its agent killed it, which is no evidence about the process itself.
    """

    exit_code: int | None = None
    signal: int | None = None
    last_line: str = ""
    ordered: bool = False


@dataclass(frozen=True)
class MemberSuspected(OfMember):
    """A verdict: a member is frozen or unreachable. The machine has it killed and replaced."""

    cause: str
    silent_seconds: float = 0.0


@dataclass(frozen=True)
class RolesHung(Input):
    """A verdict: no role makes progress, and ``roles`` (perhaps none) block the other roles.
    ``table``: the position of each role, as in the HANG event. ``still_seconds``: time since the
    last progress."""

    epoch: int
    roles: tuple[int, ...]
    cause: str
    table: Mapping[str, Any]
    still_seconds: float = 0.0


@dataclass(frozen=True)
class MemberFault(FromRole):
    """Failed communication of a member. It is mostly a consequence, so a better cause has 0.5 s to
    arrive."""

    text: str


@dataclass(frozen=True)
class MemberRaised(FromRole):
    """An exception of a role; ``text``: its last line. The process ends within 0.5 s, unless the
    epoch is closed for another cause before."""

    text: str


@dataclass(frozen=True)
class NodeInventory(Input):
    """The inventory that a node's vault promises after it has closed the epoch."""

    inventory: Inventory


@dataclass(frozen=True)
class Restored(FromRole):
    """The report of a member that it has restored the record's state, and that its peers have the
    same state."""

    generation: Generation


@dataclass(frozen=True)
class NotRestored(FromRole):
    """A failed restore: no source of ``part`` gave good bytes. ``part`` is empty if the failure is
    not of a part (peers' hashes differ). ``other_program``: the state is of another model, or of
    other flags."""

    part: str
    text: str
    other_program: bool = False


@dataclass(frozen=True)
class SizeFailed(FromRole):
    """The report of a role that it cannot train at the size of the record: ``text`` has the reason,
    such as too little memory, or state that cannot be cut. Its process stays."""

    text: str


@dataclass(frozen=True)
class AuditFailed(FromRole):
    """A difference between peers in ``subject`` in ``iteration``, whose generation they do not
    protect. If ``certain``, all ``roles`` are wrong, otherwise at least some of them."""

    iteration: int
    roles: tuple[int, ...]
    certain: bool
    subject: str


@dataclass(frozen=True)
class PhaseReported(Input):
    """The time of a member or vault in a phase of a recovery; the longest time in each phase
    counts. ``exposed``: time from the loss until a vault has sent all copies that it owed."""

    epoch: int
    phase: str
    seconds: float
    exposed: float = 0.0


@dataclass(frozen=True)
class StepReported(Input):
    """An iteration that some role has completed; its log lines were accepted."""

    epoch: int
    iteration: int


@dataclass(frozen=True)
class NotFinite(Input):
    """A non-finite number in an iteration of a role: ``number`` is its name (see failures),
    ``value`` its text: nan, inf or -inf. The role stops at this iteration."""

    epoch: int
    node: int | None
    role: int | None
    iteration: int
    number: str
    value: str


@dataclass(frozen=True)
class StackReported(Input):
    """The position of a process that hung; a single line."""

    text: str


@dataclass(frozen=True)
class DurableValid(Input):
    """A checkpoint that became valid. ``boundary``: the last moment after the iteration that the
    checkpoint includes; ``identity``: see :class:`Restore`."""

    iteration: int
    path: str
    boundary: str = "save"
    identity: str = field(default="", compare=False)


@dataclass(frozen=True)
class CheckpointsFound(Input):
    """The result of InspectCheckpoints; ``missing``: paths at which no checkpoint is left."""

    missing: frozenset[str]


@dataclass(frozen=True)
class Paused(FromRole):
    """The report of a member that pauses at the start of the iteration after ``iteration``."""

    iteration: int


@dataclass(frozen=True)
class PauseRefused(FromRole):
    """The report of a member that it is past the requested iteration, in ``iteration`` + 1."""

    iteration: int


@dataclass(frozen=True)
class MemberDone(FromRole):
    """The end of a role's last iteration; its process stays interruptible. ``early``: how far the
    program came, if it ended before its last iteration. ``unsaved``: the name of the last
    checkpoint and why it is not valid, if so."""

    early: str = ""
    unsaved: str = ""


@dataclass(frozen=True)
class RequestMade(Input):
    """A request of a user. It is journalled, unless it could not wait for the journal."""

    request: Request


@dataclass(frozen=True)
class RequestsFound(Input):
    """Requests made to earlier coordinators. ``restarted``: all processes of the run seem to have
    ended, so open requests are over, unless earlier agents come back."""

    requests: tuple[Request, ...]
    restarted: bool = False


@dataclass(frozen=True)
class Exported(Input):
    """The checkpoint of a request: at ``path``, or an empty path with an ``error``."""

    number: int
    iteration: int
    path: str
    error: str = ""


@dataclass(frozen=True)
class DrainRequested(Input):
    """A request to move the roles of a slow node away."""

    node: int


@dataclass(frozen=True)
class ProtectionRequested(Input):
    """A request, due to a measurement, to protect the state by ``plan``; ``reason``: a text."""

    plan: ProtectionPlan
    reason: str


@dataclass(frozen=True)
class JournalWritten(Input):
    """Notice that the record of this epoch is durable."""

    epoch: int


@dataclass(frozen=True)
class JournalFailed(Input):
    """Notice that the record of this epoch cannot be durable (another coordinator, or a full
    disk)."""

    epoch: int
    text: str


@dataclass(frozen=True)
class Dumped(Input):
    """The report of a node that its parts of the generation are on disk, unless there is an
    ``error``. ``boundary``: the boundary of the extras, empty if the node has written all its
    generations. ``damaged``: parts, of this generation or others, that the node has not written
    because it has no intact bytes of them."""

    node: int
    generation: Generation
    error: str = ""
    boundary: str = ""
    damaged: frozenset[BadPart] = frozenset()


@dataclass(frozen=True)
class DumpExported(Input):
    """The end of ExportDump: the checkpoint is at ``path``, which is empty after a failure."""

    generation: Generation
    path: str


@dataclass(frozen=True)
class Diverged(Input):
    """A replayed step that gave other numbers than the first time."""

    text: str


@dataclass(frozen=True)
class DumpRequested(Input):
    """A request to save the state and end the run, to continue from there in another run.

    ``seconds``: time left until something else ends the run; None if nothing does.
    """

    reason: str
    seconds: float | None = None


@dataclass(frozen=True)
class UserStop(Input):
    """An interrupt from the user; ``keeps``: the same command may continue from the state in
    memory."""

    reason: str = "interrupted"
    keeps: bool = False
