"""Entering an epoch: build, connect, restore, synchronise, verify one role."""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from deadpool_megatron import __version__
from deadpool_megatron.cluster.link.member_link import MemberLink
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.comms import CommunicatorFault, Communicators, EpochClosed, EpochStore
from deadpool_megatron.events import GRADIENT_NORM, STATE, Kind
from deadpool_megatron.failures import FailureKind, kind_of_end
from deadpool_megatron.layout.memory_needs import (
    NodeNeeds,
    extras_capacity_bytes,
    needs_at_size,
    node_needs,
)
from deadpool_megatron.layout.ranks import first_role, rank_of
from deadpool_megatron.layout.records import EpochRecord, Generation, extras_part
from deadpool_megatron.layout.sizes import fixed_by_scheme
from deadpool_megatron.member.framework import Framework, StepCalls, UpdateAudit
from deadpool_megatron.member.frozen_weights import FrozenWeights
from deadpool_megatron.member.loop import Program, ProtectedLoop
from deadpool_megatron.member.protection import Protection
from deadpool_megatron.member.role_layout import role_layout
from deadpool_megatron.member.role_reports import RoleReports
from deadpool_megatron.ownership import check_checkpoint
from deadpool_megatron.platform import PinnedSlots, select_platform
from deadpool_megatron.settings import Settings
from deadpool_megatron.state import extras as extras_codec, template as templates
from deadpool_megatron.state.frozen_file import Wait
from deadpool_megatron.state.parts import largest_value
from deadpool_megatron.vault import memory
from deadpool_megatron.vault.disk import extras_file
from deadpool_megatron.vault.disk.sources import dump_difference
from deadpool_megatron.vault.errors import CutRefused, Interrupted, OutOfSpace, VaultError
from deadpool_megatron.vault.vault_client import VaultClient
from deadpool_megatron.wire.framing import readable

# A device gets at least this long to show that it is idle, however late it is asked.
_MIN_SYNCHRONISE_SECONDS = 0.1


class RestoreFailed(RuntimeError):
    """The generation of the record cannot be restored; ``part``: the missing part, or empty."""

    def __init__(self, part: str, text: str) -> None:
        super().__init__(text)
        self.part = part


class OtherModel(RestoreFailed):
    """The state from which the run should continue is that of another model or schedule; the
    message is one line."""


class BuiltRole(NamedTuple):
    """Objects that are made for one role and dropped with it. ``frozen``: only with large frozen
    weights; ``audit``: only if it is requested."""

    loop: ProtectedLoop
    framework: Framework
    protection: Protection
    frozen: FrozenWeights | None
    audit: UpdateAudit | None


class EpochEntry:
    """The objects built for the current role, and the stages of a recovery, in their order.

    The first stage needs no peer and touches no slot: a member that is still building when its
    epoch is closed has nothing to leave, and continues building.
    """

    def __init__(
        self, program: Program, link: MemberLink, communicators: Communicators, reports: RoleReports
    ) -> None:
        self.program = program
        self.communicators = communicators
        self.reports = reports
        self.settings = settings = link.settings
        self.role = -1
        self.generation = Generation(0, 0)
        self.boundary = "step"
        self._link = link
        self._platform = select_platform()
        self._vault = VaultClient(
            link.place.vault_socket,
            link.place.segments,
            link.seat,
            # The vault may have to make the slots first.
            connect_seconds=settings.connect_seconds + settings.restore_seconds,
            memory_bytes=settings.memory_bytes,
        )
        self._pinned = PinnedSlots(self._platform, self._warn)
        self._built: BuiltRole | None = None
        self._late: dict[str, Any] = {}  # extras whose random states are restored last
        self._pristine = b""  # encoded extras right after the build
        # Identifies the extras of a role: they are restored only into a role with the same cut.
        self._identity: list[str] = []

    @property
    def built(self) -> BuiltRole:
        """The objects for :attr:`role`; only after a build."""
        assert self._built is not None
        return self._built

    @property
    def loop(self) -> ProtectedLoop:
        """The live training loop; only after a build."""
        return self.built.loop

    @property
    def protection(self) -> Protection:
        """The role's protection; only after a build."""
        return self.built.protection

    def build_detached(self, role: int, world_size: int) -> None:
        """Make groups and loop for ``role`` without peers; drop the objects of another role."""
        self._make_groups(role, world_size)
        self._make_loop()

    @property
    def is_built(self) -> bool:
        """Return whether there are groups and a loop for :attr:`role`."""
        return self._built is not None

    def warm_up(self) -> None:
        """Run one iteration without peers, to warm kernels, allocator and schedules, and take the
        memory that a role needs for its generations.

        A restore replaces all state that this iteration changes.
        """
        self.loop.warm_up()
        self.built.framework.forget_in_flight()
        self._park()

    def _park(self) -> None:
        """Make slots for the coming role, and page-lock their parts, unless the node may need that
        memory for copies of other roles."""
        try:
            self._check_memory(pinned=False)
            self._vault.park(self.protection.layout)
        except OutOfSpace as error:
            print(f"slots are made when there is a role for them: {error}", flush=True)
            return
        self._pinned.pin(self._vault.slot_views(self.protection.copied_parts))

    # Stages.

    def adopt(self, record: EpochRecord, role: int) -> None:
        """Build for ``role``. At a fresh start only make its groups: :meth:`rebuild` makes the
        loop, with peers."""
        world_size = len(record.seats)
        built_for = self.role if self.is_built else -1
        if record.restore.kind == "initial":
            self._make_groups(role, world_size)
        elif not self.is_built or (self.role != role and not self._renumber(role)):
            self.build_detached(role, world_size)
            if built_for >= 0:
                print(f"built for role {built_for}, rebuilt for role {role}", flush=True)
        elif built_for != role:
            print(f"built for role {built_for}, takes role {role} in place", flush=True)

    def rebuild(self, record: EpochRecord, role: int) -> None:
        """Connect every group of the epoch; at a fresh start, make the loop."""
        limit = self.settings.rebuild_seconds
        store = EpochStore(self._link.store, record.epoch, limit)
        self.communicators.attach(record.epoch, store, rank_of(role), deadline_seconds=limit)
        if record.restore.kind == "initial":
            self._make_loop()

    def restore(self, record: EpochRecord, role: int) -> None:
        """Restore the record's generation into the live objects. Raises CutRefused for a failure
        that only another size has."""
        restore, framework = record.restore, self.built.framework
        layout = self.protection.layout
        if restore.kind == "dump" and (reason := dump_difference(Path(restore.path), layout)):
            raise OtherModel(
                "",
                f"the state in {restore.path} is of another model or other flags: role {role}:"
                f" {reason}; resume it with the command that wrote it",
            )
        if restore.kind != "memory" and not self._vault.has_segment(self.role):
            # Memory is checked before any slot is made. A run that continues from memory has its
            # slots, and should rather run with fewer copies than end.
            for text in self._check_memory(pinned=self._platform.is_cuda):
                self._warn(text)
        # This message comes first, so that the coordinator compares the state in memory with this
        # model: the vault may have made slots for that state already, and refuses another layout.
        own = layout.without_runs.to_dict()
        self._link.send({"t": "registered", "layout": own, **self._sizes()})
        recipe = restore.recipes.get(role)
        try:
            self.protection.enter(record.epoch, record.protection.every)
        except OutOfSpace as error:
            if recipe is None or not recipe.cut:
                raise
            raise CutRefused(str(error)) from error
        self.built.framework.forget_in_flight()
        self.boundary = restore.boundary
        if restore.kind in ("memory", "dump"):
            self.generation = restore.generation
            self._restore_from_vault(record)
            self.protection.begin_from(self.generation, self.boundary)
            return
        self._late, self.reports.reported = {}, []
        if restore.kind == "durable":
            # The state after the build is restored first: a checkpoint does not hold all state that
            # an interrupted iteration, or the warm-up of a spare, has changed.
            pristine = extras_codec.decode(self._pristine)
            framework.restore(pristine)
            framework.restore_last(pristine)
            if (frozen := self.built.frozen) is not None:
                frozen.forget()
            if kept := self._extras_of(Path(restore.path)):
                self._compare_schedule(record, kept)
            self._load(Path(restore.path))
            framework.readopt()
            if kept:
                framework.restore(kept)
                self.reports.resend(kept["told"])
            # Captured by value: a reset of the loop changes some of the tensors in place.
            self._late = kept or extras_codec.decode(self.capture_extras())
        elif loaded := self.loop.loaded:
            self._late = self._extras_of(loaded)
            if self._late:
                framework.restore_passing(self._late)
        # A program may have loaded a checkpoint of its own while its loop was built.
        self.generation = Generation(record.epoch, self.loop.counters["iteration"])

    def synchronise(self, record: EpochRecord, role: int) -> None:
        """Derive parameters from peers, and iterators from counters; restore random states last."""
        self.built.framework.synchronise()
        self.loop.reset_after_interrupt()
        if self._late:
            self.built.framework.restore_last(self._late)
            self._late = {}

    def verify(self, record: EpochRecord, role: int) -> None:
        """Compare the state that peers of every dimension must hold equal; at a start, make the
        first generation."""
        self.built.framework.verify()
        if record.restore.kind in ("initial", "durable"):
            if (frozen := self.built.frozen) is not None:
                frozen.write(self._waiting(record.epoch, "verify"))
            # The first generation of a new lineage is sealed and committed before the first update,
            # but after the comparison: unequal state must not become a generation.
            self.protection.announce(self.generation, first=True)
            # Its boundary is that of the checkpoint: a restore of this generation must not repeat
            # the segments that the checkpoint includes.
            self.protection.complete(self.capture_extras(), self.boundary)
            self.protection.begin_from(self.generation, self.boundary)
        if record.restore.kind == "initial" and rank_of(role) == 0:
            k = self.generation.iteration
            if (path := self.program.loaded_checkpoint(k)) is not None:
                where = {"temporary": str(path), "final": str(path), "loaded": True}
                self.reports.send("durable-request", iteration=k, **where)

    # Parts of the stages.

    def capture_extras(self) -> bytes:
        """Return the encoded extras of the loop in its current state."""
        return self._capture(self.built.framework, self.built.frozen)

    def _capture(self, framework: Framework, frozen: FrozenWeights | None) -> bytes:
        others = {"told": self.reports.reported, "frozen": "" if frozen is None else frozen.name()}
        values = {**framework.capture(), **others, "identity": self._identity}
        return extras_codec.encode(values)

    def require_finite_state(self) -> None:
        """Before a save, find non-finite values that the gradient norm misses."""
        self.reports.require_finite(STATE, largest_value(self.built.framework.parts))

    def quiesce(self, deadline_seconds: float) -> bool:
        """After an interrupt, wait until no copy reads the state and the device is idle.

        On a device, True proves that no kernel of the closed epoch will still write.
        """
        limit = time.monotonic() + deadline_seconds
        quiet = not self.is_built or self.protection.quiesce(deadline_seconds)
        try:
            left = limit - time.monotonic()
            self._platform.synchronize(max(_MIN_SYNCHRONISE_SECONDS, left))
        except (TimeoutError, RuntimeError) as error:
            print(f"this process has to be replaced: {error}", file=sys.stderr, flush=True)
            return False
        return quiet

    def close(self) -> None:
        """End threads and connections; the vault keeps the slots."""
        if self.is_built:
            self.protection.close()
        self._pinned.release()
        self._vault.close()

    def _load(self, checkpoint: Path) -> None:
        """Load a checkpoint. Raises RestoreFailed if the checkpoint is at fault."""
        try:
            check_checkpoint(checkpoint)
            self.loop.load_checkpoint(checkpoint)
        except BaseException as error:  # some frameworks exit where they find no checkpoint
            # torch collects the exceptions of all ranks, each with its frames, in a BaseException.
            failures = [pair[0] for pair in getattr(error, "failures", {}).values()] or [error]
            others = (EpochClosed, CommunicatorFault, MemoryError, torch.OutOfMemoryError)
            for failure in failures:
                if isinstance(failure, others):
                    raise failure from error
            text = f"{type(failures[0]).__name__}: {failures[0]}".splitlines()[0]
            if kind_of_end(text) is not FailureKind.PROCESS_CRASH:
                raise  # a device, or the connection to a peer, is at fault
            raise RestoreFailed("", f"{checkpoint} cannot be loaded: {text}") from error

    def _compare_schedule(self, record: EpochRecord, values: dict[str, Any]) -> None:
        """At a start, whose command may have changed, raise OtherModel if the schedule of the state
        differs from that of the command line, unless a flag overrides it."""
        difference = self.built.framework.schedule_difference(values) if record.begins else None
        if difference is None:
            return
        if not difference.is_overridden:
            advice = f"give the former, or {difference.override_flag} as well"
            raise OtherModel("", f"{difference.text}: {advice}")
        if rank_of(self.role) == 0:
            self._warn(f"{difference.text}, which counts ({difference.override_flag})")

    def _extras_of(self, checkpoint: Path) -> dict[str, Any]:
        """Return the extras of this role in a checkpoint's folder; empty if there are none for it,
        so that only the program's own load restores state. Raises RestoreFailed."""
        try:
            encoded = extras_file.read(checkpoint, rank_of(self.role), dist.get_world_size())
            values = extras_codec.decode(encoded) if encoded else {}
        except (OSError, extras_file.ExtrasFileError, extras_codec.ExtrasError) as error:
            raise RestoreFailed("", f"{checkpoint} cannot be loaded: {error}") from error
        if values.get("identity") == self._identity:
            return values
        if rank_of(self.role) == 0 and not self.loop.loads_extras:
            self._warn(
                f"{checkpoint} has no extras of these roles: what its format does not hold"
                " (random states of data-parallel ranks above 0, running sums) is not restored"
            )
        return {}

    def _restore_from_vault(self, record: EpochRecord) -> None:
        settings = self.settings
        try:
            restored = self._vault.restore(
                self.protection.layout,
                record.epoch,
                self.generation,
                self.boundary,
                # The vault fails earlier, after a last attempt, and names the part that it lacks.
                deadline_seconds=settings.restore_seconds + settings.connect_seconds,
                interrupted=self._link.interrupt_fd,
            )
        except Interrupted as error:
            raise EpochClosed(record.epoch, "restore") from error
        except CutRefused:
            raise
        except VaultError as error:
            raise RestoreFailed(getattr(error, "part", ""), str(error)) from error
        part = extras_part(self.boundary)
        try:
            values = extras_codec.decode(restored.part(part))
            self.protection.restore(restored)
            if (frozen := self.built.frozen) is not None:
                frozen.restore(values.get("frozen", ""), self._waiting(record.epoch, "restore"))
        except extras_codec.ExtrasError as error:
            # The extras were damaged before they were sealed, so all copies and checksums agree.
            raise RestoreFailed(part, str(error)) from error
        finally:
            restored.close()
        self._compare_schedule(record, values)
        self.built.framework.restore(values)
        self._late = values
        self.reports.resend(values["told"])

    def _waiting(self, epoch: int, operation: str) -> Wait:
        def wait(seconds: float) -> None:
            if readable(self._link.interrupt_fd, seconds):
                raise EpochClosed(epoch, operation)

        return wait

    def _check_memory(self, *, pinned: bool) -> list[str]:
        """Compare memory and needs before the first slot is made; return warnings, one line each.
        Raises OutOfSpace with one line that names needs, limit and remedy."""
        needs = node_needs(self.protection.layout, self._link.place.members_per_node, self.settings)
        # Other members of the node may have taken their share already, which the limits include.
        limits = memory.memory_limits(self._vault.directory, self.settings.memory_bytes)
        if problem := memory.problem(needs, limits):
            raise OutOfSpace(problem)
        return memory.warnings(needs, limits, memory.memlock_bytes(), pinned=pinned)

    def _sizes(self) -> dict[str, Any]:
        if self.settings.elastic == "off":
            return {}
        place, framework, settings = self._link.place, self.built.framework, self.settings
        sizes = framework.sizes(place.world_size, place.members_per_node)
        reason = next((part.indivisible for part in framework.parts if part.indivisible), "")
        sizes = sizes.fixed(fixed_by_scheme(settings.protection) or reason)
        size = dist.get_world_size() // sizes.ranks_per_replica
        layout, per_node = self.protection.layout, place.members_per_node

        def needs_of(other: int) -> NodeNeeds:
            return needs_at_size(layout, size, other, sizes.grid.cp, per_node, settings)

        limits = memory.memory_limits(self._vault.directory, settings.memory_bytes)
        return {"sizes": memory.affordable_sizes(sizes, needs_of, limits).to_dict()}

    def _warn(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        if self._link.seat.local_rank == 0 and self.reports.record is not None:
            self.reports.send_event(Kind.LOG, None, {"level": "warning", "text": text})

    def _make_groups(self, role: int, world_size: int) -> None:
        self._drop()
        os.environ["RANK"] = str(rank_of(role))
        os.environ["WORLD_SIZE"] = str(world_size)
        self.communicators.detach()
        self.program.make_groups()
        self.role = role

    def _renumber(self, role: int) -> bool:
        """Take ``role`` with the objects of another role of its class; False if they do not fit."""
        loop, rank = self.loop, rank_of(role)
        # At another size the groups and the cut of the optimizer differ, whatever the rank.
        if first_role(role) != first_role(self.role) or not self.program.serves(loop, rank):
            return False
        try:
            self.communicators.renumber(rank)
        except ValueError:
            return False
        self.protection.close()
        self.built.framework.release()
        os.environ["RANK"] = str(rank)
        self.role = role
        with self.communicators.reusing_groups():
            self._protect(self.program.renumber(loop, self.reports.emit))
        return True

    def _make_loop(self) -> None:
        self._protect(self.program.make_loop(self.reports.emit))

    def _protect(self, loop: ProtectedLoop) -> None:
        framework, settings = self.program.framework(loop), self.settings
        frozen = None
        if large := framework.large_frozen_weights():
            folder = RunDirectory(Path(os.environ["DEADPOOL_RUN_DIR"])).frozen
            frozen = FrozenWeights(large, folder)
        meaning = framework.meaning()
        cut = (part.signature() for part in framework.parts)
        self._identity = [__version__, *framework.versions, meaning, *cut]
        # A renumbered model may have been warmed up: keep the extras from right after the build.
        self._pristine = self._pristine or self._capture(framework, frozen)
        layout = role_layout(
            self.role,
            framework.parts,
            extras_capacity_bytes(len(self._pristine), settings.extras_capacity_bytes),
            framework.peers,
            framework.slots + settings.max_lag,
            meaning,
        )
        publish_template(framework.template(layout), settings, self._link.place.segments)
        protection = Protection(
            vault=self._vault,
            platform=self._platform,
            settings=settings,
            parts=framework.parts,
            layout=layout,
            interrupt_fd=self._link.interrupt_fd,
            closed_epoch=lambda: self._link.closed_epoch,
            report_wait=self.reports.report_wait,
            pinned=self._pinned,
        )
        before, after, audit = [protection.before_update], [protection.after_update], None
        # With fewer model replicas than at the start, no peer may be left to compare with.
        if settings.audit_interval and (len(framework.peers) > 1 or not first_role(self.role)):
            audit = framework.audit(
                self._vault, settings.audit_interval, protection.await_committed, self.reports
            )
            before.append(audit.before_update)
            after.append(audit.after_update)
        judge = functools.partial(self.reports.require_finite, GRADIENT_NORM)
        framework.install(StepCalls(protection.gate, before, after, judge))
        self._built = BuiltRole(loop, framework, protection, frozen, audit)

    def _drop(self) -> None:
        """Drop the objects of another role before those of the new role take memory."""
        if self.role < 0:
            return
        self._pinned.release()
        if self._built is not None:
            self._built.protection.close()
            self._built.loop.close()
        self._built = None
        self._late, self._pristine = {}, b""
        self.program.drop_groups()
        gc.collect()


def publish_template(
    template: templates.StateTemplate, settings: Settings, directory: Path
) -> None:
    """Write ``template`` for the exporters of this node. A thread also writes it into the run
    directory, for exporters of other nodes at the end of the run, if exports are on or the run has
    another size than at its start.

    Raises OSError, and TemplateError if exports were requested and are impossible.
    """
    if template.refusal and settings.export_iterations:
        raise templates.TemplateError(f"--deadpool-persist-interval: {template.refusal}")
    role = template.role
    templates.write_template(directory, template)

    def share() -> None:
        try:
            shared = RunDirectory(Path(os.environ["DEADPOOL_RUN_DIR"])).templates
            templates.share_template(directory, role, shared)
        except OSError as error:
            text = f"role {role} could not be exported if its node were lost: {error}"
            print(text, file=sys.stderr, flush=True)

    if settings.exports or first_role(role) != settings.first_role:
        threading.Thread(target=share, name="skeleton", daemon=True).start()
