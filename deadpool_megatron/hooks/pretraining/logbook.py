"""TensorBoard, W&B and the lines of training_log(): each step once, whoever writes it.

A step that is repeated after a recovery is not written again by the process that wrote it. Another
process that takes the last role over opens the same directory with a purge step, which hides what
the dead one may have written of the steps that are repeated.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


class Logbook:
    """Of one process; main thread only. On other roles than the last one it has no writer."""

    def __init__(self) -> None:
        # (iteration, kind of line) of the newest lines written by this process.
        self._written: dict[str, int] = {}
        self._writer: Any = None
        self._wandb: Any = None
        self._opened = False

    def open(self, restored: bool, first_iteration: int) -> None:
        """Once in a process, before its first line: ``first_iteration`` is the next to be written.

        ``restored``: a run is under way, and somebody may have written that iteration before.
        """
        if self._opened:
            return
        self._opened = True
        if not restored:
            self._open_writers(None)
            return
        self._open_writers(first_iteration)
        # Lines of the iterations before are in the files of whoever played this role.
        self._written = dict.fromkeys(("log", "evaluation"), first_iteration - 1)

    @contextmanager
    def lines(self, kind: str, iteration: int) -> Iterator[None]:
        """What the block prints and writes are the lines of ``kind`` of ``iteration``."""
        if iteration <= self._written.get(kind, 0):
            with self.silence(), contextlib.redirect_stdout(io.StringIO()):
                yield
            return
        with self.silence():
            self._give(self._writer, self._wandb)
            yield
        self._written[kind] = iteration
        if self._writer is not None:
            # Within its own two minutes a kill would take the lines with it.
            self._writer.flush()

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Nothing that the block writes reaches a writer, unless it is a block of :meth:`lines`."""
        from megatron.training import global_vars

        before = global_vars._GLOBAL_TENSORBOARD_WRITER, global_vars._GLOBAL_WANDB_WRITER
        self._give(None, None)
        try:
            yield
        finally:
            self._give(*before)

    def mute(self) -> None:
        """From now on nothing but :meth:`lines` writes: what train() writes first is there."""
        self._give(None, None)

    def _give(self, writer: Any, wandb: Any) -> None:
        from megatron.training import global_vars

        global_vars._GLOBAL_TENSORBOARD_WRITER = writer
        global_vars._GLOBAL_WANDB_WRITER = wandb

    def _open_writers(self, purge_step: int | None) -> None:
        """As Megatron's set_global_variables() does it, on the last role."""
        from megatron.training import get_args, global_vars

        args = get_args()
        if dist.get_rank() != dist.get_world_size() - 1:
            return
        if args.tensorboard_dir:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ModuleNotFoundError:
                print("WARNING: TensorBoard writing requested but is not available", flush=True)
            else:
                self._writer = SummaryWriter(
                    log_dir=args.tensorboard_dir,
                    max_queue=args.tensorboard_queue_size,
                    purge_step=purge_step,
                )
        global_vars._set_wandb_writer(args)
        self._wandb = global_vars._GLOBAL_WANDB_WRITER
        self._give(self._writer, self._wandb)
