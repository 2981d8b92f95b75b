"""The audit of an iteration: state and results that data-parallel peers must have in common.

Before the passes all replicas compute the same micro-batch (:mod:`.pass_audit`). Then, around each
inner update::

    before    peers compare sums of the weights that the forward pass has used; then the audited
              role sends the state of its shard, as it was captured after the previous update, and
              the gradients that it is about to use to all peers, and each peer computes the update
              on copies; in each audit another role is audited
    after     the audited role adds the sums of its own result, and all peers compare

ByteRobust (dual-phase replay) and Megatron's rerun machine also repeat an update on another device.
Here this takes the shard of a single role, a chunk at a time, and hardly any memory.

After a mismatch this iteration has no generation: the roles wait until the coordinator has
quarantined the node, and the run continues from the previous generation, which is committed
already.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deadpool_megatron.events import Kind
from deadpool_megatron.layout.records import Generation, is_due
from deadpool_megatron.megatron.audit import comparison, update_replay, update_transfer as transfer
from deadpool_megatron.megatron.audit.pass_audit import PassAudit, incomparable_reason
from deadpool_megatron.megatron.dimensions import plain_parameters
from deadpool_megatron.megatron.loop import MegatronLoop
from deadpool_megatron.megatron.optimizer import inner_optimizers, is_distributed, parameters_of
from deadpool_megatron.member.framework import UpdateAudit
from deadpool_megatron.member.peer_comparison import current_device, gather_by_role
from deadpool_megatron.member.role_reports import RoleReports
from deadpool_megatron.state.optimizer_state import UnsupportedState
from deadpool_megatron.state.parts import Part, fingerprint

_SUMS = 2  # the number of sums in a fingerprint

# Returns the bytes of a part of a generation that is sealed in a slot of this role.
SealedPart = Callable[[Generation, str], memoryview | None]


def _refuse_unauditable(optimizer: Any) -> None:
    reason, optimizers = update_replay.replay_refusal(optimizer), inner_optimizers(optimizer)
    for inner in optimizers:
        if not is_distributed(inner):
            reason = "without the distributed optimizer"
        elif inner.ddp_config.num_distributed_optimizer_instances > 1:
            reason = "with several optimizer instances"
        else:
            continue
        reason += " wrong state stays in the replica that has it"
    if not reason and all(dist.get_world_size(i.data_parallel_group) < 2 for i in optimizers):
        reason = "there are no data-parallel peers"
    if reason:
        raise UnsupportedState(f"--deadpool-audit-interval: {reason}; leave it out")


def is_audited(iteration: int, interval: int, every: int) -> bool:
    """Return whether an iteration is audited: from each ``interval``-th iteration on, the first
    iteration whose previous state is captured. Each ``every``-th generation is captured."""
    before = max(0, iteration - every)
    return is_due(iteration - 1, every) and iteration // interval > before // interval


def audit_number(iteration: int, interval: int, every: int) -> int:
    """Return the number of an audit; numbers are consecutive, so that roles take turns."""
    return iteration // max(interval, every)


class Audit(comparison.Auditor, UpdateAudit):
    """The audits of a role in a process.

    ``shards``: the part of each inner optimizer. Raises UnsupportedState where no peer can repeat
    the computation of this role.
    """

    def __init__(
        self,
        loop: MegatronLoop,
        shards: Sequence[Part],
        sealed_part: SealedPart,
        interval: int,
        await_committed: Callable[[], None],
        reports: RoleReports,
    ) -> None:
        _refuse_unauditable(loop.optimizer)
        super().__init__(loop, await_committed, reports)
        self._inner = inner_optimizers(loop.optimizer)
        self._shards = shards
        self._sealed_part = sealed_part
        self._interval = interval
        self._passes = None
        if reason := incomparable_reason(loop):
            print(f"audits do not compare passes: {reason}", flush=True)
        else:
            self._passes = PassAudit(loop, await_committed, reports)
            loop.around_passes = self._passes.around
        self._previous: Generation | None = None
        self._weights_compared = False
        # For each repeated inner update the sums of this role's result from the state that was
        # sent, a row for each chunk.
        self._computed: dict[int, Tensor] = {}
        self._seconds = 0.0
        self._bytes = 0

    def announce(self, iteration: int, previous: Generation, every: int) -> None:
        """Announce the next iteration, and the generation from whose state it starts; each
        ``every``-th generation is captured."""
        self._iteration, self._previous, due = iteration, previous, (self._interval, every)
        self._number = audit_number(iteration, *due) if is_audited(iteration, *due) else None
        if self._passes is not None:
            self._passes.announce(iteration, self._number)
        self._weights_compared, self._computed = False, {}
        self._seconds, self._bytes = 0.0, 0

    def before_update(self, index: int) -> None:
        """Audit the weights and the update that inner optimizer ``index`` is about to make."""
        if self._number is None:
            return
        started = time.monotonic()
        if not self._weights_compared:
            self._weights_compared = True
            self._await_committed()
            self._compare_weights()
        if (peers := self._peers(index)) is not None:
            audited = self._audited(peers, self._number)
            if audited == dist.get_rank():
                self._damage("audit.state", self._shards[index].tensors)
            self._computed[index] = self._compute_alike(index, audited, peers)
        self._seconds += time.monotonic() - started

    def after_update(self, index: int) -> None:
        """Compare the update that inner optimizer ``index`` has made."""
        if self._number is None:
            return
        started = time.monotonic()
        if (peers := self._peers(index)) is not None:
            self._compare_update(index, self._audited(peers, self._number), peers)
        self._seconds += time.monotonic() - started
        if index == len(self._inner) - 1:
            self._number = None
            if dist.get_rank() == 0:  # mismatches were reported by each role itself
                passes = 0.0 if self._passes is None else self._passes.seconds
                facts = {"seconds": passes + self._seconds, "bytes": self._bytes}
                self._reports.send_event(Kind.AUDITED, self._iteration, facts)

    def _peers(self, index: int) -> dist.ProcessGroup | None:
        group: dist.ProcessGroup = self._inner[index].data_parallel_group
        return group if dist.get_world_size(group) > 1 else None

    def _audited(self, peers: dist.ProcessGroup, number: int) -> int:
        roles = dist.get_process_group_ranks(peers)
        return roles[number % len(roles)]

    def _compare_weights(self) -> None:
        """Compare the weights of the forward pass, equal in all data-parallel peers."""
        groups: dict[bool, dist.ProcessGroup] = {}
        for index, inner in enumerate(self._inner):
            is_expert = any(g.get("is_expert_parallel") for g in inner.optimizer.param_groups)
            if (peers := self._peers(index)) is not None:
                groups[is_expert] = peers
        for is_expert, peers in sorted(groups.items()):
            held = plain_parameters(self._loop, expert=is_expert)
            self._damage("audit.weight", held)
            found = gather_by_role(fingerprint(held, current_device()), peers)
            sums = {role: _sums(values) for role, values in found.items()}
            subject = "expert weights" if is_expert else "weights"
            self._stop_if_wrong(comparison.compare_held(sums, subject))

    def _compute_alike(self, index: int, audited: int, peers: dist.ProcessGroup) -> Tensor:
        """Return the sums of :meth:`_compute`, after comparing them with those of peers. Without a
        majority all peers recompute; a role whose result changes has an intermittent fault."""
        sums = self._compute(index, audited, peers)
        kinds, first = self._gather_computed(sums, peers)
        subject = f"the update of role {audited}"
        mismatch = comparison.compare_computed(first, kinds, subject)
        if mismatch is not None and not mismatch.is_certain:
            _, second = self._gather_computed(self._compute(index, audited, peers), peers)
            self._stop_if_wrong(comparison.compare_repeated(first, second, subject))
        return sums

    def _gather_computed(
        self, sums: Tensor, peers: dist.ProcessGroup
    ) -> tuple[dict[int, int], dict[int, comparison.Sums]]:
        """Return the kind of hardware (:func:`.comparison.hardware_number`) and the sums of each
        role."""
        own = torch.tensor([self._hardware], dtype=torch.int64, device=sums.device)
        found = gather_by_role(torch.cat([own, sums.flatten()]), peers)
        hardware = {role: int(row[0]) for role, row in found.items()}
        return hardware, {role: _sums(row[1:]) for role, row in found.items()}

    def _compute(self, index: int, audited: int, peers: dist.ProcessGroup) -> Tensor:
        """Return the sums, of shape (chunks, 2), of the update of ``audited``, made on copies."""
        inner, device, is_own = self._inner[index], current_device(), audited == dist.get_rank()
        payload = transfer.describe(inner) if is_own else b""
        description = transfer.parse(transfer.broadcast_bytes(payload, audited, peers, device))
        sums = []
        for chunk in description.chunks:
            if is_own:
                flat = transfer.pack(inner, chunk, self._state_before(index), device)
            else:
                flat = torch.empty(transfer.chunk_bytes(chunk), dtype=torch.uint8, device=device)
            dist.broadcast(flat, src=audited, group=peers)
            copies = transfer.unpack(chunk, flat)
            self._bytes += flat.numel()
            del flat
            update_replay.update_copies(inner, description.groups, copies)
            updated = [tensor for copy in copies for tensor in copy.tensors.values()]
            self._damage("audit.update", updated)
            sums.append(fingerprint(updated, device))
        if is_own:
            gradients = [p.grad for p in parameters_of(inner) if p.grad is not None]
            self._damage("audit.gradient", gradients)
        return torch.stack(sums) if sums else torch.zeros(0, _SUMS, dtype=torch.int64).to(device)

    def _state_before(self, index: int) -> Callable[[Tensor], Tensor]:
        """Return a function that maps a tensor of a shard to its captured value, or to the tensor
        itself where no slot of this role holds the value."""
        part, previous = self._shards[index], self._previous
        held = None if previous is None else self._sealed_part(previous, part.name)
        if held is None:
            return lambda tensor: tensor
        return lambda tensor: part.slice(held, tensor)

    def _compare_update(self, index: int, audited: int, peers: dist.ProcessGroup) -> None:
        inner, sums = self._inner[index], self._computed.pop(index)
        used = torch.zeros_like(sums)
        if audited == dist.get_rank():
            for number, chunk in enumerate(update_replay.chunks(inner)):
                tensors = (t for p in chunk for _, t in update_replay.all_tensors(inner, p))
                used[number] = fingerprint(tensors, sums.device)
        kinds, found = self._gather_computed(torch.cat([sums, used]), peers)
        repeats = {role: both[: used.numel()] for role, both in found.items()}
        subject = f"the update of role {audited}"
        if len(set(kinds.values())) > 1:
            self._report_incomparable(comparison.without_peers(kinds), "updates", min(found))
        used_sums = found[audited][used.numel() :]
        self._stop_if_wrong(comparison.compare_update(audited, used_sums, repeats, kinds, subject))


def _sums(values: Tensor) -> comparison.Sums:
    return tuple(int(value) for value in values.reshape(-1))
