"""Which generations travel as steps, when they count as committed, and what a buddy keeps."""

import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from deadpool_megatron.layout import gradient_chain, records
from deadpool_megatron.layout.records import Generation, PartInfo, RoleLayout, Seat, gradients_part
from deadpool_megatron.layout.schemes import ProtectionPlan, SchemeKind, SchemeNumbers
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault import commit_ledger, role_worker as workers, slot_memory
from deadpool_megatron.vault.copies import Target
from deadpool_megatron.vault.role_worker import RoleWorker
from deadpool_megatron.vault.schemes.gradients import Recompute, replayed_otherwise
from deadpool_megatron.vault.shm import segment as segments
from deadpool_megatron.vault.shm.segment import PartState, Segment, SlotState, copy_name, own_name
from tests.vault.harness import record_of
from tests.vault.slots import SlotStore, scheme_of

EVERY = 4
EXTRAS = records.extras_part("step")
WHOLE = ["shard0", EXTRAS]
STEP = [gradients_part("shard0"), records.UPDATE_PART, records.SUMS_PART, EXTRAS]
ALL = sorted({*WHOLE, *STEP})


def g(iteration: int) -> Generation:
    return Generation(1, iteration)


def make_layout(slots: int = 2, nbytes: int = 64, covered: bool = False) -> RoleLayout:
    shared = (0, 1) if covered else (0,)
    parts = (
        PartInfo("shard0", 3 * nbytes, shared),
        *gradient_chain.step_parts({"shard0": PartInfo("", nbytes, shared)}, 64, 0),
        PartInfo(EXTRAS, 64, (0,)),
    )
    return RoleLayout(0, parts, (0, 1), slots, "hash")


def record(every: int = EVERY, **more: Any) -> records.EpochRecord:
    plan = ProtectionPlan(SchemeNumbers(SchemeKind.RECOMPUTE, full_every=every))
    return record_of(1, range(2), protection=plan, **more)


def begun(trusted: tuple[int, ...] = (0,), **options: Any) -> Recompute:
    return Recompute(record(**options), trusted)


def test_a_step_counts_when_the_buddy_has_it_and_the_own_slot_is_whole():
    chains, layout, buddy = begun(), make_layout(), Target(1)
    ledger = commit_ledger.Acknowledgements(chains)
    chains.decide(layout, g(0), has_step=True)
    chains.decide(layout, g(1), has_step=True)
    assert ledger.missing(layout, g(0), ALL, buddy) == WHOLE
    assert ledger.missing(layout, g(1), ALL, buddy) == STEP
    ledger.add(0, g(1), 1, STEP[:-2])
    assert ledger.boundary(layout, g(1), ALL) is None
    ledger.add(0, g(1), 1, STEP)
    assert ledger.boundary(layout, g(1), ALL) == "step"
    assert ledger.boundary(layout, g(1), STEP) is None, "the own slot lacks the shard"
    assert ledger.boundary(layout, g(1), [*WHOLE, records.UPDATE_PART]) is None
    chains.make_whole(0, g(1))
    assert ledger.missing(layout, g(1), ALL, buddy) == ["shard0"]
    assert ledger.boundary(layout, g(1), ALL) is None


def test_parts_that_peers_hold_need_no_gradients():
    chains, layout, buddy = begun(), make_layout(covered=True), Target(1)
    ledger = commit_ledger.Acknowledgements(chains)
    for iteration in (0, 1):
        chains.decide(layout, g(iteration), has_step=True)
    assert ledger.missing(layout, g(1), ALL, buddy) == STEP[1:]


def test_steps_never_go_into_parity_blocks():
    """Slots have room for steps whatever the plan is now."""
    plan, layout = ProtectionPlan(SchemeNumbers(SchemeKind.PARITY, group=2)), make_layout()
    scheme = scheme_of(record_of(1, range(2), 3, protection=plan), None)
    owed = scheme.owed(layout, g(1)).names
    assert {target.block is None: set(names) for target, names in owed.items()} == {
        False: {"shard0"},
        True: {EXTRAS},
    }


def test_sums_come_back():
    sums = {"shard0": (1 << 40, (1 << 64) - 1), "shard1": (0, 7)}
    assert gradient_chain.unpack_sums(gradient_chain.pack_sums(sums)) == sums


def test_sums_are_not_written_after_a_close(tmp_path, monkeypatch):
    """Checksums take time; when they are there the slot may be the next epoch's."""
    state, layout, seat = (
        SlotStore(scheme_of, 0, tmp_path, Settings(), lambda _: None),
        make_layout(),
        Seat(0, 0, 0),
    )
    state.adopt(record())
    path = tmp_path / own_name(0, seat)
    segment = state.table.segments[path.name] = Segment.create(path, layout, seat, ALL)
    segment.mark_writing(0)
    segment.begin(0, g(1), 1)
    segment.fill(0, {"shard0": 9, records.UPDATE_PART: 9, EXTRAS: 9}, 1)
    worker = RoleWorker(state, state.gate.record or record(), 0, seat)

    def slow(view: memoryview) -> int:
        if state.gate.is_open(1):
            state.close(1)
            segment.mark_writing(0)
            segment.begin(0, Generation(2, 1), 2)
        return segments.checksum(view)

    monkeypatch.setattr(workers, "checksum", slow)
    worker.seal()
    assert segment.state(0) is SlotState.WRITING
    assert segment.entry(0, records.SUMS_PART).state is PartState.ABSENT


def opened(directory: Path, every: int = EVERY) -> SlotStore:
    """The vault of node 1, which keeps copies of role 0."""
    state = SlotStore(scheme_of, 1, directory, Settings(full_every=every), lambda _: None)
    state.adopt(record(every))
    return state


def put(state: SlotStore, layout: RoleLayout, generation: Generation, names: list[str]) -> Segment:
    """What serving a put does."""
    segment = slot_memory.ensure_copy(state, layout, generation, names)
    slot = state.claim(segment, generation, 1)
    assert slot is not None, "no put ever waits for a slot"
    segment.reserve(names, [slot])
    for name in names:
        view = segment.data(slot, name)
        view[:] = bytes(len(view))
        segment.seal_part(slot, name, len(view), 1, 1)
    state.release(segment, slot)
    return segment


def held_by(state: SlotStore) -> dict[Generation, set[str]]:
    found: dict[Generation, set[str]] = {}
    for slot in state.table.sealed(0):
        found.setdefault(slot.generation, set()).update(slot.parts)
    return found


def blocks(directory: Path) -> int:
    """Bytes of memory behind all files."""
    return sum(path.stat().st_blocks * 512 for path in directory.glob("*.seg"))


def test_a_buddy_keeps_chains_in_memory_that_stays_the_same(tmp_path):
    """All that may still be asked for can be produced, and the steps go round in their slots."""
    layout, state, chains = make_layout(nbytes=1 << 20), opened(tmp_path), begun()
    taken = []
    for iteration in range(25):
        put(state, layout, g(iteration), STEP if iteration % EVERY else WHOLE)
        held = held_by(state)
        for one in range(max(0, iteration - 1), iteration + 1):
            assert gradient_chain.chain(held, g(one), "shard0"), (iteration, one)
        taken.append(blocks(tmp_path))
    assert taken[9] == taken[-1] < (2 * 3 + 6 + 1) << 20
    assert not chains.lacks_base(state.table.held(0), [1, 24], [gradients_part("shard0")])
    assert chains.lacks_base(state.table.held(0), [1, 17], [gradients_part("shard0")])
    two = [gradients_part("shard0"), gradients_part("shard1")]  # dense and expert, say
    assert chains.lacks_base(state.table.held(0), [1, 24], two), "of one it has the base"
    assert chains.lacks_base(state.table.held(0), None, [gradients_part("shard0")])
    assert not chains.lacks_base(state.table.held(0), None, ["shard0"])


def test_extras_of_a_later_boundary_come_to_the_step_that_they_belong_to(tmp_path):
    """They would take the place of a whole copy else."""
    late = records.extras_part("evaluation")
    plain = make_layout()
    layout = replace(plain, parts=(*plain.parts, PartInfo(late, 64, (0,))))
    state = opened(tmp_path)
    for iteration in range(2 * EVERY):
        put(state, layout, g(iteration), STEP if iteration % EVERY else WHOLE)
        put(state, layout, g(iteration), [late])
    copies = state.table.segments[copy_name(0)]
    assert {copies.generation(slot) for slot in range(2)} == {g(0), g(EVERY)}
    assert all(late in held_by(state)[g(iteration)] for iteration in (6, 7))


def test_the_base_that_a_node_held_as_the_owner_stays_while_steps_lead_from_it(tmp_path):
    """A role has moved to another node and the old one has become its buddy: it says that it has
    the restored generation already, in the segment of its own former member."""
    layout, state = make_layout(), opened(tmp_path)
    table, path = state.table, tmp_path / own_name(0, Seat(1, 0, 0))
    old = table.segments[path.name] = Segment.create(path, layout, Seat(1, 0, 0), ALL)
    old.mark_writing(0)
    old.begin(0, g(4), 1)
    for name in WHOLE:
        old.seal_part(0, name, 9, 1, 1)
    old.set_state(0, SlotState.SEALED)
    kept = layout.generations_kept(EVERY)
    for iteration in range(5, 4 + EVERY):
        put(state, layout, g(iteration), STEP)
        assert len(gradient_chain.chain(held_by(state), g(iteration), "shard0")) == iteration - 3
        assert table.serves(old, g(iteration))
    # Its last step may be asked for until the slots of its owner hold newer ones.
    assert kept == EVERY - 1 + layout.slots + 1
    assert not table.unneeded(old, lambda _: kept - 1, kept)
    assert table.unneeded(old, lambda _: kept, kept)


@settings(max_examples=30)
@given(
    st.integers(2, 5),
    st.integers(2, 4),
    st.lists(st.sampled_from(["step", "step", "step", "whole", "lost"]), max_size=30),
)
def test_no_base_of_a_restorable_generation_is_overwritten(every, slots, wishes):
    """Rules 3 and 4 over random chains: broken ones, irregular whole copies, damaged bases."""
    layout = make_layout(slots=slots)
    with tempfile.TemporaryDirectory() as folder:
        state, chains = opened(Path(folder), every), begun(every=every)
        table = state.table
        for iteration, wish in enumerate(wishes):
            new = g(iteration)
            chains.decide(layout, new, has_step=wish != "whole")
            before = held_by(state)
            recent = [g(it) for it in range(max(0, iteration - slots + 1), iteration)]
            good = [one for one in recent if gradient_chain.chain(before, one, "shard0")]
            follows = chains.follows(0, new)
            shown = None if follows is None else follows.to_list()
            if follows and chains.lacks_base(table.held(0), shown, [gradients_part("shard0")]):
                chains.make_whole(0, new)
            step = chains.follows(0, new) is not None
            put(state, layout, new, STEP if step else WHOLE)
            after = held_by(state)
            assert [one for one in recent if gradient_chain.chain(after, one, "shard0")] == good
            assert gradient_chain.chain(after, new, "shard0"), (
                "what counts as committed can be produced"
            )
            if wish == "lost":  # a damaged base
                bases = [s for s in table.sealed(0) if "shard0" in s.parts]
                for place in table.find(0, min(s.generation for s in bases), "shard0"):
                    table.mark_bad(place)


@pytest.mark.parametrize(
    ("known", "wrong"), [("same", []), ("other", ["shard0"]), ("", ["shard0"])]
)
def test_recomputed_parts_are_sealed_only_with_the_owners_checksum(tmp_path, known, wrong):
    """Of a part that no checksum is known of nobody can say that it is right."""
    layout = RoleLayout(0, (PartInfo("shard0", 8, (0,)),), (0, 1), 2, "hash")
    segment = Segment.create(tmp_path / copy_name(0), layout, None, ["shard0"])
    segment.open_slot(0, g(5), 1)
    segment.seal_part(0, "shard0", 8, 17, 1)
    sums = {} if not known else {"shard0": (8, 17 if known == "same" else 18)}
    place: Any = SimpleNamespace(view=memoryview(gradient_chain.pack_sums(sums)))
    assert replayed_otherwise(segment, 0, {"shard0": 17}, place) == wrong
    state = segment.entry(0, "shard0").state
    assert state is (PartState.BAD if wrong else PartState.SEALED)
