"""Which Megatron-LM is refused, and what members get for NCCL's sake; see calls/."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.hookpoints import points_of
from deadpool_megatron.support import versions
from tests.common.calls import test_calls_are_answered_as_before  # noqa: F401

VERSION = "0.16.1"


def whole() -> dict[str, Any]:
    """A Megatron-LM in which all points are as they have to be."""
    made: dict[str, Any] = {
        "megatron.core.package_info": SimpleNamespace(__version__=VERSION),
        "megatron.training": ModuleType("megatron.training"),
    }
    for point in points_of(VERSION):
        module, names = made.setdefault(point.module, ModuleType(point.module)), dict[str, Any]()
        exec(f"def {point.function}({', '.join(point.parameters)}): return 7", names)
        setattr(module, point.function, names[point.function])
    return made


def examined(modules: dict[str, Any]) -> versions.VersionReport:
    def importer(name: str) -> Any:
        if name not in modules:
            raise ModuleNotFoundError(name)
        return modules[name]

    return versions.examine(importer)


def loaded(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The same as loaded modules, with copies of the functions under other names."""
    modules, train = whole(), "megatron.training.training"
    modules["megatron.training"].pretrain = modules[train].pretrain
    modules[train].write_checkpoint = modules["megatron.training.checkpointing"].save_checkpoint
    for name in ("pretrain_gpt", "somebody_else"):
        modules[name] = ModuleType(name)
        modules[name].pretrain = modules[train].pretrain
    for name, module in modules.items():
        patch.setitem(sys.modules, name, module)
    return modules
