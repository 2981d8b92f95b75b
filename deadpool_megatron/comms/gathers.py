"""All-gathers of several tensors on gloo, as one operation per tensor: torch's own corrupts memory.

Each gloo group of torch 2.13 has two worker threads. When a worker has finished an
operation it writes the operation's name into one string that all workers of the group share, and
holds no lock (``ProcessGroupGloo::runLoop``, ``lastCompletedWorkName``). Names of up to 15
characters lie inside the string object, so that two writers at worst mix letters that nobody reads.
``ALLGATHER_COALESCED`` is longer: it lies on the heap, each write frees the one before, and two
workers that end at the same time free one block twice or write into a freed one. Some time later
an unrelated allocation aborts the process ("malloc(): unaligned tcache chunk detected"), or some
tensor holds a few letters. It takes one such operation and another one right behind it, as with
``--overlap-param-gather`` and several buckets.

The same bytes arrive through ``_allgather_base``, whose name is short. Of the operations on dense
tensors only these all-gathers have a long name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
from torch.distributed import ProcessGroup


def failure_of(work: Any) -> str | None:
    """The failure of a completed Work, if it has failed."""
    try:
        work.wait()
    except RuntimeError as error:
        return str(error)
    return None


class SeveralWorks:
    """Several gloo Works as one; ``copy_results`` moves results from buffers when all are done.

    ``results`` holds pairs (output of the caller, buffer); it is empty where the operations write
    into the caller's outputs themselves, which ``private`` tells. ``kept`` lives as long as this.
    """

    def __init__(
        self, works: list[Any], results: list[tuple[torch.Tensor, torch.Tensor]], kept: list[Any]
    ) -> None:
        self._works = works
        self._results = results
        self._kept = kept

    @property
    def private(self) -> bool:
        """Return whether nothing of the caller is written before ``copy_results``."""
        return bool(self._results)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As Work.wait, over all of them."""
        until = None if timeout is None else monotonic() + timeout.total_seconds()
        for work in self._works:
            if until is None:
                work.wait()
            else:
                # Zero would mean "no timeout".
                work.wait(timedelta(seconds=max(until - monotonic(), 0.001)))
        return True

    def is_completed(self) -> bool:
        """Return whether all have ended; in failure too."""
        return all(work.is_completed() for work in self._works)

    def failure(self) -> str | None:
        """Return what the first that has failed says; others may continue for as long as their
        timeout."""
        failed = (one for one in self._works if one.is_completed() and not one.is_success())
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
        """Ends with the last of them; its value is :meth:`result`."""
        if self.private:
            raise RuntimeError("wait for the Work of an uneven operation: it has no future")
        ends = torch.futures.collect_all([work.get_future() for work in self._works])
        return ends.then(lambda them: [one for each in them.value() for one in each.value()])

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

    Answers a Work, or a :class:`SeveralWorks` that writes into the outputs itself. Raises
    ValueError when the lists differ in length.
    """
    return _as_one(
        [
            plain._allgather_base(output, one, *args, **kwargs)
            for output, one in zip(outputs, inputs, strict=True)
        ],
        [*outputs, *inputs],
    )


def gather_each_list(
    plain: Any,
    output_lists: Sequence[Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``allgather_coalesced`` of ``plain``: ``output_lists[rank][i]`` = that rank's ``inputs[i]``.

    Answers and raises as :func:`gather_each`.
    """
    return _as_one(
        [
            plain.allgather([list(outputs)], [one], *args, **kwargs)
            for *outputs, one in zip(*output_lists, inputs, strict=True)
        ],
        [output_lists, inputs],
    )


#: the methods of ProcessGroup that must not reach gloo -> what to call instead
INSTEAD: dict[str, Callable[..., Any]] = {
    "all_gather_single_coalesced": gather_each,
    "allgather_coalesced": gather_each_list,
    "allgather_into_tensor_coalesced": gather_each,
}


def mend_plain_groups() -> None:
    """Make stock gloo groups of this process gather tensor by tensor. Idempotent.

    For runs on torch's own communicators. Groups of other backends, and subclasses with methods
    of their own, are left as they are.
    """
    for name, instead in INSTEAD.items():
        original = getattr(ProcessGroup, name, None)
        if original is not None and not hasattr(original, "deadpool_instead"):
            setattr(ProcessGroup, name, _on_gloo(original, instead))


def _on_gloo(original: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)  # what torch says of it included: comms/inner.py reads that
    def gather(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        chosen = instead if self.name() == "gloo" else original
        return chosen(self, *args, **kwargs)

    gather.deadpool_instead = instead  # type: ignore[attr-defined]
    return gather


def _as_one(works: list[Any], kept: list[Any]) -> Any:
    return works[0] if len(works) == 1 else SeveralWorks(works, [], kept)
