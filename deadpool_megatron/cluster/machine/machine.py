"""The coordinator as a pure state machine: an input and a time in, actions out.

No I/O, no clock, no randomness: tests can try any order of events without processes. The caller
feeds one input at a time, with a clock that never runs back (in seconds), and carries out the
actions in order. An announced epoch is closed once and reopened under a higher number; a record
that a failure overtakes before it is durable is never announced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deadpool_megatron.cluster.machine import (
    bootstrap,
    epoch,
    faults,
    inputs as ev,
    membership,
    pauses,
    requests,
    shutdown,
    state as states,
    takeover,
)
from deadpool_megatron.cluster.machine.actions import Action
from deadpool_megatron.cluster.machine.blame import Failure
from deadpool_megatron.cluster.machine.core import Core
from deadpool_megatron.layout.planner import is_rolled_back
from deadpool_megatron.layout.records import EpochRecord, Restore, Seat, SeatTable
from deadpool_megatron.layout.schemes import first_plan
from deadpool_megatron.layout.sizes import SizeChanges

NO_NODES: Mapping[int, str] = {}
# The function that handles each input. An input from or about a member is handled only if it comes
# from, or is about, the current process in that place.
_HANDLERS: Mapping[type[ev.Input], Callable[[Core, Any], None]] = {
    ev.NodeJoined: bootstrap.node_joined,
    ev.FactsReported: bootstrap.facts_reported,
    ev.NodeLost: membership.node_lost,
    ev.AgentEnded: takeover.agent_ended,
    ev.NodeInventory: epoch.note_inventory,
    ev.StepReported: epoch.step_reported,
    ev.PhaseReported: epoch.phase_reported,
    ev.StackReported: faults.note_stack,
    ev.NotFinite: faults.not_finite,
    ev.RolesHung: faults.roles_hung,
    ev.DurableValid: shutdown.durable_valid,
    ev.CheckpointsFound: epoch.checkpoints_inspected,
    ev.RequestMade: requests.add,
    ev.RequestsFound: requests.adopt,
    ev.Exported: requests.exported,
    ev.DrainRequested: pauses.drain_slow,
    ev.ProtectionRequested: pauses.change_protection,
    ev.JournalWritten: epoch.journal_written,
    ev.JournalFailed: epoch.journal_failed,
    ev.Dumped: shutdown.note_dumped,
    ev.DumpExported: shutdown.dump_exported,
    ev.Diverged: faults.diverged,
    ev.DumpRequested: pauses.dump_requested,
    ev.UserStop: shutdown.stop,
    ev.MemberHello: membership.hello,
    ev.MemberWarm: membership.warm,
    ev.MemberRegistered: membership.registered,
    ev.MemberLost: membership.lost,
    ev.MemberSuspected: membership.suspected,
    ev.MemberFault: faults.fault_reported,
    ev.MemberRaised: faults.raised,
    ev.NotRestored: faults.restore_failed,
    ev.SizeFailed: faults.size_failed,
    ev.AuditFailed: faults.audit_failed,
    ev.Restored: epoch.restored,
    ev.MemberDone: pauses.note_done,
    ev.Paused: pauses.note_paused,
    ev.PauseRefused: pauses.pause_later,
}
# Inputs after which all awaited nodes may have joined.
_GATHERS = (ev.NodeJoined, ev.NodeLost, ev.AgentEnded, ev.MemberHello, ev.MemberRegistered)


class Machine(Core):
    """The state machine. ``state`` begins as that of a new run; :meth:`handle` changes it. After an
    exception in :meth:`handle` the machine is half changed and must not be used any more."""

    def __init__(self, config: states.Config, now: float) -> None:
        first, ranks = config.settings.first_role, range(config.world_size)
        planned = {first + rank: Seat(*divmod(rank, config.nproc), 0) for rank in ranks}
        saved = (config.start, *config.older) if config.start.kind != "initial" else ()
        state = states.State(
            states.Bootstrapping(now + config.settings.start_seconds),
            SeatTable(planned),
            lineage=states.LineageProgress(valid=saved),
            protection=states.ChosenProtection(first_plan(config.settings)),
            changes=SizeChanges(config.world_size),
            began=now,
        )
        super().__init__(config, state, now)

    def take_over(
        self,
        last: EpochRecord,
        valid: Sequence[Restore],
        *,
        removed: Mapping[int, str] = NO_NODES,
        quarantined: Mapping[int, str] = NO_NODES,
    ) -> None:
        """Begin as a coordinator that takes over a run: ``last`` is the newest record, ``valid``
        the valid checkpoints, newest first, ``removed`` the nodes given up since that record, with
        the cause, ``quarantined`` the nodes quarantined since, with their hosts (see
        membership.quarantine).

        Agents have ``rejoin_seconds`` to join again, after a restart of all processes
        ``start_seconds``. Training continues meanwhile, and afterwards in the same epoch unless
        something has happened to it (see takeover).
        """
        state, config, history = self.state, self.config, last.history
        if config.has_new_command:
            # The settings of the new command apply, not the plan that a user chose under the
            # earlier command. Requests to that run are over (cli/start/restart).
            state.protection.reported = last.protection
        else:
            # The last coordinator may not have reported the plan of the record: report it again.
            reported = history.reported_plan
            state.protection = states.ChosenProtection(last.protection, reported=reported)
        state.phase_state = states.TakingOver(self.now + takeover.rejoin_limit_seconds(config))
        state.seats, state.epoch, state.record = SeatTable(last.seats), last.epoch, last
        state.restarted, state.start = config.restarted, history.start
        if history.sizes is not None:
            state.memory.sizes, state.changes = history.sizes, history.changes
        fleet = state.fleet
        fleet.removed = {**history.removed, **removed}
        fleet.quarantined = history.quarantined | quarantined.keys()
        fleet.quarantined_hosts = history.quarantined_hosts | {*filter(None, quarantined.values())}
        fleet.draining = fleet.quarantined & state.seats.nodes
        fleet.distrust(history.distrusted)
        lineage = state.lineage
        lineage.kept, lineage.ever_ran = history.kept, last.restore.kind == "memory"
        lineage.newest = max(last.emitted_up_to, config.finished)
        for restore in reversed(valid):
            if not is_rolled_back(restore.generation, history.nonfinite):
                lineage.add_valid(restore)
        lineage.remove(history.invalidated)
        lineage.invalidated = history.invalidated
        # Failures are counted across coordinators, so that a repeated failure ends the run.
        state.blame.failures = tuple(
            (int(entry["iteration"]), Failure.from_dict(entry)) for entry in history.failures
        )
        state.blame.nonfinite = history.nonfinite
        state.recoveries.count = history.recoveries
        state.recoveries.steps_recomputed = history.steps_recomputed

    def handle(self, event: ev.Input, now: float) -> list[Action]:
        """Handle one input. An input that is stale or does not fit the phase changes nothing."""
        self.now, self.actions = now, []
        if isinstance(event, ev.Tick):
            self._tick()
        elif not isinstance(event, ev.OfMember) or self.is_present(event):
            _HANDLERS[type(event)](self, event)
        running = self.state.phase_state
        has_missed = isinstance(running, states.TakingOver) and running.missed is not None
        if has_missed or isinstance(event, _GATHERS):
            bootstrap.check_gathered(self)
            running = self.state.phase_state
        if isinstance(running, states.Running) and not running.has_begun:
            pauses.begin(self, running)
        if self.state.requests:
            requests.advance(self)
        return self.actions

    def _tick(self) -> None:
        """Check every deadline. When the wait of the phase has taken too long, log its subject."""
        state = self.state
        if state.blame.suspicion is not None:
            faults.believe(self)
        deadline = state.phase_state.deadline
        if deadline is not None and self.now >= deadline:
            if waited := state.waiting_for():
                self.log("warning", f"no longer waiting for {waited}")
            self._overdue(waited)
        elif isinstance(state.phase_state, states.Bootstrapping | states.TakingOver):
            bootstrap.check_gathered(self)
        membership.check_members(self)

    def _overdue(self, waited: str) -> None:
        """Act on the deadline of the phase. ``waited``: the subject of its wait, as text."""
        state = self.state
        match state.phase_state:
            case states.Bootstrapping() as bootstrapping:
                bootstrap.end_bootstrap(self, bootstrapping, waited)
            case states.TakingOver() as taking_over if state.record is not None:
                takeover.end_wait(self, taking_over, state.record)
            case states.Closing(inspects=True):
                # Checkpoints that could not be inspected in time are assumed to exist.
                epoch.checkpoints_inspected(self, ev.CheckpointsFound(frozenset()))
            case states.Closing(awaited=awaited):
                killed = state.fleet.places_with(states.MemberStatus.KILLED)
                for node in sorted(awaited | {node for node, _ in killed}):
                    failure = membership.timeout_failure(node, "did not close the epoch in time")
                    membership.drop_node(self, node, failure)
            case states.WaitingSpare():
                epoch.end_wait(self)
            case states.Deciding():
                shutdown.cannot_decide(self, f"waited too long for {waited}")
            case states.Opening(restored=restored):
                faults.not_restored(self, tuple(sorted(set(state.seats) - restored)))
            case states.Running():
                pauses.grow(self)
            case states.Pausing():
                pauses.check_paused(self, overdue=True)
            case states.Dumping() as dumping:
                shutdown.dump_overdue(self, dumping)
            case states.Ending():
                shutdown.check_ended(self, overdue=True)
