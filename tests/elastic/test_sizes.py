"""Checkpoints of the embedded trainer load at another number of ranks."""

from pathlib import Path

import pytest

from tests.elastic.harness.legs import Leg, Lengths, trainer_legs
from tests.trainer.layouts import BF16, FP16, MODEL, MOE, OVERLAP, PP2, TP2

pytestmark = pytest.mark.slow
FULL = pytest.mark.full
BATCH_OF_12 = "--global-batch-size 12"


def trained(arguments: str, lengths: Lengths, folder: Path) -> list[Leg]:
    folder.mkdir()
    return list(trainer_legs(arguments, lengths, folder))


@pytest.mark.parametrize(
    ("full", "small", "flags"),
    [
        (6, 4, f"{PP2} {BF16} {BATCH_OF_12}"),
        pytest.param(6, 4, f"{PP2} {BF16} {BATCH_OF_12} {OVERLAP}", marks=FULL),
        pytest.param(3, 2, f"--bf16 {BATCH_OF_12}", marks=FULL),
        pytest.param(4, 2, f"{TP2} {BF16} --sequence-parallel", marks=FULL),
        pytest.param(4, 2, f"{FP16} --use-distributed-optimizer", marks=FULL),
        pytest.param(8, 4, f"{PP2} {BF16} {MOE} --moe-input-jitter-eps 0.01", marks=FULL),
        pytest.param(4, 2, f"{BF16} --num-distributed-optimizer-instances 2", marks=FULL),
    ],
)
def test_other_numbers_of_ranks_train_the_same_samples(text, tmp_path, full, small, flags):
    arguments = f"{MODEL} {text} {flags} --eval-interval 2 --eval-iters 1"
    lengths = [(full, 3), (small, 5), (full, 6)]
    found = trained(arguments, lengths, tmp_path / "first")
    again = trained(arguments, lengths, tmp_path / "again")
    assert [(leg.steps, leg.hashes) for leg in again] == [(leg.steps, leg.hashes) for leg in found]
    (undisturbed,) = trained(arguments, [(full, 6)], tmp_path / "undisturbed")
    samples = {number: digests for leg in found for number, digests in leg.samples.items()}
    assert samples == undisturbed.samples
    steps = [step for leg in found for step in leg.steps]
    for step, wanted in zip(steps, undisturbed.steps, strict=True):
        assert step["iteration"] == wanted["iteration"]
        assert step["learning_rate"] == wanted["learning_rate"]
        loss, other = (float.fromhex(facts["loss"]) for facts in (step, wanted))
        assert loss == pytest.approx(other, rel=1e-2)


def test_change_back_and_forth_alters_nothing(text, tmp_path):
    """Parameters, moments and extras are carried over whole."""
    arguments = f"{MODEL} {text} {PP2} {BF16} {BATCH_OF_12}"
    first, _, back = trained(arguments, [(6, 3), (4, 3), (6, 3)], tmp_path / "legs")
    assert [states[3] for states in back.hashes] == [states[3] for states in first.hashes]
