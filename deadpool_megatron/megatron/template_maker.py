"""Makes the template of a role's part of a checkpoint from live objects: which bytes lie where.

A program makes the state that a save would write (:meth:`MegatronLoop.checkpoint_state`). Each
tensor in it is identified by its address: in a shard part, among the extras, or in a parameter that
is cast from master weights in a shard part. Every data-parallel peer writes those parameters of a
distributed optimizer whose master weights it has, so that no peer needs bytes of other peers. A run
with an unknown tensor has no exports, and reports that. The training process hands the template to
the exporters.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    is_main_replica,
)
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from torch import Tensor

from deadpool_megatron.layout.ranks import rank_of
from deadpool_megatron.layout.records import RoleLayout
from deadpool_megatron.megatron import optimizer
from deadpool_megatron.megatron.loop import MegatronLoop
from deadpool_megatron.megatron.loop_extras import frozen_and_buffers, large_frozen_weights
from deadpool_megatron.megatron.replacement import replaced
from deadpool_megatron.state import template
from deadpool_megatron.state.parts import Part
from deadpool_megatron.state.template import StateTemplate, TemplateError

# Objects that no iteration changes and that are no tensors.
_CONSTANT_OBJECTS = (
    ".per_bucket_numel",
    ".per_bucket_numel_unpadded",
    "._extra_state",
    "rerun_state_machine_state",  # the machine is idle
)


def make_template(loop: MegatronLoop, parts: Sequence[Part], layout: RoleLayout) -> StateTemplate:
    """Return the state template of the role of ``loop``; with a refusal if none can be made.

    This does not communicate, and reads no more than the parameters, once. It never raises: whether
    a run can do without checkpoints is not decided here.
    """
    try:
        return _Maker(loop, parts, layout).make()
    except TemplateError as error:
        refusal = str(error)
    except Exception as error:
        refusal = f"Megatron does not make the state to save: {type(error).__name__}: {error}"
    return StateTemplate(layout.role, layout.layout_hash, refusal=refusal)


@dataclass(frozen=True)
class _Origin:
    """The place in a generation of the bytes of some memory: ``count`` elements from ``address``
    on, each ``itemsize`` bytes wide in memory and of dtype ``stored`` in the generation."""

    address: int
    count: int
    itemsize: int
    part: str
    offset_bytes: int
    stored: torch.dtype
    is_extra: bool = False

    @property
    def end(self) -> int:
        return self.address + self.count * self.itemsize

    def offset_of(self, element: int) -> int:
        return self.offset_bytes + element * self.stored.itemsize


class _Maker:
    def __init__(self, loop: MegatronLoop, parts: Sequence[Part], layout: RoleLayout) -> None:
        self._loop = loop
        self._layout = layout
        self._inner = optimizer.inner_optimizers(loop.optimizer)
        if optimizer.layer_wise(loop.optimizer) or optimizer.state_numbers(loop.optimizer):
            raise TemplateError("ranks talk to make the state, or parameters count their own steps")
        self._origins: list[_Origin] = []
        for part in parts:
            for tensor, offset in part.places():
                self._add(tensor, part.name, offset, tensor.dtype)
        offset = 0
        for _, tensor in large_frozen_weights(loop):
            self._add(tensor, template.FROZEN, offset, tensor.dtype)
            offset += tensor.nbytes
        # Memory of parameters of which each data-parallel peer has a run.
        self._shared: list[tuple[int, int, bool]] = []
        self._kept_alive: list[Tensor] = []
        for inner in self._inner:
            self._add_derived(inner)

    def make(self) -> StateTemplate:
        with self._without_gathering():
            state = self._loop.checkpoint_state()
        # This comes last: a router that is asked for its state replaces its bias by an fp32 bias.
        for name, tensor in frozen_and_buffers(self._loop):
            self._add(tensor, f"buffer.{name}", 0, tensor.dtype, is_extra=True)
        padding = set(_padding(state))
        if "optimizer" in state:
            state["optimizer"] = self._marked_optimizer(state["optimizer"])
        sharded, common = save_preprocess(state, False)
        pieces: list[template.Piece] = []
        objects: dict[str, Any] = {}
        for leaf in nested_values(sharded):
            if isinstance(leaf, ShardedTensor):
                pieces += self._pieces(leaf, (leaf.key, leaf.global_offset) in padding)
            elif isinstance(leaf, ShardedObject):
                if is_main_replica(leaf.replica_id):
                    objects[leaf.unique_key] = self._checked(leaf)
            else:
                raise TemplateError(f"{type(leaf).__name__} is nothing that checkpoints hold")
        return StateTemplate(
            role=self._layout.role,
            layout_hash=self._layout.layout_hash,
            pieces=tuple(pieces),
            objects=objects,
            common=common if rank_of(self._layout.role) == 0 else None,
        )

    # Where bytes lie.

    def _add(
        self,
        tensor: Tensor,
        part: str,
        offset_bytes: int,
        stored: torch.dtype,
        *,
        is_extra: bool = False,
    ) -> None:
        if tensor.numel() and tensor.is_contiguous():
            place = tensor.data_ptr(), tensor.numel(), tensor.element_size()
            origin = _Origin(*place, part, offset_bytes, stored, is_extra)
            bisect.insort(self._origins, origin, key=lambda each: each.address)

    def _add_derived(self, inner: Any) -> None:
        """Add parameters that are cast from master weights, whole or a run of them."""
        for parameter, master, start in optimizer.model_parameters(inner):
            run = parameter.detach().view(-1)[start : start + master.numel()]
            if master.data_ptr() == run.data_ptr():
                continue  # the parameter itself is updated
            origin, offset = self._one_piece(master, "master weights do")
            if not torch.equal(master.detach().view(-1).to(run.dtype), run):
                raise TemplateError("a parameter is not what its master weights round to")
            self._add(run, origin.part, offset, origin.stored)
        if optimizer.is_distributed(inner):
            self._share(inner, (tensor for buffer in inner.buffers for tensor in buffer.params))

    @contextlib.contextmanager
    def _without_gathering(self) -> Iterator[None]:
        """While the block runs, keep distributed optimizers from gathering their state for a save.
        They return memory that stands for the state, is never touched, and has known runs of this
        role.

        Megatron then cuts this memory into parameters (distrib_optimizer.py, fully_reshardable).
        """
        with contextlib.ExitStack() as stack:
            for inner in (each for each in self._inner if optimizer.is_distributed(each)):
                stand_in = functools.partial(self._stand_in, inner)
                stack.enter_context(replaced(inner, get_parameter_state_dp_zero=stand_in))
            yield

    def _stand_in(self, inner: Any, *_args: Any, **_kwargs: Any) -> dict[Any, Any]:
        """Return tensors by buffer, dtype and name, as ``get_parameter_state_dp_zero`` does."""
        rank = inner.data_parallel_group.rank()
        answer: dict[Any, Any] = {"buckets_coalesced": True}
        for number, (buffer, ranges) in enumerate(
            zip(inner.buffers, inner.gbuf_ranges, strict=True)
        ):
            ((dtype, buckets),) = ranges.items()
            whole = {
                name: torch.empty(buffer.numel_unpadded, dtype=torch.float32)
                for name in ("param", "exp_avg", "exp_avg_sq")
            }
            before = 0
            for bucket, found in zip(buffer.buckets, buckets, strict=True):
                own = before + rank * (bucket.grad_data.numel() // inner.data_parallel_group.size())
                for parameter, run in found["param_map"].items():
                    start = own + run["gbuf_local"].start
                    kept = inner._get_main_param_and_optimizer_states(parameter)
                    for name, tensor in whole.items():
                        self._stand_for(tensor, start, kept[name])
                before += bucket.numel_unpadded
            self._share(inner, whole.values())
            self._kept_alive += whole.values()
            answer[number] = {dtype: {**whole, "numel_unpadded": buffer.numel_unpadded}}
        return answer

    def _stand_for(self, whole: Tensor, start: int, kept: Tensor) -> None:
        """Note that ``whole``, from element ``start`` on, stands for a tensor of a shard part."""
        origin, offset = self._one_piece(kept, "the optimizer's state does")
        if kept.dtype != whole.dtype:
            raise TemplateError(f"the optimizer keeps its state as {kept.dtype}")
        self._add(whole[start : start + kept.numel()], origin.part, offset, origin.stored)

    def _share(self, inner: Any, tensors: Iterable[Tensor]) -> None:
        """Note tensors of which each data-parallel peer of a distributed optimizer has a run."""
        for tensor in tensors:
            end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
            first_instance = inner.distributed_optimizer_instance_id == 0
            bisect.insort(self._shared, (tensor.data_ptr(), end, first_instance))

    def _one_piece(self, tensor: Tensor, subject: str) -> tuple[_Origin, int]:
        """Return the origin of a whole tensor, and the offset of its first byte in the part."""
        found = self._find(tensor)
        if len(found) != 1 or found[0][1] != tensor.numel():
            raise TemplateError(f"{subject} not lie in one piece of a shard part")
        _, _, origin, first = found[0]
        return origin, origin.offset_of(first)

    def _find(self, tensor: Tensor) -> list[tuple[int, int, _Origin, int]]:
        """Return the known runs of a contiguous tensor: first and last element, origin, and the
        element of the origin at which the run begins."""
        item = tensor.element_size()
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * item
        found = []
        place = bisect.bisect_left(self._origins, end, key=lambda each: each.address)
        # Origins do not overlap, so all origins before an origin that ends too early do as well.
        while place > 0 and (origin := self._origins[place - 1]).end > begin:
            place -= 1
            low, high = max(begin, origin.address), min(end, origin.end)
            if origin.itemsize == item:
                first = (low - origin.address) // item
                found.append(((low - begin) // item, (high - begin) // item, origin, first))
        return found[::-1]

    # Tensors.

    def _pieces(self, leaf: ShardedTensor, is_padding: bool) -> Iterator[template.Piece]:
        data = leaf.data
        if not data.is_contiguous():
            raise TemplateError(f"{leaf.key} is saved from memory that is not contiguous")
        if is_padding:
            if is_main_replica(leaf.replica_id):
                zeros = _Origin(0, data.numel(), data.element_size(), template.ZEROS, 0, data.dtype)
                yield from self._run(leaf, 0, data.numel(), zeros, 0)
            return
        runs = self._find(data)
        owner = self._shared_by(data)
        if owner is None:
            if not is_main_replica(leaf.replica_id):
                return
            end = 0
            for start, stop, _, _ in runs:
                if start != end:
                    break
                end = stop
            if end != data.numel():
                raise TemplateError(f"{leaf.key} lies in no shard part and in no extras")
        elif not (owner and _leads_its_copies(leaf.replica_id)):
            return
        for start, stop, origin, first in runs:
            yield from self._run(leaf, start, stop, origin, first)

    def _run(
        self, leaf: ShardedTensor, start: int, stop: int, origin: _Origin, first: int
    ) -> Iterator[template.Piece]:
        """Yield the boxes of elements ``start`` to ``stop``; ``first``: the element of the origin
        that belongs to ``start``."""
        prepended = leaf.prepend_axis_num
        for box in template.boxes(tuple(leaf.data.shape), start, stop):
            local = (*([0] * prepended), *box.offsets)
            offset = origin.offset_of(first + box.start - start)
            yield template.Piece(
                key=leaf.key,
                shape=tuple(leaf.global_shape),
                offsets=tuple(a + b for a, b in zip(leaf.global_offset, local, strict=True)),
                sizes=(*([1] * prepended), *box.sizes),
                dtype=template.dtype_name(leaf.data.dtype),
                part=origin.part,
                offset_bytes=0 if origin.part == template.ZEROS else offset,
                stored=template.dtype_name(origin.stored),
                is_extra=origin.is_extra,
            )

    def _shared_by(self, data: Tensor) -> bool | None:
        """Return whether memory of a parameter of a distributed optimizer belongs to its first
        instance, which writes; None for any other memory."""
        begin, end = data.data_ptr(), data.data_ptr() + data.numel() * data.element_size()
        place = bisect.bisect_right(self._shared, begin, key=lambda each: each[0]) - 1
        if place < 0 or not data.numel():
            return None
        low, high, first_instance = self._shared[place]
        return first_instance if low <= begin and end <= high else None

    # Other values.

    def _checked(self, leaf: ShardedObject) -> Any:
        is_constant = leaf.key.endswith(_CONSTANT_OBJECTS)
        if is_constant and "_extra_state" in leaf.key:
            configs = [getattr(chunk, "config", None) for chunk in self._loop.model_chunks]
            is_constant = not any(getattr(config, "fp8", None) for config in configs)
        if not is_constant and not template.has_marks(leaf.data):
            raise TemplateError(f"{leaf.key}: nobody knows how an iteration changes it")
        return leaf.data

    def _marked_optimizer(self, node: Any) -> Any:
        chained = getattr(self._loop.optimizer, "chained_optimizers", [self._loop.optimizer])
        if len(chained) == 1:
            return self._marked(node, 0, self._inner[0])
        return {
            key: self._marked(node[key], self._inner.index(link), link)
            if any(link is inner for inner in self._inner)
            else node[key]
            for key, link in enumerate(chained)
        }

    def _marked(self, node: Any, index: int, inner: Any) -> Any:
        """Return the values that an inner optimizer saves and that are no tensors, with marks."""
        if isinstance(node, ShardedObject):
            node.data = self._marked(node.data, index, inner)
            return node
        if not isinstance(node, Mapping):
            return node
        marked = dict(node)
        if "param_groups" in node:
            marked["param_groups"] = [
                self._marked_group(group, index, number, inner)
                for number, group in enumerate(node["param_groups"])
            ]
            if isinstance(node.get("state"), Mapping):
                # The step is left out at the first capture, where it is zero.
                step = self._step(inner, as_number=False)
                marked["state"] = {**node["state"], **({"common_step": step} if step else {})}
        if "grad_scaler" in node:
            marked["grad_scaler"] = self._marked_scaler(node["grad_scaler"], index)
        if "optimizer" in node:
            marked["optimizer"] = self._marked(node["optimizer"], index, inner)
        return marked

    def _marked_group(
        self, group: Mapping[str, Any], index: int, number: int, inner: Any
    ) -> dict[str, Any]:
        live = inner.optimizer.param_groups[number]
        marked: dict[str, Any] = {}
        for key, value in group.items():
            if key == "step" and key not in live:
                step = self._step(inner, as_number=True)
                if step is None:
                    raise TemplateError("the number of steps lies in no shard part")
                marked[key] = step
            elif isinstance(live.get(key), Tensor) or (
                key in live and isinstance(value, int | float | bool | str | tuple)
            ):
                marked[key] = template.FromExtras(("param_groups", index, number, key))
            else:
                marked[key] = value
        return marked

    def _marked_scaler(self, node: Any, index: int) -> Any:
        if isinstance(node, ShardedObject):
            node.data = self._marked_scaler(node.data, index)
            return node
        return {key: template.FromExtras(("scalers", f"scaler{index}", key)) for key in node}

    def _step(self, inner: Any, *, as_number: bool) -> template.StepNumber | None:
        for state in inner.optimizer.state.values():
            step = state.get("step")
            if isinstance(step, Tensor) and (found := self._find(step.view(-1))):
                _, _, origin, first = found[0]
                stored = template.dtype_name(origin.stored)
                return template.StepNumber(origin.part, origin.offset_of(first), stored, as_number)
        return None


def _leads_its_copies(replica_id: Any) -> bool:
    """Return whether all numbers of a copy are those of the main copy, except the last, which is
    its data-parallel rank."""
    if isinstance(replica_id, int):
        raise TemplateError(f"copies of a parameter are numbered {replica_id}, without groups")
    return all(number == 0 for number in replica_id[:-1])


def _padding(node: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield key and offset of the padding between parameters in a flat buffer."""
    if isinstance(node, ShardedObject | ShardedTensor):
        return
    if isinstance(node, Mapping):
        flag = node.get("padding")
        if isinstance(flag, LocalNonpersistentObject) and flag.obj:
            for leaf in node.values():
                if isinstance(leaf, ShardedTensor):
                    yield leaf.key, tuple(leaf.global_offset)
            return
        for child in node.values():
            yield from _padding(child)
    elif isinstance(node, list):
        for child in node:
            yield from _padding(child)
