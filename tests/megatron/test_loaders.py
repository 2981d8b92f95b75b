"""Data loaders leave torch's own generator alone, and may be at their end."""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from deadpool_megatron.megatron.pretraining.build import Build
from deadpool_megatron.megatron.stand_ins import with_own_generator


def build_loader(dataset: Any = None, consumed_samples: int = 0) -> Any:
    """As Megatron's, whose sampler refuses to begin after the last sample."""
    assert dataset is None or consumed_samples < len(dataset)
    return torch.utils.data.DataLoader(torch.arange(8), batch_size=2)  # type: ignore[arg-type]


def cyclic(loader: Any) -> Iterator[Any]:
    """As Megatron's ``cyclic_iter``: the loader is iterated with the first batch that is wanted."""
    while True:
        yield from loader


def drawn_by(make: Callable[[], Any]) -> bool:
    """Whether a batch of such an iterator costs a number of torch's generator."""
    before = torch.get_rng_state()
    next(make())
    return not torch.equal(before, torch.get_rng_state())


def test_iteration_over_a_loader_draws_nothing():
    assert drawn_by(lambda: cyclic(build_loader())), "what it is about"
    assert not drawn_by(lambda: cyclic(with_own_generator(build_loader)()))
    assert with_own_generator(lambda: None)() is None, "a role without data has no loader"


def test_iterators_draw_nothing_after_random_states_are_restored(monkeypatch):
    """With ``--dataloader-type cyclic``, on a machine with a GPU: here Megatron-LM is replaced."""
    training = replaced_megatron(monkeypatch, "cyclic")

    def make(_: Any) -> Any:
        return cyclic(training["build_pretraining_data_loader"](range(8), 0)), None, None

    build = built()
    assert not drawn_by(lambda: build.make_training_iterators(make, None)[0])
    build.renew_iterators()
    assert not drawn_by(lambda: build.iterators[0][0])
    assert training["build_pretraining_data_loader"] is build_loader


@pytest.mark.parametrize(("kind", "consumed"), [("single", 8), ("single", 4), ("cyclic", 4)])
def test_iterators_are_renewed_where_every_sample_is_read(monkeypatch, kind, consumed):
    """The end of a run is an iterator that has nothing more to give, and no error."""
    training = replaced_megatron(monkeypatch, kind)
    position = 0

    def make(_: Any) -> Any:
        loader = training["build_pretraining_data_loader"](range(8), position)
        return iter(loader), None, None

    build = built()
    build.make_training_iterators(make, None)
    position = consumed
    build.renew_iterators()
    assert bool(list(build.iterators[0][0])) == (consumed < 8)


def replaced_megatron(monkeypatch: pytest.MonkeyPatch, kind: str) -> dict[str, Any]:
    training, package = ModuleType("training"), ModuleType("megatron.training")
    vars(training)["build_pretraining_data_loader"] = build_loader
    vars(package)["training"] = training
    args = SimpleNamespace(full_validation=False, eval_iters=0, dataloader_type=kind)
    vars(package)["get_args"] = lambda: args
    monkeypatch.setitem(sys.modules, "megatron.training", package)
    monkeypatch.setitem(sys.modules, "megatron.training.training", training)
    return vars(training)


def built() -> Build:
    command_line: Any = None
    build = Build(command_line)
    build.train_arguments = {"train_data_iterator": None, "valid_data_iterator": None}
    return build
