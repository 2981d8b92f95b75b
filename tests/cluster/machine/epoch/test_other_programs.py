"""A process with another program than the run is excluded; no other node is at fault."""

from deadpool_megatron.cluster.machine import actions as act, inputs as ev
from deadpool_megatron.failures import ExitStatus
from deadpool_megatron.preflight.eligibility import HostFacts
from tests.cluster.machine.bootstrapping.test_restart import come_and_close
from tests.cluster.machine.rig import SIGKILL, Phase, Rig, g

LINE = "train.py: sha256=1, in the run sha256=2"


def has_another(rig: Rig, node: int) -> list[act.Action]:
    incarnation = rig.state.fleet.members[node, 0].incarnation
    end = {"exit_code": ExitStatus.OTHER_PROGRAM, "last_line": LINE}
    return rig.feed(ev.MemberLost(node, 0, incarnation, **end))


def crashed_and_edited(rig: Rig) -> Rig:
    """The process of node 1 is killed, and its successor reads an edited file."""
    rig.feed(ev.MemberLost(1, 0, 0, signal=SIGKILL))
    rig.closed(g(3))
    rig.journal()
    has_another(rig, 1)
    assert not rig.of(act.StartMembers), "a replacement would read the same"
    rig.closed(g(3), g(3, 2))
    return rig


def test_other_program_without_a_spare_waits_and_its_host_may_return():
    rig = Rig(nodes=2, spares=0).run(3)
    for node, known in rig.state.fleet.nodes.items():
        known.facts = HostFacts(f"host{node}")
    crashed_and_edited(rig)
    assert rig.state.phase is Phase.WAITING_SPARE
    assert not rig.state.fleet.quarantined_hosts
    assert not rig.of(act.Finish, rig.log)


def test_spare_with_another_program_is_dropped():
    rig = Rig(nodes=2, spares=2).run(3)
    has_another(rig, 3)
    (drop,) = rig.of(act.DropNode)
    assert (drop.node, drop.excluded) == (3, True)
    assert LINE in drop.cause
    assert rig.state.phase is Phase.RUNNING


def test_start_after_the_end_of_all_processes_may_have_another_program():
    rig = Rig(nodes=2, spares=0).run(3)
    assert rig.record.history.start == 0
    again = rig.successor(restarted=True)
    come_and_close(again, 0, 1, generations=(g(3),))
    assert again.pending.history.start == rig.record.epoch
