"""All processes are new, or too much is lost: the state that the coordinator recovers."""

from dataclasses import replace

import pytest

from deadpool_megatron.cluster.machine import actions as act, inputs as ev
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.records import Generation, Holding, Inventory, Restore
from tests.cluster.machine.rig import STEP, Phase, Rig, Seat, g, layout


def started_again(*valid: Restore, iteration: int | None = 7) -> Rig:
    """The coordinator of the next processes of a run of two nodes; no agent has come yet."""
    return Rig(nodes=2, spares=0).run(iteration).successor(*valid, restarted=True)


def found(rig: Rig, node: int, *roles: int, generations: tuple[Generation, ...]) -> Inventory:
    held = tuple(Holding(role, generation, STEP) for role in roles for generation in generations)
    world = rig.config.world_size
    return Inventory(node, 0, held, tuple(layout(role, world) for role in roles))


def join(rig: Rig, node: int, *roles: int, generations: tuple[Generation, ...]) -> None:
    inventory = found(rig, node, *roles, generations=generations) if roles else None
    rig.feed(ev.NodeJoined(node, "host", 1000 + node, f"node{node}", found=inventory))


def closed(rig: Rig, node: int, *roles: int, generations: tuple[Generation, ...]) -> None:
    inventory = found(rig, node, *roles, generations=generations)
    rig.feed(ev.NodeInventory(replace(inventory, epoch=rig.record.epoch)))


def come_and_close(rig: Rig, *roles: int, generations: tuple[Generation, ...]) -> None:
    """Both of two nodes join, and close the last epoch; each holds this of these roles."""
    for take in (join, closed):
        for node in range(2):
            take(rig, node, *roles, generations=generations)


def texts(rig: Rig) -> str:
    events = [*rig.emitted(Kind.LOG), *rig.emitted(Kind.WAITING_FOR_SPARE)]
    return "\n".join(str(e.data["text"]) for e in events)


def test_incomplete_memory_falls_back_to_the_checkpoint_with_a_reason():
    rig = started_again(Restore("durable", Generation(0, 5), "save", "/ck/5"))
    come_and_close(rig, 0, generations=(g(7),))
    rig.journal()
    assert rig.record.restore.kind == "durable"
    assert "durable state /ck/5, iteration 5: no generation can be restored" in texts(rig)


def test_command_of_another_program_keeps_the_slots():
    rig = started_again()
    come_and_close(rig, 0, 1, generations=(g(7),))
    rig.journal()
    assert rig.record.begins
    rig.feed(ev.NotRestored(*rig.seat(1), rig.record.epoch, "", "max_lr", other_program=True))
    end = rig.only(act.Finish)
    assert (end.exit_status, end.kind, end.keeps_slots) == (2, "other-program", True)


def test_abandoned_lineage_in_memory_is_not_restored():
    rig = started_again()
    come_and_close(rig, 0, 1, generations=(g(7), g(9, lineage=5)))
    assert rig.pending.restore.generation == g(7)


def test_other_model_ends_the_run_and_keeps_the_slots():
    rig = started_again(iteration=None)
    come_and_close(rig, 0, 1, generations=(g(7),))
    rig.journal()
    rig.feed(ev.MemberRegistered(*rig.seat(0), layout(0, 2, layout_hash="another")))
    end = rig.only(act.Finish)
    assert (end.exit_status, end.keeps_slots) == (2, True)
    assert "of another model or other flags" in end.reason


@pytest.mark.parametrize("how", ["error", "lost", "late"])
def test_node_that_cannot_write_does_not_delay_the_end(how):
    rig = Rig(nodes=3, spares=0).run()
    rig.feed(ev.NodeLost(2, "gone"), ev.NodeLost(1, "gone"))
    closed(rig, 0, 0, generations=(g(7),))
    if how == "error":
        rig.feed(ev.Dumped(0, g(7), error="disk full"))
        assert "could not write all it holds: disk full" in texts(rig)
    elif how == "lost":
        rig.feed(ev.NodeLost(0, "gone"))
    else:
        rig.tick(rig.settings.first_step_seconds)
    assert rig.only(act.Finish).exit_status == 1
    assert "wrote what they held" not in rig.only(act.Finish).reason
    kept = how != "lost"  # there is nothing else
    assert rig.only(act.Finish).keeps_slots == kept
    assert ("dump of nodes [0] could not be written" in rig.only(act.Finish).reason) == kept


def test_failed_dump_after_a_restart_is_not_reported_as_dumped():
    """A node whose disk is full, in the epoch in which its slots were found as it came."""
    rig = started_again()
    rig.alter("lineage", newest=7)
    join(rig, 0, 0, generations=(g(7),))
    join(rig, 1, 1, generations=(g(7),))
    rig.feed(ev.DumpRequested("enough"))
    for node in range(2):
        closed(rig, node, node, generations=(g(7),))
    assert rig.only(act.Dump).held == (), "the generation is whole"
    rig.feed(ev.Dumped(0, g(7)), ev.Dumped(1, g(7), error="disk full"))
    assert not rig.emitted(Kind.DUMPED)
    assert rig.only(act.Dump).held == (g(7),), "what is left of it, for a later run"
    rig.feed(ev.Dumped(0, g(7)))
    end = rig.only(act.Finish)
    assert "dump of nodes [1] could not be written" in end.reason
    assert end.keeps_slots


def test_interrupted_start_keeps_the_memory_of_earlier_starts():
    rig = started_again()
    join(rig, 0, 0, generations=(g(7),))
    rig.feed(ev.UserStop("interrupted"))
    end = rig.only(act.Finish)
    assert (end.exit_status, end.keeps_slots, end.reason) == (130, True, "interrupted")


@pytest.mark.parametrize("until", ["decided", "open"])
def test_interrupted_run_keeps_no_memory(until):
    rig = started_again()
    come_and_close(rig, 0, 1, generations=(g(7),))
    rig.journal()
    if until == "open":
        rig.restored()
    rig.feed(ev.UserStop("interrupted"))
    assert not rig.only(act.Finish).keeps_slots


def test_nodes_of_ended_agents_have_time_to_return():
    rig = Rig(nodes=2, spares=0).run()
    rig.alter_nodes(returns=True)  # their memory outlives their agents, as on a cluster
    rig.feed(ev.NodeLost(1, "connection closed"))
    closed(rig, 0, 0, generations=(g(7),))
    assert rig.state.phase is Phase.WAITING_SPARE
    assert "nodes [1] have" in texts(rig)
    join(rig, 4, 1, generations=(g(7),))
    assert rig.pending.restore.kind == "memory"
    assert rig.pending.seats[1] == Seat(4, 0, 0)


@pytest.mark.parametrize(("finished", "ends"), [(7, True), (0, False)])
@pytest.mark.parametrize("anew", [False, True])
def test_finished_iterations_forbid_a_start_from_scratch(finished, ends, anew):
    """The record does not know how far the first epoch came; only the events do."""
    more = {"finished": finished, "from_scratch": anew}
    rig = Rig().run().successor(restarted=True, **more)
    rig.join(0, 1, 2)
    rig.closed()
    if ends and not anew:
        (finish,) = rig.of(act.Finish, rig.log)
        assert (finish.exit_status, finish.keeps_slots) == (2, True)
        assert "iteration 7 was finished; --from-scratch begins again at 0" in finish.reason
        return
    assert rig.pending.restore.kind == "initial"
    recovery = rig.state.recoveries.current
    assert recovery is not None
    assert recovery.recomputed(rig.pending.restore) == finished, "all are lost"
