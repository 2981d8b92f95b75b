"""Takeover: another coordinator continues a run, unless something happened to it.

The journal contains the last decisions, and the agents report their outcome. While the agents come
back, the machine is BOOTSTRAPPING, members continue to work, and a failure is only noted
(``missed``). When all agents are back, the newest epoch stays open, or is closed as after any
failure.
"""

from __future__ import annotations

from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.cluster.machine.blame import Failure
from deadpool_megatron.cluster.machine.core import Core
from deadpool_megatron.cluster.machine.epoch import check_opened, close, opening_seconds
from deadpool_megatron.cluster.machine.membership import give_up, matters
from deadpool_megatron.cluster.machine.requests import refuse_assumed
from deadpool_megatron.cluster.machine.state import Config, MemberStatus, Opening, TakingOver
from deadpool_megatron.failures import FailureKind, precedence
from deadpool_megatron.layout.records import EpochRecord
from deadpool_megatron.preflight import eligibility


def note_join(core: Core, event: ev.NodeJoined) -> None:
    """Note the report of a joining agent about the newest epoch, while all agents come back."""
    state, record, phase_state = core.state, core.state.record, core.state.phase_state
    if not isinstance(phase_state, TakingOver) or record is None:
        return
    for local_rank, epoch in event.restored.items():
        role = state.role_at(event.node, local_rank, event.members.get(local_rank, -1))
        if epoch == record.epoch and role is not None:
            phase_state.restored.add(role)
    # A new agent: the members of its node have died with the agent before it.
    if event.node in record.nodes and not event.epoch and not event.members:
        state.restarted = True
    # A spare that joined after the newest record has members, and no epoch.
    if event.epoch or event.members:
        state.survived = True
    if state.survived:
        phase_state.requests = frozenset()
    if event.closed >= record.epoch:
        cause = f"epoch {record.epoch} was closed before the coordinator changed"
        close(core, Failure(cause, FailureKind.COORDINATOR))


def agent_ended(core: Core, event: ev.AgentEnded) -> None:
    """Give up a node that is awaited, unless all processes of the run, or of some nodes, have been
    started again: then it may be about to come back."""
    state = core.state
    is_restart = core.config.restarted or state.restarted
    if not isinstance(state.phase_state, TakingOver) or state.record is None or is_restart:
        return
    if event.node in state.fleet.absent(state.record.nodes):
        cause = "its agent has ended: its host refuses connections"
        give_up(core, event.node, cause, FailureKind.NODE_LOST)


def check_rejoined(core: Core, taking_over: TakingOver, record: EpochRecord) -> None:
    """Continue when every node of the newest record is back or lost.

    After a restart nothing is lost by waiting: lost nodes may come back under other numbers, with
    their slots, so that as many nodes are awaited as have seats in the record. If an earlier agent
    has come back, others may still train, and no node counts as lost before ``rejoin_seconds``.
    """
    state, config = core.state, core.config
    began = taking_over.deadline - rejoin_limit_seconds(config)
    is_late = core.now >= began + config.settings.rejoin_seconds
    if state.restarted and (is_late or not state.survived):
        waits_for_spares = core.now < began + config.settings.connect_seconds
        wanted = config.nodes + config.spares if waits_for_spares else len(state.seats.nodes)
        if len(state.fleet.nodes) >= wanted:
            end_wait(core, taking_over, record)
            return
    if (
        (state.survived or not state.restarted)
        # The counts are compared first: this runs for every join and every hello.
        and len(state.fleet.nodes) + len(state.fleet.removed) >= len(record.nodes)
        and not state.fleet.absent(record.nodes)
        and (taking_over.missed is not None or not _is_unclear(core, record))
    ):
        _resume(core, taking_over, record)


def _is_unclear(core: Core, record: EpochRecord) -> bool:
    """Return whether only nodes without a role are lost, and only layouts that roles have yet to
    report can show whether those nodes owed copies."""
    state = core.state
    if record.seats.keys() <= state.memory.layouts.keys():
        return False
    lost = {node for node in state.fleet.removed if node in record.nodes}
    return (
        bool(lost)
        and lost.isdisjoint(state.seats.nodes)
        and all(_is_alive(core, role) for role in record.seats)
    )


def rejoin_limit_seconds(config: Config) -> float:
    """Return how long agents may take to reach a coordinator that has taken over."""
    settings = config.settings
    return settings.start_seconds if config.restarted else settings.rejoin_seconds


def end_wait(core: Core, taking_over: TakingOver, record: EpochRecord) -> None:
    """Count the nodes that have not come back by now as lost."""
    reason = f"did not reconnect within {rejoin_limit_seconds(core.config):g} s"
    for node in core.state.fleet.absent(record.nodes):
        give_up(core, node, reason, FailureKind.NODE_LOST)
    _resume(core, taking_over, record)


def _resume(core: Core, taking_over: TakingOver, record: EpochRecord) -> None:
    """Leave the newest epoch open; no member notices the change of coordinator."""
    state, fleet = core.state, core.state.fleet
    if core.settings.check != "off":  # new nodes are compared with their common facts
        known = [node.facts for node in fleet.nodes.values() if node.facts is not None]
        state.agreed = eligibility.agree(known)
    if any(known.returns for known in fleet.nodes.values()):  # then lost nodes may return, too
        fleet.returning |= fleet.removed.keys() & record.nodes.keys()
    if state.restarted and not state.survived:
        state.start = record.epoch
    refuse_assumed(core, taking_over.requests)
    # A lost node is named rather than the failures that its peers have reported before.
    causes = filter(None, (taking_over.missed, _unseen_failure(core, record)))
    failure = min(causes, key=lambda cause: precedence(cause.kind), default=None)
    deadline = core.now + opening_seconds(core, record)
    restored, done = taking_over.restored, taking_over.done
    state.phase_state = Opening(deadline, restored, done, taking_over.begins, taking_over.pause)
    if failure is not None:
        close(core, failure)
        return
    core.log("info", f"all agents are back, epoch {record.epoch} stays open")
    check_opened(core)


def _unseen_failure(core: Core, record: EpochRecord) -> Failure | None:
    """Return the failure that was not reported, as there was no coordinator."""
    state = core.state
    ended = [role for role in sorted(record.seats) if not _is_alive(core, role)]
    if ended and state.restarted:
        some = "all processes" if len(ended) == len(record.seats) else f"processes of roles {ended}"
        return Failure(f"{some} were started again", FailureKind.RESTART)
    if quarantined := sorted(state.fleet.draining & set(state.fleet.nodes)):
        node = quarantined[0]
        cause = f"node {node} was quarantined for the rest of the run"
        return Failure.of_node(node, cause, FailureKind.EXCLUDED)
    for node in sorted(set(record.nodes) - set(state.fleet.nodes)):
        if matters(state, record, node):
            reason = state.fleet.removed.get(node, "gone")
            cause = reason if reason.startswith(f"node {node}") else f"node {node}: {reason}"
            return Failure.of_node(node, cause)
    if ended:
        cause = f"members of roles {ended} ended while there was no coordinator"
        signature = ("unseen", *map(str, ended))
        node = record.seats[ended[0]].node
        return Failure(cause, FailureKind.PROCESS_CRASH, signature, node=node)
    return None


def _is_alive(core: Core, role: int) -> bool:
    """Return whether exactly the process that has the role's seat is alive."""
    seat = core.state.seats[role]
    member = core.state.fleet.members.get((seat.node, seat.local_rank))
    return (
        member is not None
        and member.incarnation == seat.incarnation
        and member.status is not MemberStatus.KILLED
    )
