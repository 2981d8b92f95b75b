"""The host at hand: its facts from files, limits and package metadata, and what it offers to any
run, which is asked before anything starts and named where it is missing."""

from __future__ import annotations

import os
import pwd
import re
import resource
import shutil
import socket
import sys
from importlib import metadata
from pathlib import Path

import deadpool_megatron
from deadpool_megatron.preflight import health
from deadpool_megatron.preflight.facts import HostFacts
from deadpool_megatron.preflight.gpus import visible_gpus
from deadpool_megatron.vault.memory import cgroup_memory, memlock_bytes
from deadpool_megatron.vault.pace import interface_of

_SHM = Path("/dev/shm")
# Distributions that decide what a training process computes; by their names in the package index.
_PACKAGES = ("torch", "megatron-core", "transformer-engine", "apex", "numpy")
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_NCCL_FILES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64")
_IFF_UP = 1
_FIRST_USER = 1000
_REMOVES = re.compile(r"^\s*RemoveIPC\s*=\s*(\w+)", re.MULTILINE)


def read_facts(address: str, command: str = "", limit_seconds: float = 0.0) -> HostFacts:
    """Returns the facts of this host, whose address for others is ``address``. ``command``: the
    site's own word on its health, which is waited for ``limit_seconds`` at most; none if empty.

    Takes as long as nvidia-smi, where there is one. Loads neither torch nor the driver: processes
    may still be forked.
    """
    shm = shutil.disk_usage(_SHM) if _SHM.is_dir() else None
    interface = interface_of(address)
    return HostFacts(
        hostname=socket.gethostname(),
        address=address,
        interface=interface,
        interface_up=_is_up(interface),
        versions=versions(),
        gpus=len(visible_gpus(os.environ)),
        shm_bytes=shm.total if shm else 0,
        shm_free_bytes=shm.free if shm else 0,
        memory_bytes=available_memory() or 0,
        memlock_bytes=memlock_bytes(),
        open_files=_limit(resource.RLIMIT_NOFILE),
        health=health.ask(command, limit_seconds) if command else health.Answer(),
    )


def versions() -> dict[str, str]:
    """Returns component -> version of what is installed here."""
    found = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "deadpool-megatron": deadpool_megatron.__version__,
    }
    found |= {name: version for name in _PACKAGES if (version := _package_version(name))}
    if nccl := _nccl_version():
        found["nccl"] = nccl
    if driver := _driver_version():
        found["nvidia driver"] = driver
    return found


def available_memory() -> int | None:
    """Returns the bytes that can be had without swapping, by the host and by the own cgroup."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":") for line in lines)
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    group = cgroup_memory()
    return free if group is None else min(free, group.left_bytes)


def missing() -> str:
    """Return why no run can be on this host; empty where one can."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return (
            f"pidfd_open is not offered here ({error.strerror}), by which a node hears of the end"
            " of its processes: it takes a kernel from 5.3 on and, in a container, a seccomp"
            " profile that lets it pass"
        )
    return ""


def memory_may_go(user: int, root: Path = Path("/")) -> str:
    """Return why what this user has in shared memory may be removed under a run; empty where
    nothing says so. As logind judges: below the users of the system nobody, and nobody who lingers.
    """
    if user < _FIRST_USER or not (root / "run/systemd/system").is_dir():
        return ""
    try:
        name = pwd.getpwuid(user).pw_name
    except KeyError:
        name = str(user)
    if (root / "var/lib/systemd/linger" / name).exists():
        return ""
    removes = "yes"
    etc = root / "etc/systemd"
    settings = [etc / "logind.conf", *sorted(etc.glob("logind.conf.d/*.conf"))]
    for path in filter(Path.is_file, settings):
        removes = (_REMOVES.findall(path.read_text(errors="replace")) or [removes])[-1]
    if removes.lower() not in ("yes", "true", "on", "1"):
        return ""
    return (
        f"systemd-logind has RemoveIPC={removes}: it removes what user {name} has in /dev/shm when"
        f" the last login of {name} on this host ends: 'loginctl enable-linger {name}' keeps it"
    )


def _package_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _nccl_version() -> str:
    """Of the wheel that torch uses, else of the system's library; empty without one."""
    for name in _NCCL_PACKAGES:
        if version := _package_version(name):
            return version
    for directory in _NCCL_FILES:
        library = Path(directory, "libnccl.so.2")
        if library.exists():
            return library.resolve().name.removeprefix("libnccl.so.")
    return ""


def _driver_version() -> str:
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return ""


def _is_up(interface: str) -> bool:
    if not interface:
        return True  # unknown; that others reach the address is tested anyway
    directory = Path("/sys/class/net", interface)
    try:
        flags = int((directory / "flags").read_text(), 16)
        return bool(flags & _IFF_UP) and (directory / "operstate").read_text().strip() != "down"
    except (OSError, ValueError):
        return True


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft
