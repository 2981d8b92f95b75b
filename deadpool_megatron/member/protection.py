"""Generations on the training side: start the copy, seal behind training's back, gate the update.

One iteration, as this module sees it (design, section 4)::

    gate()        entry of the outermost optimizer.step: the generation that the next slot write
                  must not outrun is committed
    fence()       before each inner update: the running copy has left the shard
    using(i)      right before inner update i: what it uses is kept, where the scheme wants it
    updated(i)    after inner update i: its copy into the idle slot starts
    complete(k)   the iteration is over: extras are captured, the rest of the copies started,
                  and a helper thread hands the slot to the vault when the bytes have arrived

The vault seals, checks, ships and commits. Nothing here touches the network.

Cadence. With ``ProtectionPlan.every`` = n only generations of iterations that n divides are *due*,
and the first one of an epoch. In the other iterations nothing is captured, no slot is taken and no
commit waited for; what stays is the fence, since the copy of the last due generation may still read
the shard, and an update after a close must not happen (rule 11). Slots and lag count due
generations. Let p be a due iteration, p-n and p-2n the ones before it; the slot for p is taken
after the gate of p, right before the first inner update; where an update is skipped, at the first
byte. The gate's argument (design, section 4) holds for every n:

* 2+N slots. The slot for p holds p-2n (N = 0). The gate of p has waited for p-n in this role, and
  before any role overwrites anything in iteration p the collective of that iteration has told it
  that all roles have entered their optimizer step, so have passed their gates of p: all of them
  have committed p-n. The iterations between need no gate, for nothing is overwritten in them.
  That collective is enqueued; where the host does not read its result (Megatron keeps the gradient
  norm on the device from 0.17 on), the host has been told nothing. So before a slot is taken the
  host waits until the device has come that far.
* 3+N slots. The slot for p holds p-3n. The update of p depends, through the peers' forward and
  backward of p, on every role's update p-1, which is its update p-n or a later one; for these, too,
  the host has waited when it takes the slot. Each of them came after that role's gate of p-n, which
  had waited for p-2n: all roles have committed p-2n.

The first gate of an epoch waits in whatever iteration it comes: until then the generation that the
epoch has begun with may be in memory once only.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, TypeVar

from torch import Tensor

from deadpool_megatron import failpoints
from deadpool_megatron.comms import EpochClosed
from deadpool_megatron.layout.records import Generation, RoleLayout, extras_part, is_due
from deadpool_megatron.member.update_capture import UpdateCapture
from deadpool_megatron.platform import devices
from deadpool_megatron.settings import Settings
from deadpool_megatron.state.parts import Part
from deadpool_megatron.vault.errors import Frozen, Interrupted, VaultError
from deadpool_megatron.vault.member import RestoredParts, SlotWriter, VaultClient
from deadpool_megatron.vault.shm.segment import checksum

# Shorter waits are the price of looking, not a stall.
_STALL_SECONDS = 0.001
_POLL_SECONDS = 0.05
_FROZEN_PAUSE_SECONDS = 0.005

_Answer = TypeVar("_Answer")


class ProtectionError(RuntimeError):
    """A generation could not be handed to the vault; the message says why."""


class ExtrasOutgrown(ProtectionError):
    """No slot has room for the extras; the message names the setting that gives more."""


class SlotViews:
    """Tensors over the parts of slots, made once for each slot: a part may have thousands.

    Of one process, whose slots stay where they are as long as it plays its role.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], list[Tensor]] = {}

    def of(self, part: Part, writer: SlotWriter) -> list[Tensor]:
        """Returns CPU tensors over the part in the slot that is written, one per live tensor."""
        buffer = writer.part(part.name)
        if not part.nbytes:  # memory without bytes has no address
            return part.views(buffer)
        place = part.name, devices.host_range(buffer)[0]
        if place not in self._known:
            self._known[place] = part.views(buffer)
        return self._known[place]


@dataclass(frozen=True)
class _Job:
    """A slot whose bytes are on their way."""

    writer: SlotWriter
    copies: tuple[devices.CopyHandle, ...]
    extras: bytes
    boundary: str
    other_sizes: Mapping[str, int]


class Protection:
    """Main-thread object of one role in one process; see the module text.

    ``closed_epoch`` answers the newest closed epoch, ``interrupt_fd`` becomes readable at a close.
    ``report_wait(generation, seconds, over)`` tells of long waits. All waits end by EpochClosed on
    an interrupt. ``is_gated``: a due generation that was announced has passed :meth:`gate`.
    """

    def __init__(
        self,
        vault: VaultClient,
        platform: devices.Platform,
        settings: Settings,
        parts: list[Part],
        layout: RoleLayout,
        interrupt_fd: int,
        closed_epoch: Callable[[], int],
        report_wait: Callable[[Generation, float, bool], None],
        pinned: devices.PinnedSlots,
        updates: UpdateCapture | None = None,
    ) -> None:
        self.layout = layout
        self.stall_seconds = 0.0
        self._vault = vault
        self._platform = platform
        self._settings = settings
        self._parts = parts
        self._interrupt_fd = interrupt_fd
        self._closed_epoch = closed_epoch
        self._report_wait = report_wait
        self._updates = updates or UpdateCapture()
        self._epoch, self._every = 0, 1
        self._upcoming = self._newest_due = self._handed_over = Generation(0, 0)
        self._upcoming_is_due, self._owes, self.is_gated = True, False, False
        # Whose state the coming updates begin from; None until there is one in this epoch.
        self._previous: Generation | None = None
        self._writer: SlotWriter | None = None
        self._views = SlotViews()
        self._copies: dict[int, devices.CopyHandle] = {}
        # Newest last: (generation, boundary) that the gate may have to see committed.
        self._pending: deque[tuple[Generation, str]] = deque(maxlen=settings.max_lag + 1)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._failure: str | None = None
        self._sealer: threading.Thread | None = None
        self._enter_thread = platform.thread_entry()
        self._pinned = pinned
        copied = [*parts, *self._updates.gradients]
        self.copied_parts = [part.name for part in copied if part.nbytes]

    def enter(self, epoch: int, every: int = 1, *, with_steps: bool = False) -> None:
        """Begin epoch ``epoch``: nothing is under way; the vault knows this role and its layout.

        ``every``: the cadence of the epoch's record; ``with_steps``: gradients are kept, which
        needs a cadence of 1. The vault may have to make the slots first.
        """
        self._epoch, self._every = epoch, every
        self._owes, self._previous, self._failure = False, None, None
        self._updates.begin(wanted=with_steps)
        self._pending.clear()
        try:
            self._vault.register(self.layout, epoch, self._interrupt_fd)
        except Interrupted as error:
            raise EpochClosed(epoch, "the slots of the role") from error
        self._pinned.keep_only(self._vault.slot_views(self.copied_parts))

    def owe(self, generation: Generation, boundary: str) -> None:
        """After a restore: the very next gate waits until ``generation`` is committed again."""
        self._pending.extend([(generation, boundary)] * (self._settings.max_lag + 1))
        self._newest_due = generation
        self._owes = True
        self._previous = generation

    def gate(self) -> None:
        """Wait until the update about to come may overwrite what it will overwrite."""
        if not self._epoch:
            return  # warming up: nothing is protected yet
        failpoints.hit("gate")
        if not (self._upcoming_is_due or self._owes):
            return  # no slot is taken in this iteration
        self._owes, self.is_gated = False, True
        self._await_sealer()
        if len(self._pending) > self._settings.max_lag:
            self._await_commit(*self._pending[0])

    def settle(self) -> None:
        """Wait until the newest generation is committed (end of run, planned swap)."""
        self._await_sealer()
        if self._pending:
            self._await_commit(*self._pending[-1])

    def end(self) -> None:
        """Wait until all is committed that the run has made; nothing newer will come."""
        self.settle()
        self._vault.ended()

    def fence(self) -> None:
        """Before an inner update: no copy may still read the shard, the epoch must be open."""
        if not self._epoch:
            return
        if self._interrupted():
            raise EpochClosed(self._epoch, "the update of the optimizer")
        self._await_sealer()

    def using(self, index: int) -> None:
        """The fence; a slot for what inner update ``index`` makes; copies of what it will use."""
        self.fence()
        if self._epoch and self._upcoming_is_due:
            self._slot()
        if index in self._copies:  # of an update before, in this iteration: it is copied again
            self._await("the copy of an update into its slot", self._copies[index].wait)
            del self._copies[index]
        if self._writer is not None:
            self._updates.capture(index, self._writer)

    def updated(self, index: int) -> None:
        """Inner update ``index`` is done: start copying its part into the idle slot."""
        if self._epoch and self._upcoming_is_due and index not in self._copies:
            part = self._parts[index]
            views = self._views.of(part, self._slot())
            self._copies[index] = self._platform.side_copy(views, part.tensors)

    def complete(self, extras: bytes, boundary: str = "step") -> None:
        """The due iteration announced last is over; ``extras`` are its encoded extras, as they are
        at ``boundary``: a later one for state of which the segments before it are part already.

        Starts the copies that no update has started (a skipped update changes nothing, but its
        generation is sealed like any other) and returns without waiting for any.
        """
        self._check_room(extras, boundary)
        # At once, unless an iteration went by without a gate: one job at a time.
        self._await_sealer()
        for index in range(len(self._parts)):
            self.updated(index)
        copies, writer = list(self._copies.values()), self._slot()
        sizes, captured = self._updates.finish(
            writer, self._upcoming, self._previous, copies, self._await
        )
        copies += captured
        self._writer, self._copies = None, {}
        self._idle.clear()
        self._handed_over = self._previous = self._upcoming
        if self._sealer is None:
            sealer = threading.Thread(target=self._seal_jobs, name="deadpool-sealer", daemon=True)
            sealer.start()
            self._sealer = sealer
        self._jobs.put(_Job(writer, tuple(copies), extras, boundary, sizes))
        self._pending.append((self._upcoming, boundary))
        self._newest_due = self._upcoming

    def append(self, generation: Generation, boundary: str, extras: bytes) -> None:
        """Add the extras as they are after segment ``boundary`` to a generation handed over, which
        :meth:`holds` it."""
        self._check_room(extras, boundary)
        self._await_sealer()
        if self._interrupted():
            raise EpochClosed(self._epoch, "extras of a segment")
        self._unless_frozen(
            "extras of a segment",
            lambda: self._vault.append(generation, extras_part(boundary), extras),
        )
        self._pending[-1] = (generation, boundary)

    def announce(self, generation: Generation, *, first: bool = False) -> None:
        """Name the generation that the coming updates make; the ``first`` of a line is always due.

        The same for all roles, by the number of the iteration alone. Gradients of the iteration
        before may be overwritten from now on.
        """
        self._updates.order_copies(self._await)
        self._upcoming, self.is_gated = generation, False
        self._upcoming_is_due = first or is_due(generation.iteration, self._every)

    @property
    def is_wanted(self) -> bool:
        """Return whether the generation announced last is due, so that :meth:`complete` has to
        follow."""
        return self._upcoming_is_due

    def holds(self, generation: Generation) -> bool:
        """Return whether ``generation`` is the newest one handed over or restored: its segments
        count."""
        return generation == self._newest_due

    def restore(self, restored: RestoredParts, generation: Generation) -> Mapping[str, Any]:
        """Bring all shard parts of ``generation`` into the live tensors.

        Those that nobody holds whole are recomputed, compared with the owner's checksums and handed
        to the vault. Returns what is to be reported of that, empty if nothing was recomputed.
        """
        held = [part for part in self._parts if part.name in restored.names]
        missing = [part for part in self._parts if part.name not in restored.names]
        self.load((part, restored.part(part.name)) for part in held)
        return self._updates.recompute(missing, restored, generation, self) if missing else {}

    def load(self, restored: Iterable[tuple[Part, memoryview]]) -> None:
        """Bring restored bytes into live tensors; asynchronous out of page-locked slots."""
        start, limit = self._platform.side_copy, self._settings.restore_seconds
        for copy in [start(part.tensors, part.views(found)) for part, found in restored]:
            self._wait("restored state on the device", copy.wait, limit)

    def seal_replayed(self, generation: Generation, sums: Mapping[str, tuple[int, int]]) -> str:
        """Hand over the restored ``generation``, whose parts in ``sums`` have been recomputed.

        ``sums``: shard part -> (bytes, checksum) that the owner had. Returns the first part whose
        bytes are others; then nothing is handed over. Empty when all are the same.
        """
        writer = self._unless_frozen(
            "the choice of a slot", lambda: self._vault.begin(generation, self._epoch)
        )
        chosen = [part for part in self._parts if part.name in sums]
        for part in chosen:
            copy = self._platform.side_copy(self._views.of(part, writer), part.tensors)
            self._await("the copy of a recomputed generation into its slot", copy.wait)
        for part in chosen:
            found = part.nbytes, checksum(writer.part(part.name))
            if found != sums[part.name]:
                writer.abandon()
                return part.name
        writer.fill({part.name: part.nbytes for part in chosen})
        return ""

    def quiesce(self, deadline_seconds: float) -> bool:
        """After an interrupt: wait until no copy reads the shard; drop what was under way.

        False when a copy has not ended in time, or with an error: the process cannot continue.
        """
        limit = time.monotonic() + deadline_seconds
        done = self._idle.wait(deadline_seconds)
        for copy in [*self._copies.values(), *self._updates.running()]:
            try:
                done = copy.wait(max(0.0, limit - time.monotonic())) and done
            except devices.CopyFailedError:
                done = False
        self._copies = {}
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None
        self._pending.clear()
        return done

    def close(self) -> None:
        """End the helper thread."""
        if self._sealer is not None:
            self._jobs.put(None)
            self._sealer.join(self._settings.drain_seconds)
            self._sealer = None

    def _await_commit(self, generation: Generation, boundary: str) -> None:
        started = time.monotonic()
        is_committed = self._vault.wait_committed(
            generation,
            boundary,
            interrupted=self._interrupt_fd,
            on_wait=lambda seconds: self._report_wait(generation, seconds, False),
            report_every_seconds=self._settings.gate_report_seconds,
        )
        self._count_stall(generation, time.monotonic() - started)
        if not is_committed or self._interrupted():
            raise EpochClosed(self._epoch, f"commit of iteration {generation.iteration}")

    def _interrupted(self) -> bool:
        return self._closed_epoch() >= self._epoch

    def _slot(self) -> SlotWriter:
        """The slot of the announced generation, taken after the gate and after a word from all
        roles has come to this host: see the module text."""
        if self._writer is None:
            # As long as a peer may take; who hangs is found, and the epoch closed, before that.
            limit = self._settings.first_step_seconds
            self._wait("an answer of every role", self._platform.catch_up, limit)
            if self._interrupted():  # an abort lets a device go on, too
                raise EpochClosed(self._epoch, "the choice of a slot")
            self._writer = self._unless_frozen(
                "the choice of a slot", lambda: self._vault.begin(self._upcoming, self._epoch)
            )
            self._pinned.pin(self._writer.part(name) for name in self.copied_parts)
        return self._writer

    def _unless_frozen(self, operation: str, action: Callable[[], _Answer]) -> _Answer:
        """Call ``action``, which writes into a slot.

        The vault freezes its slots before the member hears of the close. But one that was just
        restarted freezes them as well, until the agent has told it, or the vault after it, which
        epoch is open. Look again as long as peers wait; then it is the vault's fault (VaultError).
        """
        settings, started, waited = self._settings, time.monotonic(), 0.0
        limit, report_at = settings.operation_timeout_seconds, settings.gate_report_seconds
        while True:
            try:
                answer = action()
            except Frozen as error:
                waited = time.monotonic() - started
                if self._interrupted():
                    raise EpochClosed(self._epoch, operation) from error
                if waited > limit:
                    why = f"{operation}: frozen for {limit:g} s, though epoch {self._epoch} is open"
                    raise VaultError(why) from error
                if waited > report_at:  # else it would look like a hang of this role
                    self._report_wait(self._upcoming, waited, False)
                    report_at = waited + settings.gate_report_seconds
            else:
                self._count_stall(self._upcoming, waited)
                return answer
            time.sleep(_FROZEN_PAUSE_SECONDS)

    def _check_room(self, extras: bytes, boundary: str) -> None:
        capacity = next(p.nbytes for p in self.layout.parts if p.name == extras_part(boundary))
        if len(extras) > capacity:
            more = ceil(2 * len(extras) / 1e6)
            raise ExtrasOutgrown(
                "the extras (counters, log sums, buffers) have grown to"
                f" {len(extras)} bytes, there is room for {capacity}: continue with"
                f" --deadpool-extras-room-mb {more}, or more if it still grows"
            )

    def _await_sealer(self) -> None:
        """Wait until the slot of the last generation is handed over. Raises as all waits do."""
        self._await("the copy of a generation into its slot", self._idle.wait)
        if self._failure is not None:
            if self._interrupted():
                raise EpochClosed(self._epoch, self._failure)
            raise ProtectionError(self._failure)

    def _await(self, what: str, wait: Callable[[float], bool]) -> None:
        """Call ``wait`` (seconds -> done) until it is done; a stall. Raises as all waits do."""
        started = time.monotonic()
        self._wait(what, wait, self._settings.operation_timeout_seconds)
        self._count_stall(self._handed_over, time.monotonic() - started)

    def _wait(self, what: str, wait: Callable[[float], bool], limit_seconds: float) -> None:
        limit = time.monotonic() + limit_seconds
        while not wait(_POLL_SECONDS):
            if self._interrupted():
                raise EpochClosed(self._epoch, what)
            if time.monotonic() > limit:
                raise ProtectionError(f"{what}: still waiting after {limit_seconds:g} s")

    def _count_stall(self, generation: Generation, seconds: float) -> None:
        if seconds > _STALL_SECONDS:
            self.stall_seconds += seconds
            self._report_wait(generation, seconds, True)

    def _seal_jobs(self) -> None:
        self._enter_thread()
        while (job := self._jobs.get()) is not None:
            try:
                self._seal(job)
            except Exception as error:
                # Shown by the main thread at its next gate; nothing was sealed.
                self._failure = f"generation {job.writer.generation} was not handed over: {error}"
            finally:
                self._idle.set()

    def _seal(self, job: _Job) -> None:
        limit = self._settings.operation_timeout_seconds
        failpoints.hit("snapshot.copy", iteration=job.writer.generation.iteration)
        for copy in job.copies:
            if not copy.wait(limit):
                raise ProtectionError(f"copy not finished within {limit:g} s")
        name = extras_part(job.boundary)
        job.writer.part(name)[: len(job.extras)] = job.extras
        if self._interrupted():
            # Rule 11: the epoch may have been closed before the last byte was computed.
            job.writer.abandon()
            return
        sizes = {part.name: part.nbytes for part in self._parts}
        job.writer.fill({**sizes, **job.other_sizes, name: len(job.extras)})
        failpoints.hit("snapshot.filled", iteration=job.writer.generation.iteration)
