"""Holds two torch_dist checkpoints against each other, tensor for tensor and value for value."""

import functools
import io
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def contents(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any], Any]:
    """Whole tensors by key, objects by key, common values: all that is in a checkpoint."""
    metadata = FileSystemReader(directory).read_metadata()
    tensors = {
        key: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, storage_reader=FileSystemReader(directory), no_dist=True)
    objects = {}
    for index, place in metadata.storage_data.items():
        if index.fqn not in tensors:
            data = (directory / place.relative_path).read_bytes()
            piece = data[place.offset : place.offset + place.length]
            objects[index.fqn] = _read(io.BytesIO(piece))
    # From Megatron-LM 0.19 on, which loads both, it is an object as well.
    (in_shards,) = objects.pop("common_state/shard_0_1", [None])
    common = directory / "common.pt"
    return tensors, objects, in_shards or _read(common)


class _Unknown:
    """An object of a class that the installed Megatron lacks."""

    def __init__(self, *given: Any) -> None:
        self.given = given


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except (AttributeError, ImportError):
            assert module.startswith("megatron.")
            return functools.partial(_Unknown, module, name)


def _read(file: Path | io.BytesIO) -> Any:
    return torch.load(file, weights_only=False, pickle_module=_PICKLE)


_PICKLE = SimpleNamespace(__name__="pickle", Unpickler=_Unpickler, load=pickle.load)


def differences(saved: Path, exported: Path) -> list[str]:
    """Return the differences between two checkpoints.

    Between parameters in the flat buffer of a distributed optimizer Megatron saves memory that
    was never written; an export has zeros there, in pieces of their own.
    """
    first, second = contents(saved), contents(exported)
    found = [f"key {key}" for key in first[0].keys() ^ second[0].keys()]
    metadata = FileSystemReader(exported).read_metadata().state_dict_metadata
    for key in first[0].keys() & second[0].keys():
        a, b = first[0][key], second[0][key]
        entry = metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks if ".bucket_idx_" in key else ():
            start, size = chunk.offsets[0], chunk.sizes[0]
            if size < 64 and not b[start : start + size].any():
                a[start : start + size] = 0
        if a.dtype != b.dtype or a.shape != b.shape:
            found.append(f"{key}: {a.dtype} {a.shape} and {b.dtype} {b.shape}")
        elif not torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)):
            found.append(f"{key}: other bytes")
    found += unequal(first[1], second[1], "objects")
    found += unequal(first[2], second[2], "common")
    names = [sorted(path.name for path in each.iterdir()) for each in (saved, exported)]
    fixed = [
        [name for name in each if not name.endswith((".distcp", "common.pt"))] for each in names
    ]
    return [*found, *unequal(fixed[0], fixed[1], "files")]


def unequal(a: Any, b: Any, where: str) -> list[str]:
    """Places at which two values differ, in type too."""
    if type(a) is not type(b):
        return [f"{where}: {type(a).__name__} and {type(b).__name__}"]
    if isinstance(a, dict):
        found = [f"{where}.{key} is in one only" for key in a.keys() ^ b.keys()]
        for key in a.keys() & b.keys():
            found += unequal(a[key], b[key], f"{where}.{key}")
        return found
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return [f"{where}: {len(a)} and {len(b)} entries"]
        return [
            line
            for i, (x, y) in enumerate(zip(a, b, strict=True))
            for line in unequal(x, y, f"{where}[{i}]")
        ]
    if isinstance(a, torch.Tensor):
        same = a.dtype == b.dtype and torch.equal(a, b)
    elif isinstance(a, np.ndarray):
        same = a.dtype == b.dtype and np.array_equal(a, b)
    elif hasattr(a, "__dict__") and not isinstance(a, type) and not callable(a):
        return unequal(vars(a), vars(b), where)
    else:
        same = a == b or (a != a and b != b)  # a sum of losses may be none
    return [] if same else [f"{where}: {a!r} and {b!r}"]
