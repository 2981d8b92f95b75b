"""All-gathers of several tensors on gloo, as an operation for each tensor.

torch's own operation for several tensors corrupts memory.

Each gloo group of torch 2.13 has two worker threads. When a worker has finished an operation it
writes the operation's name into a string that all workers of the group share, without a lock
(``ProcessGroupGloo::runLoop``, ``lastCompletedWorkName``). Names of up to 15 characters lie inside
the string object, so two writers at worst mix the letters of a string that no code reads. The
longer name ``ALLGATHER_COALESCED`` lies on the heap. Each write frees the previous name, so two
workers that end at the same time free a block twice or write into a freed block. Some time later an
unrelated allocation aborts the process ("malloc(): unaligned tcache chunk detected"), or some
tensor holds a few letters. Two such operations in a row suffice, as with ``--overlap-param-gather``
and several buckets.

The same bytes arrive through ``_allgather_base``, whose name is short. No other operation on dense
tensors has a long name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
from torch.distributed import ProcessGroup


def failure_of(work: Any) -> str | None:
    """Return the error of a completed Work; None for success."""
    try:
        work.wait()
    except RuntimeError as error:
        return str(error)
    return None


@dataclass(eq=False)
class SeveralWorks:
    """Several gloo Works in a single object; ``copy_results`` moves results from buffers at the
    end.

    ``_results`` holds pairs (output of the caller, buffer). It is empty, and ``private`` is false,
    where the operations write into the caller's outputs themselves. ``_kept`` has objects that must
    live as long as this Work.
    """

    _works: list[Any]
    _results: list[tuple[torch.Tensor, torch.Tensor]]
    _kept: list[Any]

    @property
    def private(self) -> bool:
        """Return whether only ``copy_results`` writes into the caller's outputs."""
        return bool(self._results)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all Works, as Work.wait does for a single Work."""
        until = None if timeout is None else monotonic() + timeout.total_seconds()
        for work in self._works:
            if until is None:
                work.wait()
            else:
                # Zero would mean "no timeout".
                work.wait(timedelta(seconds=max(until - monotonic(), 0.001)))
        return True

    def is_completed(self) -> bool:
        """Return whether all Works have ended, with or without an error."""
        return all(work.is_completed() for work in self._works)

    def failure(self) -> str | None:
        """Return the error of the first failed Work; others may continue until their timeout."""
        failed = (w for w in self._works if w.is_completed() and not w.is_success())
        return next((text for text in map(failure_of, failed) if text is not None), None)

    def copy_results(self) -> None:
        """Move results into the caller's outputs; once, on the caller's thread."""
        for output, buffer in self._results:
            output.copy_(buffer)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        return next((e for e in (work.exception() for work in self._works) if e), None)

    def result(self) -> list[torch.Tensor]:
        if self.private:
            return [output for output, _ in self._results]
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> Any:
        """Return a future that ends with the last Work; its value is :meth:`result`."""
        if self.private:
            raise RuntimeError("wait for the Work of an uneven operation: it has no future")
        ends = torch.futures.collect_all([work.get_future() for work in self._works])
        return ends.then(lambda all_: [tensor for end in all_.value() for tensor in end.value()])

    def synchronize(self) -> None:
        for work in self._works:
            work.synchronize()


def gather_each(
    plain: Any,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``all_gather_single_coalesced`` of the group ``plain``: ``outputs[i]`` = all ``inputs[i]``.

    Returns a Work, or a :class:`SeveralWorks` that writes into the outputs itself. Raises
    ValueError when the lists differ in length.
    """
    pairs = zip(outputs, inputs, strict=True)
    works = [plain._allgather_base(output, source, *args, **kwargs) for output, source in pairs]
    return _combined(works, [*outputs, *inputs])


def gather_each_list(
    plain: Any,
    output_lists: Sequence[Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``allgather_coalesced`` of ``plain``: ``output_lists[rank][i]`` = that rank's ``inputs[i]``.

    Returns and raises as :func:`gather_each`.
    """
    rows = zip(*output_lists, inputs, strict=True)
    works = [plain.allgather([outputs], [source], *args, **kwargs) for *outputs, source in rows]
    return _combined(works, [output_lists, inputs])


#: the methods of ProcessGroup that must not reach gloo -> their replacements
REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "all_gather_single_coalesced": gather_each,
    "allgather_coalesced": gather_each_list,
    "allgather_into_tensor_coalesced": gather_each,
}


def patch_plain_groups() -> None:
    """Make stock gloo groups of this process gather tensor by tensor. Idempotent.

    For runs on torch's own communicators. Groups of other backends, and subclasses with methods
    of their own, are left as they are.
    """
    for name, replacement in REPLACEMENTS.items():
        original = getattr(ProcessGroup, name, None)
        if original is not None and not hasattr(original, "deadpool_replacement"):
            setattr(ProcessGroup, name, _on_gloo(original, replacement))


def _on_gloo(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)  # with torch's docstring, which comms/inner.py reads
    def gather(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        chosen = replacement if self.name() == "gloo" else original
        return chosen(self, *args, **kwargs)

    gather.deadpool_replacement = replacement  # type: ignore[attr-defined]
    return gather


def _combined(works: list[Any], kept: list[Any]) -> Any:
    return works[0] if len(works) == 1 else SeveralWorks(works, [], kept)
