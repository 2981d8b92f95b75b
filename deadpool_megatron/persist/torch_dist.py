"""Checkpoints in the torch_dist format: the file of each role, and their join into a checkpoint.

A role's file is written from the copy of its generation and read back. It holds tensors and objects
as ``torch.save`` writes them, one after the other; the metadata of the checkpoint has the place of
each. Roles need nothing of each other. Nothing that another node sent is unpickled: the index of a
role's file is JSON in the directory of the unfinished checkpoint.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import mmap
import os
import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import xxhash
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import _internals as sharding_spec
from torch.distributed.checkpoint import filesystem, metadata as dcp

from deadpool_megatron.layout.ranks import rank_of
from deadpool_megatron.layout.records import extras_part
from deadpool_megatron.state import frozen_file, template
from deadpool_megatron.state.extras import ExtrasError, decode
from deadpool_megatron.vault.disk import extras_file
from deadpool_megatron.vault.disk.pinned_snapshot import Snapshot
from deadpool_megatron.vault.shm.segment import checksum

_READ_BYTES = 16 << 20
_Box = tuple[tuple[int, ...], tuple[int, ...]]
# Megatron reads this first, to choose a reader (core/dist_checkpointing).
_CONFIGURATION = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class WritingError(Exception):
    """The file could not be written correctly; the message is one line."""


class GenerationSource:
    """A role's pinned generation; ``frozen``: the folder with the files of weights that no
    iteration changes. Raises WritingError when bytes are damaged.
    """

    def __init__(self, snapshot: Snapshot, frozen: Path) -> None:
        self._frozen = frozen
        self._parts: dict[str, memoryview] = {}
        files: dict[str, memoryview] = {}
        for path in {snapshot.path, *snapshot.elsewhere.values()}:
            with open(path, "rb") as file:
                # Private, not read-only: torch warns of tensors in memory that cannot be written.
                files[path] = memoryview(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE))
        for name, (offset, nbytes, digest) in snapshot.parts.items():
            part = files[snapshot.elsewhere.get(name, snapshot.path)][offset : offset + nbytes]
            if checksum(part) != digest:
                raise WritingError(f"part {name} of role {snapshot.role} was damaged in memory")
            self._parts[name] = part
        self.encoded_extras = self._parts[extras_part(snapshot.boundary)]
        try:
            self.extras = decode(self.encoded_extras)
        except ExtrasError as error:
            raise WritingError(f"extras of role {snapshot.role}: {error}") from error

    def number(self, part: str, offset_bytes: int, dtype: str) -> Tensor:
        """Return a tensor without axes over one number of a shard part."""
        return self._run(part, offset_bytes, template.dtype_of(dtype), 1).view(())

    def tensor(self, piece: template.Piece) -> Tensor:
        """Return the values of a piece, with its shape and dtype, in memory of its own extent."""
        count = math.prod(piece.sizes)
        if piece.is_extra:
            kept = self.extras.get(piece.part)
            if not isinstance(kept, Tensor):
                raise WritingError(f"{piece.key}: the extras do not hold {piece.part}")
            first = piece.offset_bytes // template.dtype_of(piece.stored).itemsize
            found = kept.reshape(-1)[first : first + count].clone()
            return found.view(piece.sizes)
        if piece.part == template.ZEROS:
            return torch.zeros(piece.sizes, dtype=template.dtype_of(piece.dtype))
        found = self._run(piece.part, piece.offset_bytes, template.dtype_of(piece.stored), count)
        return found.to(template.dtype_of(piece.dtype)).view(piece.sizes)

    def _run(self, part: str, offset_bytes: int, dtype: torch.dtype, count: int) -> Tensor:
        if not count:
            return torch.empty(0, dtype=dtype)
        if part == template.FROZEN and part not in self._parts:
            self._parts[part] = self._frozen_part()
        try:
            return torch.frombuffer(
                self._parts[part], dtype=dtype, count=count, offset=offset_bytes
            )
        except (KeyError, ValueError) as error:
            raise WritingError(f"part {part} does not reach that far: {error}") from error

    def _frozen_part(self) -> memoryview:
        """Map the file of frozen weights; of roles with equal weights only one writes them."""
        try:
            return frozen_file.mapped(self._frozen, str(self.extras.get("frozen", "")))
        except frozen_file.FrozenFileError as error:
            raise WritingError(str(error)) from error


class _Counted(io.RawIOBase):
    """A file that counts the bytes written to it and has their checksum."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file
        self.count = 0
        self.digest = xxhash.xxh3_64()

    def writable(self) -> bool:
        """See ``io.RawIOBase``."""
        return True

    def write(self, data: Any) -> int:
        """See ``io.RawIOBase``; writes all bytes."""
        view = memoryview(data).cast("B")
        self._file.write(view)
        self.digest.update(view)
        self.count += len(view)
        return len(view)


def _save(value: Any, target: _Counted) -> None:
    torch.save(value, cast(BinaryIO, target))


def file_name(rank: int) -> str:
    """Return Megatron's name of the file of a rank."""
    return f"__{rank}_0.distcp"


def write_role(
    recipe: template.StateTemplate, source: GenerationSource, directory: Path
) -> dict[str, Any]:
    """Write the role's file, read it back from the disk, and return its index as JSON values.

    Raises WritingError, also where a number is not finite, and OSError.
    """
    path = directory / file_name(rank_of(recipe.role))
    tensors: list[list[Any]] = []
    objects: list[list[Any]] = []
    with _checked(path) as counted:
        for piece in recipe.pieces:
            start, value = counted.count, source.tensor(piece)
            is_judged = not piece.is_extra and value.is_floating_point() and value.itemsize > 1
            if is_judged and not value.isfinite().all():
                raise WritingError(f"{piece.key} of role {recipe.role} is not finite")
            _save(value, counted)
            place = [start, counted.count - start]
            box = [list(piece.shape), list(piece.offsets), list(piece.sizes)]
            tensors.append([piece.key, *box, template.dtype_name(value.dtype), *place])
        for key, value in recipe.objects.items():
            start = counted.count
            _save([filled(value, source)], counted)
            objects.append([key, start, counted.count - start])
    facts = {"role": recipe.role, "file": path.name, "bytes": counted.count}
    return {**facts, "tensors": tensors, "objects": objects}


def write_extras(source: GenerationSource, directory: Path, rank: int, roles: int) -> None:
    """Write the extras of a rank next to the checkpoint. Raises WritingError, OSError."""
    with _checked(extras_file.path_in(directory, rank, roles)) as counted:
        counted.write(extras_file.with_checksum(source.encoded_extras))


def filled(value: Any, source: GenerationSource) -> Any:
    """Return a value of the checkpoint as it is in the generation. Raises TemplateError."""
    return template.fill(value, source.extras, source.number)


@contextlib.contextmanager
def _checked(path: Path) -> Iterator[_Counted]:
    """Open a new file for the block; at its end flush it to the disk, read it back without the
    page cache where the system allows that, and compare. Raises WritingError, OSError."""
    with open(path, "wb") as file:
        counted = _Counted(file)
        yield counted
        file.flush()
        os.fsync(file.fileno())
    found, count = xxhash.xxh3_64(), 0
    with open(path, "rb", buffering=0) as written:
        with contextlib.suppress(OSError):  # a hint, which some file systems do not know
            os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while piece := written.read(_READ_BYTES):
            found.update(piece)
            count += len(piece)
    if (count, found.intdigest()) != (counted.count, counted.digest.intdigest()):
        raise WritingError(f"{path} does not hold what was written to it")


def check_cover(key: str, shape: Sequence[int], found: Iterable[_Box]) -> None:
    """Raise WritingError unless the boxes (offsets, sizes) fill the tensor, each element once."""
    pieces = [ShardMetadata([*offsets], [*sizes]) for offsets, sizes in found]
    try:
        sharding_spec.validate_non_overlapping_shards_metadata(pieces)
        sharding_spec.check_tensor(pieces, shape)
    except (ValueError, IndexError) as error:  # the latter without boxes
        raise WritingError(f"{key}: {error}") from error


def metadata_of(indexes: Iterable[Mapping[str, Any]]) -> dcp.Metadata:
    """Return the metadata of a checkpoint made of these files. Raises WritingError unless every
    tensor is complete and every object there once.
    """
    boxes: dict[str, list[_Box]] = defaultdict(list)
    known: dict[str, tuple[tuple[int, ...], str]] = {}
    entries: dict[str, Any] = {}
    places: dict[dcp.MetadataIndex, Any] = {}
    for role in indexes:
        for key, shape, offsets, sizes, dtype, start, length in role["tensors"]:
            if known.setdefault(key, (tuple(shape), dtype)) != (tuple(shape), dtype):
                raise WritingError(f"{key}: roles do not agree on its shape or dtype")
            boxes[key].append((tuple(offsets), tuple(sizes)))
            index = dcp.MetadataIndex(key, torch.Size(offsets), len(boxes[key]) - 1)
            places[index] = filesystem._StorageInfo(str(role["file"]), start, length)
        for key, start, length in role["objects"]:
            if key in entries:
                raise WritingError(f"{key} was written twice")
            entries[key] = dcp.BytesStorageMetadata()
            info = filesystem._StorageInfo(str(role["file"]), start, length)
            places[dcp.MetadataIndex(key)] = info
    for key, (shape, dtype) in known.items():
        check_cover(key, shape, boxes[key])
        entries[key] = dcp.TensorStorageMetadata(
            properties=dcp.TensorProperties(dtype=template.dtype_of(dtype)),
            size=torch.Size(shape),
            chunks=[dcp.ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes[key]],
        )
    return dcp.Metadata(state_dict_metadata=entries, storage_data=places)


def join(directory: Path, indexes: Sequence[Mapping[str, Any]], common: Any) -> None:
    """Finish the checkpoint in ``directory``, which has the files of all roles.

    ``common``: the values that are not sharded. Raises WritingError, OSError.
    """
    for role in indexes:
        found = (directory / str(role["file"])).stat().st_size
        if found != role["bytes"]:
            raise WritingError(f"{role['file']} has {found} instead of {role['bytes']} bytes")
    metadata = metadata_of(indexes)
    version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
    if version is not None:
        metadata.version = version
    with _checked(directory / "common.pt") as counted:
        _save(common, counted)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    (directory / "metadata.json").write_text(json.dumps(_CONFIGURATION))
    read = filesystem.FileSystemReader(directory).read_metadata()
    if read.state_dict_metadata != metadata.state_dict_metadata or (
        read.storage_data != metadata.storage_data
    ):
        raise WritingError(f"{directory / '.metadata'} does not hold what was written to it")
