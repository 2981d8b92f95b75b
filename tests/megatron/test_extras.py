"""The extras: what they restore, and refusals of state that they would lose."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state, rerun_state_machine
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params
from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine
from megatron.core.transformer.moe.moe_utils import save_to_aux_losses_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from deadpool_megatron.layout.records import EpochRecord, Generation, Restore, Seat
from deadpool_megatron.megatron import loop_extras as extras, optimizer as optimizers
from deadpool_megatron.megatron.exact_load import exact_load
from deadpool_megatron.megatron.optimizer import ShardState
from deadpool_megatron.member.entry import RestoreFailed
from deadpool_megatron.settings import Settings
from deadpool_megatron.state import extras as codec
from deadpool_megatron.state.extras import ExtrasError
from deadpool_megatron.vault.disk import extras_file
from tests.gpu.digests import state_digests
from tests.megatron.plain_loop import captured, plain_loop, scaler, schedule
from tests.member.session_rig import BareEntry


class Model(torch.nn.Module):
    """A trained and a frozen weight, a persistent buffer and another."""

    config = SimpleNamespace()

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.frozen = torch.nn.Parameter(torch.arange(4.0), requires_grad=False)
        self.register_buffer("expert_bias", torch.zeros(2))
        self.register_buffer("local_tokens_per_expert", torch.zeros(2), persistent=False)


class Loop:
    """The parts of a loop that are captured, with an fp16 optimizer."""

    loads_extras = False

    def __init__(self) -> None:
        self.model = Model()
        self.model_chunks: list[Any] = [self.model]
        inner = SimpleNamespace(
            optimizer=torch.optim.AdamW([self.model.weight], lr=0.5),
            grad_scaler=scaler(hysteresis=2),
            config=SimpleNamespace(),
        )
        inner.param_groups = inner.optimizer.param_groups
        self.optimizer = SimpleNamespace(chained_optimizers=[inner])
        self.scheduler = SimpleNamespace(num_steps=0)
        self.counters = {"iteration": 0, "consumed_valid_samples": 0}
        self.log_sums = {"loss": 0.0}

    @property
    def scaler(self) -> DynamicGradScaler:
        return self.optimizer.chained_optimizers[0].grad_scaler

    def extra_state(self) -> dict[str, Any]:
        return {"answer": [1.5, None]}

    def restore_extra_state(self, values: dict[str, Any]) -> None:
        self.given_back = values

    def load_checkpoint(self, directory: Path) -> None:
        """A checkpoint holds what is trained, and what is persistent."""
        with torch.no_grad():
            self.model.weight.fill_(7)
            self.model.expert_bias.fill_(7)
        self.counters["iteration"] = 6


def forget_losses() -> None:
    extras.expert_losses().clear()
    MTPLossLoggingHelper.tracker.clear()


@pytest.fixture
def loop():
    torch.manual_seed(5)
    forget_losses()
    yield Loop()
    forget_losses()


def put_back(loop: Loop, values: dict[str, Any]) -> None:
    extras.restore(loop, values)
    extras.restore_last(values)


def test_frozen_weights_and_all_buffers_are_restored(loop):
    """Traps, A8: they are in no optimizer and in no gather; the warm-up of a spare moves some."""
    with torch.no_grad():
        loop.model.expert_bias.fill_(0.25)
        loop.model.local_tokens_per_expert.fill_(12)
    values = captured(loop)
    spare = Loop()
    with torch.no_grad():
        for tensor in (*spare.model.buffers(), spare.model.frozen):
            tensor.fill_(-1)
    objects = {name: id(buffer) for name, buffer in spare.model.named_buffers()}
    put_back(spare, values)
    assert spare.model.frozen.tolist() == [0, 1, 2, 3]
    assert spare.model.expert_bias.tolist() == [0.25] * 2
    assert spare.model.local_tokens_per_expert.tolist() == [12] * 2
    assert {n: id(b) for n, b in spare.model.named_buffers()} == objects, "in place"


def test_buffer_is_restored_in_its_width(loop):
    """Built in bf16 and not run yet, a router's bias is narrower than in training."""
    with torch.no_grad():
        loop.model.expert_bias.fill_(0.001)
    values = captured(loop)
    spare = Loop()
    bias = spare.model.expert_bias
    bias.data = bias.data.bfloat16()
    put_back(spare, values)
    assert spare.model.expert_bias is bias
    assert torch.equal(bias, loop.model.expert_bias)
    assert bias.dtype == torch.float32


def test_state_that_moves_before_the_update_is_restored(loop):
    """Traps, A4 and A5: the scaler and the bias move although the update is skipped."""
    loop.scaler.update(True)
    values = captured(loop)
    wanted = {name: float(value) for name, value in loop.scaler.state_dict().items()}
    loop.scaler.update(True)
    loop.model.expert_bias.add_(1)
    loop.scheduler.num_steps += 8
    loop.optimizer.chained_optimizers[0].param_groups[0]["lr"] = 0.1
    loop.counters["iteration"] += 1
    loop.counters["skipped"] = 1
    loop.log_sums.update(loss=0.1, of_another_iteration=0.2)
    put_back(loop, values)
    assert {name: float(v) for name, v in loop.scaler.state_dict().items()} == wanted
    assert loop.model.expert_bias.tolist() == [0, 0]
    assert loop.scheduler.num_steps == 0
    assert loop.optimizer.chained_optimizers[0].param_groups[0]["lr"] == 0.5
    assert loop.counters == {"iteration": 0, "consumed_valid_samples": 0}
    assert loop.log_sums == {"loss": 0.0}
    # The next update is as the first time.
    loop.scaler.update(True)
    again = float(loop.scaler.scale)
    put_back(loop, values)
    loop.scaler.update(True)
    assert float(loop.scaler.scale) == again


def test_loss_sums_reach_a_process_that_has_none(loop):
    save_to_aux_losses_tracker("load_balancing_loss", torch.tensor(0.5), 2, 4)
    MTPLossLoggingHelper.tracker["values"] = torch.tensor([0.75])
    values = captured(loop)
    forget_losses()
    # Warm-up of a spare: an entry of its own, of something that was not captured.
    save_to_aux_losses_tracker("z_loss", torch.tensor(3.0), 1, 4)
    put_back(loop, values)
    tracker = extras.logged_losses()
    assert tracker["moe.load_balancing_loss"]["values"].tolist() == [0, 0.5, 0, 0]
    assert tracker["moe.z_loss"]["values"].tolist() == [0, 0, 0, 0]
    assert MTPLossLoggingHelper.tracker["values"].tolist() == [0.75]
    save_to_aux_losses_tracker("load_balancing_loss", torch.tensor(0.5), 2, 4)
    assert tracker["moe.load_balancing_loss"]["values"].tolist() == [0, 1, 0, 0]
    put_back(loop, values)
    assert tracker["moe.load_balancing_loss"]["values"].tolist() == [0, 0.5, 0, 0]


def test_loss_sums_are_summed_over_the_groups_of_the_role(loop, monkeypatch):
    """A restored step is logged before any forward pass has set them."""
    group, other_group = object(), object()
    monkeypatch.setattr(parallel_state, "_TENSOR_AND_CONTEXT_PARALLEL_GROUP", group)
    save_to_aux_losses_tracker("load_balancing_loss", torch.tensor(0.5), 2, 4, reduce_group=group)
    save_to_aux_losses_tracker("of their own", torch.tensor(0.5), 2, 4, avg_group=object())
    values = captured(loop)
    save_to_aux_losses_tracker("z_loss", torch.tensor(0.5), 2, 4)
    entries = extras.logged_losses()
    restored, other = entries["moe.load_balancing_loss"], entries["moe.z_loss"]
    own = entries["moe.of their own"]["avg_group"]
    # A process without a forward pass, and another that was built for another role.
    for before in (None, other_group):
        monkeypatch.setattr(parallel_state, "_TENSOR_AND_CONTEXT_PARALLEL_GROUP", other_group)
        for entry in (restored, other):
            entry["values"].zero_()
            entry.update(reduce_group=before and group, avg_group=before)
        put_back(loop, values)
        assert restored["values"].tolist() == [0.0, 0.5, 0.0, 0.0]
        assert restored["reduce_group"] is other_group
        assert restored["avg_group"] is None
        assert other["reduce_group"] is None
        assert entries["moe.of their own"]["avg_group"] is own


def test_buffer_that_only_one_side_has_is_an_error(loop):
    values = captured(loop)
    loop.model.register_buffer("made_later", torch.zeros(1))
    with pytest.raises(ExtrasError, match=r"buffer\.0\.made_later"):
        extras.restore(loop, values)
    with pytest.raises(ExtrasError, match=r"buffer\.0\.made_later"):
        extras.restore(Loop(), captured(loop))


def test_durable_restore_begins_with_state_that_no_checkpoint_holds(monkeypatch, loop, tmp_path):
    """Token counts of an interrupted forward would move the expert bias by a wrong step. Extras
    in the folder of the checkpoint count if they are of this role of this model."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    warned = list[str]()
    layout = SimpleNamespace(without_runs=SimpleNamespace(to_dict=dict), peers=(0,))
    protection = SimpleNamespace(enter=lambda epoch, every, **more: None, layout=layout)
    built = SimpleNamespace(
        loop=loop,
        protection=protection,
        framework=SimpleNamespace(
            capture=lambda: extras.capture(loop),
            restore=lambda values: extras.restore(loop, values),
            restore_last=extras.restore_last,
            readopt=lambda: None,
            forget_in_flight=lambda: None,
        ),
        frozen=None,
    )
    entry = BareEntry(
        role=0,
        settings=Settings(elastic="off"),
        reports=SimpleNamespace(reported=[], resend=lambda reported: None),
        _vault=SimpleNamespace(has_segment=lambda role: True),
        _built=built,
        _link=SimpleNamespace(send=lambda message: None),
        _warn=warned.append,
        _identity=["this model"],
    )
    entry._pristine = entry.capture_extras()
    wanted = torch.rand(2)
    with torch.no_grad():
        loop.model.local_tokens_per_expert.fill_(99)
    loop.counters["from the dead iteration"] = 1
    loop.scaler.update(True)
    loop.scaler.update(True)
    restore = Restore("durable", Generation(4, 6), path=str(tmp_path))
    record = EpochRecord(4, {0: Seat(0, 0, 0)}, {}, restore)

    def after_restore() -> torch.Tensor:
        extras.restore_last(entry._late)
        return torch.rand(2)

    entry.restore(record, 0)
    assert loop.model.local_tokens_per_expert.tolist() == [0, 0]
    assert loop.model.expert_bias.tolist() == [7, 7]
    assert loop.counters == {"iteration": 6, "consumed_valid_samples": 0}
    assert float(loop.scaler.scale) == 2.0**16
    assert entry.generation == Generation(4, 6)
    assert torch.equal(after_restore(), wanted)
    assert len(warned) == 1
    with torch.no_grad():
        loop.model.local_tokens_per_expert.fill_(5)
    saved, other = entry.capture_extras(), torch.rand(2)
    extras_file.write(tmp_path, 0, 2, saved)
    entry.restore(record, 0)
    assert loop.model.local_tokens_per_expert.tolist() == [5, 5]
    assert torch.equal(after_restore(), other)
    assert len(warned) == 1
    entry._identity = ["another model"]
    entry.restore(record, 0)
    assert loop.model.local_tokens_per_expert.tolist() == [0, 0]
    assert len(warned) == 2
    extras_file.path_in(tmp_path, 0, 2).write_bytes(extras_file.with_checksum(saved)[:-1])
    with pytest.raises(RestoreFailed, match="is damaged"):
        entry.restore(record, 0)
    extras_file.path_in(tmp_path, 0, 2).rename(extras_file.path_in(tmp_path, 1, 2))
    with pytest.raises(RestoreFailed, match="No such file"):
        entry.restore(record, 0)


def test_parts_hold_tensors_that_a_load_has_replaced(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [0])
    monkeypatch.setattr(parallel_state, "get_data_parallel_group", lambda **_: None)
    weight = torch.nn.Parameter(torch.zeros(3))
    adam = torch.optim.AdamW([weight], lr=0.5)
    weight.grad = torch.ones(3)
    adam.step()
    inner = SimpleNamespace(optimizer=adam, ddp_config=None)
    state = ShardState(SimpleNamespace(chained_optimizers=[inner]))
    (part,) = state.parts
    saved = adam.state_dict()
    loaded = {
        **saved,
        "state": {0: {k: torch.full_like(v, 4) for k, v in saved["state"][0].items()}},
    }
    adam.load_state_dict(loaded)
    weight.data = torch.full((3,), 9.0)
    assert not any((tensor == 4).any() for tensor in part.tensors)
    state.readopt()
    found = sorted({value for tensor in part.tensors for value in tensor.tolist()} - {0.0})
    assert found == [4, 9]
    # From now on updates reach the parts again.
    adam.step()
    assert {value for tensor in part.tensors for value in tensor.tolist()} >= {
        *weight.tolist(),
        *adam.state[weight]["exp_avg"].tolist(),
    }


# Refusals (traps, A8 and C).


@pytest.mark.parametrize(("sizes", "spans"), [((4, 4), True), ((4, 2), False), ((2, 2), False)])
def test_statistics_span_the_world_when_those_of_every_optimizer_do(monkeypatch, sizes, spans):
    """Those of the experts may not, where those of the rest do: then one more slot is needed."""
    monkeypatch.setattr(optimizers, "is_distributed", lambda inner: True)
    monkeypatch.setattr(optimizers.dist, "get_world_size", lambda group=4: group)
    inner = [
        SimpleNamespace(get_grad_stats_parallel_group=lambda size=size: size) for size in sizes
    ]
    chained = SimpleNamespace(chained_optimizers=inner)
    assert optimizers.statistics_span_the_world(chained) == spans


class Attention(torch.nn.Module):
    """The state that Megatron's attention keeps for the log of the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.current_max_attn_logits: torch.Tensor | None = None

    def see(self, *logits: float) -> None:
        found = self.weight * torch.tensor(logits)
        known = self.current_max_attn_logits
        self.current_max_attn_logits = found if known is None else torch.max(known, found)


def test_logits_of_an_audit_are_neither_logged_nor_clipped_by():
    """It computes what is another role's, and on another device perhaps."""
    made = plain_loop([attention := Attention()])
    for seen in (None, [3.0, 14.5]):
        if seen is not None:
            attention.see(*seen)
        kept = codec.decode(codec.encode(extras.capture_passing(made)))
        attention.see(20.0, 1.0)
        extras.restore_passing(made, kept)
        left = attention.current_max_attn_logits
        assert (None if left is None else left.tolist()) == seen


def test_spikes_are_judged_by_the_losses_of_the_run(monkeypatch):
    """And not by a warm-up, or by an iteration that was interrupted."""
    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    monkeypatch.setattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", machine)
    made = plain_loop([Attention()])

    def is_spike(loss: float) -> bool:
        seen = torch.tensor(loss)
        return bool(machine.is_unexpectedly_large(seen, threshold=10, context="loss"))

    for _ in range(100):
        assert not is_spike(2.5)
    machine.first_iteration_complete = True
    kept = captured(made)
    machine.large_value_counts.clear()
    machine.first_iteration_complete = False
    assert not is_spike(1e6), "a process that has just warmed up"
    extras.restore(made, kept)
    assert machine.first_iteration_complete
    assert is_spike(1e6)


STYLES = ["linear", "cosine", "inverse-square-root", "WSD"]


def made(beta: float = 0.95, **changes: Any) -> Any:
    """Return a loop whose scheduler has these arguments."""
    chunk = torch.nn.Linear(2, 2, bias=False)
    adam = torch.optim.AdamW(chunk.parameters(), betas=(0.9, beta))
    inner = SimpleNamespace(optimizer=adam, param_groups=adam.param_groups)
    loop = plain_loop([chunk], inner)
    loop.scheduler = schedule(inner, **changes)
    return loop


def put_over(loop: Any, spare: Any) -> None:
    extras.restore(spare, captured(loop))


@pytest.mark.parametrize("style", STYLES)
def test_spare_continues_with_the_schedule_of_the_checkpoint(style):
    """--use-checkpoint-opt-param-scheduler with another schedule on the command line."""
    saved = made(lr_decay_style=style, lr_decay_steps=40, lr_warmup_steps=8, end_wd=0.2)
    saved.scheduler.step(10)
    survivor, spare = made(), made()
    survivor.scheduler.load_state_dict(saved.scheduler.state_dict())
    put_over(survivor, spare)
    by_arguments = made(use_checkpoint_opt_param_scheduler=False, end_wd=0.3)
    put_over(survivor, by_arguments)
    assert by_arguments.scheduler.end_wd == 0.3
    for _ in range(20):
        for loop in (survivor, spare):
            loop.scheduler.step(1)
        (wanted,), (found,) = (
            loop.optimizer.chained_optimizers[0].param_groups for loop in (survivor, spare)
        )
        assert (found["lr"], found["weight_decay"]) == (wanted["lr"], wanted["weight_decay"])


def test_other_schedule_is_named_where_the_command_line_does_not_count():
    """A number that the style of the decay does not use is none."""
    quiet = {"use_checkpoint_opt_param_scheduler": False, "lr_decay_style": "constant"}
    kept = captured(made(**quiet))
    assert extras.schedule_difference(made(**quiet), kept) == ""
    assert extras.schedule_difference(made(**quiet, lr_decay_steps=999), kept) == ""
    assert extras.schedule_difference(made(end_wd=0.7), kept) == "", "the state's is requested"
    found = extras.schedule_difference(made(**quiet, end_wd=0.7), kept)
    assert found == "end_wd is 0.1 in the state and 0.7 on the command line"
    lower = made(**quiet)
    (group,) = lower.optimizer.chained_optimizers[0].param_groups
    group["max_lr"] = 0.25
    found = extras.schedule_difference(lower, kept)
    assert found == "max_lr is None in the state and 0.25 on the command line"
    assert not extras.overrides_schedule(lower.scheduler)
    lower.scheduler.override_opt_param_scheduler = True
    saved = [[{**group, "max_lr": 9.0, "lr": 9.0}]]
    extras.restore(lower, {**kept, "scheduler.num_steps": 8, "param_groups": saved})
    assert (group["max_lr"], group["lr"]) == (0.25, 0.25)


def test_load_takes_the_rates_of_the_command_line_where_they_count():
    """By kind of group, whatever their order; a kind with several rates is Megatron's to match."""
    lists: Any = [{"lr_mult": m, "max_lr": lr, "params": []} for m, lr in ((1, 1.0), (2, 2.0))]
    several: Any = [{"lr_mult": 3, "max_lr": lr, "params": []} for lr in (3.0, 4.0)]
    loaded: list[dict[str, Any]] = []

    class Optimizer:
        optimizer = SimpleNamespace(param_groups=[*lists, *several])

        def load_state_dict(self, state: dict[str, Any]) -> None:
            loaded.append(state)

    optimizer = Optimizer()
    asked = SimpleNamespace(override_opt_param_scheduler=True)
    for scheduler in (asked, None):
        with exact_load(optimizer, scheduler):
            groups = [{"lr_mult": m, "max_lr": 9.0} for m in (2, 1, 3)]
            optimizer.load_state_dict({"optimizer": {"param_groups": groups}})
    rates = [[group["max_lr"] for group in state["optimizer"]["param_groups"]] for state in loaded]
    assert rates == [[2.0, 1.0, 9.0], [9.0, 9.0, 9.0]]


def test_spare_continues_with_the_betas_of_the_checkpoint():
    """Megatron's load takes whole parameter groups, with any command line."""
    survivor, spare = made(), made()
    saved, loaded = (
        loop.optimizer.chained_optimizers[0].optimizer for loop in (made(0.5), survivor)
    )
    loaded.load_state_dict(saved.state_dict())
    put_over(survivor, spare)
    assert spare.optimizer.chained_optimizers[0].param_groups[0]["betas"] == (0.9, 0.5)


class TrainsOnlyExperts:
    """Experts are trained, and everything else is frozen: Megatron's own optimizers of that."""

    def __init__(self) -> None:
        weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
        self.made = plain_loop([torch.nn.Module()])
        config = OptimizerConfig(fp16=True, lr=0.1)
        self.stub, experts = (
            Float16OptimizerWithFloat16Params(adam, config, scaler(hysteresis=1), None)
            for adam in (None, torch.optim.AdamW([weight]))
        )
        self.made.optimizer = ChainedOptimizer([self.stub, experts])

    def overflow(self) -> None:
        for inner in self.made.optimizer.chained_optimizers:
            inner.grad_scaler.update(True)

    @property
    def scale(self) -> float:
        return float(self.made.optimizer.get_loss_scale())


@pytest.mark.parametrize("by", ["survivor", "spare"])
def test_loss_is_scaled_as_before(by, monkeypatch):
    """The scale of the loss is that of the first optimizer of a chain, even of a stub."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    loop = TrainsOnlyExperts()
    assert loop.stub.is_stub_optimizer
    loop.overflow()
    kept = captured(loop.made)
    digests = state_digests(loop.made)
    loop.overflow()
    assert (loop.scale, state_digests(loop.made) == digests) == (2.0**14, False)
    found = loop if by == "survivor" else TrainsOnlyExperts()
    extras.restore(found.made, kept)
    assert found.scale == 2.0**15
    assert state_digests(found.made) == digests
