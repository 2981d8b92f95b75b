"""TensorBoard, W&B and the lines of training_log(): each step once, whoever writes it.

A step that is repeated after a recovery is not written again by the process that wrote it. The last
role also notes in the run directory what it has written: another process that takes the role over
continues behind that, in a file of its own. (The purge step of TensorBoard would hide the points
"vs samples" of all steps before, too.) What a closed epoch interrupts is not written at all. What a
killed process had written and not noted is written again, with the same numbers.

W&B: one run for the whole of a training, which a successor continues. Its service keeps rows in
memory for a while, and ends with the process whose rows they are: those are missing then.

The run's own records are told of the same numbers, exactly.
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
    """Of one process; main thread only. On other roles than the last one it has no writer."""

    def __init__(self, run_directory: Path) -> None:
        # (iteration, kind of line) of the newest lines written by this process, or before it.
        self._written: dict[str, int] = {}
        self._writer: Any = None
        self._wandb: Any = None
        self._opened = False
        self._note = run_directory / _NOTE
        # Of the newest lines: their epoch, and when they were written. None before the first.
        self._epoch: int | None = None
        self._wall_seconds: float | None = None
        # Marks of a recovery that are still to be written.
        self._marks: dict[str, float] = {}

    def open(self, restored: bool, first_iteration: int) -> None:
        """Once in a process, before its first line: ``first_iteration`` is the next to be written.

        ``restored``: a run is under way, and somebody may have written that iteration before.
        """
        if self._opened:
            return
        self._opened = True
        if restored:
            # Lines of the iterations before are in the files of whoever played this role.
            self._written = dict.fromkeys(("log", "evaluation"), first_iteration - 1)
        if not self._is_last():
            return
        if restored:
            self._take_over()
        self._open_writers()
        self._write_note()

    def close(self) -> None:
        """The training is over. Megatron ends W&B's run itself, but not after a recovery, when it
        sees no writer; what W&B has not written would be lost with the process."""
        wandb, self._wandb = self._wandb, None
        if wandb is not None:
            wandb.finish()

    @contextmanager
    def lines(
        self, kind: str, iteration: int, check: Callable[[], None], epoch: int
    ) -> Iterator[None]:
        """Take what the block prints and writes for the lines of ``kind`` of ``iteration``.

        They are written at its end, when ``check`` has not raised EpochClosed.
        """
        repeated = iteration <= self._written.get(kind, 0)
        is_shown = not repeated
        printed = io.StringIO()
        try:
            with self.silence(), self._held() as held, contextlib.redirect_stdout(printed):
                if not repeated:
                    self._give(self._writer, self._wandb)
                yield
            check()
        except EpochClosed:
            is_shown = False
            raise
        finally:
            if is_shown:
                print(printed.getvalue(), end="", flush=True)
        if repeated:
            return
        for write in held:
            write()
        self._written[kind] = iteration
        if kind == "log" or epoch == self._epoch:  # else the marks of a recovery are yet to come
            self._epoch, self._wall_seconds = epoch, time.time()
        if self._is_last():
            self._write_note()

    def mark(self, epoch: int, recomputed: int, iteration: int, *, shown: bool) -> None:
        """Among the lines of an iteration: the epoch, a curve that steps up with each recovery, and
        with the first new line after one what it has cost. ``shown``: in this iteration; what is
        not comes with the next one that is.

        The seconds are those in which nothing new was logged, by the clocks of whoever logged.
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
        """Put off what the block writes: calls to make. Megatron looks at the types of writers,
        so they stay what they are."""
        calls: list[functools.partial[None]] = []

        def put_off(write: Callable[..., None], *args: Any, **kwargs: Any) -> None:
            calls.append(functools.partial(write, *args, **kwargs))

        targets = [(self._wandb, "log")]
        if self._writer is not None:
            targets.append((self._writer.file_writer.event_writer, "add_event"))
        with contextlib.ExitStack() as stack:
            for owner, name in targets:
                if owner is not None:
                    later = functools.partial(put_off, getattr(owner, name))
                    stack.enter_context(replaced(owner, name, later))
            yield calls

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

    def _is_last(self) -> bool:
        """Return whether this is the role that Megatron writes lines on."""
        return dist.get_rank() == dist.get_world_size() - 1

    def _take_over(self) -> None:
        """Learn what another process has written in this role."""
        try:
            note = json.loads(self._note.read_text())
        except (OSError, ValueError):
            return  # nobody has come so far
        for kind, iteration in note["written"].items():
            self._written[kind] = max(self._written.get(kind, 0), iteration)
        self._epoch, self._wall_seconds = note.get("epoch"), note.get("wall_seconds")

    def _write_note(self) -> None:
        """Note that what is written now is complete."""
        if self._writer is not None:
            # Within its own two minutes a kill would take the lines with it.
            self._writer.flush()
        note = {"written": self._written, "epoch": self._epoch, "wall_seconds": self._wall_seconds}
        write_json(self._note, note)

    def _open_writers(self) -> None:
        """As Megatron's set_global_variables() does it."""
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
        self._give(self._writer, self._wandb)


def name_run(environment: MutableMapping[str, str]) -> None:
    """Have wandb.init() make, or continue with, the W&B run of this run; not if the user has said
    how runs are resumed."""
    if "WANDB_RESUME" not in environment and "DEADPOOL_RUN_ID" in environment:
        environment["WANDB_RESUME"] = "allow"
        environment.setdefault("WANDB_RUN_ID", f"deadpool-{environment['DEADPOOL_RUN_ID']}")


class Reporter:
    """Tells the run's own records, on one role: the first tensor- and data-parallel one of the last
    pipeline stage."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._has_begun = False

    def step(
        self, iteration: int, answer: tuple[Any, ...], optimizer: Any, counters: Mapping[str, int]
    ) -> None:
        """An iteration was trained; ``answer`` is what train_step() answered."""
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
        self._emit(
            "step",
            {
                "iteration": iteration,
                "loss": _loss(answer[LOSSES]),
                "grad_norm": None if skipped or norm is None else float(norm).hex(),
                "learning_rate": float(rate or 0.0).hex(),
                "skipped": skipped,
                "samples": counters["consumed_train_samples"],
            },
        )

    def evaluation(self, iteration: int, losses: Mapping[str, Any] | None) -> None:
        """An evaluation between iterations gave these mean losses."""
        if losses and _is_reporting_role():
            self._emit("evaluation", {"iteration": iteration, "loss": _loss(losses)})

    def lost_checkpoint(self, directory: Path, why: str) -> None:
        """Nobody falls back to a checkpoint; said by the role that calls this."""
        text = f"the checkpoint {directory} does not count: {why}"
        self._emit("log", {"level": "warning", "text": text})
        print(f"deadpool: {text}", flush=True)


def _is_reporting_role() -> bool:
    return bool(
        parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    )


def _loss(losses: Mapping[str, Any]) -> str:
    """The loss that is trained on, exactly: Megatron's models call it ``lm loss``."""
    value = losses.get("lm loss", next(iter(losses.values())))
    return float(value).hex()
