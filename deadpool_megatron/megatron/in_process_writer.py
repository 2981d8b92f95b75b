"""Writes torch_dist checkpoints inside the training process.

Megatron forks processes that write, and spawns another process that carries their results. On a
machine that forks its training processes, the spawned process would import the training script
again, without the stand-ins. Forked children hold every socket of the rank open beyond its death,
which hides the death from its peers. A rank that dies while it writes leaves a folder that no
tracker names.
"""

from __future__ import annotations

import functools
import importlib
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

_STRATEGIES = "megatron.core.dist_checkpointing.strategies"
#: path, name and (bytes, tensors) of one file
_Bucket = tuple[str, str, tuple[list[Any], list[tuple[Any, Any]]]]


def write_files(
    transforms: list[Any],
    use_msc: bool,
    rank: int,  # noqa: ARG001
    buckets: Sequence[_Bucket],
    results: queue.Queue[dict[int, Any] | Exception],
) -> None:
    """Write the files of a rank in turn. Put into ``results`` the results by file, or the first
    error.

    Replaces FileSystemWriterAsync.write_preloaded_data_multiproc, or _multithread.
    """
    writer = importlib.import_module(f"{_STRATEGIES}.filesystem_async").FileSystemWriterAsync
    written: dict[int, Any] = {}
    for index, bucket in enumerate(buckets):
        answers: queue.Queue[tuple[int, Any]] = queue.Queue()
        pending: queue.Queue[int] = queue.Queue()
        pending.put(index)
        writer.write_preloaded_data(
            transforms, index, bucket, answers, pending, use_fsync=True, use_msc=use_msc
        )
        answer = answers.get_nowait()[1]
        if isinstance(answer, Exception):
            results.put(answer)
            return
        written[index] = answer
    results.put(written)


def install() -> None:
    """Have Megatron save in this way; megatron.core must have been imported."""
    files: Any = importlib.import_module(f"{_STRATEGIES}.filesystem_async")
    # filesystem_async.py:54 starts the process for results; here a queue for each save suffices.
    _replace(files, _new_queue, "_get_write_results_queue", "get_write_results_queue")
    if not files.HAVE_PSUTIL:
        # Megatron only logs how much memory writing took, but refuses to write when it cannot.
        files._process_memory = int
    # filesystem_async.py:222 forks a process for each file; from 0.17 on these are threads.
    writer, write = files.FileSystemWriterAsync, staticmethod(write_files)
    _replace(writer, write, "write_preloaded_data_multiproc", "write_preloaded_data_multithread")
    # async_utils.py:183 forks a process for --async-save.
    calls = importlib.import_module(f"{_STRATEGIES}.async_utils")
    calls.TemporalAsyncCaller.schedule_async_call = _schedule
    # async_utils.py:266 spawns a lasting process for --use-persistent-ckpt-worker, without which
    # arguments.py:1138 switches --async-save off.
    calls.AsyncCallsQueue._get_async_caller = lambda _queue: calls.TemporalAsyncCaller()
    # From 0.17 on this process is spawned when groups are made (training/async_utils.py:53).
    calls.AsyncCallsQueue.warmup_persistent_caller = lambda *_args, **_options: None


def _new_queue(mp_mode: str = "") -> queue.Queue[Any]:  # noqa: ARG001
    return queue.Queue()


def _replace(place: Any, replacement: object, *names: str) -> None:
    """Replace the only attribute among ``names`` that this version has."""
    (name,) = (name for name in names if hasattr(place, name))
    setattr(place, name, replacement)


class _Writer(threading.Thread):
    """A writer in a thread, with the methods of a process that Megatron uses."""

    def kill(self) -> None:
        """Wait for the end: a thread cannot be stopped, and there may be no second writer."""
        self.join()


def _schedule(caller: Any, request: Any) -> None:
    """Do the work of TemporalAsyncCaller.schedule_async_call, with a thread for the process."""
    if request.async_fn is None:
        return
    arguments = list(request.async_fn_args)
    if request.preload_fn:
        arguments[1] = _copies(request.preload_fn())
    caller.start_time = time.time()
    write = functools.partial(request.async_fn, *arguments, **request.async_fn_kwargs)
    caller.process = _Writer(target=write, name="deadpool-checkpoint", daemon=True)
    caller.process.start()


def _copies(buckets: Sequence[_Bucket]) -> list[_Bucket]:
    """Return copies of the buckets: training still changes the tensors of the model."""
    return [
        (path, name, (data, [(item, tensor.clone()) for item, tensor in tensors]))
        for path, name, (data, tensors) in buckets
    ]
