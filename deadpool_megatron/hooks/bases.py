"""Bases: the bfloat16 weights of other owners, copied into the own slot for the buddy's vault.

After the parameter gather a data-parallel peer has the weights of every shard, in the flat buffers
of the distributed optimizer: the shard of an owner is one slice of each bucket. So a base is a few
large copies, and where the owner's masters find their weights in it follows from Megatron's own
ranges of its shard. What is not as thought here (a weight changed after its cast, a backend that
rounds otherwise) is found by the checksum of what is put together, and travels whole.

Unproven: on a device, whose copies go the way of the shard's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deadpool_megatron.hooks.optimizer import (
    ShardState,
    UnsupportedOptimizer,
    inner_optimizers,
    is_distributed,
    masters_in_adam,
)
from deadpool_megatron.layout.bases import (
    MASTERS_PART,
    WEIGHT_BYTES,
    Masters,
    base_part,
    kept_for,
    local_parts,
    pack_masters,
)
from deadpool_megatron.layout.records import EpochRecord, PartInfo
from deadpool_megatron.layout.schemes import Kind
from deadpool_megatron.platform.base import CopyHandle, Platform
from deadpool_megatron.settings import Settings
from deadpool_megatron.state.packing import Part
from deadpool_megatron.vault.client import SlotWriter


class BaseKeeper:
    """Of one role in one process. Main thread.

    ``peers``: the roles of its data-parallel group; ``count``: for how many owners there is room.
    Raises UnsupportedOptimizer where nothing could ever travel as halves.
    """

    def __init__(
        self,
        optimizer: Any,
        shard: ShardState,
        platform: Platform,
        peers: Sequence[int],
        count: int,
    ) -> None:
        self._platform = platform
        self._peers = tuple(peers)
        found = list(zip(inner_optimizers(optimizer), shard.parts, strict=True))
        refuse_without_masters([inner for inner, _ in found], self._peers)
        self._inner = [inner for inner, _ in found if _suits(inner, self._peers)]
        self._count = count
        self.parts: list[Part] = []  # one for each owner of the epoch
        self._nbytes = self._part(0, self._peers[0]).nbytes
        starts = self._starts()
        masters = {
            part.name: _masters(inner, part, starts)
            for inner, part in found
            if any(inner is one for one in self._inner)
        }
        self._masters = pack_masters({name: one for name, one in masters.items() if one.runs})

    def layout_parts(self, role: int) -> list[PartInfo]:
        """The parts that a slot needs."""
        return local_parts(role, self._count, self._nbytes, len(self._masters))

    @property
    def names(self) -> list[str]:
        """Names of all parts with weights."""
        return [base_part(number) for number in range(self._count)]

    def begin(self, owners: Sequence[int]) -> None:
        """A new epoch, in which the weights of ``owners`` are kept."""
        self.parts = [self._part(number, owner) for number, owner in enumerate(owners)]

    def finish(self, writer: SlotWriter) -> tuple[dict[str, int], list[CopyHandle]]:
        """The iteration is over, its weights gathered: part -> bytes, and copies under way."""
        writer.part(MASTERS_PART)[: len(self._masters)] = self._masters
        sizes = {MASTERS_PART: len(self._masters)}
        copies = []
        for part in self.parts:
            sizes[part.name] = part.nbytes
            views = part.views(writer.part(part.name))
            copies.append(self._platform.side_copy(views, part.tensors))
        return sizes, copies

    def _part(self, number: int, owner: int) -> Part:
        """The weights of an owner's shard, as live slices of this role's buffers."""
        rank = self._peers.index(owner)
        return Part(base_part(number), [one for _, one in self._slices(rank)], (owner,))

    def _slices(self, rank: int) -> Iterator[tuple[tuple[int, int, int], Tensor]]:
        """(inner optimizer, buffer, bucket), and what ``rank`` has of it."""
        for index, inner in enumerate(self._inner):
            for number, buffer in enumerate(inner.buffers):
                if buffer.param_dtype is not torch.bfloat16:
                    continue
                for place, bucket in enumerate(buffer.buckets):
                    weights = bucket.param_data.view(-1)
                    size = weights.numel() // len(self._peers)
                    yield (index, number, place), weights[rank * size : (rank + 1) * size]

    def _starts(self) -> dict[tuple[int, int, int], int]:
        """Where each slice begins in a base, by id of its inner optimizer, buffer and bucket."""
        whole = self._part(0, self._peers[0])
        offsets = [offset for _, offset in whole.places()]
        keys = [key for key, _ in self._slices(0)]
        return {
            (id(self._inner[index]), number, place): offset
            for (index, number, place), offset in zip(keys, offsets, strict=True)
        }


def owners_of(
    record: EpochRecord, role: int, peers: Sequence[int], settings: Settings
) -> tuple[tuple[int, ...], str]:
    """The owners whose weights a role keeps in an epoch; and a warning, for one role of its group,
    if nobody keeps any: the flag does nothing then."""
    if settings.compaction == "off" or Kind.BUDDY not in record.protection.kinds:
        return (), ""
    kept = kept_for(record, peers, settings.replicas)
    if any(kept.values()) or role != min(peers):
        return kept[role], ""
    roles = ", ".join(str(peer) for peer in peers)
    return (), (
        f"--deadpool-compaction: the state of roles {roles} travels whole: no other node that is to"
        " keep their copies has one of them, their data-parallel peers"
    )


def refuse_without_masters(inner: Sequence[Any], peers: Sequence[int]) -> None:
    """Raise UnsupportedOptimizer, with one line, where no peer has the weights in time."""
    why = ""
    if len(peers) < 2:
        why = "there are no data-parallel peers, so nobody else has the weights"
    elif not any(is_distributed(one) for one in inner):
        why = "only the distributed optimizer shards its masters (--use-distributed-optimizer)"
    elif any(is_distributed(one) and one.ddp_config.overlap_param_gather for one in inner):
        why = "with --overlap-param-gather peers have the weights of an iteration in the next one"
    elif not any(_suits(one, peers) for one in inner):
        why = "no part has fp32 masters of bfloat16 weights that all data-parallel peers gather"
    if why:
        raise UnsupportedOptimizer(
            f"--deadpool-compaction on: {why}; use --deadpool-compaction off"
        )


def _suits(inner: Any, peers: Sequence[int]) -> bool:
    """Whether this one's masters are fp32 of bfloat16 weights that all of ``peers`` gather.

    The same for all of them: it does not look at what the own share holds, maybe nothing.
    """
    if not is_distributed(inner) or masters_in_adam(inner):
        return False
    if inner.ddp_config.num_distributed_optimizer_instances > 1:
        return False
    if tuple(dist.get_process_group_ranks(inner.data_parallel_group)) != tuple(peers):
        return False  # that of the experts
    return any(buffer.param_dtype is torch.bfloat16 for buffer in inner.buffers)


def _masters(inner: Any, part: Part, starts: dict[tuple[int, int, int], int]) -> Masters:
    """Where the own masters lie in their part, and their weights in a base."""
    runs = []
    groups = zip(inner.model_float16_groups, inner.shard_fp32_from_float16_groups, strict=True)
    for parameter, master in (pair for group in groups for pair in zip(*group, strict=True)):
        buffer, _, bucket = inner.model_param_gbuf_map[parameter]
        start = starts.get((id(inner), buffer, bucket))
        if start is not None and master is not None and master.dtype is torch.float32:
            local = inner._get_model_param_range_map(parameter)["gbuf_local"].start
            runs.append((part.offset_of(master), master.numel(), start + WEIGHT_BYTES * local))
    return Masters(tuple(sorted(runs)))
