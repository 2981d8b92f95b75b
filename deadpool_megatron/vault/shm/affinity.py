"""Places of a vault on its host's processors, and of slots in its memory. No privileges are needed.

Slots get their memory when they are reserved, not when bytes arrive. By default the kernel takes it
from the NUMA node of the processor that reserves, which is right for a member that is bound to the
processors beside its device and for the vault. A member that knows its device's node asks for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
from collections.abc import Collection, Iterator
from pathlib import Path

AUTO = "auto"
_SYSTEM = Path("/sys/devices/system/node")
_CPU_LIST = re.compile(r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*")
# Of the processors that the node's processes may use; the last ones, since what counts from 0 up
# (members that are bound by their slot) is found at the other end.
_AUTO_SHARE = 4
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_DEFAULT, _PREFERRED = 0, 1
_NODE_OF_ADDRESS = 3  # MPOL_F_NODE | MPOL_F_ADDR
_MASK_BITS = 1024
_WORD_BITS = 64


def parse_cpus(text: str) -> frozenset[int]:
    """``0-3,8`` -> {0, 1, 2, 3, 8}. Raises ValueError for anything else."""
    if not _CPU_LIST.fullmatch(text):
        raise ValueError(f"{text!r} is no list of processors like 0-3,8")
    found: set[int] = set()
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        if not numbers:
            raise ValueError(f"{piece} runs backwards in the list of processors {text!r}")
        found.update(numbers)
    return frozenset(found)


def choose_cpus(text: str, allowed: Collection[int]) -> frozenset[int] | None:
    """Return what ``--deadpool-set vault-cpus`` means on a host; None: wherever the kernel likes.

    ``allowed``: processors that this process may use. Raises ValueError, one line, for a list that
    cannot be had.
    """
    if not text:
        return None
    if text == AUTO:
        ordered = sorted(allowed)
        return frozenset(ordered[-max(1, len(ordered) // _AUTO_SHARE) :])
    wanted = parse_cpus(text)
    if missing := wanted - set(allowed):
        raise ValueError(
            f"--deadpool-set vault-cpus={text}: processors {format_cpus(missing)} are not among"
            f" those that this node's processes may use ({format_cpus(allowed)})"
        )
    return wanted


def format_cpus(cpus: Collection[int]) -> str:
    """Inverse of :func:`parse_cpus`."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1][1:] = [cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(map(str, run)) for run in runs)


def settle_process(cpus: str, nice: int) -> None:
    """Put this process in its place; before it starts threads, which inherit it.

    Raises ValueError for processors that cannot be had.
    """
    chosen = choose_cpus(cpus, os.sched_getaffinity(0))
    if chosen is not None:
        os.sched_setaffinity(0, chosen)
    os.nice(nice)


def memory_nodes() -> frozenset[int]:
    """The NUMA nodes of this host; one, where it does not say."""
    try:
        return parse_cpus((_SYSTEM / "online").read_text().strip())
    except (OSError, ValueError):
        return frozenset({0})


@contextlib.contextmanager
def memory_near(node: int | None) -> Iterator[bool]:
    """While it lasts, memory that this thread reserves comes from a NUMA node, as long as there is
    some; True when that is so.

    Nothing is changed on a host with one node, where a policy has been set already (numactl), or
    where the kernel does not allow it: then memory comes from where the thread runs.
    """
    several = memory_nodes()
    if node is None or len(several) < 2 or node not in several or not _set_policy(node):
        yield False
        return
    try:
        yield True
    finally:
        _set_policy(None)


def other_memory_node(memory: memoryview) -> int | None:
    """Returns a NUMA node on which ``memory`` (its first byte) does not lie; None on a host with
    one node, or where the kernel does not tell."""
    nodes, number = sorted(memory_nodes()), _GET_MEMPOLICY.get(platform.machine())
    if len(nodes) < 2 or number is None or not memory:
        return None
    found = ctypes.c_int(-1)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.byref(found), None, 0, ctypes.c_void_p(address), _NODE_OF_ADDRESS)
    if libc.syscall(number, *arguments) != 0:
        return None
    return next((node for node in nodes if node > found.value), nodes[0])


def _set_policy(node: int | None) -> bool:
    """Prefer a node, or go back to the default; False when it cannot be done."""
    numbers = _SET_MEMPOLICY.get(platform.machine()), _GET_MEMPOLICY.get(platform.machine())
    if None in numbers:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    mask = (ctypes.c_ulong * (_MASK_BITS // _WORD_BITS))()
    mode = ctypes.c_int(_DEFAULT)
    if node is None:
        return bool(libc.syscall(numbers[0], _DEFAULT, None, 0) == 0)
    if libc.syscall(numbers[1], ctypes.byref(mode), None, 0, None, 0) != 0:
        return False
    if mode.value != _DEFAULT or node >= _MASK_BITS:
        return False
    mask[node // _WORD_BITS] = 1 << (node % _WORD_BITS)
    return bool(libc.syscall(numbers[0], _PREFERRED, ctypes.byref(mask), _MASK_BITS + 1) == 0)
