"""``python -m deadpool_megatron.persist JOB``: one node's part of an export; started by its agent.

``JOB`` is a file with JSON: ``directory`` (of the unfinished checkpoint), ``skeletons`` (a
directory), ``taken`` (see :class:`~deadpool_megatron.vault.disk.taken.Taken`), ``dump`` (null, or
``path``, ``generation``, ``boundary`` of a dump, and the ``roles`` to write of it),
``iteration``, ``world_size``, ``joins`` (whether this process makes one checkpoint of what all have
written), ``deadline_seconds``, ``node``, ``run_dir``. Exit status 0; 1 with the reason as the last
line of standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from deadpool_megatron import failpoints
from deadpool_megatron.cluster.process.posix import die_with_parent
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, write_text
from deadpool_megatron.layout.records import Generation
from deadpool_megatron.ownership import OwnershipError, make_private
from deadpool_megatron.persist import foreign_classes
from deadpool_megatron.persist.skeleton import SkeletonError, read_skeleton
from deadpool_megatron.persist.writing import GenerationSource, WritingError, filled, join, write_role
from deadpool_megatron.process_names import set_process_name
from deadpool_megatron.vault.disk.sources import taken_of_dump
from deadpool_megatron.vault.disk.taken import Taken
from deadpool_megatron.vault.errors import VaultError

_LEAST_PRIORITY = 19
_LOOK_SECONDS = 0.1


def main() -> int:
    """See the module text."""
    parser = argparse.ArgumentParser(prog="python -m deadpool_megatron.persist")
    parser.add_argument("job", type=Path)
    parser.add_argument("--parent", type=int, required=True, help="pid that it dies with")
    given = parser.parse_args()
    die_with_parent(given.parent)
    set_process_name("dp-persist")
    os.nice(_LEAST_PRIORITY)
    torch.set_num_threads(1)
    foreign_classes.install()
    failpoints.load()
    job = json.loads(given.job.read_text())
    failpoints.set_context(node=job["node"], process="persist", run_dir=job["run_dir"])
    try:
        _carry_out(job)
    except (OwnershipError, WritingError, SkeletonError, VaultError, OSError) as error:
        print(f"node {job['node']}: {error}", file=sys.stderr)
        return 1
    return 0


def _carry_out(job: Mapping[str, Any]) -> None:
    directory = Path(job["directory"])
    make_private(directory)
    common: Any = None
    for taken in _sources(job):
        skeleton = read_skeleton(Path(job["skeletons"]), taken.role, taken.layout_hash)
        failpoints.hit("persist.write", role=taken.role, iteration=taken.generation.iteration)
        source = GenerationSource(taken, RunDirectory(Path(job["run_dir"])).frozen)
        told = write_role(skeleton, source, directory)
        if taken.role == 0:
            common = filled(skeleton.common, source)
        # It appears whole.
        write_text(_told_path(directory, taken.role), json.dumps(told))
    failpoints.hit("persist.written", iteration=job["iteration"])
    if job["joins"]:
        told_by_all = _await_all(directory, int(job["world_size"]), float(job["deadline_seconds"]))
        join(directory, told_by_all, common)
        for role in range(int(job["world_size"])):
            _told_path(directory, role).unlink()


def _sources(job: Mapping[str, Any]) -> Iterator[Taken]:
    """Yield where the bytes of each role are; one after the other, as there may be many files."""
    yield from map(Taken.from_dict, job["taken"])
    dump = job["dump"]
    for role in [] if dump is None else dump["roles"]:
        generation = Generation.from_list(dump["generation"])
        yield taken_of_dump(Path(dump["path"]), role, generation, dump["boundary"])


def _told_path(directory: Path, role: int) -> Path:
    return directory / f".role-{role}.json"


def _await_all(
    directory: Path, world_size: int, deadline_seconds: float
) -> list[Mapping[str, Any]]:
    limit = time.monotonic() + deadline_seconds
    told: dict[int, Mapping[str, Any]] = {}
    while len(told) < world_size:
        for role in set(range(world_size)) - set(told):
            if (path := _told_path(directory, role)).exists():
                told[role] = json.loads(path.read_text())
        if len(told) < world_size:
            if time.monotonic() > limit:
                missing = ", ".join(str(r) for r in range(world_size) if r not in told)
                raise WritingError(
                    f"roles {missing} have not written to {directory} within"
                    f" {deadline_seconds:g} s: is it a directory that all nodes share?"
                )
            time.sleep(_LOOK_SECONDS)
    return [told[role] for role in sorted(told)]


if __name__ == "__main__":
    sys.exit(main())
