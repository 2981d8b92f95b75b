"""The index of a checkpoint from anywhere: reading it runs nothing of it."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from deadpool_megatron.cli.storage import checkpoint_files

_MODULES = sorted(
    {module for module, _ in checkpoint_files._ALLOWED}
    | {"torch", "torch.distributed.checkpoint.planner", "os", "posix", "subprocess", "builtins"}
)
_WORDS = ("os", "system", "pickle", "loads", "Path", "io", "__builtins__", "eval", "Metadata")
_names = st.one_of(
    st.lists(st.sampled_from(_WORDS), min_size=1, max_size=4).map(".".join),
    st.text(max_size=12),
)


@given(st.sampled_from(_MODULES), _names)
@example("torch.distributed.checkpoint.filesystem", "os.system")
@example("torch.distributed.checkpoint.metadata", "os.system")
@example("torch", "_utils.os.system")
@example("torch", "serialization.pickle.loads")
@example("builtins", "eval")
@example("pathlib", "PosixPath.home")
def test_only_whole_names_of_the_list_are_let_in(module: str, name: str) -> None:
    reader = checkpoint_files._IndexReader(io.BytesIO(), set())
    if (module, name) in {*checkpoint_files._ALLOWED, ("builtins", "getattr")}:
        return
    try:
        found = reader.find_class(module, name)
    except (pickle.UnpicklingError, AttributeError, ValueError):
        return
    if found is not checkpoint_files._StandIn:
        assert module == "torch"
        assert type(found).__name__ in ("dtype", "layout", "memory_format")


class _Got:
    """What is pickled as ``getattr(owner, name)``."""

    def __init__(self, owner: object, name: str) -> None:
        self._got = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self._got


def test_members_of_an_enum_are_read_as_early_versions_of_python_3_11_write_them() -> None:
    def read(owner: object, name: str) -> object:
        return checkpoint_files._IndexReader(
            io.BytesIO(pickle.dumps(_Got(owner, name))), set()
        ).load()

    member = "TORCH_CHANNELS_LAST"
    assert read(_MEM_FORMAT_ENCODING, member) is _MEM_FORMAT_ENCODING[member]
    assert isinstance(read(Path, "home"), checkpoint_files._StandIn)
    for owner, name in (
        (_MEM_FORMAT_ENCODING, "__class__"),
        (torch.Size, "__init__"),
        ("text", "format"),
    ):
        with pytest.raises(pickle.UnpicklingError):
            read(owner, name)


def test_no_name_of_the_list_has_a_dot() -> None:
    assert not [name for _, name in checkpoint_files._ALLOWED if "." in name]
