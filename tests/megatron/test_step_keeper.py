"""Gradients and values of an update: when they are copied, and from when on they are trusted."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deadpool_megatron.layout.gradient_chain import key, pack_sums
from deadpool_megatron.layout.records import SUMS_PART, UPDATE_PART, Generation, gradients_part
from deadpool_megatron.megatron import optimizer as optimizers, step_keeper
from deadpool_megatron.megatron.step_keeper import StepKeeper
from deadpool_megatron.member.framework import StepCalls
from deadpool_megatron.member.role_layout import role_layout
from deadpool_megatron.platform import select_platform
from deadpool_megatron.state import extras as codec
from deadpool_megatron.state.initial_state import complete_adam
from deadpool_megatron.state.parts import Part
from deadpool_megatron.vault.shm.segment import checksum
from tests.common.programs import check_output
from tests.state.loading import load
from tests.trainer.layouts import TINY, make_loop
from tests.trainer.ranks import run_ranks

GRADIENTS = gradients_part("shard0")


def g(iteration: int) -> Generation:
    return Generation(1, iteration)


def wait(_: str, until: Callable[[float], bool]) -> None:
    assert until(10.0)


class Keeper(StepKeeper):
    """A keeper in iterations of training; also its vault, whose slots are sealed at once."""

    def __init__(self, optimizer: Any, shards: Any) -> None:
        self.slots: dict[Generation, dict[str, memoryview]] = {}
        self.matched: list[bool] = []
        self.reports: list[dict[str, Any]] = []
        self.shards, self.now = shards.parts, g(0)
        vault: Any = self
        super().__init__(optimizer, shards, select_platform(), vault, self.reports.append)
        self.sizes = {part.name: part.nbytes for part in (*self.layout_parts(0), *self.shards)}
        self.begin(wanted=True)

    def sealed_part(self, generation: Generation, name: str) -> memoryview | None:
        return self.slots.get(generation, {}).get(name)

    def rehearsed(self, matched: bool) -> None:
        self.matched.append(matched)

    def writer(self) -> Any:
        slot = self.slots.setdefault(self.now, {})

        def part(name: str) -> memoryview:
            return slot.setdefault(name, memoryview(bytearray(self.sizes[name])))

        return SimpleNamespace(part=part)

    def seal(self) -> None:
        for part in self.shards:
            views = part.views(self.writer().part(part.name))
            for view, tensor in zip(views, part.tensors, strict=True):
                view.copy_(tensor)

    def iteration(self, number: int, train: Callable[[], None]) -> dict[str, int]:
        """Train an iteration and finish it; return the sizes of its step."""
        self.now = g(number)
        train()
        self.seal()
        sizes, copies = self.finish(self.writer(), self.now, g(number - 1), [], wait)
        self.order_copies(wait)
        for copy in copies:
            wait("", copy.wait)
        return sizes

    def replay_all(self) -> Any:
        """Compute the newest generation from the first, with the steps listed backwards."""
        held = {key(g(0), part.name): self.slots[g(0)][part.name] for part in self.shards}
        newest = self.slots[self.now]
        sums = {p.name: (p.nbytes, checksum(newest[p.name])) for p in self.shards}
        held[key(self.now, SUMS_PART)] = memoryview(pack_sums(sums))
        for iteration in range(self.now.iteration, 0, -1):
            slot = self.slots[g(iteration)]
            held |= {key(g(iteration), name): slot[name] for name in slot.keys() - sums.keys()}
        restored: Any = SimpleNamespace(names=tuple(held), part=held.__getitem__)
        live: Any = SimpleNamespace(
            load=lambda parts: [load(*each) for each in parts], seal_replayed=lambda *_: ""
        )
        return self.recompute(self.shards, restored, self.now, live)


class Rig(Keeper):
    """A keeper of one parameter under AdamW."""

    def __init__(self) -> None:
        self.parameter = torch.nn.Parameter(torch.ones(5))
        self.adam = torch.optim.AdamW([self.parameter], lr=0.1, weight_decay=0.1)
        complete_adam(self.adam)
        state = self.adam.state[self.parameter]
        self.part = Part("shard0", [self.parameter, *state.values()], (0,))
        inner = SimpleNamespace(optimizer=self.adam)
        shards = SimpleNamespace(parts=[self.part])
        super().__init__(SimpleNamespace(chained_optimizers=[inner]), shards)
        self.drift = 0.0

    def update(self, gradient: torch.Tensor | None) -> None:
        self.parameter.grad = gradient
        self.capture(0, self.writer())
        self.adam.step()
        with torch.no_grad():
            self.parameter.add_(self.drift)

    def step(self, number: int, *, skipped: bool = False) -> dict[str, int]:
        """An iteration whose gradients are zeroed at its end, as by the next."""
        gradient = torch.full((5,), float(number))
        sizes = self.iteration(number, lambda: None if skipped else self.update(gradient))
        gradient.zero_()
        return sizes


@pytest.fixture
def rig():
    """With generation 0 in its slot."""
    made = Rig()
    made.seal()
    return made


def test_step_holds_the_gradients_that_the_update_used(rig):
    sizes = rig.step(1)
    assert sizes[GRADIENTS] == rig.sizes[GRADIENTS]
    assert 0 < sizes[UPDATE_PART] <= rig.sizes[UPDATE_PART]
    (held,) = rig.gradients[0].views(rig.slots[g(1)][GRADIENTS])
    assert held.tolist() == [1.0] * 5
    assert rig.matched == [True]
    assert rig.reports[0]["matched"]
    assert rig.reports[0]["bytes"] == rig.part.nbytes
    rig.step(2)
    assert rig.matched == [True], "rehearsed once"


def test_skipped_update_is_a_step_without_gradients(rig):
    sizes = rig.step(1, skipped=True)
    assert sizes[GRADIENTS] == 0
    assert sizes[UPDATE_PART] > 0
    assert rig.matched == [], "it shows nothing"


def test_rehearsal_waits_for_a_state_before_in_own_slots():
    rig = Rig()
    rig.step(1)
    assert rig.matched == []
    rig.step(2)
    assert rig.matched == [True]


def test_update_that_a_replay_does_not_give_ends_the_keeping(rig):
    rig.drift = 1e-3
    assert set(rig.step(1).values()) == {0}
    assert rig.matched == [False]
    assert rig.reports[0]["difference"] == "shard0, parameter of parameter 0"
    assert set(rig.step(2).values()) == {0}
    assert not rig.keeps()
    rig.begin(wanted=True)
    assert not rig.keeps(), "for the rest of the run"


def test_step_needs_a_plan_that_wants_it_and_the_generation_before(rig):
    assert set(rig.step(2).values()) != {0}
    rig.begin(wanted=False)
    assert set(rig.step(3).values()) == {0}
    rig.begin(wanted=True)
    for previous in (g(7), None):
        sizes, _ = rig.finish(rig.writer(), g(9), previous, [], wait)
        assert set(sizes.values()) == {0}


def test_two_updates_in_an_iteration_are_no_step(rig):
    """A step has room for the gradients of one update: a replay would not give the result."""
    assert rig.step(1)[UPDATE_PART] > 0
    rig.now = g(2)
    rig.update(torch.ones(5))
    assert rig.step(2)[UPDATE_PART] == 0
    assert rig.step(3)[UPDATE_PART] > 0


def test_copies_of_an_interrupted_step_are_returned_once(rig):
    rig.update(torch.ones(5))
    (copy,) = rig.running()
    wait("", copy.wait)
    assert rig.running() == []


def test_layout_has_room_for_steps_only_where_they_are_kept(rig):
    plain = role_layout(0, [rig.part], 128 << 10, [0], 2, "pp0")
    kept = role_layout(0, [rig.part], 128 << 10, [0], 2, "pp0", rig.layout_parts(0))
    assert kept.layout_hash != plain.layout_hash
    assert kept.shard_parts == plain.shard_parts == ("shard0",)
    assert GRADIENTS in [part.name for part in kept.parts]


def test_parameter_without_a_gradient_is_named(rig):
    assert rig.iteration(1, lambda: rig.update(None))[UPDATE_PART] > 0
    assert rig.matched == [True]


def test_no_other_scheme_loads_the_module():
    """Neither a member nor Megatron-LM's own scripts, as far as imports show."""
    program = (
        "import sys\n"
        "from deadpool_megatron.megatron import stand_ins\n"
        "stand_ins.install()\n"
        "import deadpool_megatron.megatron.pretraining.pretrain_program\n"
        "print(*(name for name in sys.modules if 'deadpool' in name))"
    )
    names = check_output("-c", program).split()
    assert "deadpool_megatron.member.protection" in names
    assert step_keeper.__name__ not in names


def test_steps_are_replayed_in_their_order_however_they_are_listed(rig):
    """Adam does not commute."""
    for iteration in range(1, 10):
        rig.step(iteration)
    wanted = [tensor.clone() for tensor in rig.part.tensors]
    assert rig.replay_all()["steps"] == 9
    assert all(map(torch.equal, rig.part.tensors, wanted))


EXPERTS = "--num-experts 4 --expert-model-parallel-size 2 --disable-bias-linear"
LAYOUTS = {
    "fp32-plain": "",
    "fp32-distributed": "--use-distributed-optimizer",
    "bf16-plain": "--bf16",
    "bf16-overlap": "--bf16 --use-distributed-optimizer --overlap-grad-reduce",
    "fp16-with-skips": "--fp16 --use-distributed-optimizer --initial-loss-scale 524288",
    "bf16-experts": f"--bf16 --use-distributed-optimizer {EXPERTS}",
}


def train_and_replay(arguments: str) -> dict[str, Any]:
    """On one rank: six iterations with steps kept, then all of them again from the first state."""
    loop, _ = make_loop(arguments)
    optimizers.complete_state(loop.optimizer)
    keeper = Keeper(loop.optimizer, optimizers.ShardState(loop.optimizer))
    before = [lambda index: keeper.capture(index, keeper.writer())]
    calls = StepCalls(lambda: None, before, [], lambda norm: None)
    optimizers.install_step_hooks(loop.optimizer, calls)
    keeper.seal()
    filled = [keeper.iteration(number, loop.train_step)[GRADIENTS] for number in range(1, 7)]
    newest = keeper.slots[keeper.now]
    wanted = {part.name: bytes(newest[part.name]) for part in keeper.shards}
    steps = [codec.decode(keeper.slots[g(number)][UPDATE_PART]) for number in range(1, 7)]
    keeper.replay_all()
    keeper.seal()
    return {
        "matched": keeper.matched,
        "differs": [name for name, held in wanted.items() if bytes(newest[name]) != held],
        "filled": filled,
        "skipped": sum(update is None for step in steps for update in step["inner"]),
        "inner": len(keeper.shards),
        "difference": keeper.reports[0]["difference"],
    }


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_megatron_iterations_are_replayed_from_their_steps(name):
    for result in run_ranks(2, train_and_replay, f"{TINY} --weight-decay 0.1 {LAYOUTS[name]}"):
        assert result["matched"] == [True]
        assert result["differs"] == []
        assert result["difference"] == ""
        assert (result["filled"][0] == 0) == name.startswith("fp16")
        assert result["filled"][-1] > 0
        assert (result["skipped"] > 0) == name.startswith("fp16")
        assert (result["inner"] > 1) == name.endswith("experts")
