"""Megatron as a framework: its optimizers, extras, groups and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from megatron import core
from megatron.core import parallel_state
from torch import Tensor

from deadpool_megatron.layout.records import RoleLayout
from deadpool_megatron.layout.sizes import Sizes
from deadpool_megatron.megatron import dimensions, identity, loop_extras, optimizer
from deadpool_megatron.megatron.audit.audit import Audit
from deadpool_megatron.megatron.interrupt_cleanup import InterruptCleanup
from deadpool_megatron.megatron.loop import MegatronLoop, model_config
from deadpool_megatron.megatron.template_maker import make_template
from deadpool_megatron.member.framework import Framework, ScheduleDifference, StepCalls, UpdateAudit
from deadpool_megatron.member.role_reports import RoleReports
from deadpool_megatron.planning.model_replicas import sizes_of
from deadpool_megatron.state.template import StateTemplate
from deadpool_megatron.vault.vault_client import VaultClient


class MegatronFramework(Framework):
    """The framework of a loop on Megatron; see :class:`Framework`."""

    versions = (core.__version__,)

    def __init__(self, loop: MegatronLoop) -> None:
        optimizer.refuse_unknown_state(loop.optimizer, model_config(loop))
        if loop.arguments is not None:
            optimizer.refuse_lossy_saves(loop.optimizer, loop.arguments[0])
        optimizer.complete_state(loop.optimizer)
        self._loop = loop
        self._shard = optimizer.ShardState(loop.optimizer)
        self.parts = self._shard.parts
        identity.identify(loop, self.parts)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.peers = dist.get_process_group_ranks(group)
        self.slots = 2 if optimizer.statistics_span_the_world(loop.optimizer) else 3
        self._cleanup = InterruptCleanup(loop)

    def meaning(self) -> str:
        """See :class:`Framework`."""
        return identity.role_meaning(self._loop)

    def install(self, calls: StepCalls) -> None:
        """See :class:`Framework`."""
        calls = calls._replace(after=[self._shard.after_update, *calls.after])
        optimizer.install_step_hooks(self._loop.optimizer, calls)

    def capture(self) -> dict[str, Any]:
        """See :class:`Framework`."""
        return loop_extras.capture(self._loop)

    def restore(self, values: dict[str, Any]) -> None:
        """See :class:`Framework`."""
        loop_extras.restore(self._loop, values)

    def restore_last(self, values: dict[str, Any]) -> None:
        """See :class:`Framework`. Loss sums are restored here as well."""
        loop_extras.restore_last(values)

    def restore_passing(self, values: dict[str, Any]) -> None:
        """See :class:`Framework`."""
        loop_extras.restore_passing(self._loop, values)

    def readopt(self) -> None:
        """See :class:`Framework`."""
        self._shard.readopt()

    def release(self) -> None:
        """See :class:`Framework`."""
        self._shard.release()

    def synchronise(self) -> None:
        """See :class:`Framework`."""
        dimensions.rebuild_from_peers(self._loop)

    def verify(self) -> None:
        """See :class:`Framework`."""
        dimensions.verify(self._loop)

    def forget_in_flight(self) -> None:
        """See :class:`Framework`."""
        self._cleanup.forget()

    def entry_digests(self) -> dict[str, str]:
        """See :class:`Framework`."""
        return identity.entry_digests(self._loop)

    def schedule_difference(self, values: dict[str, Any]) -> ScheduleDifference | None:
        """See :class:`Framework`."""
        text = loop_extras.schedule_difference(self._loop, values)
        is_overridden = loop_extras.overrides_schedule(self._loop.scheduler)
        flag = "--override-opt-param-scheduler"
        return ScheduleDifference(text, flag, is_overridden) if text else None

    def large_frozen_weights(self) -> Sequence[tuple[str, Tensor]]:
        """See :class:`Framework`."""
        return loop_extras.large_frozen_weights(self._loop)

    def sizes(self, world_size: int, members_per_node: int) -> Sizes:
        """See :class:`Framework`."""
        if self._loop.arguments is None:
            return Framework.sizes(self, world_size, members_per_node)
        sizes = sizes_of(*self._loop.arguments, world_size, members_per_node)
        reasons = [part.indivisible for part in self.parts]
        if optimizer.state_numbers(self._loop.optimizer):
            reasons.append("the optimizer keeps plain numbers of each parameter")
        if sizes.grid.ep > 1 and core.__version__.startswith("0.16."):
            reasons.append("Megatron-LM 0.16 saves random states of experts by data-parallel rank")
        if optimizer.saves_by_parameter(self._loop.arguments[0]):
            reasons.append(
                "--dist-ckpt-optim-fully-reshardable loses state where buckets are padded"
            )
        return sizes.fixed(next(filter(None, reasons), ""))

    def template(self, layout: RoleLayout) -> StateTemplate:
        """See :class:`Framework`."""
        return make_template(self._loop, self.parts, layout)

    def audit(
        self, vault: VaultClient, interval: int, wait: Callable[[], None], reports: RoleReports
    ) -> UpdateAudit:
        """See :class:`Framework`."""
        return Audit(self._loop, self.parts, vault.sealed_part, interval, wait, reports)
