"""``python -m deadpool_megatron.persist JOB``: write a node's part of an export.

The agent of the node starts this process. ``JOB`` is a JSON file with an object:

``directory``         of the unfinished checkpoint
``skeletons``         the directory with the state templates
``taken``             snapshots in memory to write, each as JSON of
                      :class:`~deadpool_megatron.vault.disk.pinned_snapshot.Snapshot`
``dump``              null, or the ``path``, ``generation`` and ``boundary`` of a dump, and its
                      ``roles`` to write
``roles``             all roles of the checkpoint, ascending; the process with the first role joins
                      the files of all processes
``iteration``, ``deadline_seconds``, ``node``, ``run_dir``

The exit status is 0, or 1 with the reason as the last line of standard error.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import json
import os
import sys
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from deadpool_megatron import failpoints
from deadpool_megatron.cluster.process.posix import die_with_parent
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.file_systems import write_text
from deadpool_megatron.layout.ranks import rank_of
from deadpool_megatron.layout.records import Generation
from deadpool_megatron.ownership import OwnershipError, make_private
from deadpool_megatron.persist import torch_dist
from deadpool_megatron.process_names import set_process_name
from deadpool_megatron.state.template import TemplateError, read_template
from deadpool_megatron.vault.disk.pinned_snapshot import Snapshot
from deadpool_megatron.vault.disk.sources import snapshot_of_dump
from deadpool_megatron.vault.errors import VaultError

_NICENESS = 19
_POLL_SECONDS = 0.1
# The package whose objects are copied from templates to checkpoints without an import.
_FOREIGN = "megatron"


def main() -> int:
    """See the module text."""
    parser = argparse.ArgumentParser(prog="python -m deadpool_megatron.persist")
    parser.add_argument("job", type=Path)
    parser.add_argument("--parent", type=int, required=True, help="pid that it dies with")
    args = parser.parse_args()
    die_with_parent(args.parent)
    set_process_name("dp-persist")
    os.nice(_NICENESS)
    torch.set_num_threads(1)
    stand_in_for_megatron()
    failpoints.load()
    job = json.loads(args.job.read_text())
    failpoints.set_context(node=job["node"], process="persist", run_dir=job["run_dir"])
    try:
        _carry_out(job)
    except (OwnershipError, torch_dist.WritingError, TemplateError, VaultError, OSError) as error:
        print(f"node {job['node']}: {error}", file=sys.stderr)
        return 1
    return 0


def _carry_out(job: Mapping[str, Any]) -> None:
    """Write the files of this node's roles, and join all files if it has the first role."""
    directory = Path(job["directory"])
    make_private(directory)
    common: Any = None
    roles, has_first_role = job["roles"], False
    for snapshot in _sources(job):
        template = read_template(Path(job["skeletons"]), snapshot.role, snapshot.layout_hash)
        failpoints.hit("persist.write", role=snapshot.role, iteration=snapshot.generation.iteration)
        source = torch_dist.GenerationSource(snapshot, RunDirectory(Path(job["run_dir"])).frozen)
        index = torch_dist.write_role(template, source, directory)
        torch_dist.write_extras(source, directory, rank_of(snapshot.role), len(roles))
        if snapshot.role == roles[0]:
            has_first_role, common = True, torch_dist.filled(template.common, source)
        # Renamed into place, so that the process that joins the files never reads a partial index.
        write_text(_index_path(directory, snapshot.role), json.dumps(index))
    failpoints.hit("persist.written", iteration=job["iteration"])
    if has_first_role:
        indexes = _await_all(directory, roles, float(job["deadline_seconds"]))
        torch_dist.join(directory, indexes, common)
        for role in roles:
            _index_path(directory, role).unlink()


def _sources(job: Mapping[str, Any]) -> Iterator[Snapshot]:
    """Yield the snapshots of this node's roles; those of a dump are read only when requested."""
    yield from map(Snapshot.from_dict, job["taken"])
    dump = job["dump"]
    for role in [] if dump is None else dump["roles"]:
        generation = Generation.from_list(dump["generation"])
        yield snapshot_of_dump(Path(dump["path"]), role, generation, dump["boundary"])


def _index_path(directory: Path, role: int) -> Path:
    return directory / f".role-{role}.json"


def _await_all(
    directory: Path, roles: Sequence[int], deadline_seconds: float
) -> list[Mapping[str, Any]]:
    """Return the indexes of all roles' files once they exist. Raises WritingError if some do not
    within the deadline."""
    limit = time.monotonic() + deadline_seconds
    while missing := [role for role in roles if not _index_path(directory, role).exists()]:
        if time.monotonic() > limit:
            raise torch_dist.WritingError(
                f"roles {', '.join(map(str, missing))} have not written to {directory} within"
                f" {deadline_seconds:g} s: is it a directory that all nodes share?"
            )
        time.sleep(_POLL_SECONDS)
    return [json.loads(_index_path(directory, role).read_text()) for role in sorted(roles)]


def stand_in_for_megatron() -> None:
    """Replace every module of Megatron by a stand-in in this process, before the first import.

    The arguments of a run hold members of Megatron's enumerations, which pickle stores with the
    name of their class. An import of the class would import Megatron with all that it needs. Here a
    class is only a name, and an object of such a class is written as it was read.
    """
    assert _FOREIGN not in sys.modules, "Megatron was imported here"
    sys.meta_path.insert(0, _ForeignFinder())


class _ForeignFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for each module of Megatron."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] != _FOREIGN:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _ForeignModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _ForeignModule(types.ModuleType):
    """A module that has a class of each name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        cls = _ForeignClass(name, (), {"__module__": self.__name__})
        setattr(self, name, cls)
        return cls


class _ForeignClass(type):
    """A stand-in for a class of Megatron. pickle gets the members of an enumeration from its class:
    by a call in most versions of Python, by an attribute in some versions of 3.11."""

    def __call__(cls, *args: Any) -> Any:
        return _ForeignObject(cls, args)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _ForeignObject(getattr, (cls, name))


class _ForeignObject:
    """An object that is pickled as the call that created it."""

    def __init__(self, function: Any, args: tuple[Any, ...]) -> None:
        self._call = function, args

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._call


if __name__ == "__main__":
    sys.exit(main())
