"""The mismatch of an audit: which of several peers is wrong, by what each of them has computed.

Pure but for the two ends: the number that says what a role computes on, and what it does when
somebody is wrong. Only where that number is equal are equal bytes to be expected: another model of
GPU or CPU, another driver or another number of threads may have a library choose other kernels,
which add in another order and are as right.
"""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from deadpool_megatron import failpoints
from deadpool_megatron.events import Kind
from deadpool_megatron.megatron.loop import MegatronLoop
from deadpool_megatron.member.peer_comparison import current_device
from deadpool_megatron.member.role_reports import RoleReports

# The words of a fingerprint (deadpool_megatron.state.parts), of one or of several blocks.
Sums = tuple[int, ...]
_PASS = "a forward and backward pass"
_RESULTS = ("output", "returned", "gradient")
_CPU_FACTS = Path("/proc/cpuinfo")
_GPU_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Mismatch:
    """``roles``: all of them are wrong, or share the work that is; if not ``is_certain``, their
    peers may be wrong in their stead. ``subject`` differs, in words."""

    roles: tuple[int, ...]
    is_certain: bool
    subject: str


def hardware(device: torch.device) -> int:
    """Equal for roles with the same devices, drivers and libraries; less than 2**56."""
    facts = [
        platform.machine(),
        _line(_CPU_FACTS, "model name"),
        torch.backends.cpu.get_cpu_capability(),
        str(torch.get_num_threads()),
        torch.__version__,
    ]
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
        facts += [name, f"{major}.{minor}", str(torch.version.cuda), _line(_GPU_DRIVER, "NVRM")]
        facts.append(str(torch.backends.cudnn.version()))  # type: ignore[no-untyped-call]
    digest = hashlib.blake2b("\n".join(facts).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def compare_held(held: Mapping[int, Sums], subject: str) -> Mismatch | None:
    """Judge peers that must hold the same: whoever differs from more than half of them is wrong.

    ``held``: role -> sums. Returns None where all are equal.
    """
    counts = Counter(held.values())
    if len(counts) < 2:
        return None
    common, count = counts.most_common(1)[0]
    if 2 * count > len(held):
        return Mismatch(
            tuple(sorted(r for r, sums in held.items() if sums != common)), True, subject
        )
    return Mismatch(tuple(sorted(held)), False, subject)


def compare_computed(
    computed: Mapping[int, Sums], hardware: Mapping[int, int], subject: str
) -> Mismatch | None:
    """Judge peers that have computed the same: each by those with the same hardware, for others may
    come to other bytes and be as right.

    ``computed``: role -> sums; ``hardware``: role -> a number, equal for the same. Returns None
    where all that can be compared are equal.
    """
    odd = _odd({role: (hardware[role], sums) for role, sums in computed.items()})
    return Mismatch(tuple(sorted(odd.roles)), odd.is_certain, subject) if odd.roles else None


def incomparable(keys: Mapping[int, Hashable]) -> list[int]:
    """Returns roles that nobody can be compared with. ``keys``: role -> equal for those who can."""
    counts = Counter(keys.values())
    return sorted(role for role, key in keys.items() if counts[key] < 2)


def compare_update(
    audited: int,
    used: Sums,
    again: Mapping[int, Sums],
    hardware: Mapping[int, int],
    subject: str,
) -> Mismatch | None:
    """Judge an update of role ``audited``, whose result has the sums ``used``.

    ``again``: role -> sums of what it has computed from the state before and the gradients; the
    audited role is one of them, so that it is wrong by its own word if it does not get twice the
    same. ``hardware``: see :func:`compare_computed`. Returns None where all are equal.
    """
    others = compare_computed(again, hardware, subject)
    if used == again[audited]:
        return others
    wrong = set(others.roles) if others is not None and others.is_certain else set()
    return Mismatch(tuple(sorted(wrong | {audited})), True, subject)


def compare_repeated(
    first: Mapping[int, Sums], second: Mapping[int, Sums], subject: str
) -> Mismatch | None:
    """Judge peers that have no majority by what they have computed once more: whoever came to
    something else than before is wrong. Returns None where all or none did."""
    changed = [role for role in sorted(first) if first[role] != second[role]]
    return Mismatch(tuple(changed), True, subject) if 0 < len(changed) < len(first) else None


@dataclass(frozen=True)
class Pass:
    """Results of one role's pass of a micro-batch. ``replica``: its data-parallel rank; ``stage``
    of the pipeline; ``place``: equal for roles that must come to the same on the same ``hardware``,
    a number. ``output`` was passed on, ``returned`` is the gradient of it that came back,
    ``gradient`` that of the role's weights."""

    replica: int
    stage: int
    place: int
    output: Sums
    returned: Sums
    gradient: Sums
    hardware: int = 0


def comparable(passes: Mapping[int, Pass]) -> dict[int, Hashable]:
    """Returns for each role what is equal for those that it can be compared with: its place, and
    the hardware of its whole replica, since what a stage makes goes through all others."""
    replicas: dict[int, list[tuple[int, int]]] = {}
    for _, one in sorted(passes.items()):
        replicas.setdefault(one.replica, []).append((one.place, one.hardware))
    return {role: (one.place, tuple(sorted(replicas[one.replica]))) for role, one in passes.items()}


def unrepeatable(repeats: Mapping[int, tuple[Hashable, bool]]) -> list[int]:
    """Roles for which a pass did not give twice the same, of places where that is no exception.

    ``repeats``: role -> equal for those that it can be compared with, a place; and whether it did.
    Where half of a place or more did not, that place tells nothing: who is odd there may be as
    right as the others, and so may be all behind.
    """
    odd: list[int] = []
    for place in {place for place, _ in repeats.values()}:
        peers = {role: same for role, (where, same) in repeats.items() if where == place}
        if 2 * sum(peers.values()) <= len(peers):
            odd += [role for role, same in peers.items() if not same]
    return sorted(odd)


def compare_passes(passes: Mapping[int, Pass]) -> Mismatch | None:
    """Judge roles by the pass of one micro-batch; in each replica, the first that is wrong.

    ``passes``: role -> sums. What is wrong spreads: forward to later stages, backward to earlier
    ones, and to all roles that work on one stage, one of which has begun it. So there may be more
    of them, though it is certain that their replica is wrong: none of them can be relied on.
    """
    keys = comparable(passes)
    odd = [
        _odd({role: (keys[role], getattr(one, name)) for role, one in passes.items()})
        for name in _RESULTS
    ]
    wrong = _origins(passes, [set(one.roles) for one in odd])
    return Mismatch(wrong, all(one.is_certain for one in odd), _PASS) if wrong else None


def compare_repeated_passes(
    first: Mapping[int, Pass], second: Mapping[int, Pass]
) -> Mismatch | None:
    """Judge replicas that have no majority by the same micro-batch once more: what came to
    something else than before was computed wrong in one of the two. Returns None where that
    happened in all replicas or in none."""
    changed = [
        {role for role, one in first.items() if getattr(one, name) != getattr(second[role], name)}
        for name in _RESULTS
    ]
    replicas = {first[role].replica for some in changed for role in some}
    is_told = 0 < len(replicas) < len({one.replica for one in first.values()})
    return Mismatch(_origins(first, changed), True, _PASS) if is_told else None


class Auditor:
    """The word of a role in an audit. Main thread. All its communication ends with the epoch.

    ``settle`` waits until the newest generation is committed.
    """

    def __init__(
        self, loop: MegatronLoop, settle: Callable[[], None], reports: RoleReports
    ) -> None:
        self._loop = loop
        self._settle = settle
        self._reports = reports
        self._hardware = hardware(current_device())
        self._iteration = 0
        # Of this iteration's audit; None: it is not audited.
        self._number: int | None = None
        self._has_reported_incomparable = False

    def _stop_if_wrong(self, mismatch: Mismatch | None) -> None:
        """Tell the coordinator, and go no further: this iteration has no generation. Then it ends
        by what ends the epoch; without a mismatch it returns."""
        if mismatch is None:
            return
        roles, subject, certain = list(mismatch.roles), mismatch.subject, mismatch.is_certain
        facts = {"iteration": self._iteration, "roles": roles, "certain": certain, "what": subject}
        self._reports.send("audit-failed", **facts)
        reason = f"{subject} in iteration {self._iteration} differ, roles {roles}"
        self._reports.block_until_decided(reason)

    def _report_incomparable(self, roles: list[int], subject: str, reporter: int = 0) -> None:
        """Once: nobody can judge ``subject`` these roles compute."""
        if roles and not self._has_reported_incomparable:
            self._has_reported_incomparable = True
            self._warn(
                f"audits cannot judge {subject} of roles {roles}: no data-parallel peer has the"
                " same hardware, driver and libraries",
                reporter,
            )

    def _warn(self, text: str, reporter: int = 0) -> None:
        if dist.get_rank() == reporter:
            self._reports.send_event(Kind.LOG, None, {"level": "warning", "text": text})

    def _damage(self, point: str, tensors: Iterable[Tensor]) -> None:
        """Let a test have a bit of the first of these tensors that has any wrong."""
        if failpoints.hit(point, iteration=self._iteration) is None:
            return
        chosen = next(tensor for tensor in tensors if tensor.numel() > 1)
        # Not detached: autograd would see that it was changed.
        value = chosen.data.reshape(-1)[:1].view(torch.uint8)
        value[-2] ^= 0x40  # the highest bit of its mantissa


def _odd(held: Mapping[int, tuple[Hashable, Sums]]) -> Mismatch:
    """Return who differs from its peers, by place; not certain where any of them have no
    majority."""
    roles: list[int] = []
    is_certain = True
    for place in {place for place, _ in held.values()}:
        peers = {role: sums for role, (where, sums) in held.items() if where == place}
        if (found := compare_held(peers, "")) is not None:
            roles += found.roles
            is_certain = is_certain and found.is_certain
    return Mismatch(tuple(roles), is_certain, "")


def _origins(passes: Mapping[int, Pass], odd: Sequence[set[int]]) -> tuple[int, ...]:
    """The roles among which the error began, in each replica that has one. ``odd``: those whose
    output, whose gradient that came back and whose own gradient differ."""
    wrong: set[int] = set()
    for replica in {passes[role].replica for some in odd for role in some}:
        stages = {role: one.stage for role, one in passes.items() if one.replica == replica}
        wrong |= _first_wrong(stages, *(some & stages.keys() for some in odd))
    return tuple(sorted(wrong))


def _first_wrong(
    stages: Mapping[int, int], outputs: set[int], returned: set[int], gradients: set[int]
) -> set[int]:
    """Of one replica (role -> stage) the roles among which the error began."""
    if outputs:
        first = min(stages[role] for role in outputs)
        return {role for role in outputs if stages[role] == first}
    if backward := gradients - returned:
        last = max(stages[role] for role in backward)
        return {role for role in backward if stages[role] == last}
    # What came back was wrong, though all behind it is right: lost between two stages.
    last = max(stages[role] for role in returned | gradients)
    return {role for role, stage in stages.items() if stage in (last, last + 1)}


def _line(file: Path, begin: str) -> str:
    """The first line of a file of the kernel that begins so; empty where there is none."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(begin)), "")
