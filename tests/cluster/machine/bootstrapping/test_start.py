"""The start: the nodes that epoch 1 needs, and the end if some are missing."""

import pytest

from deadpool_megatron.cluster.machine import actions as act, inputs as ev
from deadpool_megatron.layout.records import Restore, Seat
from deadpool_megatron.layout.sizes import Sizes
from tests.cluster.machine.rig import Phase, Rig, g, layout


def test_spares_have_time_to_be_in_the_first_record():
    rig = Rig(nodes=1, spares=1)
    rig.join(0)
    rig.hello(0)
    assert rig.state.phase is Phase.BOOTSTRAPPING
    rig.tick(rig.settings.connect_seconds)
    assert rig.only(act.WriteRecord).record.fewer_copies == {0}


def test_too_few_members_at_the_deadline_end_the_run():
    rig = Rig(nodes=2, spares=0)
    rig.join(0, 1)
    rig.hello(0)
    rig.tick(rig.settings.start_seconds)
    finish = rig.only(act.Finish)
    assert finish.exit_status == 2
    assert "node 1" in finish.reason
    assert rig.only(act.DropNode).node == 1
    rig.tick(rig.settings.close_seconds)
    assert rig.only(act.Exit).exit_status == 2


def test_command_that_exits_twice_in_the_same_way_is_not_started_again():
    rig = Rig(nodes=2, spares=0)
    rig.join(0, 1)
    for slot_of in (0, 1):  # both fail the first time: that is no repetition
        rig.feed(ev.MemberLost(slot_of, 0, 0, exit_code=1, last_line="ImportError"))
        assert rig.only(act.StartMembers).incarnations == {0: 1}
    rig.feed(ev.MemberLost(0, 0, 1, exit_code=1, last_line="ImportError"))
    assert rig.only(act.Finish).exit_status == 1
    assert "ImportError" in rig.only(act.Finish).reason


@pytest.mark.parametrize(("has_trained", "status"), [(False, 2), (True, 1)])
def test_program_that_ends_by_itself_is_not_tried_again(has_trained, status):
    rig = Rig()
    if has_trained:
        rig.run().steps(7)
    else:
        rig.gather()
        rig.journal()
    rig.feed(ev.MemberLost(*rig.seat(0), exit_code=0, last_line="ERROR: Invalid metadata file"))
    if has_trained:
        rig.closed(g(7))
        rig.feed(*(ev.Dumped(node, g(7)) for node in rig.only(act.Dump).nodes))
    finish = rig.only(act.Finish)
    assert finish.exit_status == status
    text = "the program ended: ERROR: Invalid metadata file [role 0 on node 0"
    assert finish.reason.startswith(text)


def test_opening_limit_kills_silent_members_and_waits_for_their_end():
    rig = Rig().opening()
    rig.restored(0)
    s = rig.settings
    rig.tick(s.adopt_seconds + s.rebuild_seconds + s.restore_seconds + s.start_seconds)
    assert not rig.last, "its index files, or its compilers, may take long"
    rig.tick(s.first_step_seconds)
    assert rig.only(act.KillMember) == act.KillMember(1, 0, 0, hung=True)
    assert rig.only(act.CloseEpoch).epoch == 1
    assert "roles [1]" in rig.only(act.CloseEpoch).cause
    rig.closed(g(0))
    assert rig.state.phase is Phase.CLOSING
    rig.feed(ev.MemberLost(1, 0, 0, signal=9))
    assert rig.pending.seats[1] == Seat(1, 0, 1)


@pytest.mark.parametrize(("loaded", "status"), [((3, 3), None), ((3, 5), 1), ((0, 5), 1)])
def test_run_begins_with_the_iteration_that_all_roles_have_loaded(loaded, status):
    """A program that loads a checkpoint while it is built begins at its iteration."""
    rig = Rig().opening()
    for role, iteration in enumerate(loaded):
        rig.feed(ev.Restored(*rig.seat(role), 1, g(iteration)))
    if status is None:
        assert rig.state.phase is Phase.RUNNING
        assert rig.record.restore == Restore("initial", g(3))
        assert (rig.state.reached, rig.state.blame.suspicion) == (3, None)
    else:
        finish = rig.only(act.Finish)
        assert finish.exit_status == status
        assert finish.reason.startswith("roles loaded different checkpoints")


def test_machine_keeps_the_fewest_sizes_that_members_report():
    rig, sizes = Rig().run(), [Sizes(1, (1, 2)), None, Sizes(1, (2,), "no room"), Sizes(1, (1, 2))]
    for found in sizes:
        rig.feed(ev.MemberRegistered(*rig.seat(0), layout(0, 2), found))
    assert rig.state.memory.sizes == sizes[2]


def test_other_layout_for_the_same_role_is_not_accepted_for_state_in_memory():
    rig = Rig().run()
    rig.feed(ev.MemberLost(1, 0, 0, signal=9))
    rig.decided(g(0))
    rig.feed(ev.MemberRegistered(1, 0, 1, layout(1, 2, layout_hash="other")))
    assert rig.only(act.KillMember).node == 1
    assert "lays out" in rig.only(act.CloseEpoch).cause
