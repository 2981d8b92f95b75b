"""TensorBoard, W&B and the lines of training_log(): each step once, whoever writes it.

A step that is repeated after a recovery is not written again by the process that wrote it. The last
role also notes in the run directory what it has written, and how long its file for TensorBoard was
then. Another process that takes the role over goes on behind that, in a file of its own, and cuts
off what its predecessor had begun to write. (The purge step of TensorBoard would hide the points
"vs samples" of all steps before, too.) What a closed epoch interrupts is not written at all.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from deadpool_megatron.comms import EpochClosed
from deadpool_megatron.hooks.pretraining.iterations.wandb_rows import Call, WandbRows, name_run
from deadpool_megatron.hooks.pretraining.scene import replaced

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
        """What the block prints and writes are the lines of ``kind`` of ``iteration``.

        They are written at its end, when ``check`` has not raised EpochClosed.
        """
        repeated = iteration <= self._written.get(kind, 0)
        printed = io.StringIO()
        try:
            with self.silence(), self._held() as held, contextlib.redirect_stdout(printed):
                if not repeated:
                    self._give(self._writer, self._wandb)
                yield
            check()
        except EpochClosed:
            raise
        except BaseException:
            self._print(printed, repeated)
            raise
        self._print(printed, repeated)
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

    def _print(self, printed: io.StringIO, repeated: bool) -> None:
        if not repeated:
            print(printed.getvalue(), end="", flush=True)

    @contextmanager
    def _held(self) -> Iterator[list[functools.partial[None]]]:
        """What the block writes is put off: calls to make. Megatron looks at the types of writers,
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
        """Whether this is the role that Megatron writes lines on."""
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
        """What is written now is complete."""
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


def _row(
    values: Mapping[str, Any], step: int | None = None, *_more: Any, **_named: Any
) -> Call | None:
    """What wandb.log() is given, if it says for which step."""
    return None if step is None else (values, step)
