"""Checkpoints in the torch_dist format: the file of each role, and their join into a checkpoint.

A role's file is written from a copy of its generation, and read back. It holds tensors and objects
in a row, as ``torch.save`` writes them; the metadata of the checkpoint has the place of each. To
write its file a role needs no other role. Nothing that another node wrote is unpickled: the index
of a role's file is JSON in the directory of the unfinished checkpoint.
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
# The content of metadata.json, by which Megatron chooses a reader (core/dist_checkpointing).
_CONFIGURATION = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class WritingError(Exception):
    """A file could not be written correctly; the message is a line."""


class GenerationSource:
    """The bytes of a role's pinned generation. ``frozen``: the folder with the files of weights
    that no iteration changes. Raises WritingError if bytes are damaged.
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
        """Return the values of a piece, with its shape and dtype. The tensor's storage has only
        these values, as ``torch.save`` writes whole storages."""
        count = math.prod(piece.sizes)
        if piece.is_extra:
            extra = self.extras.get(piece.part)
            if not isinstance(extra, Tensor):
                raise WritingError(f"{piece.key}: the extras do not hold {piece.part}")
            first = piece.offset_bytes // template.dtype_of(piece.stored).itemsize
            values = extra.reshape(-1)[first : first + count].clone()
            return values.view(piece.sizes)
        if piece.part == template.ZEROS:
            return torch.zeros(piece.sizes, dtype=template.dtype_of(piece.dtype))
        values = self._run(piece.part, piece.offset_bytes, template.dtype_of(piece.stored), count)
        return values.to(template.dtype_of(piece.dtype)).view(piece.sizes)

    def _run(self, part: str, offset_bytes: int, dtype: torch.dtype, count: int) -> Tensor:
        """Return a flat tensor over ``count`` elements of a part. Raises WritingError."""
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
        """Return the mapped file of frozen weights. It is mapped on use, as only a single role of
        those with equal weights writes them. Raises WritingError."""
        try:
            return frozen_file.map_verified(self._frozen, str(self.extras.get("frozen", "")))
        except frozen_file.FrozenFileError as error:
            raise WritingError(str(error)) from error


class _CountingFile(io.RawIOBase):
    """A file that counts the bytes written to it and computes their checksum."""

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


def _save(value: Any, target: _CountingFile) -> None:
    torch.save(value, cast(BinaryIO, target))


def file_name(rank: int) -> str:
    """Return Megatron's name of the file of a rank."""
    return f"__{rank}_0.distcp"


def write_role(
    recipe: template.StateTemplate, source: GenerationSource, directory: Path
) -> dict[str, Any]:
    """Write the role's file, read it back from the disk, and return its index as JSON values.

    Raises WritingError, also if a number is not finite, and OSError.
    """
    path = directory / file_name(rank_of(recipe.role))
    tensors: list[list[Any]] = []
    objects: list[list[Any]] = []
    with _open_checked(path) as target:
        for piece in recipe.pieces:
            start, value = target.count, source.tensor(piece)
            is_checked = not piece.is_extra and value.is_floating_point() and value.itemsize > 1
            if is_checked and not value.isfinite().all():
                raise WritingError(f"{piece.key} of role {recipe.role} is not finite")
            _save(value, target)
            place = [start, target.count - start]
            box = [list(piece.shape), list(piece.offsets), list(piece.sizes)]
            tensors.append([piece.key, *box, template.dtype_name(value.dtype), *place])
        for key, value in recipe.objects.items():
            start = target.count
            _save([filled(value, source)], target)
            objects.append([key, start, target.count - start])
    facts = {"role": recipe.role, "file": path.name, "bytes": target.count}
    return {**facts, "tensors": tensors, "objects": objects}


def write_extras(source: GenerationSource, directory: Path, rank: int, roles: int) -> None:
    """Write the extras of a rank next to the checkpoint. Raises WritingError, OSError."""
    with _open_checked(extras_file.path_in(directory, rank, roles)) as target:
        target.write(extras_file.with_checksum(source.encoded_extras))


def filled(value: Any, source: GenerationSource) -> Any:
    """Return a value of the template with the generation's values for its marks. Raises
    TemplateError."""
    return template.fill(value, source.extras, source.number)


@contextlib.contextmanager
def _open_checked(path: Path) -> Iterator[_CountingFile]:
    """Open a new file for a block of code. At the end of the block flush it to the disk, read it
    back, without the page cache if the system allows that, and compare the checksums. Raises
    WritingError, OSError."""
    with open(path, "wb") as file:
        target = _CountingFile(file)
        yield target
        file.flush()
        os.fsync(file.fileno())
    digest, count = xxhash.xxh3_64(), 0
    with open(path, "rb", buffering=0) as reader:
        with contextlib.suppress(OSError):  # a hint, which some file systems do not know
            os.posix_fadvise(reader.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while piece := reader.read(_READ_BYTES):
            digest.update(piece)
            count += len(piece)
    if (count, digest.intdigest()) != (target.count, target.digest.intdigest()):
        raise WritingError(f"{path} does not hold what was written to it")


def check_cover(key: str, shape: Sequence[int], boxes: Iterable[_Box]) -> None:
    """Raise WritingError unless the boxes (offsets, sizes) cover each element of the tensor
    once."""
    pieces = [ShardMetadata([*offsets], [*sizes]) for offsets, sizes in boxes]
    try:
        sharding_spec.validate_non_overlapping_shards_metadata(pieces)
        sharding_spec.check_tensor(pieces, shape)
    except (ValueError, IndexError) as error:  # IndexError: there are no boxes
        raise WritingError(f"{key}: {error}") from error


def metadata_of(indexes: Iterable[Mapping[str, Any]]) -> dcp.Metadata:
    """Return the metadata of a checkpoint, from the indexes of all roles' files. Raises
    WritingError unless each tensor is complete and each object occurs once.
    """
    boxes: dict[str, list[_Box]] = defaultdict(list)
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}  # shape, dtype
    entries: dict[str, Any] = {}
    places: dict[dcp.MetadataIndex, Any] = {}
    for role in indexes:
        for key, shape, offsets, sizes, dtype, start, length in role["tensors"]:
            if tensors.setdefault(key, (tuple(shape), dtype)) != (tuple(shape), dtype):
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
    for key, (shape, dtype) in tensors.items():
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
        size = (directory / str(role["file"])).stat().st_size
        if size != role["bytes"]:
            raise WritingError(f"{role['file']} has {size} instead of {role['bytes']} bytes")
    metadata = metadata_of(indexes)
    version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
    if version is not None:
        metadata.version = version
    with _open_checked(directory / "common.pt") as target:
        _save(common, target)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    (directory / "metadata.json").write_text(json.dumps(_CONFIGURATION))
    reread = filesystem.FileSystemReader(directory).read_metadata()
    if reread.state_dict_metadata != metadata.state_dict_metadata or (
        reread.storage_data != metadata.storage_data
    ):
        raise WritingError(f"{directory / '.metadata'} does not hold what was written to it")
