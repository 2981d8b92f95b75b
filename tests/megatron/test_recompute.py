"""Gradients and values of an update: copied when, ordered before what, trusted from when on."""

from types import SimpleNamespace
from typing import Any

import torch

from deadpool_megatron.layout.gradient_chain import key, pack_sums
from deadpool_megatron.layout.records import SUMS_PART, UPDATE_PART, Generation, gradients_part
from deadpool_megatron.megatron import step_keeper as recompute
from deadpool_megatron.megatron.step_keeper import StepKeeper
from deadpool_megatron.member.role_layout import role_layout
from deadpool_megatron.platform.devices import CopyHandle, CpuPlatform
from deadpool_megatron.state.parts import Part
from deadpool_megatron.vault.shm.segment import checksum
from tests.common.programs import check_output

GRADIENTS = gradients_part("shard0")


def g(iteration: int) -> Generation:
    return Generation(1, iteration)


class Vault:
    """Plays VaultClient: what is sealed in own slots, and what it was told."""

    def __init__(self) -> None:
        self.sealed: dict[Generation, dict[str, memoryview]] = {}
        self.told: list[bool] = []

    def sealed_part(self, generation: Generation, name: str) -> memoryview | None:
        return self.sealed.get(generation, {}).get(name)

    def rehearsed(self, matched: bool) -> None:
        self.told.append(matched)


class Rig:
    """One parameter under AdamW, and a keeper that goes through iterations as Protection does."""

    def __init__(self) -> None:
        self.parameter = torch.nn.Parameter(torch.ones(5))
        adam = torch.optim.AdamW([self.parameter], lr=0.1, weight_decay=0.1)
        adam.state[self.parameter] = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros(5),
            "exp_avg_sq": torch.zeros(5),
        }
        self.inner = SimpleNamespace(optimizer=adam)
        state = adam.state[self.parameter]
        self.part = Part("shard0", [self.parameter, *state.values()], (0,))
        self.vault, self.reports = Vault(), list[dict[str, Any]]()
        self.keeper = StepKeeper(
            SimpleNamespace(chained_optimizers=[self.inner]),
            SimpleNamespace(parts=[self.part]),  # type: ignore[arg-type]
            CpuPlatform(),
            self.vault,  # type: ignore[arg-type]
            lambda facts: self.reports.append(dict(facts)),
        )
        self.sizes = {info.name: info.nbytes for info in self.keeper.layout_parts(0)}
        self.slots: dict[Generation, dict[str, memoryview]] = {}
        self.wrong = False
        self.keeper.begin(wanted=True)

    def writer(self, generation: Generation) -> Any:
        slot = self.slots.setdefault(generation, {})
        sizes = {**self.sizes, "shard0": self.part.nbytes}

        def part(name: str) -> memoryview:
            return slot.setdefault(name, memoryview(bytearray(sizes[name])))

        return SimpleNamespace(part=part)

    def seal(self, generation: Generation) -> None:
        for view, tensor in zip(
            self.part.views(self.writer(generation).part("shard0")), self.part.tensors, strict=True
        ):
            view.copy_(tensor)
        self.vault.sealed[generation] = self.slots[generation]

    def step(self, iteration: int, *, skipped: bool = False) -> dict[str, int]:
        """One iteration; the gradients are zeroed right behind it, as the next one does."""
        generation = g(iteration)
        gradient = torch.full((5,), float(iteration))
        if not skipped:
            self.parameter.grad = gradient
            self.keeper.capture(0, self.writer(generation))
            self.inner.optimizer.step()
            if self.wrong:
                with torch.no_grad():
                    self.parameter.add_(1e-3)
        self.seal(generation)
        sizes, copies = self.keeper.finish(
            self.writer(generation),
            generation,
            g(iteration - 1),
            [],
            lambda _, wait: self.done(wait(5.0)),
        )
        self.keeper.order_copies(lambda _, wait: self.done(wait(5.0)))
        gradient.zero_()
        for copy in copies:
            self.wait(copy)
        return sizes

    def wait(self, copy: CopyHandle) -> None:
        self.done(copy.wait(5.0))

    @staticmethod
    def done(value: bool) -> None:
        assert value


def test_a_step_holds_the_gradients_that_the_update_used():
    rig = Rig()
    rig.seal(g(0))
    sizes = rig.step(1)
    assert sizes[GRADIENTS] == rig.sizes[GRADIENTS]
    assert 0 < sizes[UPDATE_PART] <= rig.sizes[UPDATE_PART]
    (held,) = rig.keeper.gradients[0].views(rig.slots[g(1)][GRADIENTS])
    assert held.tolist() == [1.0] * 5
    assert rig.vault.told == [True]
    assert rig.reports[0]["matched"]
    assert rig.reports[0]["bytes"] == rig.part.nbytes
    rig.step(2)
    assert rig.vault.told == [True], "rehearsed once"


def test_a_skipped_update_is_a_step_without_gradients():
    rig = Rig()
    rig.seal(g(0))
    sizes = rig.step(1, skipped=True)
    assert sizes[GRADIENTS] == 0
    assert sizes[UPDATE_PART] > 0
    assert rig.vault.told == [], "it shows nothing"


def test_the_rehearsal_waits_for_a_state_before_in_own_slots():
    rig = Rig()
    rig.step(1)
    assert rig.vault.told == []
    rig.step(2)
    assert rig.vault.told == [True]


def test_an_update_that_a_replay_does_not_give_ends_it():
    rig = Rig()
    rig.seal(g(0))
    rig.wrong = True
    sizes = rig.step(1)
    assert rig.vault.told == [False]
    assert rig.reports[0]["difference"] == "shard0, parameter of parameter 0"
    assert set(sizes.values()) == {0}
    assert set(rig.step(2).values()) == {0}
    assert not rig.keeper.keeps()
    rig.keeper.begin(wanted=True)
    assert not rig.keeper.keeps(), "for the rest of the run"


def test_no_step_without_a_plan_that_wants_it_or_across_a_gap():
    rig = Rig()
    rig.seal(g(0))
    assert set(rig.step(2).values()) != {0}
    rig.keeper.begin(wanted=False)
    assert set(rig.step(3).values()) == {0}
    rig.keeper.begin(wanted=True)
    writer = rig.writer(g(9))
    sizes, _ = rig.keeper.finish(writer, g(9), g(7), [], lambda what, wait: None)
    assert set(sizes.values()) == {0}
    sizes, _ = rig.keeper.finish(writer, g(9), None, [], lambda what, wait: None)
    assert set(sizes.values()) == {0}


def test_two_updates_in_an_iteration_are_no_step():
    """It has room for the gradients of one: a replay would not come to what the two have made."""
    rig = Rig()
    rig.seal(g(0))
    assert rig.step(1)[UPDATE_PART] > 0
    rig.parameter.grad = torch.ones(5)
    rig.keeper.capture(0, rig.writer(g(2)))
    rig.inner.optimizer.step()
    assert rig.step(2)[UPDATE_PART] == 0
    assert rig.step(3)[UPDATE_PART] > 0


def test_copies_of_an_interrupted_step_are_handed_out_to_be_waited_for():
    rig = Rig()
    rig.parameter.grad = torch.ones(5)
    rig.keeper.capture(0, rig.writer(g(1)))
    (copy,) = rig.keeper.running()
    rig.wait(copy)
    assert rig.keeper.running() == []


def test_the_layout_has_room_for_steps_only_where_they_are_kept():
    rig = Rig()
    plain = role_layout(0, [rig.part], 128 << 10, [0], 2, "pp0")
    kept = role_layout(0, [rig.part], 128 << 10, [0], 2, "pp0", rig.keeper.layout_parts(0))
    assert kept.layout_hash != plain.layout_hash
    assert kept.shard_parts == plain.shard_parts == ("shard0",)
    assert GRADIENTS in [part.name for part in kept.parts]


def test_a_parameter_without_a_gradient_is_named():
    rig = Rig()
    rig.seal(g(0))
    rig.keeper.capture(0, rig.writer(g(1)))  # no gradient at all
    rig.inner.optimizer.step()
    rig.seal(g(1))
    sizes, _ = rig.keeper.finish(
        rig.writer(g(1)), g(1), g(0), [], lambda _, wait: rig.done(wait(5.0))
    )
    assert sizes[UPDATE_PART] > 0
    assert rig.vault.told == [True]


def test_no_other_scheme_loads_it():
    """Neither a member nor one of Megatron-LM's own scripts, as far as imports go."""
    program = (
        "import sys\n"
        "from deadpool_megatron.megatron import stand_ins\n"
        "stand_ins.install()\n"
        "import deadpool_megatron.megatron.pretraining.pretrain_program\n"
        "print(*(name for name in sys.modules if 'deadpool' in name))"
    )
    names = check_output("-c", program).split()
    assert "deadpool_megatron.member.protection" in names
    assert recompute.__name__ not in names


def test_steps_are_replayed_in_their_order_however_they_are_listed():
    """Adam does not commute."""
    rig, count = Rig(), 9
    rig.seal(g(0))
    for iteration in range(1, count + 1):
        rig.step(iteration)
    live = [tensor.clone() for tensor in rig.part.tensors]
    newest = rig.slots[g(count)]
    sums = {"shard0": (rig.part.nbytes, checksum(newest["shard0"]))}
    held = {key(g(0), "shard0"): rig.slots[g(0)]["shard0"]}
    held[key(g(count), SUMS_PART)] = memoryview(pack_sums(sums))
    for iteration in range(count, 0, -1):
        for name in (UPDATE_PART, GRADIENTS):
            held[key(g(iteration), name)] = rig.slots[g(iteration)][name]
    restored: Any = SimpleNamespace(names=tuple(held), part=held.__getitem__)

    def load(parts: Any) -> None:
        for part, found in parts:
            for tensor, view in zip(part.tensors, part.views(found), strict=True):
                tensor.data.copy_(view)

    protection: Any = SimpleNamespace(load=load, seal_replayed=lambda *_: "")
    facts = rig.keeper.recompute([rig.part], restored, g(count), protection)
    assert facts["steps"] == count
    for found, wanted in zip(rig.part.tensors, live, strict=True):
        assert torch.equal(found, wanted)
