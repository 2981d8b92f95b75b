"""Comparison of the results of an audit: which of several peers are wrong.

Pure, except for :func:`hardware_number` and :class:`Auditor`. Equal bytes can only be expected of
roles with equal hardware. For another model of GPU or CPU, another driver or another number of
threads a library may choose other kernels, which add in another order. Their results differ without
being wrong.
"""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from deadpool_megatron import failpoints
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.ranks import first_role
from deadpool_megatron.megatron.loop import MegatronLoop
from deadpool_megatron.member.peer_comparison import current_device
from deadpool_megatron.member.role_reports import RoleReports

# The integers of a fingerprint (state.parts.fingerprint), of one or several of its blocks.
Sums = tuple[int, ...]
_Value = TypeVar("_Value")
_PASS = "a forward and backward pass"
_RESULTS = ("output", "returned", "gradient")
_CPU_FACTS = Path("/proc/cpuinfo")
_GPU_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Mismatch:
    """Roles with a wrong result. If they compute the result together, a single role may have caused
    the error. If not ``is_certain``, their peers may be wrong instead. ``subject``: a text that
    names the results."""

    roles: tuple[int, ...]
    is_certain: bool
    subject: str


def hardware_number(device: torch.device) -> int:
    """Return a number below 2**56 that is equal for roles with the same devices, drivers and
    libraries."""
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
    """Compare peers that must hold the same state: a role that differs from more than half of them
    is wrong. ``held``: role -> sums. Returns None where all are equal.
    """
    counts = Counter(held.values())
    if len(counts) < 2:
        return None
    common, count = counts.most_common(1)[0]
    if 2 * count > len(held):
        roles = sorted(role for role, sums in held.items() if sums != common)
        return Mismatch(tuple(roles), True, subject)
    return Mismatch(tuple(sorted(held)), False, subject)


def compare_computed(
    computed: Mapping[int, Sums], hardware: Mapping[int, int], subject: str
) -> Mismatch | None:
    """Compare the results of peers for the same computation. Each peer is compared only with peers
    of the same hardware, since other hardware may rightly give other bytes.

    ``computed``: role -> sums; ``hardware``: role -> :func:`hardware_number`. Returns None where
    all comparable results are equal.
    """
    found = _outliers({role: (hardware[role], sums) for role, sums in computed.items()})
    return Mismatch(tuple(sorted(found.roles)), found.is_certain, subject) if found.roles else None


def without_peers(keys: Mapping[int, Hashable]) -> list[int]:
    """Return the roles without a comparable peer. ``keys``: role -> a key, equal for comparable
    roles."""
    counts = Counter(keys.values())
    return sorted(role for role, key in keys.items() if counts[key] < 2)


def compare_update(
    audited: int, used: Sums, repeats: Mapping[int, Sums], hardware: Mapping[int, int], subject: str
) -> Mismatch | None:
    """Compare an update of role ``audited`` with the same update by its peers.

    ``used``: sums of the result with which the audited role continues. ``repeats``: role -> sums of
    the result when that role computes the update from the old state and the gradients. The audited
    role does so, too, and is wrong if its two results differ. ``hardware``: see
    :func:`compare_computed`. Returns None where all are equal.
    """
    mismatch = compare_computed(repeats, hardware, subject)
    if used == repeats[audited]:
        return mismatch
    wrong = set(mismatch.roles) if mismatch is not None and mismatch.is_certain else set()
    return Mismatch(tuple(sorted(wrong | {audited})), True, subject)


def compare_repeated(
    first: Mapping[int, Sums], second: Mapping[int, Sums], subject: str
) -> Mismatch | None:
    """Compare the repeated results of peers that have no majority: a role whose result changed is
    wrong. Returns None where all results changed, or none."""
    changed = [role for role in sorted(first) if first[role] != second[role]]
    return Mismatch(tuple(changed), True, subject) if 0 < len(changed) < len(first) else None


@dataclass(frozen=True)
class Pass:
    """Results of a role's pass of a micro-batch. ``replica``: the role's data-parallel rank;
    ``stage``: its pipeline stage; ``place``: a number that is equal for roles that must get the
    same results if they have the same ``hardware``. ``output``: sums of the activations for the
    next stage; ``returned``: sums of their gradient from that stage; ``gradient``: sums of the
    gradient of the role's weights."""

    replica: int
    stage: int
    place: int
    output: Sums
    returned: Sums
    gradient: Sums
    hardware: int = 0


def comparison_keys(passes: Mapping[int, Pass]) -> dict[int, Hashable]:
    """Return for each role a key that is equal for comparable roles: its place, and the hardware of
    its whole replica, since the results of a stage pass through all other stages."""
    replicas: dict[int, list[tuple[int, int]]] = {}
    for each in passes.values():
        replicas.setdefault(each.replica, []).append((each.place, each.hardware))
    return {role: (p.place, tuple(sorted(replicas[p.replica]))) for role, p in passes.items()}


def unrepeatable_roles(repeats: Mapping[int, tuple[Hashable, bool]]) -> list[int]:
    """Return the roles whose repeated pass gave another result, in places where at least half of
    the roles got another result. Comparing these, or roles of later stages, proves no fault.

    ``repeats``: role -> its place (equal for comparable roles), and whether the results were equal.
    """
    roles: list[int] = []
    for peers in _by_place(repeats):
        if 2 * sum(peers.values()) <= len(peers):
            roles += [role for role, same in peers.items() if not same]
    return sorted(roles)


def compare_passes(passes: Mapping[int, Pass]) -> Mismatch | None:
    """Compare the passes of a micro-batch, and find the first wrong roles of each replica.

    ``passes``: role -> its pass. An error spreads: forward to later stages, backward to earlier
    stages, and among all roles of a stage. So the mismatch may name several roles, of which a
    single role has a fault. At most it is certain that their replica is wrong.
    """
    keys = comparison_keys(passes)
    outliers = [
        _outliers({role: (keys[role], getattr(each, name)) for role, each in passes.items()})
        for name in _RESULTS
    ]
    wrong = _origins(passes, [set(each.roles) for each in outliers])
    return Mismatch(wrong, all(each.is_certain for each in outliers), _PASS) if wrong else None


def compare_repeated_passes(
    first: Mapping[int, Pass], second: Mapping[int, Pass]
) -> Mismatch | None:
    """Compare the passes of a micro-batch, repeated by replicas that have no majority: a result
    that changed was wrong the first or the second time. Returns None where the results of all
    replicas changed, or of none."""
    changed = [
        {role for role in first if getattr(first[role], name) != getattr(second[role], name)}
        for name in _RESULTS
    ]
    replicas = {first[role].replica for some in changed for role in some}
    is_decided = 0 < len(replicas) < len({each.replica for each in first.values()})
    return Mismatch(_origins(first, changed), True, _PASS) if is_decided else None


class Auditor:
    """The base class of audits, by which a role reports their results. Main thread. All
    communication ends with the epoch.

    ``await_committed`` waits until the newest generation is committed.
    """

    def __init__(
        self, loop: MegatronLoop, await_committed: Callable[[], None], reports: RoleReports
    ) -> None:
        self._loop = loop
        self._await_committed = await_committed
        self._reports = reports
        self._hardware = hardware_number(current_device())
        self._iteration = 0
        # The number of this iteration's audit; None if it is not audited.
        self._number: int | None = None
        self._has_reported_incomparable = False

    def _stop_if_wrong(self, mismatch: Mismatch | None) -> None:
        """Report a mismatch to the coordinator, and wait for the end of the epoch, which raises:
        this iteration has no generation."""
        if mismatch is None:
            return
        first, subject, certain = (
            first_role(self._reports.role),
            mismatch.subject,
            mismatch.is_certain,
        )
        roles = [first + rank for rank in mismatch.roles]
        facts = {"iteration": self._iteration, "roles": roles, "certain": certain, "what": subject}
        self._reports.send("audit-failed", **facts)
        reason = f"{subject} in iteration {self._iteration} differ, roles {roles}"
        self._reports.block_until_decided(reason)

    def _report_incomparable(self, roles: list[int], subject: str, reporter: int = 0) -> None:
        """Warn once that the ``subject`` of these roles has no comparable peer."""
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
        """Let a test flip a bit of the first of these tensors that is not a scalar."""
        if failpoints.hit(point, iteration=self._iteration) is None:
            return
        chosen = next(tensor for tensor in tensors if tensor.numel() > 1)
        # ``data`` is used, since autograd would notice a change of a detached tensor.
        value = chosen.data.reshape(-1)[:1].view(torch.uint8)
        value[-2] ^= 0x40  # the highest bit of its mantissa


def _outliers(held: Mapping[int, tuple[Hashable, Sums]]) -> Mismatch:
    """Compare the roles of each place, and return all roles that differ. The result is not certain
    if the peers of any place have no majority."""
    found = [found for peers in _by_place(held) if (found := compare_held(peers, ""))]
    roles = tuple(role for each in found for role in each.roles)
    return Mismatch(roles, all(each.is_certain for each in found), "")


def _by_place(held: Mapping[int, tuple[Hashable, _Value]]) -> Iterator[dict[int, _Value]]:
    """Yield the values of the roles of each place."""
    for place in {place for place, _ in held.values()}:
        yield {role: value for role, (where, value) in held.items() if where == place}


def _origins(passes: Mapping[int, Pass], outliers: Sequence[set[int]]) -> tuple[int, ...]:
    """Return the roles among which the error began, in each replica that has an error.
    ``outliers``: the roles whose output, whose returned gradient and whose own gradient differ."""
    wrong: set[int] = set()
    for replica in {passes[role].replica for some in outliers for role in some}:
        stages = {role: each.stage for role, each in passes.items() if each.replica == replica}
        wrong |= _first_wrong(stages, *(some & stages.keys() for some in outliers))
    return tuple(sorted(wrong))


def _first_wrong(
    stages: Mapping[int, int], outputs: set[int], returned: set[int], gradients: set[int]
) -> set[int]:
    """Return the roles of a replica (role -> stage) among which the error began."""
    if outputs:
        first = min(stages[role] for role in outputs)
        return {role for role in outputs if stages[role] == first}
    if backward := gradients - returned:
        last = max(stages[role] for role in backward)
        return {role for role in backward if stages[role] == last}
    # A stage got a wrong gradient from the next stage, whose own results are right: the gradient
    # was damaged on the way, so either of the two stages may be at fault.
    last = max(stages[role] for role in returned | gradients)
    return {role for role, stage in stages.items() if stage in (last, last + 1)}


def _line(file: Path, begin: str) -> str:
    """Return the first line in a file under /proc that begins with ``begin``; empty if there is
    none."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(begin)), "")
