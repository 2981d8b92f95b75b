"""Facts of this host, from files, limits and package metadata; its GPUs, and their division among
processes; features of the system that every run needs.

The module loads neither torch nor the driver, so that its process can still fork.
"""

from __future__ import annotations

import os
import pwd
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import deadpool_megatron
from deadpool_megatron.preflight import health
from deadpool_megatron.preflight.eligibility import HostFacts
from deadpool_megatron.vault.memory import cgroup_memory, memlock_bytes
from deadpool_megatron.vault.transport import interface_of

_SHM = Path("/dev/shm")
# Distributions that determine the computed numbers, by their names in the package index.
_PACKAGES = ("torch", "megatron-core", "transformer-engine", "apex", "numpy")
# Variables that change the numbers that a program computes.
_VARIABLES = re.compile(
    r"NVTE_(?!DEBUG)\w+(?<!_DIR|_LOG)|NCCL_(ALGO|PROTO)|NVIDIA_TF32_OVERRIDE|PYTHONHASHSEED|MKL_CBWR"
    r"|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|CUDA_DEVICE_MAX_CONNECTIONS|CUBLAS_WORKSPACE_CONFIG"
)
# Read only when Python starts.
_FIXED = {"PYTHONHASHSEED"}
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_NCCL_DIRECTORIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64")
_IFF_UP = 1
_FIRST_USER = 1000
_REMOVE_IPC = re.compile(r"^\s*RemoveIPC\s*=\s*(\w+)", re.MULTILINE)
#: variable with the GPUs that a process sees, by number or UUID; the process counts them from 0
GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"
_NVIDIA_SMI_SECONDS = 20.0
_GPU_LINE = re.compile(r"^\s*(GPU|MIG) .*\(UUID: ([^)\s]+)\)", re.MULTILINE)


def read_facts(address: str, command: str = "", limit_seconds: float = 0.0) -> HostFacts:
    """Return the facts of this host, which other hosts reach at ``address``. ``command``: the
    site's health command, empty for none; it may take ``limit_seconds``.

    The call takes as long as nvidia-smi, if that is installed.
    """
    shm = shutil.disk_usage(_SHM) if _SHM.is_dir() else None
    interface = interface_of(address)
    result = health.check_health(command, limit_seconds) if command else health.HealthResult()
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
        health=result.health,
        health_text=result.text,
    )


def versions() -> dict[str, str]:
    """Return the versions of installed components, and the values of variables that change computed
    numbers, by name."""
    values = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "deadpool-megatron": deadpool_megatron.__version__,
    }
    values |= {name: version for name in _PACKAGES if (version := _package_version(name))}
    values |= numeric_variables()
    if nccl := _nccl_version():
        values["nccl"] = nccl
    if driver := _driver_version():
        values["nvidia driver"] = driver
    return values


def numeric_variables() -> dict[str, str]:
    """Return the variables of this process that change computed numbers."""
    return {name: value for name, value in os.environ.items() if _VARIABLES.fullmatch(name)}


def adopt_variables(of_run: Mapping[str, str]) -> list[str]:
    """Give this process and its children the variables that the run's start had, and return a text
    for each that was different. Variables that Python reads as it starts stay as they are."""
    here, texts = numeric_variables(), []
    for name in sorted((here.keys() | of_run.keys()) - _FIXED):
        if (value := of_run.get(name)) == (found := here.get(name)):
            continue
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
        given = "not set" if value is None else value
        texts.append(f"{name} is {given}, as in the run (it was {found or 'not set'} here)")
    return texts


def available_memory() -> int | None:
    """Return the bytes that are available without swapping, on the host and in this cgroup; None if
    not known."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":") for line in lines)
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    group = cgroup_memory()
    return free if group is None else min(free, group.left_bytes)


def missing_feature() -> str:
    """Return the reason why no run can use this host; empty if a run can."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return (
            f"pidfd_open is not available here ({error.strerror}), by which a node learns of the"
            " end of its processes: it takes a kernel from 5.3 on and, in a container, a seccomp"
            " profile that lets it pass"
        )
    return ""


def removal_warning(user: int, root: Path = Path("/")) -> str:
    """Return a warning if the system may remove this user's shared memory during a run; empty if it
    does not. By the rules of logind, the memory of system users and of users that linger stays.
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
        removes = (_REMOVE_IPC.findall(path.read_text(errors="replace")) or [removes])[-1]
    if removes.lower() not in ("yes", "true", "on", "1"):
        return ""
    return (
        f"systemd-logind has RemoveIPC={removes}: it removes what user {name} has in /dev/shm when"
        f" the last login of {name} on this host ends: 'loginctl enable-linger {name}' keeps it"
    )


def listed_gpus() -> tuple[str, ...]:
    """Return the GPUs that this container may use: the UUIDs that nvidia-smi lists, with MIG
    devices instead of their GPU. Without nvidia-smi, return the numbers of the GPUs that the driver
    knows.

    A GPU that has fallen off the bus is in the driver's list, but not in that of nvidia-smi.
    """
    if shutil.which("nvidia-smi") is not None:
        try:
            listed = subprocess.run(
                ["nvidia-smi", "-L"],
                capture_output=True,
                text=True,
                timeout=_NVIDIA_SMI_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return ()  # the driver does not answer, so training could not use the GPUs
        gpus: list[list[str]] = []
        for kind, uuid in _GPU_LINE.findall(listed.stdout):
            if kind == "GPU" or not gpus:
                gpus.append([uuid])
            else:
                gpus[-1].append(uuid)
        return tuple(uuid for gpu, *parts in gpus for uuid in parts or [gpu])
    try:
        return tuple(map(str, range(len(list(Path("/proc/driver/nvidia/gpus").iterdir())))))
    except OSError:
        return ()


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that a process with this environment sees, by their UUIDs if these are known:
    after the loss of a GPU the numbers of later GPUs change.
    """
    value = environment.get(GPU_VARIABLE)
    if value is not None and not value.strip():
        return ()
    listed = listed_gpus()
    if value is None or not listed:
        return listed
    visible: list[str] = []
    for name in (part.strip() for part in value.split(",")):
        if name.isdigit():
            gpus = listed[int(name) : int(name) + 1]
        else:
            # A UUID may be abbreviated. If no UUID is known, it is taken literally.
            has_uuids = not listed[0].isdigit()
            gpus = tuple(g for g in listed if name and g.startswith(name)) if has_uuids else (name,)
        # As in CUDA, a name that cannot be a GPU hides all names after it.
        if not gpus or not name or name.startswith("-"):
            break
        visible.append(gpus[0])
    return tuple(visible)


def member_variables(gpus: Sequence[str], local_rank: int, *, may_share: bool) -> dict[str, str]:
    """Return the variables with which a member sees only its own GPU, as number 0, because scripts
    choose their device before the member joins. If members may share GPUs, they do so where there
    are too few, and see all that the node sees if none are listed. If members may not share GPUs, a
    member without a GPU of its own sees none.
    """
    if may_share and not gpus:
        return {"LOCAL_RANK": str(local_rank)}
    index = local_rank % len(gpus) if may_share else local_rank
    return {"LOCAL_RANK": "0", GPU_VARIABLE: "".join(gpus[index : index + 1])}


def share_of(gpus: Sequence[str], number: int, size: int) -> str:
    """Return the value of :data:`GPU_VARIABLE` for share ``number`` of ``size`` GPUs each."""
    return ",".join(gpus[number * size : (number + 1) * size])


def _package_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _nccl_version() -> str:
    """Return the version of the wheel that torch uses, else of the system's library, else empty."""
    for name in _NCCL_PACKAGES:
        if version := _package_version(name):
            return version
    for directory in _NCCL_DIRECTORIES:
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
        return True  # not known; another test shows whether other hosts reach the address
    directory = Path("/sys/class/net", interface)
    try:
        flags = int((directory / "flags").read_text(), 16)
        return bool(flags & _IFF_UP) and (directory / "operstate").read_text().strip() != "down"
    except (OSError, ValueError):
        return True


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft
