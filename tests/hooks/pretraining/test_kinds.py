"""The kinds of parameters: what is built without peers has a group of each that others have."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import optimizer
from megatron.core.optimizer import OptimizerConfig, ParamKey

from deadpool_megatron.comms import Communicators
from deadpool_megatron.hooks.pretraining.build import Build, CommandLine

OVERRIDES = {
    ParamKey(name="*.bias"): {"wd_mult": 0.0},
    ParamKey(name="words.*"): {"max_lr": 0.5},
}


def stage(experts: bool, words: bool) -> torch.nn.ModuleDict:
    parts = {"dense": torch.nn.Linear(2, 2), "experts": torch.nn.Linear(2, 2)}
    for parameter in parts["experts"].parameters():
        parameter.allreduce = False  # type: ignore[attr-defined]
    kept = {name: part for name, part in parts.items() if experts or name == "dense"}
    return torch.nn.ModuleDict({**kept, **({"words": torch.nn.Linear(2, 2)} if words else {})})


def groups(build: Build, model: torch.nn.Module, overrides: Any = OVERRIDES) -> list[Any]:
    """Of every group what tells it from others, and how many parameters it has."""
    with build.kinds_told():
        made = optimizer._get_param_groups([model], OptimizerConfig(lr=1.0), overrides)  # type: ignore
    return [({k: v for k, v in one.items() if k != "params"}, len(one["params"])) for one in made]


@pytest.mark.parametrize("poor", [stage(False, False), stage(False, True), stage(True, False)])
def test_a_stage_with_fewer_kinds_is_built_alike_without_peers(
    monkeypatch: pytest.MonkeyPatch, poor: torch.nn.ModuleDict
) -> None:
    rich, own = stage(True, True), Build(CommandLine())
    communicators = Communicators()
    communicators.install()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    dist.init_process_group()
    try:
        groups(own, rich)  # tells what the peer has
        ((_, told),) = own.kinds
        with monkeypatch.context() as with_peer:
            peers = Build(CommandLine())
            with_peer.setattr(
                dist,
                "all_gather_object",
                lambda found, kinds: found.__setitem__(slice(2), (told, kinds)),
            )
            wanted = groups(peers, poor)
        alone = Build(CommandLine(), ast.literal_eval(repr(peers.kinds)))
        assert groups(alone, poor) == wanted
        assert len(groups(alone, poor)) == 6 > len(groups(Build(CommandLine()), poor))  # made twice
        other = {**OVERRIDES, ParamKey(name="words.*"): {"max_lr": 0.25}}
        stale = Build(CommandLine(), peers.kinds)
        assert groups(stale, poor, other) == groups(Build(CommandLine()), poor, other)
    finally:
        dist.destroy_process_group()
        communicators.uninstall()
