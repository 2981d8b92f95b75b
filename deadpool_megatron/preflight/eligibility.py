"""Judges whether a node may train, may train only as a last resort, or is excluded. Pure.

The versions of most nodes count as right, so no list of versions is needed. Sites do the same by
hand: they start with more nodes, test them, and exclude the worst (ezpz on Aurora and Polaris, the
BLOOM run on Jean Zay). Sizes are in bytes.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from deadpool_megatron.preflight.health import Health
from deadpool_megatron.wire.forms import Coded

# The shared memory that containers get by default, in which only a tiny model fits.
CONTAINER_SHM_BYTES = 64 << 20
MIN_OPEN_FILES = 1024
# Components whose versions may differ: nodes compute the same numbers with other drivers.
_MAY_DIFFER = ("nvidia driver",)
_GB = 1e9


@dataclass(frozen=True)
class HostFacts(Coded):
    """The facts that a node reports about itself. A limit of None means that there is no limit."""

    hostname: str
    address: str = ""
    interface: str = ""
    interface_up: bool = True
    # Component -> version, and variable that changes computed numbers -> value, if they exist here.
    versions: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0
    shm_bytes: int = 0
    shm_free_bytes: int = 0
    memory_bytes: int = 0
    memlock_bytes: int | None = None
    open_files: int | None = None
    # The result of the site's health command; good without such a command.
    health: Health = Health.GOOD
    health_text: str = ""
    # The reason why an earlier run quarantined this host; empty if no run did.
    noted: str = ""


@dataclass(frozen=True)
class Needs:
    """The needs of a run. ``gpus_per_node``: required if any node has GPUs; 0 if the run needs no
    GPUs. ``shm_bytes``: shared memory of a node; 0 if not known.
    """

    nodes: int
    gpus_per_node: int = 1
    shm_bytes: int = 0


class Eligibility(enum.StrEnum):
    """The eligibility of a node to train."""

    GOOD = "good"
    WEAK = "weak"  # trains only if no good node is left
    EXCLUDED = "excluded"


@dataclass(frozen=True)
class Defect:
    """A problem of a node, the eligibility that results, and the remedy. ``of_program``: only the
    software differs."""

    eligibility: Eligibility
    text: str
    of_program: bool = False


@dataclass(frozen=True)
class Judgement:
    """The eligibility of a node, and the reasons against it. ``of_program``: it is excluded for its
    software alone."""

    eligibility: Eligibility = Eligibility.GOOD
    reasons: tuple[str, ...] = ()
    of_program: bool = False

    @staticmethod
    def of(defects: Sequence[Defect]) -> Judgement:
        """Return the judgement that follows from defects, the worst of which decides."""
        kinds = {defect.eligibility for defect in defects}
        worst = Eligibility.WEAK if kinds else Eligibility.GOOD
        worst = Eligibility.EXCLUDED if Eligibility.EXCLUDED in kinds else worst
        decisive = [defect for defect in defects if defect.eligibility is worst]
        of_program = worst is Eligibility.EXCLUDED and all(d.of_program for d in decisive)
        return Judgement(worst, tuple(defect.text for defect in defects), of_program)

    @property
    def text(self) -> str:
        """All reasons in a line."""
        return "; ".join(self.reasons)


@dataclass(frozen=True)
class CommonFacts:
    """The facts that the nodes of a run share: versions of components, and whether there are GPUs.
    Nodes that join later are compared with these facts.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    has_gpus: bool = False


def agree(facts: Iterable[HostFacts]) -> CommonFacts:
    """Return the facts of most nodes; in a tie those of the node that comes first."""
    hosts = list(facts)
    versions = {}
    for name in sorted({name for host in hosts for name in host.versions}):
        counts = Counter(host.versions.get(name, "") for host in hosts)
        versions[name] = counts.most_common(1)[0][0]
    return CommonFacts(versions, any(host.gpus for host in hosts))


def defects_of(facts: HostFacts | None, common_facts: CommonFacts, needs: Needs) -> list[Defect]:
    """Return the defects of a node by itself and in comparison with the common facts of the run.
    Return none for a node that did not report its facts.
    """
    if facts is None:
        return []
    defects = list(problems(facts, needs))
    # Versions are mostly equal, and there may be thousands of nodes: compare all at once first.
    differ = facts.versions != common_facts.versions
    for name in sorted(common_facts.versions.keys() | facts.versions.keys()) if differ else ():
        version, common = facts.versions.get(name, ""), common_facts.versions.get(name, "")
        if version != common:
            result = Eligibility.WEAK if name in _MAY_DIFFER else Eligibility.EXCLUDED
            text = (
                f"{name} is {version or 'not there'}, on most nodes it is"
                f" {common or 'not there'}: use the same environment or image"
            )
            defects.append(Defect(result, text, of_program=True))
    if common_facts.has_gpus and facts.gpus < needs.gpus_per_node:
        text = f"{facts.gpus} GPUs, --nproc-per-node is {needs.gpus_per_node}"
        defects.append(_excluded(f"{text}: look at nvidia-smi and dmesg there"))
    return defects


def judge(facts: Mapping[int, HostFacts | None], needs: Needs) -> dict[int, Judgement]:
    """Return the judgement of each node by its facts, which are None if the node did not report
    them. In a tie of versions, that of the node with the lowest number counts as right.
    """
    ordered = dict(sorted(facts.items()))
    common = agree(host for host in ordered.values() if host is not None)
    return {node: Judgement.of(defects_of(host, common, needs)) for node, host in ordered.items()}


def problems(facts: HostFacts, needs: Needs) -> Iterator[Defect]:
    """Yield the defects that a node has by itself, without a comparison with other nodes."""
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
