"""User buffers of Transformer Engine (``--tp-comm-overlap``): memory of tensor-parallel peers that
lets communication overlap matrix products. A process has one set.

Megatron-LM has them made when it is initialised, in groups that Transformer Engine makes each time.
Here these groups are made at that point, like all other groups, and their communicators are
exchanged like those of others. Megatron-LM's own function makes the buffers at each entry of
train(), when all roles have peers: layers look them up by name in each pass.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from deadpool_megatron.failures import ExitStatus
from deadpool_megatron.megatron.replacement import replaced

_MAKER = "_initialize_tp_communicators"
# The references that sys.getrefcount() counts of an object in a list while a loop visits it.
_OWN_REFERENCES = 3
# Not empty if an exception has ended the making of a set. Process-wide, as the buffers are.
_unfinished: list[str] = []


class UserBuffers:
    """The user buffers of one build."""

    def __init__(self) -> None:
        self._make: Callable[[], None] | None = None
        self._world: Any = None
        self._peers: Any = None
        self._domains: list[list[int]] = []

    def deferred(self) -> contextlib.AbstractContextManager[None]:
        """Have Megatron-LM make the groups, and no buffers, while the block runs."""
        from megatron.training import get_args, initialize

        make = getattr(initialize, _MAKER)

        def make_groups() -> None:
            size, world = get_args().tensor_model_parallel_size, dist.get_world_size()
            self._domains = [list(range(at, at + size)) for at in range(0, world, size)]
            # The groups exchange handles of memory, which lie on the host. Of backends other than
            # gloo C++ does not know the kind, and would send from the device.
            self._world = dist.new_group(backend="gloo")
            divide: Any = dist.new_subgroups_by_enumeration
            self._peers, _ = divide(self._domains, backend="gloo")
            self._make = make

        return replaced(initialize, **{_MAKER: make_groups})

    def renew(self) -> None:
        """Replace the buffers of the previous epoch; do nothing without the flag. Collective.

        Ends a process with status UNCLEAN where Transformer Engine may still hold a buffer of
        another set: the library shares one communicator among all buffers, so the end of a buffer
        that is still referenced would end the communicator of the new buffers
        (common/include/transformer_engine/comm_gemm_overlap.h, _comm_created).
        """
        if self._make is None:
            return
        base = importlib.import_module("transformer_engine.pytorch.module.base")
        if base._ub_communicators is not None:
            old = list(base._ub_communicators.values())
            base.destroy_ub()
            gc.collect()
            if _unfinished or any(sys.getrefcount(buffer) > _OWN_REFERENCES for buffer in old):
                reason = "this process has to be replaced: user buffers of another epoch are left"
                print(reason, file=sys.stderr, flush=True)
                os._exit(ExitStatus.UNCLEAN)
            del old
        _unfinished.append(_MAKER)
        subgroups = replaced(dist, new_subgroups_by_enumeration=self._subgroups)
        with subgroups, replaced(dist, new_group=lambda *, backend: self._world):
            self._make()
        _unfinished.clear()

    def _subgroups(self, ranks: Sequence[Sequence[int]], *, backend: str) -> Any:
        """Return the existing group of these ranks."""
        if ranks != self._domains:
            raise RuntimeError(f"user buffers in groups of {ranks}: Transformer Engine before 2.7?")
        return self._peers, [self._peers]
