"""The newest iteration is replayed exactly, also behind an update that was skipped."""

from types import SimpleNamespace

import pytest
import torch

from deadpool_megatron.megatron.pretraining import dispatch
from deadpool_megatron.megatron.pretraining.newest_iteration import SKIPPED, NewestIteration
from deadpool_megatron.state.extras import ExtrasError, decode, encode

CPU = torch.device("cpu")


def trained(skipped: int, gathers_ahead: bool) -> NewestIteration:
    """An iteration that was trained, as another process gets it."""
    newest = NewestIteration(10.0)
    newest.begin(SimpleNamespace(consumed_train_samples=16, skipped_train_samples=1), gathers_ahead)
    losses = {"lm loss": torch.tensor(0.1) / 3}
    newest.finish((losses, skipped, False, False, 0, 0.7, None, 0), {"lm loss": torch.ones(1)})
    newest.operations = 25.0
    other = NewestIteration(0.0)
    other.restore(decode(encode(newest.to_dict())))
    return other


@pytest.mark.parametrize(
    ("skipped", "gathers_ahead", "told"), [(0, False, 0), (1, False, 1), (1, True, 0), (0, True, 0)]
)
def test_gathering_ahead_begins_where_it_had_begun(
    skipped: int, gathers_ahead: bool, told: int
) -> None:
    # train() turns it on behind the first update that is not skipped.
    newest = trained(skipped, gathers_ahead)
    assert newest.replay(CPU)[SKIPPED] == told
    assert newest.skipped == skipped


def test_what_cannot_be_given_back_is_an_error() -> None:
    newest = trained(skipped=0, gathers_ahead=False)
    with pytest.raises(ExtrasError, match="answer cannot be encoded: a object"):
        newest.finish((1, object()), {})


def test_a_scene_ends_by_an_exception_as_well() -> None:
    def leave(_original: object) -> None:
        raise ValueError("left")

    call = dispatch.route("train")
    with pytest.raises(ValueError, match="left"), dispatch.use_handlers({"train": leave}):
        call(str)
    assert call(str) == ""
