"""The seam to a training framework: everything that a member needs from it.

A :class:`Framework` stands for the state of one built role. There are two implementations:
:mod:`deadpool_megatron.megatron.framework` and :mod:`deadpool_megatron.torch_native`. Nothing in
this package imports either; a program returns its own (:meth:`Program.framework`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from deadpool_megatron import failpoints
from deadpool_megatron.layout.records import Generation, RoleLayout
from deadpool_megatron.layout.sizes import Sizes
from deadpool_megatron.state.optimizer_state import UnsupportedState
from deadpool_megatron.state.parts import Part
from deadpool_megatron.state.template import StateTemplate
from deadpool_megatron.vault.vault_client import VaultClient

if TYPE_CHECKING:
    from deadpool_megatron.member.role_reports import RoleReports


class StepCalls(NamedTuple):
    """Calls that a framework makes around each step of the outermost optimizer. Main thread.

    ``gate``: at the entry of the step, before its first operation. ``before`` and ``after``: around
    the update of each inner optimizer, with its index; at ``before`` the gradients are those that
    the update uses. ``judge``: with each gradient norm of an applied update, where the framework
    computes it.
    """

    gate: Callable[[], None]
    before: Sequence[Callable[[int], None]]
    after: Sequence[Callable[[int], None]]
    judge: Callable[[float], None]

    def surround(self, optimizer: Optimizer, index: int) -> None:
        """Have inner optimizer ``index`` make the calls around its updates."""

        def call_before(*_: object) -> None:
            failpoints.hit("optimizer.inside", optimizer=index)
            for call in self.before:
                call(index)

        def call_after(*_: object) -> None:
            failpoints.hit("optimizer.updated", optimizer=index)
            for call in self.after:
                call(index)

        optimizer.register_step_pre_hook(call_before)
        optimizer.register_step_post_hook(call_after)


class ScheduleDifference(NamedTuple):
    """A difference between the schedule of a restored state and that of the command line.
    ``override_flag``: the flag with which the schedule of the command line counts;
    ``is_overridden``: whether that flag was given."""

    text: str
    override_flag: str
    is_overridden: bool


class UpdateAudit(ABC):
    """The search for silent corruption in one role. Main thread."""

    @abstractmethod
    def announce(self, iteration: int, previous: Generation, every: int) -> None:
        """Name the coming iteration, and the generation from whose state it starts; each
        ``every``-th generation is captured."""

    @abstractmethod
    def before_update(self, index: int) -> None:
        """Inner optimizer ``index`` is about to update."""

    @abstractmethod
    def after_update(self, index: int) -> None:
        """Inner optimizer ``index`` has updated."""


class Framework(ABC):
    """The state of one built role, as its framework knows it. Main thread.

    ``parts``: the live tensors of the optimizers' state, one part for each inner optimizer.
    ``peers``: the roles of the data-parallel group, with this role. ``slots``: the count of slots
    that a role needs in addition to the lag: 2 if a collective over all roles lies between the gate
    and the first overwrite of an iteration, else 3 (:mod:`.protection`). ``versions``: the versions
    of the software that gives the extras their meaning.

    The constructor of an implementation takes over the state of a loop, and raises UnsupportedState
    if it does not know all of that state: after a restore of less, training would continue with
    other numbers.
    """

    parts: list[Part]
    peers: list[int]
    slots: int
    versions: Sequence[str]

    @abstractmethod
    def meaning(self) -> str:
        """Return a text that names the role and its model: where the text is equal, the bytes of
        parts with equal signatures are interchangeable."""

    @abstractmethod
    def install(self, calls: StepCalls) -> None:
        """Have the optimizers make ``calls`` from now on. Called once."""

    @abstractmethod
    def capture(self) -> dict[str, Any]:
        """Return the extras: all state that an iteration changes and no part holds, as values of
        :mod:`deadpool_megatron.state.extras`. Values that are no copies must be encoded before they
        change."""

    @abstractmethod
    def restore(self, values: dict[str, Any]) -> None:
        """Restore extras in place, except those of :meth:`restore_last`. Raises ExtrasError for
        the extras of another model."""

    @abstractmethod
    def restore_last(self, values: dict[str, Any]) -> None:
        """Restore random states, after iterators were rebuilt, which may change them."""

    @abstractmethod
    def readopt(self) -> None:
        """Move tensors that the load of a checkpoint has replaced back into the parts. Their values
        do not change."""

    @abstractmethod
    def release(self) -> None:
        """Give the model its own memory again, since another framework object takes it over."""

    @abstractmethod
    def synchronise(self) -> None:
        """Collectively derive from peers the state that no slot holds."""

    @abstractmethod
    def verify(self) -> None:
        """Collectively compare the state that peers must hold equal. Raises PeerMismatch."""

    @abstractmethod
    def forget_in_flight(self) -> None:
        """Drop the state of an interrupted step, without communication."""

    @abstractmethod
    def entry_digests(self) -> dict[str, str]:
        """Return name -> short digest of each entry of the state, except weights and optimizer
        state."""

    # Methods with a default, as not every framework has these features.

    def restore_passing(self, values: dict[str, Any]) -> None:
        """Restore the state, except gradients, that a forward and backward pass changes. The
        program has loaded all other state from a checkpoint."""
        self.restore_last(values)

    def schedule_difference(self, values: dict[str, Any]) -> ScheduleDifference | None:
        """Compare the schedule of captured ``values`` with that of the command line."""
        return None

    def large_frozen_weights(self) -> Sequence[tuple[str, Tensor]]:
        """Return weights that no iteration changes and that are too large for the extras."""
        return ()

    def sizes(self, world_size: int, members_per_node: int) -> Sizes:
        """Return the sizes of the program in a run of ``world_size`` roles at full size."""
        return Sizes(1, (world_size,), "the program does not report other numbers")

    def template(self, layout: RoleLayout) -> StateTemplate:
        """Return the template for exports of this role; with a refusal if exports are
        impossible."""
        refusal = "the program does not say what its checkpoints hold"
        return StateTemplate(layout.role, layout.layout_hash, refusal=refusal)

    def audit(
        self, vault: VaultClient, interval: int, wait: Callable[[], None], reports: RoleReports
    ) -> UpdateAudit:
        """Return the audit of this role, once in ``interval`` iterations. ``wait`` returns as soon
        as the newest generation is committed. Raises UnsupportedState."""
        raise UnsupportedState(
            "--deadpool-audit-interval: updates of this framework cannot be audited; leave it out"
        )
