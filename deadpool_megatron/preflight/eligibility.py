"""Facts of nodes -> judgement: which may train, which only if no better one is left, which may not.

That the majority's versions are right needs no list of good ones; starting with more nodes,
testing, and leaving out the worst is what sites do by hand (ezpz on Aurora and Polaris, the BLOOM
run on Jean Zay). Facts are plain data, sizes in bytes. Pure functions.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from deadpool_megatron.preflight.health import Health
from deadpool_megatron.wire.forms import Coded

# Containers get 64 MiB of shared memory unless told otherwise: only a tiny model fits in it.
CONTAINER_SHM_BYTES = 64 << 20
LEAST_OPEN_FILES = 1024
# Nodes compute the same with different drivers.
_MAY_DIFFER = ("nvidia driver",)
_GB = 1e9


@dataclass(frozen=True)
class HostFacts(Coded):
    """The facts that a node tells about itself. ``None`` for a limit means that there is none."""

    hostname: str
    address: str = ""
    interface: str = ""
    interface_up: bool = True
    # Component -> version, and variables by which it computes other numbers -> value; what is not
    # there is not named.
    versions: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0
    shm_bytes: int = 0
    shm_free_bytes: int = 0
    memory_bytes: int = 0
    memlock_bytes: int | None = None
    open_files: int | None = None
    # What the site's own command says; good where there is none.
    health: Health = Health.GOOD
    health_text: str = ""
    # Why an earlier run speaks against this host; empty where none does.
    noted: str = ""


@dataclass(frozen=True)
class Needs:
    """The needs of a run. ``gpus_per_node``: where any node has GPUs; 0 where it needs none there,
    either. ``shm_bytes``: shared memory of a node, 0 where it is not known.
    """

    nodes: int
    gpus_per_node: int = 1
    shm_bytes: int = 0


class Standing(enum.StrEnum):
    """The use that a node is of."""

    GOOD = "good"
    WEAK = "weak"  # trains only where no good node is left
    LEFT_OUT = "excluded"


@dataclass(frozen=True)
class Flaw:
    """One thing wrong with a node, what that makes of it, and what to do."""

    standing: Standing
    text: str


@dataclass(frozen=True)
class Judgement:
    """The standing of a node, and what was found against it."""

    standing: Standing = Standing.GOOD
    reasons: tuple[str, ...] = ()

    @staticmethod
    def of(flaws: Sequence[Flaw]) -> Judgement:
        """Returns the judgement that flaws amount to: the worst of them counts."""
        found = {flaw.standing for flaw in flaws}
        worst = Standing.WEAK if found else Standing.GOOD
        worst = Standing.LEFT_OUT if Standing.LEFT_OUT in found else worst
        return Judgement(worst, tuple(flaw.text for flaw in flaws))

    @property
    def text(self) -> str:
        """All reasons in one line."""
        return "; ".join(self.reasons)


@dataclass(frozen=True)
class Agreed:
    """The things that the nodes of a run have in common: versions of components, and whether there
    are GPUs. Nodes that join later are held against it.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    has_gpus: bool = False


def agree(facts: Iterable[HostFacts]) -> Agreed:
    """Returns what most of the nodes have; of equally many, what the first of them has."""
    known = list(facts)
    versions = {}
    for name in sorted({name for one in known for name in one.versions}):
        counts = Counter(one.versions.get(name, "") for one in known)
        versions[name] = counts.most_common(1)[0][0]
    return Agreed(versions, any(one.gpus for one in known))


def judge_one(facts: HostFacts | None, agreed: Agreed, needs: Needs) -> list[Flaw]:
    """Returns what is wrong with a node by itself and beside what the run has agreed on; nothing
    for a node that did not tell its facts.
    """
    if facts is None:
        return []
    found = list(problems(facts, needs))
    # Mostly they are equal, and there may be thousands of nodes.
    differ = facts.versions != agreed.versions
    for name in sorted(agreed.versions.keys() | facts.versions.keys()) if differ else ():
        here, common = facts.versions.get(name, ""), agreed.versions.get(name, "")
        if here != common:
            standing = Standing.WEAK if name in _MAY_DIFFER else Standing.LEFT_OUT
            text = (
                f"{name} is {here or 'not there'}, on most nodes it is"
                f" {common or 'not there'}: use the same environment or image"
            )
            found.append(Flaw(standing, text))
    if agreed.has_gpus and facts.gpus < needs.gpus_per_node:
        text = f"{facts.gpus} GPUs, --nproc-per-node is {needs.gpus_per_node}"
        found.append(_out(f"{text}: look at nvidia-smi and dmesg there"))
    return found


def judge(facts: Mapping[int, HostFacts | None], needs: Needs) -> dict[int, Judgement]:
    """Returns the judgement of each node by its facts, None where it did not tell them; of equally
    many versions those of the lowest node count.
    """
    ordered = dict(sorted(facts.items()))
    agreed = agree(one for one in ordered.values() if one is not None)
    return {node: Judgement.of(judge_one(one, agreed, needs)) for node, one in ordered.items()}


def problems(facts: HostFacts, needs: Needs) -> Iterator[Flaw]:
    """Yields what is wrong with a node by itself, without a look at the others."""
    if facts.noted:
        yield _out(facts.noted)
    if facts.health is not Health.GOOD:
        kind = _out if facts.health is Health.OUT else _weak
        yield kind(f"its health command says: {facts.health_text}")
    if not facts.interface_up:
        yield _out(f"interface {facts.interface} of {facts.address} is down")
    if facts.shm_free_bytes < needs.shm_bytes:
        yield _out(
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
        yield _out(
            f"{facts.memory_bytes / _GB:.1f} GB of memory are available, the slots need"
            f" {needs.shm_bytes / _GB:.1f} GB: end what else runs there"
        )
    least = max(needs.shm_bytes, CONTAINER_SHM_BYTES)
    if facts.gpus and facts.memlock_bytes is not None and facts.memlock_bytes < least:
        yield _weak(
            f"only {facts.memlock_bytes >> 10} KiB may be locked in memory: 'ulimit -l"
            " unlimited', for Slurm LimitMEMLOCK=infinity of slurmd"
        )
    if facts.open_files is not None and facts.open_files < LEAST_OPEN_FILES:
        yield _weak(f"only {facts.open_files} open files: 'ulimit -n {LEAST_OPEN_FILES}' or more")


def _out(text: str) -> Flaw:
    return Flaw(Standing.LEFT_OUT, text)


def _weak(text: str) -> Flaw:
    return Flaw(Standing.WEAK, text)
