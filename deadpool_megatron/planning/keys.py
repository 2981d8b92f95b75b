"""The keys of a plan's file: one frozen dataclass per section, each key with its help and bounds.

The help text of ``deadpool plan`` and the checks of :mod:`.file` come from here, so a key has one
definition. Units are part of the names: ``_gb`` are 10^9 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deadpool_megatron.settings import LONGEST_CADENCE, Settings


class PlanError(ValueError):
    """A plan that cannot be read or cannot hold; one line that says what to change."""


# What divides something is looked for among the smaller numbers.
_MOST_SHARES = 1_000_000


def _key(help_text: str, default: Any = ..., **bounds: Any) -> Any:
    """``least``, ``most``: bounds that are allowed; ``above``: one that is not; ``choices``."""
    metadata = {"help": help_text, **bounds}
    return field(metadata=metadata) if default is ... else field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model that is trained: either ``parameters``, or the shape that they follow from."""

    parameters: int | None = _key(
        "number of parameters, in place of the shape below", None, least=1
    )
    expert_parameters: int = _key("those of 'parameters' that lie in experts", 0, least=0)
    layers: int | None = _key("transformer layers", None, least=1)
    hidden: int | None = _key("hidden size", None, least=1)
    ffn: int | None = _key("inner size of the feed-forward part (of each expert)", None, least=1)
    heads: int | None = _key("attention heads", None, least=1, most=_MOST_SHARES)
    kv_heads: int | None = _key(
        "heads of keys and values; default: heads", None, least=1, most=_MOST_SHARES
    )
    vocab: int | None = _key("size of the vocabulary, before padding", None, least=1)
    positions: int = _key("rows of a learned position embedding; 0: there is none", 0, least=0)
    swiglu: bool = _key("gated feed-forward part, with three matrices instead of two", False)
    untied: bool = _key("the output layer has weights of its own", False)
    biases: bool = _key("linear layers have biases", True)
    rmsnorm: bool = _key("norms have one vector instead of two", False)
    experts: int = _key("experts in each layer; 0: the model is dense", 0, least=0)
    experts_per_token: int = _key("experts that one token goes through", 1, least=1)
    state_bytes_per_parameter: float = _key(
        "bytes of optimizer state; 12: fp32 master weight and Adam's two moments", 12.0, above=0
    )


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """The split of it by Megatron; roles are numbered in Megatron's order tp-cp-ep-dp-pp."""

    tp: int = _key("tensor parallel size", least=1, most=_MOST_SHARES)
    pp: int = _key("pipeline parallel size", least=1, most=_MOST_SHARES)
    dp: int = _key(
        "data parallel size, context parallelism not included", least=1, most=_MOST_SHARES
    )
    cp: int = _key("context parallel size", 1, least=1, most=_MOST_SHARES)
    ep: int = _key("expert parallel size", 1, least=1, most=_MOST_SHARES)
    etp: int | None = _key(
        "tensor parallel size of experts; default: tp", None, least=1, most=_MOST_SHARES
    )
    distributed_optimizer: bool = _key("--use-distributed-optimizer", True)
    optimizer_instances: int = _key(
        "--num-distributed-optimizer-instances", 1, least=1, most=_MOST_SHARES
    )


@dataclass(frozen=True, kw_only=True)
class Protection:
    """The settings of the run that matter here."""

    scheme: str = _key(
        "--deadpool-protection",
        Settings.protection,
        choices=("buddy", "parity", "local", "local-twice", "recompute", "mixed"),
    )
    replicas: int = _key(
        "--deadpool-replicas; parity: blocks of a group", Settings.replicas, least=1
    )
    parity_group: int = _key("--deadpool-parity-group", Settings.parity_group, least=2)
    full_every: int = _key("--deadpool-full-every, for recompute", Settings.full_every, least=2)
    link_share: float = _key("--deadpool-link-share", Settings.link_share, above=0, most=1)
    cadence: int = _key(
        "--deadpool-cadence: protect each N-th step", 1, least=1, most=LONGEST_CADENCE
    )
    max_lag: int = _key("--deadpool-max-lag", Settings.max_lag, least=0)
    spare_timeout_seconds: float = _key(
        "--deadpool-spare-timeout", Settings.spare_timeout_seconds, above=0
    )
    extras_bytes_per_role: int = _key(
        "random states, counters, buffers of one role", 500_000, least=0
    )
    extras_room_mb: float = _key(
        "--deadpool-extras-room-mb: least room for them", Settings.extras_room_mb, least=0
    )

    @property
    def survived(self) -> int:
        """Nodes that may be lost at a time."""
        return 0 if self.scheme in ("local", "local-twice") else self.replicas

    @property
    def name(self) -> str:
        """The scheme with its number."""
        numbers = {"parity": f"({self.parity_group})", "recompute": f"({self.full_every})"}
        return self.scheme + numbers.get(self.scheme, "")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The hosts. Rates are those that you measured, not those of a data sheet."""

    nodes: int = _key("nodes that train", least=1)
    gpus_per_node: int = _key("GPUs, and so roles, of a node", least=1)
    spares: int = _key("nodes that wait, warm", 0, least=0, most=10_000)
    racks: int | None = _key(
        "failure domains of equal size; default: each node is one", None, least=1
    )
    node_order: str = _key(
        "by-rack: consecutive node ids share a rack; across-racks: they are in different ones",
        "by-rack",
        choices=("by-rack", "across-racks"),
    )
    domains_file: str | None = _key(
        "in place of racks: the file of --deadpool-domains, relative to the plan", None
    )
    host_memory_gb: float = _key("host memory of a node", above=0)
    host_memory_reserved_gb: float = _key(
        "what training, loaders and system need of it", 0.0, least=0
    )
    nic_gb_s: float = _key("gigabytes (not bits) per second of one network card", above=0)
    nics: int = _key("cards that carry copies; a vault listens on one address", 1, least=1)
    nic_fraction: float = _key(
        "share of them that copies get while training goes on", 1.0, above=0, most=1
    )
    pcie_gb_s: float = _key("gigabytes per second from one GPU to host memory", above=0)
    checksum_gb_s: float = _key("gigabytes per second that one thread checksums (xxh3)", above=0)
    step_seconds: float | None = _key(
        "seconds of a step, in place of the next three", None, above=0
    )
    tflops_per_gpu: float | None = _key("peak of a GPU in this precision", None, above=0)
    efficiency: float | None = _key(
        "share of the peak that is reached (MFU)", None, above=0, most=1
    )
    tokens_per_step: int | None = _key("global batch size x sequence length", None, least=1)
    forward_backward_fraction: float = _key(
        "share of the step from the update to the next gate", above=0, most=1
    )


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Failures of nodes, and what it takes to continue."""

    node_mtbf_hours: float = _key("mean time between failures of one node", above=0)
    repair_hours: float = _key("until a lost node is back as a spare", above=0)
    swap_seconds: float = _key("loss until the interrupted step begins again, measured", above=0)
    exposure_seconds: float | None = _key(
        "loss until all copies are in memory again; default: computed", None, above=0
    )
    restart_seconds: float = _key(
        "restart of the job from a checkpoint until the first step", above=0
    )
    checkpoint_interval_steps: int = _key("steps between durable checkpoints", least=1)
    checkpoint_seconds: float = _key("for which training waits while one is written", 0.0, least=0)


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The goal that the plan is held against."""

    goodput: float = _key("wanted share of time in steps that count", 0.95, above=0, most=0.9999)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A whole file. ``domains_text`` is the content of ``cluster.domains_file``."""

    model: Model
    parallel: Parallel
    protection: Protection
    cluster: Cluster
    faults: Faults
    goal: Goal
    domains_text: str = ""


SECTIONS: dict[str, type[Any]] = {
    "model": Model,
    "parallel": Parallel,
    "protection": Protection,
    "cluster": Cluster,
    "faults": Faults,
    "goal": Goal,
}
