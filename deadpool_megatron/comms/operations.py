"""The methods of torch's ProcessGroup that communicate, what is known about each of them, and the
versions of torch on which the groups have been run.

The list is taken from the class at hand, because names come and go between torch versions; only
what is *not* communication is named here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed import ProcessGroup

#: attributes that torch 2.15 has and torch 2.13 has not, of the same kind as the next ones
NEWER_NOT_COMMUNICATION = frozenset(
    {
        "_add_ephemeral_timeout",
        "get_backend",
        "get_reconfigure_handle",
        "new_window",
        "reconfigure",
        "register_abort_hook",
        "register_post_hook",
        "register_pre_hook",
        "supports_abort_hooks",
        "supports_completion_hooks",
        "supports_reconfigure",
        "supports_window",
        "unregister_abort_hook",
        "unregister_post_hook",
        "unregister_pre_hook",
    }
)

#: attributes of ProcessGroup that start no operation and return no Work
NOT_COMMUNICATION = NEWER_NOT_COMMUNICATION | frozenset(
    {
        "BackendType",
        "CUSTOM",
        "GLOO",
        "MPI",
        "NCCL",
        "UCC",
        "UNDEFINED",
        "XCCL",
        "_backend_id",
        "_device_types",
        "_enable_collectives_timing",
        "_end_coalescing",
        "_get_backend",
        "_get_backend_name",
        "_get_sequence_number_for_group",
        "_has_hooks",
        "_id",
        "_pybind11_conduit_v1_",
        "_register_backend",
        "_register_on_completion_hook",
        "_set_default_backend",
        "_set_group_desc",
        "_set_group_name",
        "_set_sequence_number_for_group",
        "_start_coalescing",
        "_wait_for_pending_works",
        "abort",
        "bound_device_id",
        "boxed",
        "get_group_store",
        "group_desc",
        "group_name",
        "merge_remote_group",
        "monitored_barrier",
        "name",
        "rank",
        "set_timeout",
        "shutdown",
        "size",
        "split_group",
        "unbox",
        "use_pg_for_symm_mem_rendezvous",
    }
)

#: every method that starts an operation and answers a Work
COMMUNICATION: tuple[str, ...] = tuple(
    sorted(
        name
        for name in dir(ProcessGroup)
        if not name.startswith("__")
        and name not in NOT_COMMUNICATION
        and callable(getattr(ProcessGroup, name))
    )
)

SENDS = frozenset({"send"})
RECEIVES = frozenset({"recv", "recv_anysource"})
POINT_TO_POINT = SENDS | RECEIVES
#: what opens a group of NCCL inside torch, and leaves it open for its thread when NCCL refuses
#: (ProcessGroupNCCL.cpp; torch/csrc/cuda/nccl.cpp: all2all, gather, scatter)
OPENS_A_GROUP = POINT_TO_POINT | frozenset(
    name
    for name in COMMUNICATION
    if name in ("gather", "scatter")
    or "all_to_all" in name
    or "alltoall" in name
    or name.endswith("coalesced")
)
#: (major, minor): all tests run on these
ALL_TESTS = frozenset({(2, 13)})
#: and those that scripts/compat.sh starts on these; docs/compatibility.md says what came of it
SOME_TESTS = frozenset({(2, 14), (2, 15)})
#: torch before it cannot make a backend whose operations raise
OLDEST = (2, 10)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested lists, tuples and dictionaries of an operation's arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def is_asynchronous(args: tuple[Any, ...], kwargs: Any) -> bool:
    """True where the caller will wait later: what the options say, else assume so."""
    options = kwargs.get("opts") if kwargs else None
    if options is None and args:
        options = args[-1]
    return bool(getattr(options, "asyncOp", True))


class UnsupportedTorch(RuntimeError):
    """This torch lacks something that the groups need."""


def remark_on_torch(version: str) -> str:
    """Return what a user should know of ``version`` of torch; empty when all tests run on it.

    The package asks an installer for no upper bound: it must not replace the torch of an image.
    Raises UnsupportedTorch for one that cannot work.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        return f"torch {version}: cannot tell which version that is"
    number = int(found[1]), int(found[2])
    if number < OLDEST:
        raise UnsupportedTorch(f"torch {version} is too old: {_version_text(OLDEST)} is the oldest")
    if number in ALL_TESTS:
        return ""
    if number in SOME_TESTS:
        return f"torch {version}: only some tests have been run on it (docs/compatibility.md)"
    run = ", ".join(map(_version_text, sorted(ALL_TESTS | SOME_TESTS)))
    return f"torch {version}: the tests have been run on {run}; groups may lack its newest methods"


def _version_text(number: tuple[int, int]) -> str:
    return f"{number[0]}.{number[1]}"
