"""One rank's loop: its counters and events, and its state after an interrupt."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.layouts import BF16, LAYOUTS, MODEL, make_loop, steps
from tests.trainer.ranks import run_ranks

pytestmark = pytest.mark.slow


def observe(arguments: str) -> dict[str, Any]:
    """Six iterations with everything due between them."""
    loop, emitted = make_loop(arguments)
    steps(loop, 6)
    return {"emitted": emitted, "counters": loop.counters, "sums": loop.log_sums, "done": loop.done}


def test_counts_and_events(text, tmp_path):
    save = f"--save {tmp_path} --save-interval 4 --eval-interval 3 --eval-iters 1"
    (facts,) = run_ranks(1, observe, f"{MODEL} {text} {BF16} {save} --log-interval 4")
    kinds = [kind for kind, _ in facts["emitted"]]
    assert kinds == [
        *("training", "step", "step", "step", "evaluation", "step", "log"),
        *("step", "step", "evaluation"),
    ]
    assert facts["counters"] == {
        "iteration": 6,
        "consumed_train_samples": 48,
        "consumed_valid_samples": 16,
        "skipped_iterations": 0,
    }
    assert facts["done"]
    assert facts["sums"]["iterations"] == 2, "the line at iteration 4 started new sums"
    step = next(data for kind, data in facts["emitted"] if kind == "step")
    assert step["iteration"] == 1
    assert step["samples"] == 8
    assert step["skipped"] is False
    assert math.isclose(float.fromhex(step["loss"]), math.log(512), rel_tol=0.1)
    assert float.fromhex(step["grad_norm"]) > 0
    assert float.fromhex(step["learning_rate"]) == pytest.approx(0.005)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000004",
        "iter_0000006",
        "latest_checkpointed_iteration.txt",
    ]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "6"


def emissions(arguments: str) -> tuple[int, str]:
    loop, emitted = make_loop(arguments)
    steps(loop, 1)
    return len(emitted), loop.stage_class()


def test_one_rank_emits_and_every_role_has_a_class_of_its_own(text):
    ranks, flags = LAYOUTS["sequence-parallel"]
    answers = run_ranks(ranks, emissions, f"{MODEL} {text} {flags}")
    assert [count for count, _ in answers] == [0, 0, 2, 0], "first rank of the last stage"
    assert len({stage for _, stage in answers}) == ranks


def stage_classes(arguments: str) -> str:
    return str(make_loop(arguments)[0].stage_class())


def test_data_ranks_without_shards_share_a_class(text):
    first, second = run_ranks(2, stage_classes, f"{MODEL} {text}")
    assert first == second
    first, second = run_ranks(2, stage_classes, f"{MODEL} {text} {BF16}")
    assert first != second


class Interrupted(Exception):
    """The exception of a test in the middle of an iteration."""


def interrupted(arguments: str, folder: Path, point: str, segment: str) -> tuple[str, str]:
    """Break off at a fault point, return to a checkpoint, and continue; also train undisturbed."""
    from deadpool_megatron import failpoints

    loop, _ = make_loop(arguments)
    steps(loop, 2)
    loop.save_checkpoint(folder)
    steps(loop, 2)
    undisturbed = loop.state_hash()
    real_hit = failpoints.hit

    def hit(name: str, **_details: object) -> None:
        if name == point:
            raise Interrupted

    failpoints.hit = hit  # type: ignore[assignment]
    with pytest.raises(Interrupted):
        loop.train_step() if segment == "step" else loop.run_segment(segment)
    failpoints.hit = real_hit
    loop.load_checkpoint(folder)
    steps(loop, 2)
    return undisturbed, loop.state_hash()


@pytest.mark.parametrize(
    ("point", "segment"),
    [("grads.final", "step"), ("optimizer.after", "step"), ("evaluation.microbatch", "evaluation")],
)
def test_an_interrupt_leaves_nothing_behind(text, tmp_path, point, segment):
    flags = f"{MODEL} {text} --num-experts 2 --disable-bias-linear --moe-input-jitter-eps 0.01"
    ((undisturbed, again),) = run_ranks(
        1, interrupted, flags, tmp_path / "checkpoint", point, segment
    )
    assert undisturbed == again


def hash_changes(arguments: str) -> list[str]:
    """Names of what each small change of state does not show in the hash of."""
    import random

    import numpy as np
    import torch
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from deadpool_megatron.megatron.identity import entry_digests
    from deadpool_megatron.megatron.optimizer import inner_optimizers

    loop, _ = make_loop(arguments)
    steps(loop, 1)
    inner = inner_optimizers(loop.optimizer)[0].optimizer
    main = inner.param_groups[0]["params"][0]
    tracker = get_cuda_rng_tracker()
    buffer = next(value for name, value in loop.models[0].named_buffers() if "bias" in name)
    changes = {
        "parameter": lambda: next(loop.models[0].parameters()).data.view(-1)[0].add_(1),
        "buffer": lambda: buffer.view(-1)[0].add_(1),
        "main": lambda: main.data.view(-1)[0].add_(1),
        "moment": lambda: inner.state[main]["exp_avg"].view(-1)[0].add_(1),
        "step": lambda: inner.state[main]["step"].add_(1),
        "group": lambda: inner.param_groups[0].update(lr=0.5),
        "torch": lambda: torch.rand(1),
        "numpy": lambda: np.random.rand(),
        "python": lambda: random.random(),
        "tracker": lambda: tracker.states_["model-parallel-rng"][20].add_(1),
        "scheduler": lambda: setattr(loop.scheduler, "num_steps", 1),
        "counters": lambda: loop.counters.update(consumed_valid_samples=1),
        "sums": lambda: loop.log_sums.update(loss=0.5),
    }
    named = {"scheduler": "scheduler", "counters": "counters", "sums": "log_sums"}
    named |= {name: f"rng.{name}" for name in ("torch", "numpy", "python")}
    named["tracker"] = "rng.model-parallel-rng"
    unseen = []
    for name, change in changes.items():
        before, entries = loop.state_hash(), entry_digests(loop)
        assert before == loop.state_hash()
        change()
        if before == loop.state_hash():
            unseen.append(name)
        changed = {entry for entry, _ in entries.items() ^ entry_digests(loop).items()}
        assert changed == ({named[name]} if name in named else set())
    return unseen


def test_the_hash_sees_every_part_of_the_state(text):
    flags = (
        "--num-experts 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
        " --disable-bias-linear"
    )
    (unseen,) = run_ranks(1, hash_changes, f"{MODEL} {text} {flags}")
    assert unseen == []
