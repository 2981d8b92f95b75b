"""The coordinator as a pure state machine: an input and a moment in, actions out.

No I/O, no clock, no randomness: what the coordinator does after any order of events can be tested
without processes. The caller feeds inputs one at a time, with a clock that never goes back (in
seconds), and carries out the actions in order. An announced epoch is closed once and reopened under
a higher number; a record that was overtaken before it was durable is never announced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deadpool_megatron.cluster.failures import ExitStatus
from deadpool_megatron.cluster.machine import (
    bootstrap,
    ending,
    epoch,
    faults,
    membership,
    pauses,
    requests,
    takeover,
)
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.cluster.machine.actions import Action
from deadpool_megatron.cluster.machine.blame import Failure, LastWords
from deadpool_megatron.cluster.machine.core import Core
from deadpool_megatron.cluster.machine.state import (
    ChosenProtection,
    Closing,
    Config,
    Deciding,
    Dumping,
    Gathering,
    LeaveTaking,
    LineageProgress,
    Opening,
    Pausing,
    Rejoining,
    Running,
    State,
    WaitingSpare,
)
from deadpool_megatron.layout.planner import is_thrown_away
from deadpool_megatron.layout.records import EpochRecord, Generation, Restore, Seat, SeatTable
from deadpool_megatron.layout.schemes import first_plan

NOBODY: Mapping[int, str] = {}
# After these the nodes that are gathering may be complete.
_GATHERS = (
    ev.NodeJoined,
    ev.NodeLost,
    ev.MemberHello,
    ev.MemberRegistered,
)


class Machine(Core):
    """``state``: of a run that begins at ``now``, and then of what :meth:`handle` has made of it.
    An input that raises leaves it half changed: it is of no use any more.
    """

    def __init__(self, config: Config, now: float) -> None:
        wished = {
            role: Seat(role // config.nproc, role % config.nproc, 0)
            for role in range(config.world_size)
        }
        saved = (config.start, *config.older) if config.start.kind != "initial" else ()
        state = State(
            Gathering(now + config.settings.start_seconds),
            SeatTable(wished),
            lineage=LineageProgress(valid=saved),
            protection=ChosenProtection(first_plan(config.settings)),
        )
        super().__init__(config, state, now)

    def take_over(
        self,
        last: EpochRecord,
        valid: Sequence[Restore],
        *,
        gone: Mapping[int, str] = NOBODY,
        wrong: Mapping[int, str] = NOBODY,
    ) -> None:
        """Begin as a coordinator that takes over a run: ``last`` is the newest record,
        ``valid`` the checkpoints that were made valid, the newest first, ``gone`` the nodes that
        were given up since the record, ``wrong`` those found to be wrong since, with their hosts
        (see :class:`.actions.RecordQuarantined`).

        Agents have ``rejoin_seconds`` to join again, after a restart of all processes
        ``start_seconds``. Training continues meanwhile, and afterwards in the same epoch unless
        something has happened to it (see takeover).
        """
        state, config, history = self.state, self.config, last.history
        if config.begins_anew:
            # With the settings of its command; what was asked for, or chosen, in the run before is
            # over (cli/start/restarting).
            state.protection.told = last.protection
        else:
            # A plan that came with the record is reported (again): nobody knows if it was.
            state.protection = ChosenProtection(last.protection, told=history.protection_told)
        state.doing = Rejoining(self.now + takeover.patience_seconds(config))
        state.seats, state.epoch, state.record = SeatTable(last.seats), last.epoch, last
        state.restarted = config.restarted
        fleet = state.fleet
        fleet.removed = {**history.gone, **gone}
        fleet.quarantined = history.wrong | wrong.keys()
        fleet.quarantined_hosts = history.wrong_hosts | {host for host in wrong.values() if host}
        fleet.draining = fleet.quarantined & state.seats.nodes
        line = state.lineage
        line.kept, line.ever_ran = history.kept, last.restore.kind == "memory"
        line.newest = max(last.emitted_up_to, config.finished)
        for one in reversed(valid):
            if not is_thrown_away(one.generation, history.nonfinite):
                line.add_valid(one)
        line.remove(history.struck)
        line.struck = history.struck
        # So that what repeats ends the run, whoever coordinates when it does.
        state.blame.failures = tuple(
            (int(one["iteration"]), Failure.from_record(one)) for one in history.failures
        )
        state.blame.nonfinite = history.nonfinite
        state.recoveries.count = history.recoveries
        state.recoveries.steps_recomputed = history.steps_recomputed

    def handle(self, event: ev.Input, now: float) -> list[Action]:
        """Handle one input. Inputs that are stale or make no sense change nothing."""
        self.now, self.actions = now, []
        self._dispatch(event)
        if isinstance(event, _GATHERS):
            bootstrap.check_gathered(self)
        if isinstance(self.state.doing, Running) and not self.state.doing.has_begun:
            pauses.begin(self, self.state.doing)
        if self.state.requests:
            requests.settle(self)
        return self.actions

    def _dispatch(self, event: ev.Input) -> None:
        state = self.state
        match event:
            case ev.Tick():
                self._tick()
            case ev.NodeJoined():
                bootstrap.node_joined(self, event)
            case ev.FactsTold():
                bootstrap.told(self, event)
            case ev.NodeLost():
                membership.node_lost(self, event)
            case ev.NodeInventory():
                epoch.note_inventory(self, event.inventory)
            case ev.StepReported():
                self._step_reported(event.epoch, event.iteration)
            case ev.PhaseReported():
                self._report(event.epoch, event.phase, event.seconds)
            case ev.Exposed():
                self._report(event.epoch, "reprotect", event.seconds, exposed=event.seconds)
            case ev.StackTaken(text):
                state.blame.note_stack(text)
            case ev.NotFinite() if self.config.settings.nonfinite == "ignore":
                self._step_reported(event.epoch, event.iteration)
            case ev.NotFinite():
                faults.not_finite(self, event)
            case ev.RolesHung():
                faults.roles_hung(self, event)
            case ev.DurableValid(iteration, path, boundary):
                found = Restore("durable", Generation(0, iteration), boundary, path)
                state.lineage.add_valid(found)
            case ev.CheckpointsSeen(gone):
                ending.looked_at(self, gone)
                epoch.check_closed(self)
            case ev.Asked():
                requests.take(self, event)
            case ev.RequestsFound():
                requests.found(self, event)
            case ev.Exported():
                requests.exported(self, event)
            case ev.DrainRequested(node):
                pauses.drain_slow(self, node)
            case ev.ProtectionRequested():
                pauses.protect_otherwise(self, event)
            case ev.JournalWritten(number):
                epoch.journal_written(self, number)
            case ev.JournalFailed(number, text):
                epoch.journal_failed(self, number, text)
            case ev.Dumped():
                ending.note_dumped(self, event)
            case ev.DumpExported(generation, path):
                ending.dump_exported(self, generation, path)
            case ev.Diverged(text):
                epoch.save_and_end(self, LastWords(ExitStatus.DIVERGENCE, text))
            case ev.DumpRequested():
                pauses.dump_requested(self, event)
            case ev.UserStop(reason, keeps):
                ending.stop(self, reason, keeps=keeps)
            case ev.MemberFault():
                faults.fault_reported(self, event)
            case ev.NotRestored():
                faults.restore_failed(self, event)
            case ev.AuditFailed():
                faults.audit_failed(self, event)
            case ev.Restored():
                epoch.restored(self, event)
            case ev.MemberDone():
                pauses.note_done(self, event)
            case ev.Paused():
                pauses.note_paused(self, event)
            case ev.PauseRefused():
                pauses.pause_later(self, event)
            case ev.OfMember():
                membership.member_told(self, event)

    def _step_reported(self, number: int, iteration: int) -> None:
        """Some role has completed an iteration."""
        state = self.state
        if state.record is None or number != state.heard_epoch:
            self.refuse(f"step {iteration}", f"epoch {number} is not open")
            return
        state.lineage.report(Generation(number, iteration))
        is_first = state.recoveries.current is not None
        is_new = iteration > state.record.restore.generation.iteration
        if is_first and is_new and isinstance(state.doing, Running | Pausing):
            ending.end_recovery(self)

    def _report(self, number: int, phase: str, seconds: float, *, exposed: float = 0.0) -> None:
        newest = 0 if self.state.record is None else self.state.record.epoch
        self.state.recoveries.report(number, phase, seconds, exposed, newest)

    def _tick(self) -> None:
        """Look at every deadline; nothing is asked for one where there is nothing to wait for."""
        state = self.state
        if state.blame.suspicion is not None:
            faults.believe(self)
        deadline = state.deadline
        if deadline is not None and self.now >= deadline:
            if waited := state.waiting_for():
                self.log("warning", f"waited long enough for {waited}")
            self._overdue(waited)
        elif isinstance(state.doing, Gathering | Rejoining):
            bootstrap.check_gathered(self)
        if state.fleet.members.killed or state.fleet.members.building:
            membership.check_members(self)

    def _overdue(self, waited: str) -> None:
        state = self.state
        match state.doing:
            case Gathering() as gathering:
                bootstrap.gathered_enough(self, gathering, waited)
            case Rejoining() as rejoining if state.record is not None:
                takeover.time_is_over(self, rejoining, state.record)
            case Closing(looks=True):
                ending.looked_at(self, frozenset())  # what cannot be looked at may be there
                epoch.check_closed(self)
            case Closing(awaited=awaited):
                late = awaited | {place[0] for place in state.fleet.members.killed}
                for node in sorted(late):
                    membership.drop_node(
                        self, node, membership.silent(node, "did not close the epoch in time")
                    )
            case WaitingSpare():
                ending.dump(self)
            case Deciding():
                ending.cannot_decide(self, f"waited too long for {waited}")
            case Opening(restored=restored):
                faults.not_restored(self, tuple(sorted(set(state.seats) - restored)))
            case Pausing():
                pauses.check_paused(self, overdue=True)
            case Dumping() as dumping:
                ending.dump_overdue(self, dumping)
            case LeaveTaking():
                ending.check_ended(self, overdue=True)
