"""Kinds of parameters: a model that is built without peers has a group of each kind of theirs."""

import ast
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import optimizer
from megatron.core.optimizer import OptimizerConfig, ParamKey

from deadpool_megatron.comms import Communicators
from deadpool_megatron.megatron.pretraining.build import Build, CommandLine

EMBEDDINGS = ParamKey(name="words.*")
OVERRIDES = {ParamKey(name="*.bias"): {"wd_mult": 0.0}, EMBEDDINGS: {"max_lr": 0.5}}


def stage(*parts: str) -> torch.nn.ModuleDict:
    made = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in parts})
    for parameter in made["experts"].parameters() if "experts" in parts else ():
        parameter.allreduce = False  # type: ignore[attr-defined]
    return made


def groups(build: Build, model: torch.nn.Module, overrides: Any = OVERRIDES) -> list[Any]:
    """Return the distinctive values of every group, and the number of its parameters."""
    with build.kinds_exchanged():
        made = optimizer._get_param_groups([model], OptimizerConfig(lr=1.0), overrides)  # type: ignore
    return [group | {"params": len(group["params"])} for group in made]


@pytest.mark.parametrize("parts", [["dense"], ["dense", "words"], ["dense", "experts"]])
def test_stage_with_fewer_kinds_is_built_alike_without_peers(monkeypatch, parts):
    poor, peer, informed = stage(*parts), Build(CommandLine()), Build(CommandLine())
    communicators = Communicators()
    communicators.install()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    dist.init_process_group()
    groups(peer, stage("dense", "experts", "words"))
    with monkeypatch.context() as with_peer:
        with_peer.setattr(
            dist, "all_gather_object", lambda found, own: found.extend([peer.kinds[0][1], own])
        )
        with_peer.setattr(dist, "get_world_size", lambda: 0)
        wanted = groups(informed, poor)
    alone = Build(CommandLine(), ast.literal_eval(repr(informed.kinds)))
    assert groups(alone, poor) == groups(alone, poor) == wanted  # made twice for a spare
    assert len(wanted) == 6 > len(groups(Build(CommandLine()), poor))
    other = OVERRIDES | {EMBEDDINGS: {"max_lr": 0.25}}
    assert groups(alone, poor, other) == groups(Build(CommandLine()), poor, other)
    dist.destroy_process_group()
    communicators.uninstall()
