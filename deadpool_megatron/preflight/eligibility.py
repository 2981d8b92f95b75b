"""Judges by its facts whether a node may train, also only as a last resort.

The versions of the majority count as right, so no list of them is needed. Sites do the same by
hand: start with more nodes, test, and exclude the worst (ezpz on Aurora and Polaris, the BLOOM
run on Jean Zay). Facts are plain data, sizes in bytes. Pure functions.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from deadpool_megatron.preflight.health import Health
from deadpool_megatron.wire.forms import Coded

# Containers get 64 MiB of shared memory by default: only a tiny model fits in it.
CONTAINER_SHM_BYTES = 64 << 20
MIN_OPEN_FILES = 1024
# Nodes compute the same with different drivers.
_MAY_DIFFER = ("nvidia driver",)
_GB = 1e9


@dataclass(frozen=True)
class HostFacts(Coded):
    """The facts that a node reports about itself. ``None`` for a limit means that there is none."""

    hostname: str
    address: str = ""
    interface: str = ""
    interface_up: bool = True
    # Component -> version, and variable that changes computed numbers -> value; only those present.
    versions: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0
    shm_bytes: int = 0
    shm_free_bytes: int = 0
    memory_bytes: int = 0
    memlock_bytes: int | None = None
    open_files: int | None = None
    # The answer of the site's own command; good without such a command.
    health: Health = Health.GOOD
    health_text: str = ""
    # Why an earlier run quarantined this host; empty if none did.
    noted: str = ""


@dataclass(frozen=True)
class Needs:
    """The needs of a run. ``gpus_per_node`` counts if any node has GPUs; 0 if the run needs none.
    ``shm_bytes``: shared memory of a node, 0 if it is not known.
    """

    nodes: int
    gpus_per_node: int = 1
    shm_bytes: int = 0


class Eligibility(enum.StrEnum):
    """The roles that a node may get."""

    GOOD = "good"
    WEAK = "weak"  # trains only if no good node is left
    EXCLUDED = "excluded"


@dataclass(frozen=True)
class Defect:
    """A problem of a node, the eligibility that results, and the remedy."""

    eligibility: Eligibility
    text: str


@dataclass(frozen=True)
class Judgement:
    """The eligibility of a node, and the reasons against it."""

    eligibility: Eligibility = Eligibility.GOOD
    reasons: tuple[str, ...] = ()

    @staticmethod
    def of(defects: Sequence[Defect]) -> Judgement:
        """Return the judgement that follows from defects: the worst of them counts."""
        found = {defect.eligibility for defect in defects}
        worst = Eligibility.WEAK if found else Eligibility.GOOD
        worst = Eligibility.EXCLUDED if Eligibility.EXCLUDED in found else worst
        return Judgement(worst, tuple(defect.text for defect in defects))

    @property
    def text(self) -> str:
        """All reasons in one line."""
        return "; ".join(self.reasons)


@dataclass(frozen=True)
class Agreed:
    """Facts that the nodes of a run share: versions of components, and whether there are GPUs.
    Nodes that join later are compared with it.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    has_gpus: bool = False


def agree(facts: Iterable[HostFacts]) -> Agreed:
    """Return the facts of the majority; in a tie, those of the first node."""
    hosts = list(facts)
    versions = {}
    for name in sorted({name for host in hosts for name in host.versions}):
        counts = Counter(host.versions.get(name, "") for host in hosts)
        versions[name] = counts.most_common(1)[0][0]
    return Agreed(versions, any(host.gpus for host in hosts))


def defects_of(facts: HostFacts | None, agreed: Agreed, needs: Needs) -> list[Defect]:
    """Return the defects of a node by itself and compared with the agreed facts of the run; none
    for a node that did not report its facts.
    """
    if facts is None:
        return []
    found = list(problems(facts, needs))
    # Versions are mostly equal, and there may be thousands of nodes.
    differ = facts.versions != agreed.versions
    for name in sorted(agreed.versions.keys() | facts.versions.keys()) if differ else ():
        here, common = facts.versions.get(name, ""), agreed.versions.get(name, "")
        if here != common:
            result = Eligibility.WEAK if name in _MAY_DIFFER else Eligibility.EXCLUDED
            text = (
                f"{name} is {here or 'not there'}, on most nodes it is"
                f" {common or 'not there'}: use the same environment or image"
            )
            found.append(Defect(result, text))
    if agreed.has_gpus and facts.gpus < needs.gpus_per_node:
        text = f"{facts.gpus} GPUs, --nproc-per-node is {needs.gpus_per_node}"
        found.append(_excluded(f"{text}: look at nvidia-smi and dmesg there"))
    return found


def judge(facts: Mapping[int, HostFacts | None], needs: Needs) -> dict[int, Judgement]:
    """Return the judgement of each node by its facts; None stands for facts that a node did not
    report. In a tie of versions, those of the lowest node count.
    """
    ordered = dict(sorted(facts.items()))
    agreed = agree(host for host in ordered.values() if host is not None)
    return {node: Judgement.of(defects_of(host, agreed, needs)) for node, host in ordered.items()}


def problems(facts: HostFacts, needs: Needs) -> Iterator[Defect]:
    """Yield the defects of a node by itself, not compared with other nodes."""
    if facts.noted:
        yield _excluded(facts.noted)
    if facts.health is not Health.GOOD:
        kind = _excluded if facts.health is Health.OUT else _weak
        yield kind(f"its health command says: {facts.health_text}")
    if not facts.interface_up:
        yield _excluded(f"interface {facts.interface} of {facts.address} is down")
    if facts.shm_free_bytes < needs.shm_bytes:
        yield _excluded(
            f"/dev/shm has {facts.shm_free_bytes / _GB:.1f} GB free,"
            f" {needs.shm_bytes / _GB:.1f} GB are needed: 'deadpool clean', or enlarge it"
            " (mount -o remount,size=..., docker --shm-size)"
        )
    elif facts.shm_bytes <= CONTAINER_SHM_BYTES:
        yield _weak(
            f"/dev/shm has {facts.shm_bytes >> 20} MiB, as containers get by default:"
            " enlarge it (docker --shm-size, emptyDir with medium Memory)"
        )
    if facts.memory_bytes < needs.shm_bytes:
        yield _excluded(
            f"{facts.memory_bytes / _GB:.1f} GB of memory are available, the slots need"
            f" {needs.shm_bytes / _GB:.1f} GB: end what else runs there"
        )
    needed = max(needs.shm_bytes, CONTAINER_SHM_BYTES)
    if facts.gpus and facts.memlock_bytes is not None and facts.memlock_bytes < needed:
        yield _weak(
            f"only {facts.memlock_bytes >> 10} KiB may be locked in memory: 'ulimit -l"
            " unlimited', for Slurm LimitMEMLOCK=infinity of slurmd"
        )
    if facts.open_files is not None and facts.open_files < MIN_OPEN_FILES:
        yield _weak(f"only {facts.open_files} open files: 'ulimit -n {MIN_OPEN_FILES}' or more")


def _excluded(text: str) -> Defect:
    return Defect(Eligibility.EXCLUDED, text)


def _weak(text: str) -> Defect:
    return Defect(Eligibility.WEAK, text)
