"""The file of a plan: YAML and overrides -> :class:`Plan`, strictly.

One frozen dataclass per section, each key with its help and bounds: the help text of ``deadpool
plan`` and the checks of what is read come from here, so a key has one definition. Units are part of
the names: ``_gb`` are 10^9 bytes. Whatever is wrong raises PlanError with one line that names the
key; nothing is guessed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from deadpool_megatron import UserError
from deadpool_megatron.settings import LONGEST_CADENCE, Settings

_SHAPE = ("layers", "hidden", "ffn", "heads", "vocab")
_SPEED = ("tflops_per_gpu", "efficiency", "tokens_per_step")
_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
# Beyond this nothing is meant, and formulas end in infinity.
_LARGEST = 1e18
# What divides something is looked for among the smaller numbers.
_MOST_SHARES = 1_000_000


class PlanError(UserError, ValueError):
    """A plan that cannot be read or cannot hold; one line that says what to change."""


def _key(help_text: str, default: Any = ..., **bounds: Any) -> Any:
    """``least``, ``most``: bounds that are allowed; ``above``: one that is not; ``choices``."""
    metadata = {"help": help_text, **bounds}
    return field(metadata=metadata) if default is ... else field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model that is trained: either ``parameters``, or the shape that they follow from."""

    parameters: int | None = _key("number of parameters, instead of the shape below", None, least=1)
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
class PlannedProtection:
    """The settings of the run that matter here."""

    scheme: str = _key(
        "--deadpool-protection",
        Settings.protection,
        choices=("buddy", "parity", "local", "local-twice", "recompute"),
    )
    replicas: int = _key(
        "--deadpool-replicas; parity: blocks of a group", Settings.replicas, least=1
    )
    parity_group: int = _key("--deadpool-parity-group", Settings.parity_group, least=2)
    full_every: int = _key("--deadpool-set full-every, for recompute", Settings.full_every, least=2)
    link_share: float = _key("--deadpool-set link-share", Settings.link_share, above=0, most=1)
    cadence: int = _key(
        "--deadpool-cadence: protect each N-th step", 1, least=1, most=LONGEST_CADENCE
    )
    max_lag: int = _key("--deadpool-max-lag", Settings.max_lag, least=0)
    extras_bytes_per_role: int = _key(
        "random states, counters, buffers of one role", 500_000, least=0
    )
    extras_room_mb: float = _key(
        "--deadpool-extras-room-mb: least room for them", Settings.extras_room_mb, least=0
    )


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The hosts. Rates are those that you measured, not those of a data sheet."""

    nodes: int = _key("nodes that train", least=1)
    gpus_per_node: int = _key("GPUs, and so roles, of a node", least=1)
    spares: int = _key("nodes that wait, warm", 0, least=0, most=10_000)
    racks: int | None = _key(
        "failure domains of equal size; default: each node is one", None, least=1
    )
    host_memory_gb: float = _key("host memory of a node", above=0)
    host_memory_reserved_gb: float = _key(
        "what training, loaders and system need of it", 0.0, least=0
    )
    nic_gb_s: float = _key(
        "gigabytes (not bits) per second of the network card, or of all that are bonded", above=0
    )
    nic_fraction: float = _key("share of it that copies get during training", 1.0, above=0, most=1)
    pcie_gb_s: float = _key("gigabytes per second from one GPU to host memory", above=0)
    checksum_gb_s: float = _key("gigabytes per second that one thread checksums (xxh3)", above=0)
    step_seconds: float | None = _key("seconds of a step, instead of the next three", None, above=0)
    tflops_per_gpu: float | None = _key("peak of a GPU in this precision", None, above=0)
    efficiency: float | None = _key(
        "share of the peak that is reached (MFU)", None, above=0, most=1
    )
    tokens_per_step: int | None = _key("global batch size x sequence length", None, least=1)
    forward_backward_fraction: float = _key(
        "share of the step from the update to the next gate", above=0, most=1
    )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A whole file."""

    model: Model
    parallel: Parallel
    protection: PlannedProtection
    cluster: Cluster


SECTIONS: dict[str, type[Any]] = get_type_hints(Plan)


def read_plan(
    path: Path | None,
    overrides: Iterable[str] = (),
    given: Mapping[str, Mapping[str, Any]] | None = None,
) -> Plan:
    """The plan in a file, with ``section.key=value`` put over it, and all of it over what is
    ``given``. ``path``: None where all is. Raises PlanError."""
    values: Any = {}
    try:
        values = {} if path is None else _parse(path.read_text("utf-8"))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise PlanError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(values, dict):
        raise PlanError(f"{path}: expected sections ({', '.join(SECTIONS)})")
    for section, known in (given or {}).items():
        own = values.get(section)
        if own is None or isinstance(own, dict):
            values[section] = {**known, **(own or {})}
    for override in overrides:
        name, equals, text = override.partition("=")
        section, dot, key = name.partition(".")
        if not equals or not dot or section not in SECTIONS:
            names = ", ".join(SECTIONS)
            raise PlanError(f"--set {override}: expected SECTION.KEY=VALUE, a section of {names}")
        if values.get(section) is None:
            values[section] = {}
        if isinstance(values[section], dict):
            values[section][key] = _parse(text)
    try:
        return make_plan(values)
    except PlanError as error:
        raise PlanError(f"{path or 'plan'}: {error}") from error


def make_plan(values: Mapping[Any, Any]) -> Plan:
    """A plan from nested mappings, every key and value checked. Raises PlanError."""
    for name in values:
        if name not in SECTIONS:
            raise PlanError(f"{name}: unknown section, there are {', '.join(SECTIONS)}")
    plan = Plan(**{name: _section(name, cls, values.get(name)) for name, cls in SECTIONS.items()})
    _check_model(plan.model)
    _check_cluster(plan.cluster)
    if plan.model.expert_parameters and plan.cluster.step_seconds is None:
        raise PlanError(
            "cluster.step_seconds: missing; model.expert_parameters does not say through how many"
            f" of them a token goes: give it instead of {', '.join(_SPEED)}, or give the shape"
        )
    return plan


def _parse(text: str) -> Any:
    """Only this command reads YAML; training nodes need not have the package. Raises PlanError."""
    try:
        import yaml
    except ImportError as error:
        raise PlanError(
            "PyYAML is missing: install it with pip install '.[plan]' in the checkout"
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PlanError(f"not valid YAML: {' '.join(str(error).split())}") from error


def _section(name: str, cls: type[Any], given: Any) -> Any:
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise PlanError(f"{name}: expected keys with values, got {given!r}")
    fields = {entry.name: entry for entry in dataclasses.fields(cls)}
    for key in given:
        if key not in fields:
            raise PlanError(f"{name}.{key}: unknown key, there are {', '.join(fields)}")
    hints = get_type_hints(cls)
    found = {}
    for key, entry in fields.items():
        if given.get(key) is not None:
            found[key] = _checked(f"{name}.{key}", given[key], hints[key], entry.metadata)
        elif entry.default is dataclasses.MISSING:
            raise PlanError(f"{name}.{key}: missing ({entry.metadata['help']})")
    return cls(**found)


def _checked(place: str, value: Any, hint: Any, bounds: Mapping[str, Any]) -> Any:
    kind = get_args(hint)[0] if isinstance(hint, UnionType) else hint
    value = _converted(place, value, kind)
    if "choices" in bounds and value not in bounds["choices"]:
        raise PlanError(f"{place}: must be one of {', '.join(bounds['choices'])}, got {value}")
    if "least" in bounds and value < bounds["least"]:
        raise PlanError(f"{place}: must be at least {bounds['least']}, got {value}")
    if "above" in bounds and value <= bounds["above"]:
        raise PlanError(f"{place}: must be above {bounds['above']}, got {value}")
    if kind is not bool and kind is not str and value > (most := bounds.get("most", _LARGEST)):
        raise PlanError(f"{place}: must be at most {most:g}, got {value:.40g}")
    return value


def _converted(place: str, value: Any, kind: Any) -> Any:
    wrong = PlanError(f"{place}: must be {_NAMES[kind]}, got {value!r}")
    if kind in (bool, str):
        if isinstance(value, kind):
            return value
        raise wrong
    try:
        number = float(value)  # for YAML 1.1, 65e9 is text
    except (TypeError, ValueError, OverflowError):
        raise wrong from None
    if isinstance(value, bool) or not isfinite(number) or (kind is int and number != int(number)):
        raise wrong
    return kind(number if isinstance(value, str) else value)


def _check_model(model: Model) -> None:
    missing = [name for name in _SHAPE if getattr(model, name) is None]
    if model.parameters is None:
        if missing:
            raise PlanError(
                f"model.{missing[0]}: missing; give the whole shape or model.parameters"
            )
        if model.expert_parameters:
            raise PlanError("model.expert_parameters: only together with model.parameters")
    elif len(missing) < len(_SHAPE):
        raise PlanError("model.parameters: give it or the shape, not both")
    elif model.experts:
        raise PlanError("model.experts: with model.parameters, give model.expert_parameters")
    elif model.expert_parameters > model.parameters:
        raise PlanError("model.expert_parameters: must be at most model.parameters")
    if model.experts and model.experts_per_token > model.experts:
        raise PlanError(f"model.experts_per_token: must be at most model.experts ({model.experts})")


def _check_cluster(cluster: Cluster) -> None:
    missing = [name for name in _SPEED if getattr(cluster, name) is None]
    if cluster.step_seconds is None and missing:
        raise PlanError(
            f"cluster.{missing[0]}: missing; give all of {', '.join(_SPEED)}, or step_seconds"
        )
    if cluster.step_seconds is not None and len(missing) < len(_SPEED):
        raise PlanError(f"cluster.step_seconds: give it or {', '.join(_SPEED)}, not both")
    if cluster.racks is not None and cluster.racks > cluster.nodes:
        raise PlanError(f"cluster.racks: must be at most cluster.nodes ({cluster.nodes})")
    if cluster.host_memory_reserved_gb >= cluster.host_memory_gb:
        raise PlanError("cluster.host_memory_reserved_gb: must be below cluster.host_memory_gb")
