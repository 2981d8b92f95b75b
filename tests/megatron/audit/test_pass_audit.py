"""An audit of passes in a run of one role, on a model of one weight."""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, rerun_state_machine
from torch import Tensor, nn

from deadpool_megatron.megatron.audit import pass_audit
from deadpool_megatron.megatron.audit.comparison import Mismatch
from deadpool_megatron.megatron.audit.pass_audit import PassAudit


class Chunk(nn.Module):
    """The part of Megatron's DDP that the audit uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.buffers = [SimpleNamespace(grad_data=torch.zeros(4))]  # type: ignore[assignment]
        self.weight.grad = self.buffers[0].grad_data

    def forward(self, inputs: Tensor) -> Tensor:
        return self.weight * inputs

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        yield

    def zero_grad_buffer(self) -> None:
        self.buffers[0].grad_data.zero_()


class Rig:
    """``noise``: the numbers that passes add to their outputs, in order."""

    def __init__(self) -> None:
        self.chunk = Chunk()
        self.chunks = [self.chunk]
        self.done: list[str] = []
        self.reported: list[str] = []
        self.noise = iter([0.0] * 100)
        loop = SimpleNamespace(model_chunks=self.chunks)
        reports = SimpleNamespace(role=0, send_event=self._report)
        self.audit = PassAudit(loop, lambda: self.done.append("settled"), reports)  # type: ignore[arg-type]

    def _report(self, _kind: Any, _iteration: Any, data: dict[str, Any]) -> None:
        self.reported.append(data["text"])

    def forward_backward(self, *, data_iterator: Any, num_microbatches: int) -> None:
        """In place of Megatron's."""
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        for place in range(num_microbatches * len(self.chunks)):
            chunk, iterator = (
                given[place % len(self.chunks)] for given in (self.chunks, iterators)
            )
            output = chunk(next(iterator)["x"] + next(self.noise))
            machine = rerun_state_machine.get_rerun_state_machine()
            loss = output.sum()
            machine.validate_result(loss, lambda _: True, "never right", fatal=False)
            machine.is_unexpectedly_large(loss, 10.0, "loss")
            loss.backward()
            self.done.append("pass")

    def iteration(self, number: int) -> None:
        self.audit.announce(number, number)
        run = self.audit.around(self.forward_backward)
        data = [iter([{"x": torch.ones(4)}]) for _ in self.chunks]
        run(data_iterator=data if len(data) > 1 else data[0], num_microbatches=0)


@pytest.fixture
def rig(monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name in ("get_data_parallel_rank", "get_pipeline_model_parallel_rank"):
        monkeypatch.setattr(parallel_state, name, lambda: 0)
    monkeypatch.setattr(parallel_state, "get_data_parallel_group", lambda: dist.group.WORLD)
    config = SimpleNamespace(**dict.fromkeys(pass_audit.SYNCHRONISING))
    monkeypatch.setattr(pass_audit.loops, "model_config", lambda _loop: config)
    monkeypatch.setattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", None)
    mode = rerun_state_machine.RerunMode.VALIDATE_RESULTS
    rerun_state_machine.initialize_rerun_state_machine(mode=mode)
    try:
        yield Rig()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("mode", rerun_state_machine.RerunMode)
def test_audit_leaves_the_rerun_machine_as_it_was(rig, mode, monkeypatch):
    machine = rerun_state_machine.get_rerun_state_machine()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    machine.set_mode(mode)
    machine.state = rerun_state_machine.RerunState.INITIAL_RUN
    machine.first_iteration_complete = True
    before = copy.deepcopy({k: v for k, v in vars(machine).items() if k != "error_injector"})
    rig.iteration(1)
    assert rig.done.count("pass") == 2
    assert not rig.reported
    assert {name: vars(machine)[name] for name in before} == before


def test_passes_that_do_not_repeat_are_given_up(rig):
    rig.noise = iter([0.0, 1.0])
    rig.iteration(1)
    (text,) = rig.reported
    assert "of roles [0]" in text
    rig.iteration(2)
    assert rig.done.count("pass") == 2, "not computed any more"


@pytest.fixture
def gathers(monkeypatch):
    """Have that many roles gather the row of this role, changed by ``change(rows)``."""

    def given(roles: int, change: Callable[[list[Tensor]], object]) -> None:
        def gather(rows: list[Tensor], row: Tensor) -> None:
            for role, target in enumerate(rows):
                target.copy_(row)
                target[REPLICA] = role
            change(rows)

        monkeypatch.setattr(dist, "get_world_size", lambda *_: roles)
        monkeypatch.setattr(dist, "all_gather", gather)

    return given


def test_roles_commit_the_generation_before_they_report_a_mismatch(rig, gathers):
    gathers(1, lambda _: rig.done.append("compared"))
    rig.iteration(1)
    assert rig.done == ["pass", "pass", "settled", "compared"]


@pytest.fixture
def mismatches(monkeypatch):
    found: list[Mismatch | None] = []
    monkeypatch.setattr(PassAudit, "_stop_if_wrong", lambda _, mismatch: found.append(mismatch))
    return found


PASS = "a forward and backward pass"
# Positions in the row of a role.
REPLICA, HARDWARE, OUTPUT = 0, 4, 5


@pytest.mark.parametrize("other", [False, True])
def test_other_bytes_of_other_hardware_are_no_mismatch(other, rig, mismatches, gathers):
    """Three replicas of a role, the last of which gives another output."""

    def change(rows: list[Tensor]) -> None:
        rows[2][OUTPUT] += 1
        rows[2][HARDWARE] += other

    gathers(3, change)
    for number in (1, 2):
        rig.iteration(number)
    named = None if other else Mismatch((2,), True, PASS)
    assert mismatches == [named, named]
    warning = "audits cannot judge the passes of roles [2]: no data-parallel peer has"
    assert [text.startswith(warning) for text in rig.reported] == [True] * other, "once"


@pytest.mark.parametrize("is_repeated", [False, True])
def test_replica_that_does_not_repeat_itself_is_wrong(is_repeated, rig, mismatches, gathers):
    """In the second audit, as the first checks whether passes repeat. The second replica gives
    another output, once or each time."""
    errors = itertools.chain([0, 1], itertools.repeat(int(is_repeated)))
    gathers(2, lambda rows: rows[1][OUTPUT].add_(next(errors)))
    for number in (1, 2):
        rig.iteration(number)
    assert rig.done.count("pass") == 4
    assert rig.chunk.buffers[0].grad_data.sum() == 0
    named = ((0, 1), False) if is_repeated else ((1,), True)
    assert mismatches == [None, Mismatch(*named, PASS)]


def test_each_chunk_of_an_interleaved_pipeline_is_a_stage(rig, mismatches, gathers, monkeypatch):
    """Three replicas of two ranks with two chunks each; in the second replica the first chunk of
    its second rank is wrong, and with it all that comes later, the chunks of its first rank
    included."""

    def change(rows: list[Tensor]) -> None:
        for role, target in enumerate(rows):
            replica, rank = divmod(role, 2)
            target[:3] = torch.tensor([replica, rank, rank])
        first_chunk, second_chunk = OUTPUT, OUTPUT + 6
        rows[3][[first_chunk, second_chunk]] += 1
        rows[2][second_chunk] += 1

    rig.chunks.append(Chunk())
    config = SimpleNamespace(microbatch_group_size_per_vp_stage=2)
    vars(config).update(dict.fromkeys(pass_audit.SYNCHRONISING))
    monkeypatch.setattr(pass_audit.loops, "model_config", lambda _loop: config)
    gathers(6, change)
    rig.iteration(1)
    assert rig.done.count("pass") == 2 * 4, "twice, each with the minimum of the pipeline"
    assert mismatches == [Mismatch((3,), True, PASS)]
    assert all(chunk.buffers[0].grad_data.sum() == 0 for chunk in rig.chunks)
