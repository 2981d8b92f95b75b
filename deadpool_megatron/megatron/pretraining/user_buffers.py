"""User buffers of Transformer Engine (``--tp-comm-overlap``): memory of tensor-parallel peers, with
which communication overlaps the products of matrices beside it. A process has one set.

Megatron-LM has them made as it is initialised, in groups which Transformer Engine makes each time.
Here those groups are made in that place, with all others, and are exchanged with them. The buffers
are made by Megatron-LM's own function at each entry of train(), when all roles have peers: layers
look them up by name in each pass.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from deadpool_megatron.failures import ExitStatus
from deadpool_megatron.megatron.replacement import replaced

_MAKER = "_initialize_tp_communicators"
# What sys.getrefcount() counts of an object in a list that is gone through.
_OWN_REFERENCES = 3
# Of this process, as the buffers are: a set was begun, and its making was left by an exception.
_begun: list[str] = []


class UserBuffers:
    """Those of one build."""

    def __init__(self) -> None:
        self._make: Callable[[], None] | None = None
        self._world: Any = None
        self._peers: Any = None
        self._domains: list[list[int]] = []

    @contextlib.contextmanager
    def put_off(self) -> Iterator[None]:
        """While the block runs, Megatron-LM makes the groups, and no buffers."""
        from megatron.training import get_args, initialize

        make = getattr(initialize, _MAKER)

        def make_groups() -> None:
            size, world = get_args().tensor_model_parallel_size, dist.get_world_size()
            self._domains = [list(range(at, at + size)) for at in range(0, world, size)]
            # Handles of memory are exchanged in them, which lie on the host; whatever backend is
            # asked for, C++ finds one of no known kind and sends from there.
            self._world = dist.new_group(backend="gloo")
            divide: Any = dist.new_subgroups_by_enumeration
            self._peers, _ = divide(self._domains, backend="gloo")
            self._make = make

        with replaced(initialize, _MAKER, make_groups):
            yield

    def renew(self) -> None:
        """Collectively make them, instead of those of the epoch before; nothing without the flag.

        Ends a process with status UNCLEAN where Transformer Engine may still have something of
        another set: the library shares one communicator among all buffers, and the end of a
        buffer that somebody has kept would be that of the new ones
        (common/include/transformer_engine/comm_gemm_overlap.h, _comm_created).
        """
        if self._make is None:
            return
        base = importlib.import_module("transformer_engine.pytorch.module.base")
        if base._ub_communicators is not None:
            old = list(base._ub_communicators.values())
            base.destroy_ub()
            gc.collect()
            if _begun or any(sys.getrefcount(one) > _OWN_REFERENCES for one in old):
                why = "this process has to be replaced: user buffers of another epoch are left"
                print(why, file=sys.stderr, flush=True)
                os._exit(ExitStatus.UNCLEAN)
            del old
        _begun.append(_MAKER)
        with (
            replaced(dist, "new_group", lambda *, backend: self._world),
            replaced(dist, "new_subgroups_by_enumeration", self._known),
        ):
            self._make()
        _begun.clear()

    def _known(self, ranks: Sequence[Sequence[int]], *, backend: str) -> Any:
        """The group that is there for these ranks."""
        if ranks != self._domains:
            raise RuntimeError(f"user buffers in groups of {ranks}: Transformer Engine before 2.7?")
        return self._peers, [self._peers]
