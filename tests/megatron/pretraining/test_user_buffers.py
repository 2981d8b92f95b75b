"""User buffers, over epochs: with groups of the seam, and a stand-in for Transformer Engine."""

import contextlib
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from deadpool_megatron.comms import Communicators
from deadpool_megatron.failures import ExitStatus
from deadpool_megatron.megatron.pretraining import user_buffers
from deadpool_megatron.megatron.pretraining.user_buffers import UserBuffers


class Library(types.ModuleType):
    """Does what initialize_ub() of Transformer Engine does with groups."""

    _ub_communicators: Any = None
    fails, size = False, 2

    def communicators(self) -> Any:
        return self._ub_communicators

    def initialize_ub(self) -> None:
        assert self._ub_communicators is None
        self._ub_communicators = {}
        world = dist.new_group(backend="nccl")
        ranks = [list(range(at, at + self.size)) for at in range(0, 4, self.size)]
        domain, _ = dist.new_subgroups_by_enumeration(ranks, backend="nccl")  # type: ignore
        for name in ("qkv_fprop", "fc1_fprop"):
            self._ub_communicators[name] = SimpleNamespace(groups=(world, domain))
            if self.fails:
                raise ConnectionError("a peer is gone")

    def destroy_ub(self) -> None:
        self._ub_communicators = None


@pytest.fixture
def library(monkeypatch):
    made = Library("transformer_engine.pytorch.module.base")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setattr(user_buffers, "_unfinished", [])
    monkeypatch.setattr(user_buffers.os, "_exit", sys.exit)
    return made


@pytest.fixture
def buffers(library, monkeypatch):
    """Of rank 3 of four, as Megatron-LM's initialisation has left them; without peers."""
    initialize = SimpleNamespace(_initialize_tp_communicators=library.initialize_ub)
    args = SimpleNamespace(tensor_model_parallel_size=2)
    package = SimpleNamespace(get_args=lambda: args, initialize=initialize)
    monkeypatch.setitem(sys.modules, "megatron.training", package)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    communicators, made = Communicators(), UserBuffers()
    communicators.install()
    dist.init_process_group()
    made.renew()
    with made.deferred():
        initialize._initialize_tp_communicators()
    assert library.communicators() is None
    yield made
    dist.destroy_process_group()
    communicators.uninstall()


def test_each_epoch_has_new_ones_in_the_same_groups(buffers, library):
    world_map = dist.distributed_c10d._world.pg_map
    groups = dict(world_map)
    seen = []
    for _ in range(3):
        buffers.renew()
        ((world, domain),) = {buffer.groups for buffer in library.communicators().values()}
        found = [dist.get_process_group_ranks(group) for group in (world, domain)]
        assert found == [[0, 1, 2, 3], [2, 3]]
        seen.append(id(library.communicators()))
    assert dict(world_map) == groups
    assert seen[0] != seen[1]


@pytest.mark.parametrize("fails", [False, True])
def test_process_with_something_of_another_set_is_replaced(buffers, library, fails):
    """The end of a buffer that is kept would be that of the new set; and no code frees the
    buffers that C++ has made before an interrupt."""
    library.fails = fails
    with pytest.raises(ConnectionError) if fails else contextlib.nullcontext():
        buffers.renew()
    kept = None if fails else library.communicators()["fc1_fprop"]
    library.fails = False
    with pytest.raises(SystemExit) as end:
        buffers.renew()
    assert (end.value.code, kept is None) == (ExitStatus.UNCLEAN, fails)


def test_groups_of_other_ranks_are_refused(buffers, library):
    """Older versions divide by hosts, on which a spare stands elsewhere."""
    library.size = 1
    with pytest.raises(RuntimeError, match=r"\[\[0\], \[1\], \[2\], \[3\]\]"):
        buffers.renew()
