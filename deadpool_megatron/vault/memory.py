"""Memory for generations: its reservation, and its limits.

The memory in use is the memory of the files in the node's directory, plus the reservations for
memory that is being allocated. Both are read from the file system under a lock, so no record needs
repair after a kill at any moment. The lock is held while memory is counted, not while it is filled,
which takes seconds.

A host limits a run by its /dev/shm and by the cgroup of the job: shared memory counts in the cgroup
of the process that touched it first, so a limit there ends processes although /dev/shm has space.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

from deadpool_megatron import file_systems
from deadpool_megatron.layout.memory_needs import NodeNeeds, sized
from deadpool_megatron.layout.sizes import Sizes
from deadpool_megatron.vault.errors import OutOfSpace, VaultError

_LOCK = ".memory.lock"
# A process holds the lock while it reads a few files, unless the process is stopped meanwhile.
_LOCK_SECONDS = 60.0
_PAUSE_SECONDS = 0.005
# A reservation is a file without memory. Its length is the memory that its process is about to
# allocate, and its name is .booked.PID.ID.
_RESERVED = ".booked."
_PIECE_BYTES = 64 << 20
BLOCK_BYTES = 512  # unit of st_blocks, whatever the file system
_CGROUPS = Path("/sys/fs/cgroup")
# Version 1 writes a number near 2^63 where there is no limit.
_NO_LIMIT = 1 << 60


class Budget:
    """At most ``limit_bytes`` for the files in ``directory``; 0: as much as its file system has.

    Safe for use by any number of threads and processes.
    """

    def __init__(self, directory: Path, limit_bytes: int = 0) -> None:
        self.directory = directory
        self.limit_bytes = limit_bytes

    def used_bytes(self) -> int:
        """Return the memory of all files, unfinished files included."""
        return allocated_bytes(self.directory)

    def allocate(self, file: int, path: Path, ranges: Sequence[tuple[int, int]]) -> None:
        """Allocate the memory of (start, count) ranges of an open file now: a full file system must
        be an error here, not SIGBUS later. Raises OutOfSpace without exceeding the limit.
        """
        if not self.limit_bytes:
            _allocate(file, path, ranges)
            return
        wanted = sum(count for _, count in ranges)
        status = os.fstat(file)
        # Ranges that have their memory already, from before a restart, need no more.
        wanted = min(wanted, max(0, status.st_size - status.st_blocks * BLOCK_BYTES))
        if wanted:
            with self._reservation(wanted, path) as reservation:
                for piece in _pieces(ranges):
                    _allocate(file, path, [piece])
                    wanted = max(0, wanted - piece[1])
                    os.truncate(reservation, wanted)

    @contextlib.contextmanager
    def _reservation(self, wanted: int, path: Path) -> Iterator[Path]:
        """Reserve memory before it is allocated."""
        reservation = self.directory / f"{_RESERVED}{os.getpid()}.{uuid4().hex}"
        limit = time.monotonic() + _LOCK_SECONDS
        while not self._reserve(reservation, wanted, path, is_last=time.monotonic() > limit):
            time.sleep(_PAUSE_SECONDS)
        try:
            yield reservation
        finally:
            reservation.unlink(missing_ok=True)

    def _reserve(self, reservation: Path, wanted: int, path: Path, *, is_last: bool) -> bool:
        """Reserve memory. Return False, for a retry, if reservations of other threads leave too
        little: their newest piece may count twice, in its file and in the reservation. Raises
        OutOfSpace if there are no such reservations, or if this try is the last (``is_last``)."""
        with self._locked():
            if self.used_bytes() + wanted > self.limit_bytes:
                self._remove_unfinished()
            used, others = self.used_bytes(), any(self.directory.glob(f"{_RESERVED}*"))
            if used + wanted <= self.limit_bytes:
                reservation.touch(0o600)
                os.truncate(reservation, wanted)
                return True
        if others and not is_last:
            return False
        raise OutOfSpace(
            f"no room for {path.name}: {wanted} bytes needed, {self.limit_bytes - used} of"
            f" {self.limit_bytes} left in {self.directory}: raise --deadpool-memory-gb"
        )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(self.directory / _LOCK, flags, 0o600)
        try:
            try:
                file_systems.lock(handle, self.directory / _LOCK, _LOCK_SECONDS)
            except BlockingIOError as error:
                raise VaultError(
                    f"waited {_LOCK_SECONDS:g} s for {self.directory / _LOCK}: the process"
                    " that holds it seems to be stopped"
                ) from error
            yield
        finally:
            os.close(handle)

    def _remove_unfinished(self) -> None:
        """Remove unfinished files and reservations of killed processes."""
        files = ((path, path.name.rpartition(".")[2]) for path in self.directory.glob(".*.seg.*"))
        claims = ((path, path.name.split(".")[2]) for path in self.directory.glob(f"{_RESERVED}*"))
        for path, pid in (*files, *claims):
            if pid.isdigit() and not Path("/proc", pid).exists():
                path.unlink(missing_ok=True)


def allocated_bytes(directory: Path) -> int:
    """Return the memory of the files of a directory, with reservations; files that vanish
    meanwhile do not count."""
    total = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    is_reservation = entry.name.startswith(_RESERVED)
                    total += status.st_size if is_reservation else status.st_blocks * BLOCK_BYTES
    return total


def _pieces(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for start, count in ranges:
        for done in range(0, count, _PIECE_BYTES):
            yield start + done, min(_PIECE_BYTES, count - done)


def _allocate(file: int, path: Path, ranges: Sequence[tuple[int, int]]) -> None:
    try:
        for start, count in ranges:
            if count:
                os.posix_fallocate(file, start, count)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        needed = sum(count for _, count in ranges)
        raise OutOfSpace(
            f"no room for {path.name}: {needed} bytes needed on {path.parent}"
            f" (shared memory, usually /dev/shm), {free_bytes(path.parent)} free:"
            " enlarge it (mount -o remount,size=..., docker --shm-size) or use fewer slots"
        ) from error


@dataclass(frozen=True)
class CgroupMemory:
    """A memory limit of a cgroup, the bytes that are left of it, and the cgroup's path."""

    left_bytes: int
    limit_bytes: int
    path: Path


def cgroup_memory(
    root: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")
) -> CgroupMemory | None:
    """Return the tightest limit of the cgroup of this process (version 1 or 2) and the groups above
    it; None without a limit."""
    found = list(_cgroups(root, own))
    return min(found, key=lambda group: group.left_bytes, default=None)


def _cgroups(root: Path, own: Path) -> Iterator[CgroupMemory]:
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # In a container the path is often the host's, and the root is the container's own group.
        group = top / path.lstrip("/")
        for level in (group, *group.parents):
            if level.is_relative_to(top) and (found := _left_in(level, *names)) is not None:
                yield found


def _left_in(group: Path, limit_name: str, usage_name: str) -> CgroupMemory | None:
    try:
        text = (group / limit_name).read_text().strip()
        if text == "max" or (limit := int(text)) >= _NO_LIMIT:
            return None
        used = int((group / usage_name).read_text()) - _reclaimable(group)
    except (OSError, ValueError):
        return None
    return CgroupMemory(max(0, limit - used), limit, group)


def _reclaimable(group: Path) -> int:
    """Return the page cache of files on disk, which the kernel frees before it kills a process."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split(maxsplit=1) for line in lines)
    # Not "file" or "cache": those count shared memory as well.
    names = ("inactive_file", "active_file")
    if "total_inactive_file" in fields:
        names = ("total_inactive_file", "total_active_file")
    return sum(int(fields.get(name, 0)) for name in names)


def free_bytes(directory: Path) -> int:
    """Return the free bytes of the file system of a directory."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def memlock_bytes() -> int | None:
    """Return the bytes that this process may lock in memory; None for no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


@dataclass(frozen=True)
class MemoryLimit:
    """A limit of a node's memory: its total bytes, and the remedy."""

    name: str
    nbytes: int
    remedy: str


def problem(needs: NodeNeeds, limits: Sequence[MemoryLimit]) -> str:
    """Return the reason why a node with these needs must not start, in a line; empty if none."""
    tightest = min(limits, key=lambda limit: limit.nbytes, default=None)
    if tightest is None or needs.total <= tightest.nbytes:
        return ""
    return (
        f"generations need {needs.total} bytes of memory on this node, {tightest.name} allows"
        f" {tightest.nbytes}: {needs.describe()}; {tightest.remedy}, or lower --deadpool-copies"
        " or --deadpool-max-lag"
    )


def affordable_sizes(
    sizes: Sizes, needs_of: Callable[[int], NodeNeeds], limits: Sequence[MemoryLimit]
) -> Sizes:
    """Return the sizes between which a run can change: the slots of the old and the new size are in
    memory until all roles have committed at the new size. ``needs_of`` returns a node's needs for a
    number of model replicas."""
    tightest, replicas = min(limits, key=lambda limit: limit.nbytes), sizes.replicas
    needed = 0
    while len(replicas) > 1:  # the fewest replicas come first: then each role has the most state
        needed = needs_of(replicas[0]).total + needs_of(replicas[1]).total
        if needed <= tightest.nbytes:
            return replace(sizes, replicas=replicas)
        replicas = replicas[1:]
    text = f"a change of size needs {sized(needed)} of memory on this node, {tightest.name} allows"
    return sizes.fixed(f"{text} {sized(tightest.nbytes)}: {tightest.remedy}" if needed else "")


def warnings(
    needs: NodeNeeds, limits: Sequence[MemoryLimit], memlock_bytes: int | None, *, pinned: bool
) -> list[str]:
    """Return the problems that do not prevent a start. ``pinned``: a device has the slots
    locked in memory."""
    found = []
    tightest = min(limits, key=lambda limit: limit.nbytes, default=None)
    if tightest is not None and needs.total <= tightest.nbytes < needs.peak:
        found.append(
            f"memory for generations is tight: {needs.total} bytes in use ({needs.describe()}),"
            f" {needs.peak} while processes are restarted in place, {tightest.name} allows"
            f" {tightest.nbytes}: {tightest.remedy}"
        )
    needed = needs.own // max(1, needs.roles)
    if pinned and memlock_bytes is not None and memlock_bytes < needed:
        found.append(
            f"a process may lock {memlock_bytes} bytes in memory, its slots have {needed}: copies"
            " from the device may be slower; 'ulimit -l unlimited', for Slurm"
            " LimitMEMLOCK=infinity of slurmd, docker --ulimit memlock=-1"
        )
    return found


def memory_limits(directory: Path, limit_bytes: int) -> list[MemoryLimit]:
    """Return all limits for the node's generations; ``limit_bytes``: the user's, 0 for none."""
    used = allocated_bytes(directory)
    limits = [
        MemoryLimit(
            f"the file system of {directory} (/dev/shm)",
            free_bytes(directory) + used,
            "enlarge it (mount -o remount,size=..., docker --shm-size), 'deadpool clean'",
        )
    ]
    if limit_bytes:
        limits.append(MemoryLimit("--deadpool-memory-gb", limit_bytes, "raise it"))
    group = cgroup_memory()
    if group is not None:
        text = f"the memory limit of cgroup {group.path} ({group.limit_bytes} bytes)"
        remedy = "ask for more memory (sbatch --mem, docker --memory): shared memory counts in it"
        limits.append(MemoryLimit(text, group.left_bytes + used, remedy))
    return limits


def usable_bytes(directory: Path, limit_bytes: int) -> int:
    """Return the bytes that all limits allow for the node's generations, including the bytes in
    use."""
    return min(limit.nbytes for limit in memory_limits(directory, limit_bytes))
