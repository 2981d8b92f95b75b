"""Durable checkpoints: all roles write, the coordinator alone makes the result valid."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from deadpool_megatron import failpoints
from deadpool_megatron.comms import CommunicatorFault
from deadpool_megatron.hooks.loop import SteppedLoop
from deadpool_megatron.hooks.reports import Reports
from deadpool_megatron.layout.records import Generation
from deadpool_megatron.ownership import make_private
from deadpool_megatron.wire.framing import readable

_LOOK_SECONDS = 0.05


class DurableSaves:
    """One per process. :meth:`save` runs on the main thread, :meth:`done` on the watcher's."""

    def __init__(
        self,
        reports: Reports,
        check: Callable[[int], None],
        interrupt_fd: int,
        deadline_seconds: float,
    ) -> None:
        self._reports = reports
        self._check = check
        self._interrupt_fd = interrupt_fd
        self._deadline_seconds = deadline_seconds
        self._valid_iteration = 0

    def done(self, iteration: int) -> None:
        """The coordinator has made the checkpoint of ``iteration`` valid."""
        self._valid_iteration = iteration

    def save(self, loop: SteppedLoop, base: Path, epoch: int, generation: Generation) -> None:
        """Collectively write; role 0 then waits until the result counts.

        It counts only if the epoch was still open when everything was written (rule 11). Raises
        EpochClosed, or CommunicatorFault when the coordinator does not answer.
        """
        # The coordinator, and who goes on with the run, may be in other working directories.
        final = base.absolute() / f"iter_{generation.iteration:07d}"
        temporary = final.with_name(f".{final.name}.epoch{epoch}")
        failpoints.hit("save.begin")
        make_private(temporary)
        loop.save_checkpoint(temporary)
        dist.barrier()
        failpoints.hit("save.written")
        if dist.get_rank() != 0:
            return
        self._check(epoch)
        self._valid_iteration = 0
        self._reports.say(
            "durable-request",
            iteration=generation.iteration,
            temporary=str(temporary),
            final=str(final),
        )
        limit = time.monotonic() + self._deadline_seconds
        # An answer to an older request may still be under way: it names another iteration.
        while self._valid_iteration != generation.iteration:
            self._check(epoch)
            if time.monotonic() > limit:
                raise CommunicatorFault(
                    "coordinator", "durable-request", "no answer: the checkpoint is not valid"
                )
            readable(self._interrupt_fd, _LOOK_SECONDS)

    def announce(self, directory: Path, iteration: int) -> None:
        """All roles have written ``directory`` in place, complete: have it count from now on.

        Nobody waits: until the coordinator has heard of it, the run falls back to the one before.
        """
        if dist.get_rank() == 0:
            place = str(directory.absolute())
            self._reports.say("durable-request", iteration=iteration, temporary=place, final=place)
