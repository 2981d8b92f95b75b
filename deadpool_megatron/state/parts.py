"""Parts: live tensors with fixed places in a flat buffer, which a single foreach call copies.

This module also has the fingerprint by which peers compare tensors.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from deadpool_megatron.layout.shard_map import ALIGNMENT_BYTES, Run

ARENA_BYTES = 256 << 20
_WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The sums of a block need eight bytes per element, of the memory that training leaves free.
_BLOCK_ELEMENTS = 1 << 22
_PERIOD = 8191  # prime, so that the weights do not align with power-of-two shapes


def aligned(nbytes: int) -> int:
    """Round up to the alignment of tensors inside a part."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Part:
    """The live tensors of a part, in a fixed order, and their places in a flat buffer.

    ``tensors`` may have any dtype, shape and device; they are referenced, not copied, and must only
    be changed in place. ``replicas`` are the roles whose bytes of this part are identical.
    ``meaning`` describes the content and order of packed tensors, which shapes do not show.
    ``runs`` are the parameters' elements in the part, from which parts for another number of model
    replicas are cut; without runs, ``indivisible`` is the reason why that is not possible.
    Not thread-safe, but a single other thread (the copier) may use the views.
    """

    def __init__(self, name: str, tensors: Iterable[Tensor], replicas: Sequence[int]) -> None:
        self.name = name
        self.meaning = ""
        self.runs: tuple[Run, ...] = ()
        self.indivisible = "nothing says which elements of which parameters a part holds"
        self.replicas = tuple(sorted(replicas))
        # A detached alias of the same storage can be written in place without autograd.
        self.tensors = [tensor.detach() for tensor in tensors]
        self._offsets: list[int] = []
        self._starts: list[tuple[int, int]] | None = None  # address, index of the tensor
        end = 0
        for tensor in self.tensors:
            self._offsets.append(end)
            end += aligned(tensor.nbytes)
        self.nbytes = end

    def views(self, buffer: memoryview) -> list[Tensor]:
        """Return CPU tensors over ``buffer``: for each live tensor a view of its dtype and shape.

        Raises ValueError if the buffer is smaller than ``nbytes``.
        """
        if len(buffer) < self.nbytes:
            raise ValueError(f"part {self.name}: buffer of {len(buffer)} bytes, {self.nbytes} used")
        return [
            view_of(buffer, offset, tensor)
            for offset, tensor in zip(self._offsets, self.tensors, strict=True)
        ]

    def slice(self, buffer: memoryview, tensor: Tensor) -> Tensor:
        """Return a CPU tensor over the bytes of ``buffer`` that belong to a live tensor of this
        part, or to a view into such a tensor. Raises KeyError for any other tensor.
        """
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        return view_of(buffer, self.offset_of(tensor), tensor)

    def offset_of(self, tensor: Tensor) -> int:
        """Return the offset in the buffer, in bytes, of a live tensor of this part, or of a view
        into such a tensor.

        Raises KeyError for any other tensor, and for a tensor without bytes.
        """
        if self._starts is None:
            starts = [(t.data_ptr(), i) for i, t in enumerate(self.tensors) if t.numel()]
            self._starts = sorted(starts)
        address = tensor.data_ptr()
        position = bisect.bisect_right(self._starts, (address, len(self.tensors))) - 1
        if position >= 0:
            start, index = self._starts[position]
            owner = self.tensors[index]
            end, size = start + owner.nbytes, tensor.nbytes
            if size and address + size <= end and owner.device == tensor.device:
                return self._offsets[index] + address - start
        raise KeyError(f"part {self.name} does not hold that tensor")

    def places(self) -> Iterator[tuple[Tensor, int]]:
        """Yield each live tensor with the offset of its bytes in the flat buffer."""
        return zip(self.tensors, self._offsets, strict=True)

    def signature(self) -> str:
        """Return a hexadecimal digest of meaning, order, places, dtypes and shapes. Parts with
        equal signatures have interchangeable bytes."""
        digest = hashlib.sha256(f"{self.name}|{self.meaning};".encode())
        for offset, tensor in zip(self._offsets, self.tensors, strict=True):
            digest.update(f"{offset}|{tensor.dtype}|{tuple(tensor.shape)};".encode())
        return digest.hexdigest()[:32]


def view_of(buffer: memoryview, offset: int, like: Tensor) -> Tensor:
    """Return a CPU tensor over ``buffer`` from ``offset`` (bytes) on, with the dtype and shape of
    ``like``."""
    count = like.numel()
    if count == 0:
        return torch.empty(like.shape, dtype=like.dtype)
    # The buffer of a slot that is mapped for reading is read-only; its views are only read.
    flat = torch.frombuffer(buffer, dtype=like.dtype, count=count, offset=offset)
    return flat.view(like.shape)


def move_into_arenas(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Move tensors that own their storage into flat arenas, by dtype and device.

    Thousands of small optimizer tensors become a few large tensors, so that a snapshot is a few
    copies and no loop. An arena has at most ARENA_BYTES, and the old memory of its tensors is free
    before the next arena is allocated, so at most ARENA_BYTES exist twice. A larger tensor is not
    moved.

    Return tensors that cover the same bytes: the arenas, then the tensors that are views of other
    storage (as an fp32 distributed optimizer's shards of the parameter buffer), which are not
    moved. The tensor objects stay the same; only their storage changes.
    """
    movable: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    views: list[Tensor] = []
    for tensor in tensors:
        if _owns_storage(tensor):
            movable.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        else:
            views.append(tensor)
    arenas = [
        _fill_arena(batch)
        for group in movable.values()
        for batch in batches(group, lambda tensor: aligned(tensor.nbytes), ARENA_BYTES)
    ]
    return [*arenas, *views]


def batches(
    tensors: Iterable[Tensor], bytes_of: Callable[[Tensor], int], max_bytes: int
) -> Iterator[list[Tensor]]:
    """Yield the tensors in order, in lists that need at most ``max_bytes`` each. A larger tensor is
    alone in its list."""
    batch: list[Tensor] = []
    nbytes = 0
    for tensor in tensors:
        size = bytes_of(tensor)
        if batch and nbytes + size > max_bytes:
            yield batch
            batch, nbytes = [], 0
        batch.append(tensor)
        nbytes += size
    if batch:
        yield batch


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as a flat tensor on its device, which is a view if the tensor is
    contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _owns_storage(tensor: Tensor) -> bool:
    return (
        tensor.is_contiguous()
        and tensor.storage_offset() == 0
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )


def _fill_arena(tensors: Sequence[Tensor]) -> Tensor:
    """Move the tensors into a new arena, and return it; return a single tensor unchanged."""
    if len(tensors) == 1:
        return tensors[0]
    item = tensors[0].element_size()
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end // item)
        end += aligned(tensor.numel() * item)
    arena = torch.zeros(end // item, dtype=tensors[0].dtype, device=tensors[0].device)
    for start, tensor in zip(starts, tensors, strict=True):
        place = arena[start : start + tensor.numel()].view(tensor.shape)
        place.copy_(tensor.detach())
        tensor.data = place
    return arena


def fingerprint(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return a cheap fingerprint of tensors, computed on their device: the plain and the weighted
    sum (mod 2**64) of their words as integers; int64, of shape (2,).

    The fingerprint is not cryptographic. It finds the accidents that matter when peers are compared
    after a restore (a missed parameter sync, a wrong shard), and reads the parameters once. Weights
    that depend on the position let it find swapped and shifted content, unlike a plain sum.
    """
    total = torch.zeros(2, dtype=torch.int64, device=device)
    for index, tensor in enumerate(tensors):
        integers = tensor.detach().contiguous().reshape(-1)
        integers = integers.view(_WORD[integers.element_size()])
        for start in range(0, integers.numel(), _BLOCK_ELEMENTS):
            block = integers[start : start + _BLOCK_ELEMENTS].to(torch.int64)
            end = start + block.numel()
            weights = torch.arange(start, end, dtype=torch.int64, device=integers.device)
            total[0] += block.sum()
            total[1] += weights.remainder_(_PERIOD).add_(index + 1).mul_(block).sum()
    return total


def largest_value(parts: Sequence[Part]) -> float:
    """Return the largest magnitude of all floating-point numbers in the parts, or NaN if they have
    any. The parts are not copied."""
    largest = [
        torch.stack(torch.aminmax(tensor)).abs().max().float()
        for part in parts
        for tensor in part.tensors
        if tensor.is_floating_point() and tensor.element_size() > 1 and tensor.numel()
    ]
    return float(torch.stack(largest).max()) if largest else 0.0
