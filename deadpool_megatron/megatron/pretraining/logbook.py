"""TensorBoard, W&B and the lines of training_log(): each step once, in any process.

A step that is repeated after a recovery is not written again by the process that wrote it. The last
role also notes in the run directory which lines it has written: another process that takes over the
role continues after them, in a file of its own. (The purge step of TensorBoard would also hide the
points "vs samples" of all earlier steps.) Lines that a closed epoch interrupts are not written at
all. Lines that a killed process had written and not noted are written again, with the same numbers.

W&B has a single run for the whole training, which a successor continues. W&B's service keeps rows
in memory for a while, and ends with the process that wrote them: then those rows are lost.

The run's own records receive the same numbers, exactly.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

from deadpool_megatron.cluster.run_directory.directory import write_json
from deadpool_megatron.comms import EpochClosed
from deadpool_megatron.megatron.pretraining.newest_iteration import GRAD_NORM, LOSSES, SKIPPED
from deadpool_megatron.megatron.replacement import replaced
from deadpool_megatron.member.loop import Emit

# In the run directory.
_NOTE = "lines-written.json"
# In TensorBoard and W&B.
_EPOCH_TAG = "deadpool/epoch"
_SECONDS_TAG = "deadpool/recovery_seconds"
_RECOMPUTED_TAG = "deadpool/iterations_recomputed"


class Logbook:
    """The log writers of one process; main thread only. Only the last role has writers."""

    def __init__(self, run_directory: Path) -> None:
        # Kind of line -> iteration of the newest line that this or an earlier process has written.
        self._written: dict[str, int] = {}
        self._writer: Any = None
        self._wandb: Any = None
        self._opened = False
        self._note = run_directory / _NOTE
        # Epoch and time of the newest lines. None before the first.
        self._epoch: int | None = None
        self._wall_seconds: float | None = None
        # Marks of a recovery that are still to be written.
        self._marks: dict[str, float] = {}

    def open(self, restored: bool, first_iteration: int) -> None:
        """Open the writers, once in a process; ``first_iteration`` is the next to be written. Later
        calls drop all further writes outside of :meth:`lines`, in which train() makes its first
        writes.

        ``restored``: another process of the run may have written that iteration before.
        """
        if self._opened:
            self._set_writers(None, None)
            return
        self._opened = True
        if restored:
            # Earlier lines are in the files of the processes that held this role before.
            self._written = dict.fromkeys(("log", "evaluation"), first_iteration - 1)
        if not self._is_last():
            return
        if restored:
            self._take_over()
        self._open_writers()
        self._write_note()

    def close(self) -> None:
        """End W&B's run after the training. Megatron does that itself, but not after a recovery,
        when it finds no writer; rows that W&B has not written would be lost with the process."""
        wandb, self._wandb = self._wandb, None
        if wandb is not None:
            wandb.finish()

    @contextmanager
    def lines(
        self, kind: str, iteration: int, check: Callable[[], None], epoch: int
    ) -> Iterator[None]:
        """Hold back the lines of ``kind`` of ``iteration`` that the block prints and writes.

        They are printed and written at the end of the block, unless ``check`` raises EpochClosed.
        """
        is_repeated = iteration <= self._written.get(kind, 0)
        is_shown, printed = not is_repeated, io.StringIO()
        try:
            with self.silence(), self._held() as held, contextlib.redirect_stdout(printed):
                if not is_repeated:
                    self._set_writers(self._writer, self._wandb)
                yield
            check()
        except EpochClosed:
            is_shown = False
            raise
        finally:
            if is_shown:
                print(printed.getvalue(), end="", flush=True)
        if is_repeated:
            return
        for write in held:
            write()
        self._written[kind] = iteration
        if kind == "log" or epoch == self._epoch:  # otherwise a recovery has to be marked first
            self._epoch, self._wall_seconds = epoch, time.time()
        if self._is_last():
            self._write_note()

    def mark(self, epoch: int, recomputed: int, iteration: int, *, shown: bool) -> None:
        """Write the epoch among the lines of an iteration, as a curve that steps up with each
        recovery, and with the first new line after a recovery also its cost. If this iteration is
        not ``shown``, the marks are written in the next iteration that is.

        The cost in seconds is the time in which no new line was logged, by the clocks of the
        processes that log.
        """
        from megatron.training import global_vars

        writer, wandb = global_vars._GLOBAL_TENSORBOARD_WRITER, global_vars._GLOBAL_WANDB_WRITER
        if writer is None and wandb is None:
            return
        if self._epoch not in (None, epoch) and self._wall_seconds is not None:
            seconds = max(0.0, time.time() - self._wall_seconds)
            self._marks = {_SECONDS_TAG: seconds, _RECOMPUTED_TAG: recomputed}
        if not shown:
            return
        for tag, value in {_EPOCH_TAG: epoch, **self._marks}.items():
            if writer is not None:
                writer.add_scalar(tag, value, iteration)
            if wandb is not None:
                wandb.log({tag: value}, iteration)
        self._marks = {}

    @contextmanager
    def _held(self) -> Iterator[list[functools.partial[None]]]:
        """Defer the writes of the block: yield the calls that make them. The writers keep their
        types, which Megatron checks."""
        calls: list[functools.partial[None]] = []

        def later(write: Callable[..., None]) -> Callable[..., None]:
            return lambda *args, **kwargs: calls.append(functools.partial(write, *args, **kwargs))

        with contextlib.ExitStack() as stack:
            if self._wandb is not None:
                stack.enter_context(replaced(self._wandb, log=later(self._wandb.log)))
            if self._writer is not None:
                events = self._writer.file_writer.event_writer
                stack.enter_context(replaced(events, add_event=later(events.add_event)))
            yield calls

    def silence(self) -> contextlib.AbstractContextManager[None]:
        """Drop all writes of the block, except those in a block of :meth:`lines`."""
        from megatron.training import global_vars

        return replaced(global_vars, _GLOBAL_TENSORBOARD_WRITER=None, _GLOBAL_WANDB_WRITER=None)

    def _set_writers(self, writer: Any, wandb: Any) -> None:
        from megatron.training import global_vars

        global_vars._GLOBAL_TENSORBOARD_WRITER = writer
        global_vars._GLOBAL_WANDB_WRITER = wandb

    def _is_last(self) -> bool:
        """Return whether Megatron writes lines on this role."""
        return dist.get_rank() == dist.get_world_size() - 1

    def _take_over(self) -> None:
        """Read which lines another process has written in this role."""
        try:
            note = json.loads(self._note.read_text())
        except (OSError, ValueError):
            return  # no process has written lines
        for kind, iteration in note["written"].items():
            self._written[kind] = max(self._written.get(kind, 0), iteration)
        self._epoch, self._wall_seconds = note.get("epoch"), note.get("wall_seconds")

    def _write_note(self) -> None:
        """Note that the lines written so far are complete."""
        if self._writer is not None:
            # The writer flushes by itself only every two minutes: a kill would lose the lines.
            self._writer.flush()
        note = {"written": self._written, "epoch": self._epoch, "wall_seconds": self._wall_seconds}
        write_json(self._note, note)

    def _open_writers(self) -> None:
        """Open the writers as Megatron's set_global_variables() does."""
        from megatron.training import get_args, global_vars

        args = get_args()
        if args.tensorboard_dir:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ModuleNotFoundError:
                print("WARNING: TensorBoard writing requested but is not available", flush=True)
            else:
                self._writer = SummaryWriter(
                    log_dir=args.tensorboard_dir, max_queue=args.tensorboard_queue_size
                )
        name_run(os.environ)
        global_vars._set_wandb_writer(args)
        self._wandb = global_vars._GLOBAL_WANDB_WRITER
        self._set_writers(self._writer, self._wandb)


def name_run(environment: MutableMapping[str, str]) -> None:
    """Have wandb.init() make or continue the W&B run of this run, unless the user has chosen how
    W&B's runs are resumed."""
    if "WANDB_RESUME" not in environment and "DEADPOOL_RUN_ID" in environment:
        environment["WANDB_RESUME"] = "allow"
        environment.setdefault("WANDB_RUN_ID", f"deadpool-{environment['DEADPOOL_RUN_ID']}")


class Reporter:
    """Reports of a training to the run's own records, sent by a single role: the first tensor- and
    data-parallel rank of the last pipeline stage."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._has_begun = False

    def step(
        self, iteration: int, answer: tuple[Any, ...], optimizer: Any, counters: Mapping[str, int]
    ) -> None:
        """Report a trained iteration; ``answer`` is the return value of train_step()."""
        from megatron.training import get_args

        if not _is_reporting_role() or not answer[LOSSES]:
            return
        args = get_args()
        if args.train_iters and not self._has_begun:
            facts = {"iterations": args.train_iters, "sequence_length": args.seq_length}
            self._emit("training", facts)
        self._has_begun = True
        skipped, norm = bool(answer[SKIPPED]), answer[GRAD_NORM]
        rate = get_canonical_lr_for_logging(optimizer.param_groups)
        step = {
            "iteration": iteration,
            "loss": _loss(answer[LOSSES]),
            "grad_norm": None if skipped or norm is None else float(norm).hex(),
            "learning_rate": float(rate or 0.0).hex(),
            "skipped": skipped,
            "samples": counters["consumed_train_samples"],
        }
        self._emit("step", step)

    def evaluation(self, iteration: int, losses: Mapping[str, Any] | None) -> None:
        """Report the mean losses of an evaluation between iterations."""
        if losses and _is_reporting_role():
            self._emit("evaluation", {"iteration": iteration, "loss": _loss(losses)})

    def lost_checkpoint(self, directory: Path, reason: str) -> None:
        """Report, from the calling role, a checkpoint to which no recovery falls back."""
        text = f"the checkpoint {directory} does not count: {reason}"
        self._emit("log", {"level": "warning", "text": text})
        print(f"deadpool: {text}", flush=True)


def _is_reporting_role() -> bool:
    return bool(
        parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    )


def _loss(losses: Mapping[str, Any]) -> str:
    """Return the loss of the training as hexadecimal text: Megatron's models call it ``lm
    loss``."""
    value = losses.get("lm loss", next(iter(losses.values())))
    return float(value).hex()
