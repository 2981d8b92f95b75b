"""Parts: live tensors with fixed places in a flat buffer, copied by one foreach call each way.

Also the fingerprint by which peers compare tensors.
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
# The sums need eight bytes for each word of a block, of memory that training leaves free.
_BLOCK_ELEMENTS = 1 << 22
_PERIOD = 8191  # prime, so that the weights do not align with power-of-two shapes


def aligned(nbytes: int) -> int:
    """Round up to the alignment of tensors inside a part."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Part:
    """The live tensors of one part, in a fixed order, and their places in a flat buffer.

    ``tensors`` may have any dtype, shape and device; they are referenced, not copied, and must be
    changed in place only. ``replicas`` are the roles whose bytes of this part are identical.
    ``meaning`` describes the content and order of packed tensors, which their shape does not show;
    ``runs`` what each is of, for another number of model replicas, or ``indivisible`` why that
    cannot be cut from it.
    Not thread-safe; the views may be used from one other thread (the copier).
    """

    def __init__(self, name: str, tensors: Iterable[Tensor], replicas: Sequence[int]) -> None:
        self.name = name
        self.meaning = ""
        self.runs: tuple[Run, ...] = ()
        self.indivisible = "nothing says which elements of which parameters a part holds"
        self.replicas = tuple(sorted(replicas))
        # detach: an alias on the same storage that may be written in place without autograd.
        self.tensors = [tensor.detach() for tensor in tensors]
        self._offsets: list[int] = []
        self._starts: list[tuple[int, int]] | None = None  # address, number of the tensor
        end = 0
        for tensor in self.tensors:
            self._offsets.append(end)
            end += aligned(tensor.nbytes)
        self.nbytes = end

    def views(self, buffer: memoryview) -> list[Tensor]:
        """Return CPU tensors over ``buffer``: for each live tensor a view of its dtype and shape.

        Raises ValueError when the buffer is smaller than ``nbytes``.
        """
        if len(buffer) < self.nbytes:
            raise ValueError(f"part {self.name}: buffer of {len(buffer)} bytes, {self.nbytes} used")
        return [
            view_of(buffer, offset, tensor)
            for offset, tensor in zip(self._offsets, self.tensors, strict=True)
        ]

    def slice(self, buffer: memoryview, tensor: Tensor) -> Tensor:
        """Return the bytes of ``buffer`` that belong to a live tensor inside this part, as
        a CPU tensor of its dtype and shape. Raises KeyError for any other tensor.
        """
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        return view_of(buffer, self.offset_of(tensor), tensor)

    def offset_of(self, tensor: Tensor) -> int:
        """Return the offset in the buffer of a live tensor inside this part.

        Raises KeyError for any other tensor, and for a tensor without bytes.
        """
        if self._starts is None:
            starts = [(t.data_ptr(), i) for i, t in enumerate(self.tensors) if t.numel()]
            self._starts = sorted(starts)
        address = tensor.data_ptr()
        place = bisect.bisect_right(self._starts, (address, len(self.tensors))) - 1
        if place >= 0:
            start, index = self._starts[place]
            owner = self.tensors[index]
            end, size = start + owner.nbytes, tensor.nbytes
            if size and address + size <= end and owner.device == tensor.device:
                return self._offsets[index] + address - start
        raise KeyError(f"part {self.name} does not hold that tensor")

    def places(self) -> Iterator[tuple[Tensor, int]]:
        """Return each live tensor with the offset of its bytes in the flat buffer."""
        return zip(self.tensors, self._offsets, strict=True)

    def signature(self) -> str:
        """Return a hex digest of meaning, order, places, dtypes and shapes: parts with equal
        digests have interchangeable bytes."""
        digest = hashlib.sha256(f"{self.name}|{self.meaning};".encode())
        for offset, tensor in zip(self._offsets, self.tensors, strict=True):
            digest.update(f"{offset}|{tensor.dtype}|{tuple(tensor.shape)};".encode())
        return digest.hexdigest()[:32]


def view_of(buffer: memoryview, offset: int, like: Tensor) -> Tensor:
    count = like.numel()
    if count == 0:
        return torch.empty(like.shape, dtype=like.dtype)
    # A slot mapped for reading gives a read-only buffer; these views are then only read from.
    flat = torch.frombuffer(buffer, dtype=like.dtype, count=count, offset=offset)
    return flat.view(like.shape)


def move_into_arenas(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Move tensors that own their storage into flat arenas, by dtype and device.

    Thousands of small optimizer tensors become a few large tensors, so that a snapshot is a few
    copies and no loop. An arena has 256 MiB at most, and the memory of its tensors is free before
    another arena is made, so no more than that exists twice. A larger tensor stays as it is.

    Returns tensors that cover the same bytes: the arenas, then the tensors that are views of other
    storage (an fp32 distributed optimizer's shards of the parameter buffer) and stay in their
    place. The tensor objects stay the same; only their storage changes.
    """
    movable: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    rest: list[Tensor] = []
    for tensor in tensors:
        if _owns_storage(tensor):
            movable.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        else:
            rest.append(tensor)
    arenas = [
        _fill_arena(some)
        for group in movable.values()
        for some in batches(group, lambda tensor: aligned(tensor.nbytes), ARENA_BYTES)
    ]
    return [*arenas, *rest]


def batches(
    tensors: Iterable[Tensor], bytes_of: Callable[[Tensor], int], max_bytes: int
) -> Iterator[list[Tensor]]:
    """Yield the tensors in order, as many at a time as need ``max_bytes`` at most; a larger tensor
    alone."""
    some: list[Tensor] = []
    nbytes = 0
    for tensor in tensors:
        size = bytes_of(tensor)
        if some and nbytes + size > max_bytes:
            yield some
            some, nbytes = [], 0
        some.append(tensor)
        nbytes += size
    if some:
        yield some


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor on its device, flat; a view of it if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _owns_storage(tensor: Tensor) -> bool:
    return (
        tensor.is_contiguous()
        and tensor.storage_offset() == 0
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )


def _fill_arena(tensors: Sequence[Tensor]) -> Tensor:
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
    sum (mod 2**64) of all integers, int64, of shape (2,).

    Not cryptographic: it finds the accidents that matter when peers are compared after a restore (a
    missed parameter sync, a wrong shard), at the price of one read of the parameters. The sum of
    position-weighted integers catches swapped and shifted content, which a plain sum does not.
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
    """Return the largest number of the parts in magnitude, or NaN if they hold any. Makes no copy
    of them."""
    largest = [
        torch.stack(torch.aminmax(tensor)).abs().max().float()
        for part in parts
        for tensor in part.tensors
        if tensor.is_floating_point() and tensor.element_size() > 1 and tensor.numel()
    ]
    return float(torch.stack(largest).max()) if largest else 0.0
