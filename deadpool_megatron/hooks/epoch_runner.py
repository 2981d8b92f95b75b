"""The way of one role through one epoch: iterations and segments, each made safe in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from deadpool_megatron import failpoints
from deadpool_megatron.cluster.link.member_link import PausePoint
from deadpool_megatron.comms import Communicators
from deadpool_megatron.events import Kind
from deadpool_megatron.hooks.checkpoints.durable_saves import DurableSaves
from deadpool_megatron.hooks.dimensions import current_device
from deadpool_megatron.hooks.entry import EpochEntry
from deadpool_megatron.hooks.loop import Course, SteppedLoop
from deadpool_megatron.hooks.probes import OwnTimeMeter
from deadpool_megatron.hooks.reports import Reports
from deadpool_megatron.layout.part_kinds import BOUNDARIES
from deadpool_megatron.layout.records import EpochRecord, Generation
from deadpool_megatron.wire.framing import readable

_LOOK_SECONDS = 0.05

_Result = TypeVar("_Result")


class EpochRunner(Course):
    """See :class:`Course`. ``check(epoch)`` raises EpochClosed or, when the run is over, StopOrder;
    ``checkpoints``: where they go if the program does not say.
    """

    def __init__(
        self,
        record: EpochRecord,
        entry: EpochEntry,
        communicators: Communicators,
        reports: Reports,
        pause: PausePoint,
        saves: DurableSaves,
        checkpoints: Path,
        check: Callable[[int], None],
        interrupt_fd: int,
        hash_interval: int,
        own_time: OwnTimeMeter,
    ) -> None:
        self.generation = entry.generation
        self._boundary = entry.boundary
        self._first_iteration = entry.generation.iteration + 1
        self._record = record
        self._entry = entry
        self._communicators = communicators
        self._reports = reports
        self._pause = pause
        self._saves = saves
        self._checkpoints = checkpoints
        self._check_epoch = check
        self._interrupt_fd = interrupt_fd
        self._hash_interval = hash_interval
        self._own_time = own_time
        own_time.reset()

    @property
    def epoch(self) -> int:
        """See :class:`Course`."""
        return self._record.epoch

    @property
    def recomputed(self) -> int:
        """See :class:`Course`."""
        return max(0, self._record.emitted_up_to - self._record.restore.generation.iteration)

    def is_behind(self, boundary: str) -> bool:
        """See :class:`Course`."""
        return BOUNDARIES.index(boundary) <= BOUNDARIES.index(self._boundary)

    def step(self, iteration: int, run: Callable[[], _Result]) -> _Result:
        """See :class:`Course`."""
        self._stand_still_if_asked(iteration)
        reports, protection = self._reports, self._entry.protection
        generation = Generation(self._record.epoch, iteration)
        reports.iteration = iteration
        reports.section = "first-step" if iteration == self._first_iteration else "step"
        self._communicators.be_patient(iteration == self._first_iteration)
        failpoints.set_context(iteration=iteration)
        protection.announce(generation)
        if self._entry.audit is not None:
            every = self._record.protection.every
            self._entry.audit.announce(iteration, self.generation, every)
        reports.told = []
        self._own_time.begin()
        result = run()
        if protection.is_wanted and not protection.is_gated:
            # Without a step of the optimizer nobody has asked, and no role has heard of another.
            protection.gate()
            dist.all_reduce(torch.zeros(1, device=current_device()))
        self._communicators.finish_iteration()
        self.check()
        if iteration != self._first_iteration:  # which pays for what later ones find ready
            self._own_time.end()
        if protection.is_wanted:
            protection.complete(self._entry.capture_extras())
        self.generation, self._boundary = generation, "step"
        self._hash_state()
        return result

    def segment(self, boundary: str, run: Callable[[], None]) -> None:
        """See :class:`Course`."""
        if self.is_behind(boundary):
            return
        self._reports.section = boundary
        self._communicators.be_patient(True)
        self._reports.iteration = self.generation.iteration
        failpoints.set_context(iteration=self.generation.iteration, section=boundary)
        began = time.monotonic()
        if boundary == "save":
            self._entry.judge_state()
        run()
        self._communicators.finish_iteration()
        self.check()
        if self._reports.role == 0:  # one is enough: all roles wait for each other
            values = {"boundary": boundary, "seconds": time.monotonic() - began}
            self._reports.send_event(Kind.SEGMENT, self.generation.iteration, values)
        protection = self._entry.protection
        if protection.holds(self.generation):
            protection.append(self.generation, boundary, self._entry.capture_extras())
        self._boundary = boundary

    def save(self, loop: SteppedLoop) -> None:
        """See :class:`Course`."""
        base = self._entry.program.checkpoint_directory() or self._checkpoints
        epoch = self._record.epoch
        self.segment("save", lambda: self._saves.save(loop, base, epoch, self.generation))

    def hash_restored(self) -> None:
        """Have what was restored from memory compared with what stood there before, where that was
        hashed: other numbers end the run, as those of a replayed step do."""
        if self._record.restore.kind in ("memory", "dump") and self._boundary == "step":
            self._hash_state()

    def check(self) -> None:
        """Raise EpochClosed unless the epoch is open."""
        self._check_epoch(self._record.epoch)

    def count_as_durable(self, directory: Path, iteration: int) -> None:
        """See :class:`Course`."""
        self.check()
        self._saves.announce(directory, iteration)

    def _stand_still_if_asked(self, following: int) -> None:
        """A planned swap: stop at the announced boundary, protected, until the close, or until
        the coordinator has chosen a later boundary because another role was past this one."""
        if self._pause.may_start(following):
            return
        self._entry.protection.settle()
        self._reports.say("paused", iteration=self.generation.iteration)
        self._reports.section = "paused"
        while not self._pause.may_start(following):
            self.check()
            readable(self._interrupt_fd, _LOOK_SECONDS)

    def _hash_state(self) -> None:
        interval, iteration = self._hash_interval, self.generation.iteration
        if interval == 0 or iteration % interval:
            return
        value = self._entry.loop.state_hash()
        self.check()
        self._reports.send_event(Kind.STATE_HASH, iteration, {"sha256": value})
