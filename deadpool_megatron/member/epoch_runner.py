"""One role in one epoch: its iterations and segments, each protected in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from deadpool_megatron import failpoints
from deadpool_megatron.cluster.link.member_link import PausePoint
from deadpool_megatron.comms import CommunicatorFault
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.ranks import rank_of
from deadpool_megatron.layout.records import BOUNDARIES, EpochRecord, Generation
from deadpool_megatron.member.entry import EpochEntry
from deadpool_megatron.member.loop import SteppedLoop, StepRunner
from deadpool_megatron.member.own_time import OwnTimeMeter
from deadpool_megatron.member.peer_comparison import current_device
from deadpool_megatron.ownership import make_private
from deadpool_megatron.vault.disk import extras_file

_Result = TypeVar("_Result")


class EpochRunner(StepRunner):
    """See :class:`StepRunner`. ``checkpoints``: the folder of checkpoints if the program names
    none."""

    def __init__(
        self,
        record: EpochRecord,
        entry: EpochEntry,
        pause: PausePoint,
        own_time: OwnTimeMeter,
        checkpoints: Path,
    ) -> None:
        self.epoch = record.epoch
        self.recomputed = max(0, record.emitted_up_to - record.restore.generation.iteration)
        self.generation = entry.generation
        self._boundary = entry.boundary
        self._first_iteration = entry.generation.iteration + 1
        self._record = record
        self._entry = entry
        self._communicators = entry.communicators
        self._reports = entry.reports
        self._settings = entry.settings
        self._pause = pause
        self._own_time = own_time
        self._checkpoints = checkpoints
        own_time.reset()

    def includes(self, boundary: str) -> bool:
        """See :class:`StepRunner`."""
        return BOUNDARIES.index(boundary) <= BOUNDARIES.index(self._boundary)

    def step(self, iteration: int, run: Callable[[], _Result]) -> _Result:
        """See :class:`StepRunner`."""
        self._pause_if_requested(iteration)
        reports, protection = self._reports, self._entry.protection
        generation = Generation(self.epoch, iteration)
        reports.iteration = iteration
        reports.section = "first-step" if iteration == self._first_iteration else "step"
        self._communicators.allow_long_waits(iteration == self._first_iteration)
        failpoints.set_context(iteration=iteration)
        protection.announce(generation)
        if self._entry.built.audit is not None:
            every = self._record.protection.every
            self._entry.built.audit.announce(iteration, self.generation, every)
        reports.reported = []
        self._own_time.begin()
        result = run()
        if protection.is_due and not protection.is_gated:
            # Without a step of the optimizer the gate was not passed, and no collective proves that
            # all roles have passed theirs.
            protection.gate()
            dist.all_reduce(torch.zeros(1, device=current_device()))
        self._communicators.finish_iteration()
        self.check()
        if iteration != self._first_iteration:  # the first iteration includes the warm-up
            self._own_time.end()
        if protection.is_due:
            protection.complete(self._entry.capture_extras())
        self.generation, self._boundary = generation, "step"
        self._hash_state()
        return result

    def segment(self, boundary: str, run: Callable[[], None]) -> None:
        """See :class:`StepRunner`."""
        if self.includes(boundary):
            return
        self._reports.section = boundary
        self._communicators.allow_long_waits(True)
        self._reports.iteration = self.generation.iteration
        failpoints.set_context(iteration=self.generation.iteration, section=boundary)
        began = time.monotonic()
        if boundary == "save":
            self._entry.require_finite_state()
        run()
        self._communicators.finish_iteration()
        self.check()
        if rank_of(self._reports.role) == 0:  # one report is enough: roles wait for each other
            values = {"boundary": boundary, "seconds": time.monotonic() - began}
            self._reports.send_event(Kind.SEGMENT, self.generation.iteration, values)
        protection = self._entry.protection
        if protection.holds(self.generation):
            protection.append(self.generation, boundary, self._entry.capture_extras())
        self._boundary = boundary

    def save(self, loop: SteppedLoop) -> None:
        """See :class:`StepRunner`. All roles write; then the coordinator makes the result valid."""
        self.segment("save", lambda: self._save(loop))

    def capture_extras(self) -> bytes:
        """See :class:`StepRunner`."""
        return self._entry.capture_extras()

    def count_as_durable(self, directory: Path, iteration: int, extras: bytes) -> None:
        """See :class:`StepRunner`. Does not wait: until the coordinator has received the request,
        the run falls back to the previous checkpoint. If a role cannot write its extras, the
        checkpoint does not count."""
        self.check()
        failures = torch.zeros(1, device=current_device())
        try:
            extras_file.write(directory, dist.get_rank(), dist.get_world_size(), extras)
        except OSError as error:
            text = f"the checkpoint {directory} does not count: its extras: {error}"
            self._reports.send_event(Kind.LOG, iteration, {"level": "warning", "text": text})
            failures += 1
        dist.all_reduce(failures)
        if dist.get_rank() == 0 and not failures.item():
            place = str(directory.absolute())
            self._request_durable(iteration, place, place)

    def hash_restored(self) -> None:
        """Hash state that was restored from memory, if it was hashed before: a difference ends the
        run, as in a replayed step."""
        if self._record.restore.kind in ("memory", "dump") and self._boundary == "step":
            self._hash_state()

    def check(self) -> None:
        """See :class:`StepRunner`."""
        self._reports.check()

    def _save(self, loop: SteppedLoop) -> None:
        """Collectively write a checkpoint; role 0 then waits until it counts.

        It counts only if the epoch was still open when all roles had written (rule 11 of
        docs/design.md). Raises EpochClosed, or CommunicatorFault when the coordinator does not
        answer.
        """
        iteration = self.generation.iteration
        base = self._entry.program.checkpoint_directory() or self._checkpoints
        # The coordinator, and a command that resumes the run, may have other working directories.
        final = base.absolute() / f"iter_{iteration:07d}"
        temporary = final.with_name(f".{final.name}.epoch{self.epoch}")
        failpoints.hit("save.begin")
        make_private(temporary)
        loop.save_checkpoint(temporary)
        extras = self._entry.capture_extras()
        extras_file.write(temporary, dist.get_rank(), dist.get_world_size(), extras)
        dist.barrier()
        failpoints.hit("save.written")
        if dist.get_rank() != 0:
            return
        self.check()
        reports = self._reports
        reports.durable_iteration = 0
        self._request_durable(iteration, str(temporary), str(final))
        # An answer to an older request may still be under way: it names another iteration.
        if not reports.wait_until(
            lambda: reports.durable_iteration == iteration, self._settings.restore_seconds
        ):
            raise CommunicatorFault(
                "coordinator", "durable-request", "no answer: the checkpoint is not valid"
            )

    def _request_durable(self, iteration: int, temporary: str, final: str) -> None:
        self._reports.send("durable-request", iteration=iteration, temporary=temporary, final=final)

    def _pause_if_requested(self, next_iteration: int) -> None:
        """For a planned swap, stop at the announced boundary, protected, until the close, or until
        the coordinator has chosen a later boundary because a role had passed this boundary."""
        if self._pause.may_start(next_iteration):
            return
        self._entry.protection.await_committed()
        self._reports.send("paused", iteration=self.generation.iteration)
        self._reports.section = "paused"
        self._reports.wait_until(lambda: self._pause.may_start(next_iteration))

    def _hash_state(self) -> None:
        interval, iteration = self._settings.hash_interval, self.generation.iteration
        if interval == 0 or iteration % interval:
            return
        value = self._entry.loop.state_hash()
        self.check()
        self._reports.send_event(Kind.STATE_HASH, iteration, {"sha256": value})
