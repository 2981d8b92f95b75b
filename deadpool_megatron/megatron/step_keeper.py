"""The scheme ``recompute``: an older generation, and a replay of each update since.

With the generation that an update made the process keeps the input of the update: gradients, and
values of the parameter groups.

Captured at the pre-hook of each inner optimizer, after clipping and found-inf (traps, A2 and B12):
the gradients may be views of the gradient buffer, which the next iteration zeroes, so their copies
are ordered before it. An update that is skipped as a whole fires no hook: its step is marked, and
holds no gradients.

Nothing is trusted before the first update of this process has been rehearsed
(:mod:`.update_replay`).

A restore then takes a whole copy of an earlier generation, and makes every update since, at most
``full_every`` - 1, on the live tensors, right after they were restored to the base. The result
counts only if its checksums are those that its owner's vault had sealed.

No other scheme loads this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deadpool_megatron import failpoints
from deadpool_megatron.layout import records
from deadpool_megatron.layout.gradient_chain import from_key, key, step_parts, unpack_sums
from deadpool_megatron.megatron.optimizer import ShardState, inner_optimizers, parameters_of
from deadpool_megatron.megatron.update_replay import InnerUpdate, rehearse, replay, used_values
from deadpool_megatron.member.protection import SlotViews
from deadpool_megatron.member.update_capture import Await, LiveState, ReplayRefused, UpdateCapture
from deadpool_megatron.platform.devices import CopyHandle, Platform
from deadpool_megatron.state import extras as codec
from deadpool_megatron.state.parts import Part
from deadpool_megatron.vault.vault_client import RestoredParts, SlotWriter, VaultClient

_STEP_BYTES = 64 << 10
_BYTES_PER_PARAMETER = 8  # its number, in the list of those without a gradient

# matched, seconds, bytes, difference -> report to the coordinator
Report = Callable[[Mapping[str, Any]], None]


class StepKeeper(UpdateCapture):
    """Keeper of the updates of one role in one process. Main thread."""

    def __init__(
        self,
        optimizer: Any,
        shard: ShardState,
        platform: Platform,
        vault: VaultClient,
        report: Report,
    ) -> None:
        self._inner = inner_optimizers(optimizer)
        self._shards = shard.parts
        self.gradients = [
            Part(records.gradients_part(part.name), parameters_of(inner), part.replicas)
            for inner, part in zip(self._inner, shard.parts, strict=True)
        ]
        values = codec.encode({"inner": [used_values(inner) for inner in self._inner]})
        count = sum(len(part.tensors) for part in self.gradients)
        needed = 2 * len(values) + _BYTES_PER_PARAMETER * count
        self._capacity = -(-needed // _STEP_BYTES) * _STEP_BYTES
        self._platform = platform
        self._vault = vault
        self._report = report
        self._matched: bool | None = None  # the result of the rehearsal
        # They keep the mapping of the segment, so no other memory can get its address.
        self._views = SlotViews()
        self.begin(wanted=False)

    def layout_parts(self, rank: int) -> list[records.PartInfo]:
        """Return the parts that a slot needs for steps."""
        infos = {
            shard.name: records.PartInfo(part.name, part.nbytes, part.replicas)
            for shard, part in zip(self._shards, self.gradients, strict=True)
        }
        return step_parts(infos, self._capacity, rank)

    def begin(self, *, wanted: bool) -> None:
        """Begin an epoch, whose plan wants steps or does not."""
        self._is_wanted, self._is_one_update = wanted, True
        self._updates: dict[int, InnerUpdate] = {}
        self._copies: dict[int, CopyHandle] = {}
        self._reading: list[CopyHandle] = []

    def keeps(self) -> bool:
        """Return whether steps are kept at all; not after a rehearsal has failed."""
        return self._is_wanted and self._matched is not False

    def capture(self, index: int, writer: SlotWriter) -> None:
        """Start copying the input of the update that inner optimizer ``index`` is about to make."""
        if not self.keeps():
            return
        if index in self._updates:
            self._is_one_update = False  # a step has room for the gradients of one
            return
        part, inner = self.gradients[index], self._inner[index]
        into: list[Tensor] = []
        sources: list[Tensor] = []
        absent = []
        views = self._views.of(part, writer)
        for number, (parameter, view) in enumerate(zip(parameters_of(inner), views, strict=True)):
            if parameter.grad is None:
                absent.append(number)
            else:
                into.append(view)
                sources.append(parameter.grad)
        self._updates[index] = InnerUpdate(used_values(inner), tuple(absent))
        self._copies[index] = self._platform.side_copy(into, sources)

    def order_copies(self, await_it: Await) -> None:
        """Order the copies before the next iteration overwrites gradients. On a device only the
        stream waits, not the host."""
        for copy in self._reading:
            await_it("the copy of gradients", copy.precede)
        self._reading = []

    def finish(
        self,
        writer: SlotWriter,
        generation: records.Generation,
        previous: records.Generation | None,
        shard_copies: list[CopyHandle],
        await_it: Await,
    ) -> tuple[dict[str, int], list[CopyHandle]]:
        """Finish an iteration; return part -> bytes of the step in its slot, and running copies."""
        updates, self._updates = self._updates, {}
        copies, self._copies = list(self._copies.values()), {}
        self._reading = list(copies)
        has_step, self._is_one_update = self._is_one_update and self.keeps(), True
        sizes = dict.fromkeys((part.name for part in self.gradients), 0)
        sizes[records.UPDATE_PART] = 0
        if not has_step or previous is None or previous.iteration != generation.iteration - 1:
            return sizes, copies
        before = self._state_before(previous) if self._matched is None and updates else None
        if before is not None:
            for copy in (*shard_copies, *copies):
                await_it("the copies for the rehearsal of an update", copy.wait)
            self._rehearse(writer, generation, before, updates)
        if not self.keeps():
            return sizes, copies
        found = [updates.get(index) for index in range(len(self._inner))]
        payload = codec.encode({"inner": [update and update.to_dict() for update in found]})
        if len(payload) > self._capacity:
            return sizes, copies
        writer.part(records.UPDATE_PART)[: len(payload)] = payload
        sizes[records.UPDATE_PART] = len(payload)
        for index in updates:
            part = self.gradients[index]
            sizes[part.name] = part.nbytes
        self._damage_if_asked(writer, generation, copies, sizes)
        return sizes, copies

    def running(self) -> list[CopyHandle]:
        """Return the copies of an interrupted step, and forget them."""
        copies = [*self._copies.values(), *self._reading]
        self._updates, self._copies, self._reading = {}, {}, []
        return copies

    def recompute(
        self,
        missing: Sequence[Part],
        restored: RestoredParts,
        generation: records.Generation,
        live: LiveState,
    ) -> Mapping[str, Any]:
        """Compute it from the newest generation before that is whole; see the module text."""
        started = time.monotonic()
        steps = self._replay(missing, restored, live)
        sums = unpack_sums(restored.part(key(generation, records.SUMS_PART)))
        names = [part.name for part in missing]
        if not set(names) <= sums.keys():
            raise ReplayRefused(f"the checksums of {generation} do not name {', '.join(names)}")
        wrong = live.seal_replayed(generation, {name: sums[name] for name in names})
        facts = {"matched": not wrong, "steps": steps, "seconds": time.monotonic() - started}
        if wrong:
            raise ReplayRefused(
                f"{wrong} recomputed over {steps} updates is not what its owner had"
                f" ({facts['seconds']:.3f} s)"
            )
        return facts

    def _replay(self, missing: Sequence[Part], restored: RestoredParts, live: LiveState) -> int:
        """Load the base, replay what was not skipped; returns the number of steps."""
        kept = [place for name in restored.names if (place := from_key(name)) is not None]
        (base,) = {generation for generation, name in kept if name == missing[0].name}
        steps = sorted({generation for generation, name in kept if name == records.UPDATE_PART})
        live.load((part, restored.part(key(base, part.name))) for part in missing)
        names = {part.name for part in missing}
        for step in steps:
            used = codec.decode(restored.part(key(step, records.UPDATE_PART)))["inner"]
            for update, inner, shard, gradients in zip(
                used, self._inner, self._shards, self.gradients, strict=True
            ):
                if update is None or shard.name not in names:
                    continue  # this update was skipped, or the part was held whole
                held = gradients.views(restored.part(key(step, gradients.name)))
                replay(inner, InnerUpdate.from_dict(update), held)
        return len(steps)

    def _state_before(self, previous: records.Generation) -> list[memoryview] | None:
        """Return the bytes of the shard parts from which the update began. None where they are not
        in own slots (restored from elsewhere, or not sealed yet): the next update is rehearsed."""
        held = [self._vault.sealed_part(previous, part.name) for part in self._shards]
        found = [part for part in held if part is not None]
        return found if len(found) == len(held) else None

    def _rehearse(
        self,
        writer: SlotWriter,
        generation: records.Generation,
        before: list[memoryview],
        updates: Mapping[int, InnerUpdate],
    ) -> None:
        """Find out, once, whether a replay from the slots gives what the update gave."""
        started = time.monotonic()
        difference = ""
        for index, update in updates.items():
            shard, inner = self._shards[index], self._inner[index]
            gradients = self._views.of(self.gradients[index], writer)
            try:
                found = rehearse(
                    inner, update, shard, before[index], gradients, writer.part(shard.name)
                )
            except (torch.OutOfMemoryError, MemoryError) as error:
                # Training has what it needs without it; so do whole copies.
                found = f"no room to try: {str(error).partition(chr(10))[0]}"
            if found or failpoints.hit("rehearsal", iteration=generation.iteration) is not None:
                difference = f"{shard.name}, {found or 'as a test wants it'}"
                break
        self._matched = matched = not difference
        self._vault.rehearsed(matched)
        self._report(
            {
                "matched": matched,
                "difference": difference,
                "seconds": time.monotonic() - started,
                "bytes": sum(self._shards[index].nbytes for index in updates),
            }
        )

    def _damage_if_asked(
        self,
        writer: SlotWriter,
        generation: records.Generation,
        copies: list[CopyHandle],
        sizes: Mapping[str, int],
    ) -> None:
        """Let a test have wrong gradients under a right checksum."""
        if failpoints.hit("step.captured", iteration=generation.iteration) is None:
            return
        for copy in copies:
            copy.wait(1.0)
        name = next(part.name for part in self.gradients if sizes[part.name])
        writer.part(name)[2] ^= 0x40
