"""Generations on the training side: start the copy, seal it in a helper thread, gate the update.

One iteration, as this module handles it (docs/design.md, "One iteration")::

    gate()             entry of the outermost optimizer.step: the generation that the next slot
                       write must not outrun is committed
    before_update(i)   right before inner update i: the running copy has left the shard
    after_update(i)    after inner update i: its copy into the idle slot starts
    complete(k)        the iteration is over: extras are captured, the remaining copies start, and a
                       helper thread hands the slot to the vault when the bytes have arrived

The vault seals, checks, ships and commits. Nothing here touches the network.

Cadence. With ``ProtectionPlan.every`` = n only generations of iterations that n divides are *due*,
and that of the first iteration of an epoch. The other iterations capture nothing, take no slot and
wait for no commit. They still have the fence before each update, since the copy of the last due
generation may still read the shard, and an update after a close must not happen (rule 11). Slots
and lag count due generations. Let p be a due iteration, p-n and p-2n the due iterations before it.
The slot for p is taken after the gate of p, right before the first inner update; where an update
is skipped, at the first byte. The argument for the gate (docs/design.md, "Slots and the gate")
holds for every n:

* 2+N slots. The slot for p holds p-2n (N = 0). The gate of p has waited for p-n in this role.
  Before any role overwrites anything in iteration p, the collective of that iteration has proved
  that all roles have entered their optimizer step, so have passed their gates of p: all of them
  have committed p-n. The iterations between need no gate, as they overwrite nothing. That
  collective is enqueued, and the host need not read its result (Megatron keeps the gradient norm
  on the device from 0.17 on). So before a slot is taken the host waits for the device.
* 3+N slots. The slot for p holds p-3n. The update of p depends, through the peers' forward and
  backward of p, on every role's update p-1, which is its update p-n or a later update; for these,
  too, the host has waited when it takes the slot. Each of them came after that role's gate of p-n,
  which had waited for p-2n: all roles have committed p-2n.

The first gate of an epoch waits even in an iteration that is not due: until then the generation
from which the epoch started may exist only once in memory.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import TypeVar

from torch import Tensor

from deadpool_megatron import failpoints
from deadpool_megatron.comms import EpochClosed
from deadpool_megatron.layout.records import Generation, RoleLayout, extras_part, is_due
from deadpool_megatron.platform import devices
from deadpool_megatron.settings import Settings
from deadpool_megatron.state.parts import Part
from deadpool_megatron.vault.errors import Frozen, Interrupted, VaultError
from deadpool_megatron.vault.vault_client import RestoredParts, SlotWriter, VaultClient

# Shorter waits are the cost of polling, not a stall.
_STALL_SECONDS = 0.001
_POLL_SECONDS = 0.05
_FROZEN_PAUSE_SECONDS = 0.005

_Answer = TypeVar("_Answer")


class ProtectionError(RuntimeError):
    """A generation could not be handed to the vault; the message has the reason."""


class ExtrasOutgrown(ProtectionError):
    """No slot has room for the extras; the message names the setting that gives more."""


class SlotViews:
    """Tensors over the parts of slots, made once for each slot: a part may have thousands.

    The slots of a process stay at their addresses as long as it has its role.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], list[Tensor]] = {}

    def of(self, part: Part, writer: SlotWriter) -> list[Tensor]:
        """Return CPU tensors over the part in the slot that is written, one per live tensor."""
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


class Protection:
    """The protection of one role in one process, for the main thread; see the module text.

    ``closed_epoch`` returns the newest closed epoch, ``interrupt_fd`` becomes readable at a close.
    ``report_wait(generation, seconds, over)`` reports long waits. All waits end by EpochClosed on
    an interrupt. ``is_due``: the announced generation is to be captured, so :meth:`complete` has to
    follow. ``is_gated``: an announced due generation has passed :meth:`gate`.
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
        self._epoch, self._every = 0, 1
        self._upcoming = self._newest_due = self._handed_over = Generation(0, 0)
        self.is_due, self._is_first_gate, self.is_gated = True, False, False
        self._writer: SlotWriter | None = None
        self._views = SlotViews()
        self._copies: dict[int, devices.CopyHandle] = {}
        # Newest last: (generation, boundary) whose commit the gate may have to await.
        self._pending: deque[tuple[Generation, str]] = deque(maxlen=settings.max_lag + 1)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._failure: str | None = None
        self._sealer: threading.Thread | None = None
        self._enter_thread = platform.thread_entry()
        self._pinned = pinned
        self.copied_parts = [part.name for part in parts if part.nbytes]

    def enter(self, epoch: int, every: int = 1) -> None:
        """Begin ``epoch``: no copy is under way, and the vault knows this role and its layout.

        ``every``: the cadence of the epoch's record. The vault may have to make the slots first.
        """
        self._epoch, self._every = epoch, every
        self._is_first_gate, self._failure = False, None
        self._pending.clear()
        try:
            self._vault.register(self.layout, epoch, self._interrupt_fd)
        except Interrupted as error:
            raise EpochClosed(epoch, "the slots of the role") from error
        self._pinned.keep_only(self._vault.slot_views(self.copied_parts))

    def begin_from(self, generation: Generation, boundary: str) -> None:
        """After a restore: the next gate waits until ``generation`` is committed again."""
        self._pending.extend([(generation, boundary)] * (self._settings.max_lag + 1))
        self._newest_due = generation
        self._is_first_gate = True

    def gate(self) -> None:
        """Wait until the next update may overwrite the oldest slot."""
        if not self._epoch:
            return  # warming up: nothing is protected yet
        failpoints.hit("gate")
        if not (self.is_due or self._is_first_gate):
            return  # no slot is taken in this iteration
        self._is_first_gate, self.is_gated = False, True
        self._await_sealer()
        if len(self._pending) > self._settings.max_lag:
            self._await_commit(*self._pending[0])

    def await_committed(self) -> None:
        """Wait until the newest generation is committed (end of run, planned swap)."""
        self._await_sealer()
        if self._pending:
            self._await_commit(*self._pending[-1])

    def end(self) -> None:
        """Wait until the last generation of the run is committed."""
        self.await_committed()
        self._vault.report_end()

    def fence(self) -> None:
        """Before an inner update: no copy may still read the shard, the epoch must be open."""
        if not self._epoch:
            return
        if self._interrupted():
            raise EpochClosed(self._epoch, "the update of the optimizer")
        self._await_sealer()

    def before_update(self, index: int) -> None:
        """Fence inner update ``index``, and take a slot."""
        self.fence()
        if self._epoch and self.is_due:
            self._open_slot()
        if index in self._copies:  # the copy of an earlier update of this iteration: copy again
            self._await("the copy of an update into its slot", self._copies[index].wait)
            del self._copies[index]

    def after_update(self, index: int) -> None:
        """Start copying the part of inner update ``index`` into the idle slot."""
        if self._epoch and self.is_due and index not in self._copies:
            part = self._parts[index]
            views = self._views.of(part, self._open_slot())
            self._copies[index] = self._platform.side_copy(views, part.tensors)

    def complete(self, extras: bytes, boundary: str = "step") -> None:
        """End the due iteration that was announced last, with its encoded ``extras``.

        ``boundary``: the last segment that the state includes. Starts the copies that no update has
        started (a skipped update changes no state, but its generation is sealed like any other) and
        returns without waiting for a copy.
        """
        self._check_extras_fit(extras, boundary)
        # Waits only if an iteration passed without a gate: there is one job at a time.
        self._await_sealer()
        for index in range(len(self._parts)):
            self.after_update(index)
        copies, writer = list(self._copies.values()), self._open_slot()
        self._writer, self._copies = None, {}
        self._idle.clear()
        self._handed_over = self._upcoming
        if self._sealer is None:
            sealer = threading.Thread(target=self._seal_jobs, name="deadpool-sealer", daemon=True)
            sealer.start()
            self._sealer = sealer
        self._jobs.put(_Job(writer, tuple(copies), extras, boundary))
        self._pending.append((self._upcoming, boundary))
        self._newest_due = self._upcoming

    def append(self, generation: Generation, boundary: str, extras: bytes) -> None:
        """Add the extras after segment ``boundary`` to the newest generation (:meth:`holds`)."""
        self._check_extras_fit(extras, boundary)
        self._await_sealer()
        if self._interrupted():
            raise EpochClosed(self._epoch, "extras of a segment")
        part = extras_part(boundary)
        self._retry_while_frozen(
            "extras of a segment", lambda: self._vault.append(generation, part, extras)
        )
        self._pending[-1] = (generation, boundary)

    def announce(self, generation: Generation, *, first: bool = False) -> None:
        """Name the generation that the coming updates make; the ``first`` of a lineage is due.

        Whether another generation is due follows from the iteration alone, so all roles agree.
        """
        self._upcoming, self.is_gated = generation, False
        self.is_due = first or is_due(generation.iteration, self._every)

    def holds(self, generation: Generation) -> bool:
        """Return whether ``generation`` is the newest generation that was completed or restored, so
        that segments can be appended to it."""
        return generation == self._newest_due

    def restore(self, restored: RestoredParts) -> None:
        """Load all shard parts into the live tensors, asynchronously if the slots are
        page-locked."""
        start, limit = self._platform.side_copy, self._settings.restore_seconds
        found = [(part.tensors, part.views(restored.part(part.name))) for part in self._parts]
        for copy in [start(live, views) for live, views in found]:
            self._wait("restored state on the device", copy.wait, limit)

    def quiesce(self, deadline_seconds: float) -> bool:
        """After an interrupt, wait until no copy reads the shard, and drop the open generation.

        False if a copy has not ended in time or has failed: the process cannot continue.
        """
        limit = time.monotonic() + deadline_seconds
        done = self._idle.wait(deadline_seconds)
        for copy in self._copies.values():
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

    def _open_slot(self) -> SlotWriter:
        """Return the slot of the announced generation, taken after the gate and after the device
        has reached the collective of all roles: see the module text."""
        if self._writer is None:
            # A peer may take that long. A hang is found, and the epoch is closed, earlier.
            limit = self._settings.first_step_seconds
            self._wait("an answer of every role", self._platform.catch_up, limit)
            if self._interrupted():  # an abort releases the device, too
                raise EpochClosed(self._epoch, "the choice of a slot")
            self._writer = self._begin(self._upcoming)
            self._pinned.pin(self._writer.part(name) for name in self.copied_parts)
        return self._writer

    def _begin(self, generation: Generation) -> SlotWriter:
        return self._retry_while_frozen(
            "the choice of a slot", lambda: self._vault.begin(generation, self._epoch)
        )

    def _retry_while_frozen(self, operation: str, action: Callable[[], _Answer]) -> _Answer:
        """Call ``action``, which writes into a slot, until the slots are not frozen.

        The vault freezes its slots before the member receives the close. A vault that has just
        restarted freezes them as well, until its agent has sent it the open epoch. Retry as long as
        peers would wait; after that the vault is at fault (VaultError).
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
                    raise VaultError(
                        f"{operation}: frozen for {limit:g} s, though epoch {self._epoch} is open"
                    ) from error
                if waited > report_at:  # without a report, this would look like a hang of this role
                    self._report_wait(self._upcoming, waited, False)
                    report_at = waited + settings.gate_report_seconds
            else:
                self._count_stall(self._upcoming, waited)
                return answer
            time.sleep(_FROZEN_PAUSE_SECONDS)

    def _check_extras_fit(self, extras: bytes, boundary: str) -> None:
        capacity = next(p.nbytes for p in self.layout.parts if p.name == extras_part(boundary))
        if len(extras) > capacity:
            more = ceil(2 * len(extras) / 1e6)
            raise ExtrasOutgrown(
                "the extras (counters, log sums, buffers) have grown to"
                f" {len(extras)} bytes, there is room for {capacity}: continue with"
                f" --deadpool-extras-room-mb {more}, or more if it still grows"
            )

    def _await_sealer(self) -> None:
        """Wait until the slot of the last generation was handed over. Raises EpochClosed or
        ProtectionError."""
        self._await("the copy of a generation into its slot", self._idle.wait)
        if self._failure is not None:
            if self._interrupted():
                raise EpochClosed(self._epoch, self._failure)
            raise ProtectionError(self._failure)

    def _await(self, operation: str, wait: Callable[[float], bool]) -> None:
        """Call ``wait`` (seconds -> done) until it returns True, and count the time as a stall.
        Raises EpochClosed or ProtectionError."""
        started = time.monotonic()
        self._wait(operation, wait, self._settings.operation_timeout_seconds)
        self._count_stall(self._handed_over, time.monotonic() - started)

    def _wait(self, operation: str, wait: Callable[[float], bool], limit_seconds: float) -> None:
        limit = time.monotonic() + limit_seconds
        while not wait(_POLL_SECONDS):
            if self._interrupted():
                raise EpochClosed(self._epoch, operation)
            if time.monotonic() > limit:
                raise ProtectionError(f"{operation}: still waiting after {limit_seconds:g} s")

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
                # The main thread raises this error at its next wait; no part was sealed.
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
        job.writer.fill({**sizes, name: len(job.extras)})
        failpoints.hit("snapshot.filled", iteration=job.writer.generation.iteration)
