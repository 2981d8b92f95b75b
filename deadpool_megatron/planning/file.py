"""Reading a plan: YAML and overrides -> :class:`~.keys.Plan`, strictly.

Whatever is wrong raises PlanError with one line that names the key; nothing is guessed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from deadpool_megatron.planning.keys import SECTIONS, Cluster, Model, Plan, PlanError

_SHAPE = ("layers", "hidden", "ffn", "heads", "vocab")
_SPEED = ("tflops_per_gpu", "efficiency", "tokens_per_step")
# Beyond these nothing is meant, and formulas end in infinity.
_SMALLEST, _LARGEST = 1e-9, 1e18
_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def read_plan(path: Path, overrides: Iterable[str] = ()) -> Plan:
    """The plan in a file, with ``section.key=value`` put over it. Raises PlanError."""
    try:
        values = _parse(path.read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(values, dict):
        raise PlanError(f"{path}: expected sections ({', '.join(SECTIONS)})")
    for override in overrides:
        _override(values, override)
    try:
        plan = make_plan(values)
        if plan.cluster.domains_file is None:
            return plan
        domains = path.parent / plan.cluster.domains_file
        return dataclasses.replace(plan, domains_text=_domains(domains))
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def _domains(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise PlanError(f"cluster.domains_file: {error.strerror}: {path}") from error
    except ValueError as error:  # no text, or no name of a file
        raise PlanError(f"cluster.domains_file: {str(path)!r}: {error}") from error


def make_plan(values: Mapping[Any, Any]) -> Plan:
    """A plan from nested mappings, every key and value checked. Raises PlanError."""
    for name in values:
        if name not in SECTIONS:
            raise PlanError(f"{name}: unknown section, there are {', '.join(SECTIONS)}")
    sections = {name: _section(name, cls, values.get(name)) for name, cls in SECTIONS.items()}
    plan = Plan(**sections)
    _check_model(plan.model)
    _check_cluster(plan.cluster)
    if plan.model.expert_parameters and plan.cluster.step_seconds is None:
        raise PlanError(
            "cluster.step_seconds: missing; model.expert_parameters does not say through how many"
            f" of them a token goes: give it in place of {', '.join(_SPEED)}, or give the shape"
        )
    return plan


def _parse(text: str, name: str) -> Any:
    # Only this command reads YAML; training nodes need not have the package.
    try:
        import yaml
    except ImportError as error:
        raise PlanError(
            "PyYAML is missing: install it with pip install 'deadpool-megatron[plan]'"
        ) from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """PyYAML takes the last of two equal keys without a word; this one refuses."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key, _ in node.value:
                if key.value in seen:
                    raise PlanError(f"{name}: {key.value}: given twice")
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except (ValueError, TypeError, RecursionError) as error:
        raise PlanError(f"{name}: no YAML that makes sense: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise PlanError(f"{name}{where}: no YAML: {problem}") from error


def _override(values: dict[Any, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    section, dot, key = name.partition(".")
    if not equals or not dot or section not in SECTIONS:
        raise PlanError(f"--set {override}: expected SECTION.KEY=VALUE, e.g. cluster.spares=4")
    inner = values.get(section)
    if inner is not None and not isinstance(inner, dict):
        return  # make_plan says what is wrong with it
    values[section] = {**(inner or {}), key: _parse(text, f"--set {override}")}


def _section(name: str, cls: type[Any], given: Any) -> Any:
    if given is None:
        given = {}
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
            place = f"{name}.{key}"
            found[key] = _checked(place, given[key], hints[key], entry.metadata)
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
    if "most" in bounds and value > bounds["most"]:
        raise PlanError(f"{place}: must be at most {bounds['most']}, got {value}")
    return value


def _converted(place: str, value: Any, kind: Any) -> Any:
    wrong = PlanError(f"{place}: must be {_NAMES[kind]}, got {_shown(value)}")
    if kind in (bool, str):
        if isinstance(value, kind):
            return value
        raise wrong
    if isinstance(value, bool):
        raise wrong
    if isinstance(value, str):
        # For YAML 1.1, 65e9 is text.
        try:
            value = float(value)
        except ValueError:
            raise wrong from None
    if not isinstance(value, int | float) or (isinstance(value, float) and not isfinite(value)):
        raise wrong
    if not (value == 0 or _SMALLEST <= abs(value) <= _LARGEST):
        raise PlanError(
            f"{place}: must be between {_SMALLEST:g} and {_LARGEST:g}, got {_shown(value):.40}"
        )
    if kind is int and value != int(value):
        raise wrong
    return kind(value)


def _shown(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # written with the digits of base 16, of which YAML allows any number
        return "thousands of digits"


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
    if cluster.racks is not None and cluster.domains_file is not None:
        raise PlanError("cluster.racks: give it or cluster.domains_file, not both")
    if cluster.racks is not None and cluster.racks > cluster.nodes:
        raise PlanError(f"cluster.racks: must be at most cluster.nodes ({cluster.nodes})")
    if cluster.host_memory_reserved_gb >= cluster.host_memory_gb:
        raise PlanError("cluster.host_memory_reserved_gb: must be below cluster.host_memory_gb")
