"""Restoring by replay: a whole copy of an earlier generation, then every update since, once more.

At most ``full_every`` - 1 updates, on the live tensors, right after they were restored to the base.
The result counts only if its checksums are those that its owner's vault had sealed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from deadpool_megatron.hooks.generations.protection import Protection
from deadpool_megatron.hooks.generations.replay import InnerUpdate, parameters_of, replay
from deadpool_megatron.hooks.training_state.optimizer import ShardState, inner_optimizers
from deadpool_megatron.layout.part_kinds import SUMS_PART, UPDATE_PART, gradients_part
from deadpool_megatron.layout.records import Generation
from deadpool_megatron.layout.replaying import from_key, key, unpack_sums
from deadpool_megatron.state import extras as codec
from deadpool_megatron.state.packing import Part
from deadpool_megatron.vault.member.client import RestoredParts


class ReplayRefused(RuntimeError):
    """Every byte was intact, and the result is not what the owner had; one line for people."""


def load_shards(
    optimizer: Any,
    shard: ShardState,
    restored: RestoredParts,
    generation: Generation,
    protection: Protection,
) -> Mapping[str, Any]:
    """Bring all shard parts of ``generation`` into the live tensors.

    Those that nobody holds whole are recomputed, compared with the owner's checksums and handed to
    the vault. Returns what is to be reported of that, empty if nothing was recomputed. Raises
    ReplayRefused, and what waits of the protection raise.
    """
    held: list[Part] = []
    missing: list[tuple[Part, Any]] = []
    for inner, part in zip(inner_optimizers(optimizer), shard.parts, strict=True):
        if part.name in restored.names:
            held.append(part)
        else:
            missing.append((part, inner))
    protection.load((part, restored.part(part.name)) for part in held)
    if not missing:
        return {}
    started = time.monotonic()
    steps = _replay(missing, optimizer, restored, protection)
    sums = unpack_sums(restored.part(key(generation, SUMS_PART)))
    names = [part.name for part, _ in missing]
    if not set(names) <= sums.keys():
        raise ReplayRefused(f"the checksums of {generation} do not name {', '.join(names)}")
    wrong = protection.seal_replayed(generation, {name: sums[name] for name in names})
    facts = {"matched": not wrong, "steps": steps, "seconds": time.monotonic() - started}
    if wrong:
        raise ReplayRefused(
            f"{wrong} recomputed over {steps} updates is not what its owner had"
            f" ({facts['seconds']:.3f} s)"
        )
    return facts


def _replay(
    missing: list[tuple[Part, Any]],
    optimizer: Any,
    restored: RestoredParts,
    protection: Protection,
) -> int:
    """Load the base, replay what was not skipped; returns the number of steps."""
    kept = [place for name in restored.names if (place := from_key(name)) is not None]
    first = missing[0][0].name
    (base,) = {generation for generation, name in kept if name == first}
    steps = sorted({generation for generation, name in kept if name == UPDATE_PART})
    protection.load((part, restored.part(key(base, part.name))) for part, _ in missing)
    order = inner_optimizers(optimizer)
    for step in steps:
        values = codec.decode(restored.part(key(step, UPDATE_PART)))["inner"]
        for part, inner in missing:
            used = values[order.index(inner)]
            if used is None:
                continue  # this update was skipped
            name = gradients_part(part.name)
            gradients = Part(name, parameters_of(inner), part.replicas)
            held = gradients.views(restored.part(key(step, name)))
            replay(inner, InnerUpdate.from_json(used), held)
    return len(steps)
