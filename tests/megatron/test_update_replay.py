"""An update again from its state before and its gradients gives its very bytes, or is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from deadpool_megatron.layout.records import UPDATE_PART, Generation, gradients_part
from deadpool_megatron.megatron import optimizer as optimizers, update_replay
from deadpool_megatron.megatron.optimizer import complete_state
from deadpool_megatron.megatron.step_keeper import StepKeeper
from deadpool_megatron.member.framework import StepCalls
from deadpool_megatron.platform import select_platform
from deadpool_megatron.state import extras as codec
from deadpool_megatron.state.optimizer_state import UnsupportedState
from deadpool_megatron.state.parts import Part, move_into_arenas
from tests.state.loading import load
from tests.trainer.layouts import TINY, make_loop
from tests.trainer.ranks import run_ranks

FLAGS = {
    "adam-weight-decay": (torch.optim.Adam, {"weight_decay": 0.1, "foreach": False}),
    "adamw-foreach": (torch.optim.AdamW, {"weight_decay": 0.1, "foreach": True}),
    "adamw-fused": (torch.optim.AdamW, {"weight_decay": 0.01, "fused": True}),
}


class Rig:
    """One inner optimizer on packed tensors, some of which are views of another buffer."""

    def __init__(self, kind: Any, flags: dict[str, Any]) -> None:
        torch.manual_seed(3)
        whole = torch.randn(70)
        tensors = [torch.randn(33, 3), torch.randn(5), whole[:40], whole[40:], torch.randn(0)]
        self.parameters = [torch.nn.Parameter(tensor) for tensor in tensors]
        groups = [
            {"params": self.parameters[:2], "lr": 1e-2, "name": "decayed"},
            {"params": self.parameters[2:], "lr": 3e-3, "betas": (0.8, 0.9)},
        ]
        self.adam = kind(groups, **flags)
        self.inner = SimpleNamespace(optimizer=self.adam)
        for parameter in self.parameters:
            self.adam.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter.detach()),
                "exp_avg_sq": torch.zeros_like(parameter.detach()),
            }
        state = [t for p in self.parameters for t in self.adam.state[p].values()]
        self.part = Part("shard0", move_into_arenas([*self.parameters, *state]), (0,))
        self.gradients = Part(gradients_part("shard0"), self.parameters, (0,))
        self.hooked = 0
        self.adam.register_step_pre_hook(lambda *_: self.count())

    def count(self) -> None:
        self.hooked += 1

    def bytes_now(self) -> memoryview:
        held = memoryview(bytearray(self.part.nbytes))
        for view, tensor in zip(self.part.views(held), self.part.tensors, strict=True):
            view.copy_(tensor)
        return held

    def update(self, lr: float) -> tuple[update_replay.InnerUpdate, memoryview]:
        """A live update; the second parameter has no gradient."""
        held = memoryview(bytearray(self.gradients.nbytes))
        for number, view in enumerate(self.gradients.views(held)):
            view.copy_(torch.randn(view.shape))
            self.parameters[number].grad = None if number == 1 else view.clone()
        for group in self.adam.param_groups:
            group["lr"] = lr
        used = update_replay.InnerUpdate(update_replay.used_values(self.inner), (1,))
        self.adam.step()
        for parameter in self.parameters:
            parameter.grad = None
        for group in self.adam.param_groups:
            group["lr"] = -1.0  # the scheduler goes on
        return update_replay.InnerUpdate.from_dict(used.to_dict()), held

    def views(self, held: memoryview) -> list[Tensor]:
        return self.gradients.views(held)


@pytest.mark.parametrize("name", FLAGS)
def test_updates_again_give_the_same_bytes(name):
    rig = Rig(*FLAGS[name])
    start = rig.bytes_now()
    updates = [rig.update(lr) for lr in (1e-2, 5e-3, 1e-3)]
    wanted = rig.bytes_now()
    assert start != wanted
    load(rig.part, start)
    for used, held in updates:
        update_replay.replay(rig.inner, used, rig.views(held))
    assert rig.bytes_now() == wanted
    assert rig.hooked == 3, "a replay calls no hooks"
    assert rig.adam.param_groups[1]["betas"] == (0.8, 0.9)
    assert all(parameter.grad is None for parameter in rig.parameters)
    # A live update after a replay is what it would have been.
    after, _ = rig.update(1e-3), load(rig.part, wanted)
    assert after is not None
    assert rig.hooked == 4


@pytest.mark.parametrize("name", FLAGS)
def test_the_rehearsal_works_on_copies_and_sees_one_wrong_bit(name, monkeypatch):
    monkeypatch.setattr("deadpool_megatron.megatron.update_replay._CHUNK_BYTES", 500)
    rig = Rig(*FLAGS[name])
    rig.update(1e-2)
    before = rig.bytes_now()
    used, held = rig.update(5e-3)
    after = rig.bytes_now()

    def compare(**changed: Any) -> str:
        values = {"update": used, "before": before, "held": held, "after": after} | changed
        found = update_replay.rehearse(
            rig.inner,
            values["update"],
            rig.part,
            values["before"],
            rig.views(values["held"]),
            values["after"],
        )
        assert rig.bytes_now() == after, "the live state is left alone"
        return found

    assert compare() == ""
    wrong = memoryview(bytearray(held))
    rig.views(wrong)[3][7] += 1
    assert "of parameter 3" in compare(held=wrong)
    other = memoryview(bytearray(before))
    rig.part.slice(other, rig.adam.state[rig.parameters[0]]["exp_avg"])[0, 0] += 1
    assert "of parameter 0" in compare(before=other)
    groups = [{**values, "lr": 4e-3} for values in used.groups]
    assert (
        compare(update=update_replay.InnerUpdate(groups, used.without_gradient))
        == "parameter of parameter 0"
    )
    assert "of parameter 0" in compare(after=before)


def test_values_that_were_not_there_are_taken_away():
    """FusedAdam counts its steps in the groups, from its first update on."""
    rig = Rig(*FLAGS["adamw-foreach"])
    start = rig.bytes_now()
    used, held = rig.update(1e-2)
    load(rig.part, start)
    rig.adam.param_groups[0]["step"] = 7
    update_replay.replay(rig.inner, used, rig.views(held))
    assert "step" not in rig.adam.param_groups[0]
    assert len(optimizers.parameters_of(rig.inner)) == 5


def test_what_cannot_be_replayed_is_refused_at_start():
    rig = Rig(*FLAGS["adamw-foreach"])
    chained = SimpleNamespace(chained_optimizers=[rig.inner])
    update_replay.refuse_unreplayable(chained)
    rig.inner.config = SimpleNamespace(use_precision_aware_optimizer=True)
    with pytest.raises(UnsupportedState, match="precision-aware"):
        update_replay.refuse_unreplayable(chained)
    momentum = SimpleNamespace(optimizer=torch.optim.SGD(rig.parameters, lr=0.1))
    with pytest.raises(UnsupportedState, match=r"not for SGD.*use --deadpool-protection"):
        update_replay.refuse_unreplayable(SimpleNamespace(chained_optimizers=[momentum]))
    rig.adam.param_groups[0]["lr"] = torch.tensor(0.1)
    del rig.inner.config
    with pytest.raises(UnsupportedState, match="capturable"):
        update_replay.refuse_unreplayable(chained)


EXPERTS = "--num-experts 4 --expert-model-parallel-size 2 --disable-bias-linear"
LAYOUTS = {
    "fp32-plain": "",
    "fp32-distributed": "--use-distributed-optimizer",
    "bf16-plain": "--bf16",
    "bf16-overlap": "--bf16 --use-distributed-optimizer --overlap-grad-reduce",
    "fp16-with-skips": "--fp16 --use-distributed-optimizer --initial-loss-scale 524288",
    "bf16-experts": f"--bf16 --use-distributed-optimizer {EXPERTS}",
}


class _Slots:
    """Plays the vault: slots in this process, all sealed at once."""

    def __init__(self) -> None:
        self.parts: dict[Any, dict[str, memoryview]] = {}
        self.matched: list[bool] = []

    def part(self, generation: Any, name: str, nbytes: int) -> memoryview:
        slot = self.parts.setdefault(generation, {})
        return slot.setdefault(name, memoryview(bytearray(nbytes)))

    def sealed_part(self, generation: Any, name: str) -> memoryview | None:
        return self.parts.get(generation, {}).get(name)

    def rehearsed(self, matched: bool) -> None:
        self.matched.append(matched)


def train_and_replay(arguments: str) -> dict[str, Any]:
    """On one rank: six iterations with steps kept, then all of them again from the first state."""
    loop, _ = make_loop(arguments)
    complete_state(loop.optimizer)
    shard, vault, reports = optimizers.ShardState(loop.optimizer), _Slots(), list[Any]()
    keeper = StepKeeper(
        loop.optimizer,
        shard,
        select_platform(),
        vault,  # type: ignore[arg-type]
        lambda facts: reports.append(dict(facts)),
    )
    sizes = {info.name: info.nbytes for info in keeper.layout_parts(0)}
    sizes |= {part.name: part.nbytes for part in shard.parts}
    now = Generation(1, 0)

    def writer() -> Any:
        generation = now
        return SimpleNamespace(part=lambda name: vault.part(generation, name, sizes[name]))

    def keep_shard() -> None:
        for part in shard.parts:
            held = vault.part(now, part.name, part.nbytes)
            for view, tensor in zip(part.views(held), part.tensors, strict=True):
                view.copy_(tensor)

    before = [lambda index: keeper.capture(index, writer())]
    calls = StepCalls(lambda: None, before, [], lambda norm: None)
    optimizers.install_step_hooks(loop.optimizer, calls)
    keeper.begin(wanted=True)
    keep_shard()
    filled, results = [], list[bool]()
    for iteration in range(1, 7):
        keeper.order_copies(lambda _, wait: results.append(wait(10.0)))
        now = Generation(1, iteration)
        loop.train_step()
        keep_shard()
        step, copies = keeper.finish(
            writer(), now, Generation(1, iteration - 1), [], lambda _, wait: wait(10.0)
        )
        assert all(copy.wait(10.0) for copy in copies)
        filled.append(step)
    wanted = {part.name: bytes(vault.parts[now][part.name]) for part in shard.parts}
    live = optimizers.param_group_values(loop.optimizer)
    for part in shard.parts:
        load(part, vault.parts[Generation(1, 0)][part.name])
    skipped = 0
    inner = optimizers.inner_optimizers(loop.optimizer)
    for iteration in range(1, 7):
        slot = vault.parts[Generation(1, iteration)]
        values = codec.decode(slot[UPDATE_PART])["inner"]
        for index, used in enumerate(values):
            if used is None:
                skipped += 1
                continue
            held = keeper.gradients[index].views(slot[keeper.gradients[index].name])
            update_replay.replay(inner[index], update_replay.InnerUpdate.from_dict(used), held)
    keep_shard()
    return {
        "matched": vault.matched,
        "differs": [name for name, held in wanted.items() if bytes(vault.parts[now][name]) != held],
        "filled": filled,
        "skipped": skipped,
        "inner": len(inner),
        "groups_moved_on": live != optimizers.param_group_values(loop.optimizer),
        "report": reports[0],
        "copied": all(results),
    }


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_megatron_iterations_again_from_their_steps(name):
    for result in run_ranks(2, train_and_replay, f"{TINY} --weight-decay 0.1 {LAYOUTS[name]}"):
        assert result["matched"] == [True]
        assert result["copied"]
        assert result["differs"] == []
        assert result["report"]["difference"] == ""
        gradients = gradients_part("shard0")
        assert (result["filled"][0][gradients] == 0) == name.startswith("fp16")
        assert result["filled"][-1][gradients] > 0
        assert (result["skipped"] > 0) == name.startswith("fp16")
        assert (result["inner"] > 1) == name.endswith("experts")
