"""A run that continues from a checkpoint equals the uninterrupted run."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.layouts import LAYOUTS, MODEL, make_loop, steps, train
from tests.trainer.ranks import run_ranks

pytestmark = pytest.mark.slow

DUE = "--eval-interval 2 --eval-iters 1 --log-interval 4"


def save_in_the_middle(arguments: str, folder: Path) -> dict[str, Any]:
    """Three iterations, a checkpoint, three more."""
    from tests.gpu.digests import state_digests

    loop, _ = make_loop(arguments)
    steps(loop, 3)
    before = state_digests(loop)
    loop.save_checkpoint(folder)
    after = state_digests(loop)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    steps(loop, 3)
    return {
        "changed by saving": _differences(before, after),
        "children": children,
        "middle": after,
        "end": state_digests(loop),
    }


def load_and_go_on(arguments: str, folder: Path, trained_before: int) -> dict[str, Any]:
    """Load into a loop that has already trained some iterations, and train three."""
    from deadpool_megatron.megatron.optimizer import inner_optimizers
    from tests.gpu.digests import state_digests

    loop, _ = make_loop(arguments)
    steps(loop, trained_before)
    inner = [optimizer.optimizer for optimizer in inner_optimizers(loop.optimizer)]
    tensors = [t for o in inner for state in o.state.values() for t in state.values()]
    loop.load_checkpoint(folder)
    loaded = [t for o in inner for state in o.state.values() for t in state.values()]
    middle = state_digests(loop)
    steps(loop, 3)
    return {
        "kept": all(a is b for a, b in zip(tensors, loaded, strict=True)),
        "middle": middle,
        "end": state_digests(loop),
    }


def _differences(first: dict[str, str], second: dict[str, str]) -> list[str]:
    return [name for name in {**first, **second} if first.get(name) != second.get(name)]


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_resume_is_exact(name, text, tmp_path):
    ranks, flags = LAYOUTS[name]
    arguments = f"{MODEL} {text} {flags} {DUE}"
    folder = tmp_path / "checkpoint"
    straight = run_ranks(ranks, save_in_the_middle, arguments, folder)
    # Into live objects that have trained meanwhile, so that anything a load omits shows.
    resumed = run_ranks(ranks, load_and_go_on, arguments, folder, 2)
    for whole, half in zip(straight, resumed, strict=True):
        assert whole["changed by saving"] == []
        assert whole["children"] == "", "no writer process inherits this rank's sockets"
        assert _differences(whole["middle"], half["middle"]) == []
        assert _differences(whole["end"], half["end"]) == []
        assert half["kept"], "optimizer state keeps its tensors"


@pytest.mark.full
def test_a_checkpoint_before_the_first_update(text, tmp_path):
    """Steps of zero, which Megatron does not write for unsharded optimizers."""
    arguments = f"{MODEL} {text} --bf16"
    folder = tmp_path / "checkpoint"
    (straight,) = run_ranks(1, save_at_once, arguments, folder)
    (resumed,) = run_ranks(1, load_and_go_on, arguments, folder, 1)
    assert _differences(straight, resumed["middle"]) == []


def save_at_once(arguments: str, folder: Path) -> dict[str, str]:
    from tests.gpu.digests import state_digests

    loop, _ = make_loop(arguments)
    loop.save_checkpoint(folder)
    return state_digests(loop)


def rates_after_a_load(arguments: str, folder: Path) -> list[tuple[float, float]]:
    """Return the maximum and the current rate of the optimizer's first group, after each load."""
    found = []
    for more in ("", "--lr 1e-4", "--lr 1e-4 --override-opt-param-scheduler"):
        loop, _ = make_loop(f"{arguments} --lr-decay-style constant {more}")
        if not found:
            steps(loop, 2)
            loop.save_checkpoint(folder)
        loop.load_checkpoint(folder)
        steps(loop, 1)
        group = loop.optimizer.param_groups[0]
        found.append((group["max_lr"], group["lr"]))
    return found


def test_rates_of_the_command_line_count_where_they_are_asked_for(text, tmp_path):
    (found,) = run_ranks(1, rates_after_a_load, f"{MODEL} {text} --lr 1e-2", tmp_path / "saved")
    assert found == [(1e-2, 1e-2), (1e-2, 1e-2), (1e-4, 1e-4)]


def publish_over_a_torn_attempt(arguments: str, folder: Path) -> list[str]:
    """A torn save, then a complete save."""
    from deadpool_megatron.trainer import loop_checkpoint

    loop, _ = make_loop(arguments)
    loop.train_step()
    torn = folder / "iter_0000001.partial"
    torn.mkdir()
    (torn / "junk").write_text("half a file")
    assert loop_checkpoint.latest(folder) is None
    loop.run_segment("save")
    assert loop_checkpoint.latest(folder) == folder / "iter_0000001"
    return sorted(path.name for path in (folder / "iter_0000001").iterdir())


def test_a_torn_attempt_is_replaced(text, tmp_path):
    (names,) = run_ranks(
        1, publish_over_a_torn_attempt, f"{MODEL} {text} --save {tmp_path}", tmp_path
    )
    assert "junk" not in names
    assert "metadata.json" in names
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.full
def test_load_flag_goes_on_to_the_same_end(text, tmp_path):
    ranks, flags = LAYOUTS["bf16"]
    arguments = f"{MODEL} {text} {flags} --save {tmp_path} --save-interval 2"
    whole = run_ranks(ranks, train, arguments)[0]
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    rest = run_ranks(ranks, train, f"{arguments} --load {tmp_path}")[0]
    assert rest["hashes"] == whole["hashes"]
    assert rest["steps"] == whole["steps"][4:]
