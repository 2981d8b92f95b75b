"""TensorBoard, W&B and the lines of training_log(): each step once, whoever writes it.

A step that is repeated after a recovery is not written again by the process that wrote it. The last
role also notes in the run directory what it has written, and how long its file for TensorBoard was
then. Another process that takes the role over continues behind that, in a file of its own, and cuts
off what its predecessor had begun to write. (The purge step of TensorBoard would hide the points
"vs samples" of all steps before, too.) What a closed epoch interrupts is not written at all.

W&B: one run for the whole of a training, and no row missing because a process was killed. Its
service keeps rows in memory for a while (offline up to some tens of KiB, else what it has not
sent), ends with the process whose rows they are, and tells nobody which it has written. So the
newest rows lie in the run directory as well, and the process that takes the last role over logs
them again. Where W&B has a server to ask, it says from which step on it lacks rows. Offline each
process has a file of its own, and that of the successor repeats some rows of the one before.

The run's own records are told of the same numbers, exactly.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

from deadpool_megatron.comms import EpochClosed
from deadpool_megatron.hooks.loop import Emit
from deadpool_megatron.hooks.pretraining.iteration import GRAD_NORM, LOSSES, SKIPPED
from deadpool_megatron.hooks.pretraining.scene import replaced

# In the run directory.
_NOTE = "lines-written.json"
_ROWS = "wandb-rows.jsonl"
# In TensorBoard and W&B.
_EPOCH_TAG = "deadpool/epoch"
_SECONDS_TAG = "deadpool/recovery_seconds"
_RECOMPUTED_TAG = "deadpool/iterations_recomputed"

# More than W&B was ever seen to hold back, and not more than a megabyte or two.
MOST_ROWS = 1000

# What wandb.log() was given: (values, step).
Call = tuple[Mapping[str, Any], int]


class Logbook:
    """Of one process; main thread only. On other roles than the last one it has no writer."""

    def __init__(self, run_directory: Path) -> None:
        # (iteration, kind of line) of the newest lines written by this process, or before it.
        self._written: dict[str, int] = {}
        self._writer: Any = None
        self._wandb: Any = None
        self._opened = False
        self._note = run_directory / _NOTE
        self._rows = WandbRows(run_directory)
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
        else:
            self._rows.begin()
        self._open_writers()
        if restored and self._wandb is not None:
            self._rows.log_again(self._wandb)
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
        if self._wandb is not None:
            given = [write for write in held if write.func == self._wandb.log]
            self._rows.keep(
                call for write in given if (call := _row(*write.args, **write.keywords))
            )
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
        """Learn what another process has written in this role, and leave nothing half written."""
        try:
            note = json.loads(self._note.read_text())
        except (OSError, ValueError):
            return  # nobody has come so far
        for kind, iteration in note["written"].items():
            self._written[kind] = max(self._written.get(kind, 0), iteration)
        self._epoch, self._wall_seconds = note.get("epoch"), note.get("wall_seconds")
        with contextlib.suppress(OSError):
            if note["file"] and Path(note["file"]).stat().st_size > note["bytes"]:
                os.truncate(note["file"], note["bytes"])

    def _write_note(self) -> None:
        """Note that what is written now is complete."""
        file, size = "", 0
        if self._writer is not None:
            # Within its own two minutes a kill would take the lines with it.
            self._writer.flush()
            with contextlib.suppress(OSError):  # not on a file system: then nothing is cut off
                file = str(self._writer.file_writer.event_writer._file_name)
                size = Path(file).stat().st_size
        note = {"written": self._written, "file": file, "bytes": size}
        note |= {"epoch": self._epoch, "wall_seconds": self._wall_seconds}
        new = self._note.with_suffix(".new")
        new.write_text(json.dumps(note))
        new.replace(self._note)

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


class WandbRows:
    """The newest rows, in the run directory. Of the process that writes them."""

    def __init__(self, run_directory: Path) -> None:
        self._path = run_directory / _ROWS
        # A line for each block of rows that was kept.
        self._lines: list[str] = []

    def begin(self) -> None:
        """Nobody has logged anything that counts."""
        self._path.unlink(missing_ok=True)

    def keep(self, calls: Iterable[Call]) -> None:
        """Keep what W&B is about to be given; pictures, tables and the like are not."""
        by_step: dict[int, dict[str, Any]] = {}
        for values, step in calls:
            known = {name: _plain(value) for name, value in values.items()}
            kept = {name: value for name, value in known.items() if value is not None}
            by_step.setdefault(step, {}).update(kept)
        if not by_step:
            return
        line = json.dumps(list(by_step.items())) + "\n"
        self._lines.append(line)
        if len(self._lines) > 2 * MOST_ROWS:
            self._lines = self._lines[-MOST_ROWS:]
            new = self._path.with_suffix(".new")
            new.write_text("".join(self._lines))
            new.replace(self._path)
        else:
            with self._path.open("a") as file:
                file.write(line)

    def log_again(self, wandb: Any) -> None:
        """Give W&B what another process has given it, from the first step on that it lacks."""
        self._take_over()
        first_step = int(wandb.run.starting_step)
        for line in self._lines[-MOST_ROWS:]:
            for step, values in json.loads(line):
                if step >= first_step:
                    wandb.log(values, step)

    def _take_over(self) -> None:
        """Read the lines of the process before, and leave out one that it had begun."""
        try:
            text = self._path.read_text()
        except OSError:
            return  # there are none
        self._lines = [line for line in text.splitlines(keepends=True) if _is_whole(line)]
        if "".join(self._lines) != text:
            self._path.write_text("".join(self._lines))


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

        if not _speaks() or not answer[LOSSES]:
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
        if losses and _speaks():
            self._emit("evaluation", {"iteration": iteration, "loss": _loss(losses)})

    def lost_checkpoint(self, directory: Path, why: str) -> None:
        """A checkpoint could not be written; said by the role that calls this."""
        text = f"the checkpoint {directory} was not written and does not count: {why}"
        self._emit("log", {"level": "warning", "text": text})
        print(f"deadpool: {text}", flush=True)


def _row(
    values: Mapping[str, Any], step: int | None = None, *_more: Any, **_named: Any
) -> Call | None:
    """Return what wandb.log() is given, if it says for which step."""
    return None if step is None else (values, step)


def _is_whole(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return line.endswith("\n")


def _plain(value: Any) -> Any:
    """The number or text that it is, None for anything else."""
    if hasattr(value, "numel") and value.numel() == 1:
        value = value.item()
    return value if isinstance(value, bool | int | float | str) else None


def _speaks() -> bool:
    return bool(
        parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    )


def _loss(losses: Mapping[str, Any]) -> str:
    """The loss that is trained on, exactly: Megatron's models call it ``lm loss``."""
    value = losses.get("lm loss", next(iter(losses.values())))
    return float(value).hex()
