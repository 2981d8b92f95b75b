"""State that train() makes or reads at each entry: a profile, the detector of stragglers, and sums
over the sequences of an iteration. Megatron-LM itself enters train() only once.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from deadpool_megatron.megatron.replacement import replaced

#: arguments of num_floating_point_operations(), as consume_seqlen_stats_in_iteration() returns them
LENGTHS = ("total_real_tokens_in_batch", "seqlen_squared_sum_in_batch")
_CONSUME = "consume_seqlen_stats_in_iteration"


@contextlib.contextmanager
def for_training(
    lengths: Callable[[], list[float | None]], done: int | None, first: int
) -> Iterator[Callable[[], Iterable[float | None]]]:
    """Prepare an entry into train() that continues after iteration ``done`` (None: this run has
    trained no iteration), in a run that began after ``first``.

    ``lengths`` returns the sums over sequences of the newest iteration, which belong to its
    generation; train() gets these. Yields Megatron's own function, which returns the sums of a step
    that has just ended and resets them (collective where sequences were packed; no sums before
    Megatron-LM 0.18). The sums that an interrupted step has left are dropped.
    """
    from megatron.training import get_args, training

    args = get_args()
    if args.log_straggler:
        forget_detector(training.stimer)
    take: Callable[[], Iterable[float | None]] = getattr(training, _CONSUME, tuple)
    with contextlib.ExitStack() as stack:
        if take is not tuple:
            training._seqlen_stats_in_iteration, training._seqlen_stats_active = None, False
            stack.enter_context(replaced(training, **{_CONSUME: lambda: tuple(lengths())}))
        if args.profile and done is not None:
            stack.enter_context(_profile(args, done, first))
        yield take


def for_warm_up() -> contextlib.AbstractContextManager[None]:
    """Prepare an entry into train() for a step that belongs to no run, and so starts neither
    profile nor detector."""
    from megatron.training import get_args

    return replaced(get_args(), profile=False, log_straggler=False)


def _profile(args: Any, done: int, first: int) -> contextlib.AbstractContextManager[None]:
    """Have train() start a profile only if the first iteration of the profile is still to come, and
    at that iteration: torch's profiler counts from the entry. A profile that was interrupted is
    ended, and is lost."""
    if torch._C._autograd._profiler_enabled():
        torch._C._autograd._disable_profiler()
        if torch.cuda.is_available():
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
    start = args.profile_step_start
    counted = start - (args.iteration - first if args.use_pytorch_profiler else 0)
    return replaced(args, profile=done < start, profile_step_start=max(counted, 0))


def forget_detector(detector: Any) -> None:
    """Have train() configure the detector of stragglers as in a new process, equally on all roles:
    for the present rank, without times of an interrupted step, and on or off as at the start, since
    a new process does not know that it was switched."""
    if detector.sock is not None:
        with contextlib.suppress(OSError):  # this ends the wait of the listening thread
            detector.sock.shutdown(socket.SHUT_RDWR)
        detector.sock.close()
        detector.sock = None
    type(detector)._configured = False
