"""Makes one checkpoint of the files of all roles: metadata, common values, proof of completeness.

Nothing that another node sent is unpickled: what lies where in a role's file comes as JSON, in the
directory of the unfinished checkpoint itself.
"""

from __future__ import annotations

import json
import math
import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from deadpool_megatron.persist.filling import dtype_of
from deadpool_megatron.persist.writing import WritingError, write_checked

_Box = tuple[tuple[int, ...], tuple[int, ...]]
# What Megatron looks at first, to know how a checkpoint has to be read (core/dist_checkpointing).
_CONFIGURATION = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def check_cover(key: str, shape: Sequence[int], found: Iterable[_Box]) -> None:
    """Raise WritingError unless the boxes (offsets, sizes) fill the tensor, each element once."""
    ordered = sorted(found)
    active: list[_Box] = []
    for offsets, sizes in ordered:
        if any(o + s > whole for o, s, whole in zip(offsets, sizes, shape, strict=True)):
            raise WritingError(f"{key}: a piece at {offsets} reaches over the edge of {shape}")
        active = [box for box in active if not offsets or box[0][0] + box[1][0] > offsets[0]]
        if any(_overlap(box, (offsets, sizes)) for box in active):
            raise WritingError(f"{key}: the piece at {offsets} was written twice")
        active.append((offsets, sizes))
    count = sum(math.prod(sizes) for _, sizes in ordered)
    if count != math.prod(shape):
        raise WritingError(f"{key}: {count} of {math.prod(shape)} elements were written")


def _overlap(one: _Box, other: _Box) -> bool:
    axes = zip(*one, *other, strict=True)
    return all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in axes)


def metadata_of(told: Iterable[Mapping[str, Any]]) -> Metadata:
    """The metadata of a checkpoint made of these files. Raises WritingError unless every tensor is
    there whole and every object once.
    """
    boxes: dict[str, list[_Box]] = defaultdict(list)
    known: dict[str, tuple[tuple[int, ...], str]] = {}
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    for role in told:
        for key, shape, offsets, sizes, dtype, start, length in role["tensors"]:
            if known.setdefault(key, (tuple(shape), dtype)) != (tuple(shape), dtype):
                raise WritingError(f"{key}: roles do not agree on its shape or dtype")
            boxes[key].append((tuple(offsets), tuple(sizes)))
            index = MetadataIndex(key, torch.Size(offsets), len(boxes[key]) - 1)
            places[index] = filesystem._StorageInfo(str(role["file"]), start, length)
        for key, start, length in role["objects"]:
            if key in entries:
                raise WritingError(f"{key} was written twice")
            entries[key] = BytesStorageMetadata()
            places[MetadataIndex(key)] = filesystem._StorageInfo(str(role["file"]), start, length)
    for key, (shape, dtype) in known.items():
        check_cover(key, shape, boxes[key])
        entries[key] = TensorStorageMetadata(
            properties=TensorProperties(dtype=dtype_of(dtype)),
            size=torch.Size(shape),
            chunks=[ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes[key]],
        )
    return Metadata(state_dict_metadata=entries, storage_data=places)


def join(directory: Path, told: Sequence[Mapping[str, Any]], common: Any) -> None:
    """Finish the checkpoint in ``directory`` of which all roles' files are there.

    ``common``: what is not sharded. Raises WritingError, OSError.
    """
    for role in told:
        found = (directory / str(role["file"])).stat().st_size
        if found != role["bytes"]:
            raise WritingError(f"{role['file']} has {found} instead of {role['bytes']} bytes")
    metadata = metadata_of(told)
    version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
    if version is not None:
        metadata.version = version
    write_checked(directory / "common.pt", common)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    (directory / "metadata.json").write_text(json.dumps(_CONFIGURATION))
    read = filesystem.FileSystemReader(directory).read_metadata()
    if read.state_dict_metadata != metadata.state_dict_metadata or (
        read.storage_data != metadata.storage_data
    ):
        raise WritingError(f"{directory / '.metadata'} does not hold what was written to it")
