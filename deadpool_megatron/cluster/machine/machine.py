"""The coordinator as a pure state machine: (state, input, now) -> (state, actions).

No I/O, no clock, no randomness: what the coordinator does after any order of events can be tested
without processes. The caller feeds inputs one at a time, with a clock that never goes back (in
seconds), and carries out the actions in order. An announced epoch is closed once and reopened under
a higher number; a record that was overtaken before it was durable is never announced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from immutables import Map

from deadpool_megatron.cluster.failures import EXIT_DIVERGENCE, FailureKind
from deadpool_megatron.cluster.machine import deadlines, faults, members, protection, requests
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.cluster.machine.actions import Action, AskNccl
from deadpool_megatron.cluster.machine.epoch import closing, ending, looks, opening, pausing
from deadpool_megatron.cluster.machine.gathering import checkup, start, takeover
from deadpool_megatron.cluster.machine.state.blame import Blame, Failure, LastWords
from deadpool_megatron.cluster.machine.state.fleet import Fleet
from deadpool_megatron.cluster.machine.state.line import ChosenProtection, KeptLine
from deadpool_megatron.cluster.machine.state.phases import Dumping, Gathering, Phase, Rejoining
from deadpool_megatron.cluster.machine.state.recoveries import Recoveries
from deadpool_megatron.cluster.machine.state.state import (
    Config,
    State,
)
from deadpool_megatron.cluster.machine.turn import Turn
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.planner import is_thrown_away
from deadpool_megatron.layout.records import EpochRecord, Generation, Restore, Seat, SeatTable
from deadpool_megatron.layout.schemes import first_plan, plan_in_words

NOBODY: Mapping[int, str] = {}


class Machine:
    """Binds the facts of the run; holds no state of its own. Thread-safe."""

    def __init__(self, config: Config) -> None:
        self._config = config

    @property
    def begins_anew(self) -> bool:
        """Return whether the run was started again, and nothing has been decided since."""
        return self._config.begins_anew

    def start(self, now: float) -> State:
        """The state of a run that begins."""
        config = self._config
        wished = {
            role: Seat(role // config.nproc, role % config.nproc, 0)
            for role in range(config.world_size)
        }
        saved = (config.start, *config.older) if config.start.kind != "initial" else ()
        deadline = now + config.settings.start_seconds
        return State(
            Gathering(deadline),
            SeatTable(wished),
            line=KeptLine(valid=saved),
            protection=ChosenProtection(first_plan(config.settings)),
        )

    def resume(
        self,
        last: EpochRecord,
        valid: Sequence[Restore],
        now: float,
        *,
        gone: Mapping[int, str] = NOBODY,
        wrong: Mapping[int, str] = NOBODY,
    ) -> State:
        """The state of a coordinator that takes over a run: ``last`` is the newest record,
        ``valid`` the checkpoints that were made valid, the newest first, ``gone`` the nodes that
        were given up since the record, ``wrong`` those found to be wrong since, with their hosts
        (see :class:`.actions.NoteWrong`).

        Agents have ``rejoin_seconds`` to join again, after a restart of all processes
        ``start_seconds``. Training continues meanwhile, and afterwards in the same epoch unless
        something has happened to it (see gathering.takeover).
        """
        begun, history = self.start(now), last.history
        # A plan that came with the record is reported (again): nobody knows if it was.
        chosen = ChosenProtection(last.protection, told=history.protection_told)
        if self.begins_anew:
            # With the settings of its command; what was asked for, or chosen, in the run before is
            # over (cli/start/restarting).
            chosen = replace(begun.protection, told=last.protection)
        # So that what repeats ends the run, whoever coordinates when it does.
        failures = tuple(
            (int(one["iteration"]), Failure.from_record(one)) for one in history.failures
        )
        never = history.wrong | wrong.keys()
        hosts = history.wrong_hosts | {host for host in wrong.values() if host}
        seated = {seat.node for seat in last.seats.values()}
        line = replace(
            begun.line,
            kept=history.kept,
            newest=max(last.emitted_up_to, self._config.finished),
            ever_ran=last.restore.kind == "memory",
        )
        for one in reversed(valid):
            if not is_thrown_away(one.generation, history.nonfinite):
                line = line.with_valid(one)
        line = replace(line.without(history.struck), struck=history.struck)
        return begun._replace(
            doing=Rejoining(now + takeover.patience_seconds(self._config)),
            seats=SeatTable(last.seats),
            epoch=last.epoch,
            record=last,
            fleet=Fleet(
                gone=Map({**history.gone, **gone}),
                leaving=never & seated,
                wrong=never,
                wrong_hosts=hosts,
            ),
            line=line,
            blame=Blame(failures, nonfinite=history.nonfinite),
            protection=chosen,
            recoveries=Recoveries(
                count=history.recoveries, steps_recomputed=history.steps_recomputed
            ),
            restarted=self._config.restarted,
        )

    def step(self, state: State, event: ev.Input, now: float) -> tuple[State, list[Action]]:
        """Handle one input. Inputs that are stale or make no sense change nothing."""
        turn = Turn(self._config, state, now)
        _handle(turn, event)
        if turn.state.requests:
            requests.settle(turn)
        return turn.state, turn.actions


def _handle(turn: Turn, event: ev.Input) -> None:
    match event:
        case ev.Tick():
            deadlines.tick(turn)
        case ev.NodeJoined():
            start.node_joined(turn, event)
        case ev.FactsTold():
            checkup.told(turn, event)
        case ev.Probed():
            checkup.probed(turn, event)
            start.check_gathered(turn)
        case ev.NodeLost(node, cause, silent, kind):
            known = turn.state.fleet.nodes.get(node)
            if known is None:
                return  # dropped by the machine itself, which the caller then reports
            failure = Failure(f"node {node}: {cause}", kind, ("node", str(node)), node=node)
            if known.returns and not silent and kind is FailureKind.NODE_LOST:
                fleet = turn.state.fleet
                turn.state = turn.state._replace(
                    fleet=replace(fleet, returning=fleet.returning | {node})
                )
            closing.lose_node(turn, node, failure, silent_seconds=silent)
            start.check_gathered(turn)
        case ev.RolesHung():
            _roles_hung(turn, event)
        case ev.NodeInventory():
            closing.note_inventory(turn, event.inventory)
        case ev.PhaseReported(epoch, phase, seconds):
            _phase_reported(turn, epoch, phase, seconds)
        case ev.Exposed(epoch, seconds):
            _phase_reported(turn, epoch, "reprotect", seconds, exposed=seconds)
        case ev.StepReported(epoch, iteration):
            _step_reported(turn, epoch, iteration)
        case ev.StackTaken(text):
            turn.state = turn.state._replace(blame=turn.state.blame.with_stack(text))
        case ev.NotFinite() if turn.config.settings.nonfinite == "ignore":
            _step_reported(turn, event.epoch, event.iteration)
        case ev.NotFinite():
            faults.not_finite(turn, event)
        case ev.DurableValid(iteration, path, boundary):
            found = Restore("durable", Generation(0, iteration), boundary, path)
            turn.state = turn.state._replace(line=turn.state.line.with_valid(found))
        case ev.CheckpointsSeen(gone):
            looks.seen(turn, gone)
            closing.check_closed(turn)
        case ev.Asked():
            requests.take(turn, event)
        case ev.RequestsFound():
            requests.found(turn, event)
        case ev.Exported():
            requests.exported(turn, event)
        case ev.DrainRequested(node):
            _drain(turn, node)
        case ev.ProtectionRequested():
            if why := protection.take_request(turn, event):
                turn.refuse(f"protection {plan_in_words(event.plan)}", why)
            pausing.consider_pause(turn)
        case ev.JournalWritten(epoch):
            opening.journal_written(turn, epoch)
        case ev.JournalFailed(epoch, text):
            if turn.state.phase is Phase.DECIDING and epoch == turn.state.epoch:
                ending.cannot_decide(turn, f"epoch {epoch} cannot be journalled: {text}")
        case ev.Dumped():
            ending.note_dumped(turn, event)
        case ev.DumpExported(generation, path):
            ending.dump_exported(turn, generation, path)
        case ev.Diverged(text):
            closing.save_and_end(turn, LastWords(EXIT_DIVERGENCE, text))
        case ev.DumpRequested(reason, seconds):
            _dump_requested(turn, reason, seconds)
        case ev.UserStop(reason, keeps):
            ending.stop(turn, reason, keeps=keeps)
        case ev.MemberFault():
            faults.fault_reported(turn, event)
        case ev.RestoreFailed():
            faults.restore_failed(turn, event)
        case ev.AuditFailed():
            faults.audit_failed(turn, event)
        case ev.Restored():
            opening.restored(turn, event)
        case ev.MemberDone():
            pausing.note_done(turn, event)
        case ev.Paused():
            pausing.note_paused(turn, event)
        case ev.PauseRefused():
            pausing.pause_later(turn, event)
        case ev.OfMember():
            members.handle(turn, event)


def _roles_hung(turn: Turn, event: ev.RolesHung) -> None:
    state = turn.state
    if event.epoch != state.open_epoch:
        turn.refuse("hang verdict", f"epoch {event.epoch} is not open")
        return
    turn.emit(Kind.HANG, roles=list(event.roles), **event.table)
    turn.act(AskNccl(event.epoch))
    for role in event.roles:
        turn.kill((state.seats[role].node, state.seats[role].slot), hung=True)
    signature = ("hang", *map(str, event.roles))
    first = state.seats[event.roles[0]].node if event.roles else None
    closing.close(turn, Failure(event.cause, FailureKind.HANG, signature, node=first))


def _step_reported(turn: Turn, epoch: int, iteration: int) -> None:
    state = turn.state
    if state.record is None or epoch != state.heard_epoch:
        turn.refuse(f"step {iteration}", f"epoch {epoch} is not open")
        return
    turn.state = state._replace(line=state.line.reported(Generation(epoch, iteration)))
    running = state.phase in (Phase.RUNNING, Phase.PAUSING)
    if running and iteration > state.record.restore.generation.iteration:
        turn.end_recovery()


def _phase_reported(
    turn: Turn, epoch: int, phase: str, seconds: float, *, exposed: float = 0.0
) -> None:
    state = turn.state
    known = state.recoveries.reported(state.record, epoch, phase, seconds, exposed)
    turn.state = state._replace(recoveries=known)


def _drain(turn: Turn, node: int) -> None:
    state = turn.state
    if node not in state.fleet.nodes:
        turn.refuse("drain", f"node {node} is not connected", node)
        return
    turn.emit(Kind.DRAIN, node=node)
    if node not in state.seats.nodes:
        turn.log("info", f"node {node} has no role to move away", node)
        return
    turn.state = state._replace(fleet=state.fleet.draining(node))
    pausing.consider_pause(turn)
    if turn.state.phase is Phase.RUNNING:
        turn.log("warning", f"the drain of node {node} waits for a spare node", node)


def _dump_requested(turn: Turn, reason: str, seconds: float | None) -> None:
    """Whatever the phase, lead to a dump. A run that trains pauses first, so that what it has
    computed is committed; else the iteration under way is computed by the next run.
    """
    state, words = turn.state, LastWords(ending.EXIT_SAVED, reason)
    if isinstance(state.doing, Dumping):
        ending.hurry(turn, state.doing, reason)
    elif state.last_words is not None:
        pausing.shorten_pause(turn, seconds)
    elif pausing.pause_for_dump(turn, reason, seconds):
        turn.state = turn.state._replace(last_words=words)
    else:
        closing.save_and_end(turn, words, FailureKind.DRAINED)
