"""The sections of a plan, and a strict reader of them from YAML and overrides.

Each section is a frozen dataclass whose keys have a help text and bounds, from which the help of
``deadpool plan`` and the checks of the file are made. Units are part of the names: ``_gb`` means
10^9 bytes. Each error raises PlanError with a line that names the key; no value is guessed.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

from deadpool_megatron import UserError
from deadpool_megatron.layout.grid import Grid
from deadpool_megatron.settings import LONGEST_CADENCE, SchemeKind, Settings

_SHAPE = ("layers", "hidden", "ffn", "heads", "vocab")
_SPEED = ("tflops_per_gpu", "efficiency", "tokens_per_step")
_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_RELATIONS = {"min": operator.ge, "above": operator.gt, "max": operator.le}
_RELATION_TEXTS = {"min": "at least", "above": "above", "max": "at most"}


class PlanError(UserError, ValueError):
    """A plan cannot be read or cannot hold; the message names the change to make."""


class Bounds(NamedTuple):
    """Bounds of a number: at least ``min``, at most ``max``, and greater than ``above``."""

    min: float | None = None
    above: float | None = None
    #: larger numbers are mistakes, and would make formulas overflow to infinity
    max: float = 1e18


Natural = Annotated[int, Bounds(min=0)]
Count = Annotated[int, Bounds(min=1)]
# A divisor. It is bounded because messages search all smaller numbers for a fitting divisor.
Shares = Annotated[int, Bounds(min=1, max=1_000_000)]
Several = Annotated[int, Bounds(min=2)]
Cadence = Annotated[int, Bounds(min=1, max=LONGEST_CADENCE)]
Size = Annotated[float, Bounds(min=0)]
Amount = Annotated[float, Bounds(above=0)]
Fraction = Annotated[float, Bounds(above=0, max=1)]


def _key(help_text: str, default: Any = dataclasses.MISSING) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model that is trained: either ``parameters``, or the shape that determines them."""

    parameters: Count | None = _key("number of parameters, instead of the shape below", None)
    expert_parameters: Natural = _key("those of 'parameters' that lie in experts", 0)
    layers: Count | None = _key("transformer layers", None)
    hidden: Count | None = _key("hidden size", None)
    ffn: Count | None = _key("inner size of the feed-forward part (of each expert)", None)
    heads: Shares | None = _key("attention heads", None)
    kv_heads: Shares | None = _key("heads of keys and values; default: heads", None)
    vocab: Count | None = _key("size of the vocabulary, before padding", None)
    positions: Natural = _key("rows of a learned position embedding; 0: there is none", 0)
    swiglu: bool = _key("gated feed-forward part, with three matrices instead of two", False)
    untied: bool = _key("the output layer has weights of its own", False)
    biases: bool = _key("linear layers have biases", True)
    rmsnorm: bool = _key("norms have one vector instead of two", False)
    experts: Natural = _key("experts in each layer; 0: the model is dense", 0)
    experts_per_token: Count = _key("experts that one token goes through", 1)
    state_bytes_per_parameter: Amount = _key(
        "bytes of optimizer state; 12: fp32 master weight and Adam's two moments", 12.0
    )


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """The split of the model; roles are numbered in Megatron's order tp-cp-ep-dp-pp."""

    tp: Shares = _key("tensor parallel size")
    pp: Shares = _key("pipeline parallel size")
    dp: Shares = _key("data parallel size, context parallelism not included")
    cp: Shares = _key("context parallel size", 1)
    ep: Shares = _key("expert parallel size", 1)
    etp: Shares | None = _key("tensor parallel size of experts; default: tp", None)
    distributed_optimizer: bool = _key("--use-distributed-optimizer", True)
    optimizer_instances: Shares = _key("--num-distributed-optimizer-instances", 1)

    @property
    def grid(self) -> Grid:
        """Return the split of a model replica."""
        etp = self.etp or self.tp
        return Grid(self.tp, self.cp, self.pp, self.ep, etp, self.optimizer_instances)


@dataclass(frozen=True, kw_only=True)
class PlannedProtection:
    """The settings of the run that affect the plan."""

    scheme: SchemeKind = _key("--deadpool-protection", SchemeKind(Settings.protection))
    copies: Count = _key("--deadpool-copies; parity: blocks of a group", Settings.copies)
    parity_group: Several = _key("--deadpool-parity-group", Settings.parity_group)
    link_share: Fraction = _key("--deadpool-set link-share", Settings.link_share)
    cadence: Cadence = _key("--deadpool-cadence: protect each N-th step", 1)
    max_lag: Natural = _key("--deadpool-max-lag", Settings.max_lag)
    extras_bytes_per_role: Natural = _key("random states, counters, buffers of one role", 500_000)
    extras_room_mb: Size = _key("--deadpool-extras-room-mb: least room", Settings.extras_room_mb)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The hosts. Rates must be measured, not taken from a data sheet."""

    nodes: Count = _key("nodes that train")
    gpus_per_node: Count = _key("GPUs, and so roles, of a node")
    spares: Annotated[int, Bounds(min=0, max=10_000)] = _key("nodes that wait, warm", 0)
    racks: Count | None = _key("failure domains of equal size; default: each node is one", None)
    host_memory_gb: Amount = _key("host memory of a node")
    host_memory_reserved_gb: Size = _key("what training, loaders and system need of it", 0.0)
    nic_gb_s: Amount = _key("gigabytes (not bits) per second of all network cards for copies")
    nic_fraction: Fraction = _key("share of it that copies get during training", 1.0)
    pcie_gb_s: Amount = _key("gigabytes per second from one GPU to host memory")
    checksum_gb_s: Amount = _key("gigabytes per second that one thread checksums (xxh3)")
    step_seconds: Amount | None = _key("seconds of a step, instead of the next three", None)
    tflops_per_gpu: Amount | None = _key("peak of a GPU in this precision", None)
    efficiency: Fraction | None = _key("share of the peak that is reached (MFU)", None)
    tokens_per_step: Count | None = _key("global batch size x sequence length", None)
    forward_backward_fraction: Fraction = _key("share of the step from the update to the next gate")
    failure_hours: Amount = _key("mean hours from one failure of a node to its next", 5000.0)
    repair_hours: Amount = _key("mean hours until a failed node is back", 24.0)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All sections of a plan."""

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
    """Return the plan in a file. Overrides (``section.key=value``) take precedence over the file,
    and the file over ``given`` values. ``path``: None if there is no file. Raises PlanError."""
    try:
        values = {} if path is None else _parse(path.read_text("utf-8"))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise PlanError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(values, dict):
        raise PlanError(f"{path}: expected sections ({', '.join(SECTIONS)})")
    layers = [given or {}, values, *map(_override, overrides)]
    try:
        return make_plan(*layers)
    except PlanError as error:
        raise PlanError(f"{path or 'plan'}: {error}") from error


def make_plan(*layers: Mapping[Any, Any]) -> Plan:
    """Return the plan of nested mappings, with each key and value checked; later mappings override
    earlier mappings. Raises PlanError."""
    values: dict[str, dict[Any, Any]] = {name: {} for name in SECTIONS}
    for name, keys in (item for layer in layers for item in layer.items()):
        if name not in SECTIONS:
            raise PlanError(f"{name}: unknown section, there are {', '.join(SECTIONS)}")
        if not isinstance(keys, dict | None):
            raise PlanError(f"{name}: expected keys with values, got {keys!r}")
        values[name] |= keys or {}
    plan = Plan(**{name: _section(name, cls, values[name]) for name, cls in SECTIONS.items()})
    for problem in _problems(plan.model, plan.cluster):
        raise PlanError(problem)
    return plan


def _override(text: str) -> dict[str, dict[str, Any]]:
    name, equals, value = text.partition("=")
    section, dot, key = name.partition(".")
    if not equals or not dot or section not in SECTIONS:
        names = ", ".join(SECTIONS)
        raise PlanError(f"--set {text}: expected SECTION.KEY=VALUE, a section of {names}")
    return {section: {key: _parse(value)}}


def _parse(text: str) -> Any:
    """Parse YAML. The import is here because training nodes need no YAML package. Raises
    PlanError."""
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


def _section(name: str, cls: type[Any], keys: Mapping[Any, Any]) -> Any:
    hints, values = get_type_hints(cls, include_extras=True), {}
    for key in keys:
        if key not in hints:
            raise PlanError(f"{name}.{key}: unknown key, there are {', '.join(hints)}")
    for entry in dataclasses.fields(cls):
        place, value = f"{name}.{entry.name}", keys.get(entry.name)
        if value is not None:
            values[entry.name] = _convert(place, value, hints[entry.name])
        elif entry.default is dataclasses.MISSING:
            raise PlanError(f"{place}: missing ({entry.metadata['help']})")
    return cls(**values)


def _convert(place: str, value: Any, hint: Any) -> Any:
    """Return the value of key ``place`` as the type ``hint``. Raises PlanError for a value of
    another type or out of bounds."""
    if type(None) in (options := get_args(hint)):
        hint = options[0]
    if hint is SchemeKind:
        if value not in [*SchemeKind]:
            raise PlanError(f"{place}: must be one of {', '.join(SchemeKind)}, got {value}")
        return SchemeKind(value)
    kind, bounds = get_args(hint) or (hint, Bounds())
    if kind is bool:
        if not isinstance(value, bool):
            raise PlanError(f"{place}: must be {_NAMES[kind]}, got {value!r}")
        return value
    try:
        number = float(value)  # YAML 1.1 reads 65e9 as text
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if isinstance(value, bool) or not isfinite(number) or (kind is int and number != int(number)):
        raise PlanError(f"{place}: must be {_NAMES[kind]}, got {value!r}")
    value = kind(number if isinstance(value, str) else value)
    for name, bound in bounds._asdict().items():
        if bound is not None and not _RELATIONS[name](value, bound):
            raise PlanError(f"{place}: must be {_RELATION_TEXTS[name]} {bound:g}, got {value:.40g}")
    return value


def _problems(model: Model, cluster: Cluster) -> Iterator[str]:
    """Yield a message for each conflict between keys."""
    missing = [name for name in _SHAPE if getattr(model, name) is None]
    if model.parameters is None:
        if missing:
            yield f"model.{missing[0]}: missing; give the whole shape or model.parameters"
        if model.expert_parameters:
            yield "model.expert_parameters: only together with model.parameters"
    elif len(missing) < len(_SHAPE):
        yield "model.parameters: give it or the shape, not both"
    elif model.experts:
        yield "model.experts: with model.parameters, give model.expert_parameters"
    elif model.expert_parameters > model.parameters:
        yield "model.expert_parameters: must be at most model.parameters"
    if model.experts and model.experts_per_token > model.experts:
        yield f"model.experts_per_token: must be at most model.experts ({model.experts})"
    missing = [name for name in _SPEED if getattr(cluster, name) is None]
    speed = ", ".join(_SPEED)
    if cluster.step_seconds is None and missing:
        yield f"cluster.{missing[0]}: missing; give all of {speed}, or step_seconds"
    if cluster.step_seconds is not None and len(missing) < len(_SPEED):
        yield f"cluster.step_seconds: give it or {speed}, not both"
    if cluster.racks is not None and cluster.racks > cluster.nodes:
        yield f"cluster.racks: must be at most cluster.nodes ({cluster.nodes})"
    if cluster.host_memory_reserved_gb >= cluster.host_memory_gb:
        yield "cluster.host_memory_reserved_gb: must be below cluster.host_memory_gb"
    if model.expert_parameters and cluster.step_seconds is None:
        yield (
            "cluster.step_seconds: missing; model.expert_parameters does not say through how many"
            f" of them a token goes: give it instead of {speed}, or give the shape"
        )
