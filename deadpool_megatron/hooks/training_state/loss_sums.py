"""Megatron's process-wide sums of losses that are only logged: captured, and put back.

Those of the experts lie in a dictionary up to megatron-core 0.17 and in a ``MoEMetricsTracker``
since; those of multi-token prediction in a dictionary, with other keys since 0.19. Either way an
entry has tensors, and the groups over which they are summed when they are logged.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor

try:
    from megatron.core.transformer.moe import moe_logging
except ImportError:  # before 0.18
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    moe_logging = None

_SUMS = "aux."
_GROUPS = "aux_groups."
_SUM_GROUPS = ("reduce_group", "avg_group")
_SWITCHES = ("reduce_group_has_dp", "needs_dp_avg")
_MTP = "mtp"
_MOE = "moe."
_Entry = MutableMapping[str, Any]


def capture() -> dict[str, Any]:
    """The sums, and over which groups they are summed; tensors as they are, not copies."""
    values: dict[str, Any] = {}
    for name, entry in _entries().items():
        sums = {f"{_SUMS}{name}/{key}": value for key, value in _tensors(entry).items()}
        if sums:
            values |= sums
            values[f"{_GROUPS}{name}"] = _summed_over(entry)
    return values


def restore(values: dict[str, Any]) -> None:
    """Set those captured, make those that this process has not met yet, zero all others."""
    kept = {name: value for name, value in values.items() if name.startswith(_SUMS)}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for place, sums in kept.items():
        name, _, key = place.removeprefix(_SUMS).rpartition("/")
        entry = _entries().get(name)
        if entry is None:
            entry = _new_entry(name, sums.to(device, copy=True))
        if key in entry:
            entry[key].copy_(sums)
        else:
            entry[key] = sums.to(device, copy=True)
        entry.update(_groups_of(values.get(f"{_GROUPS}{name}", {})))
    for name, entry in _entries().items():
        left = {key: one for key, one in _tensors(entry).items() if _place(name, key) not in kept}
        for tensor in left.values():
            tensor.zero_()
        if left and len(left) == len(_tensors(entry)):
            entry.update(dict.fromkeys(_SUM_GROUPS))


def _place(name: str, key: str) -> str:
    return f"{_SUMS}{name}/{key}"


def _entries() -> dict[str, _Entry]:
    """By name; what is changed in them is changed in Megatron."""
    found = {f"{_MOE}{name}": _fields(entry) for name, entry in _of_experts().items()}
    return {**found, _MTP: MTPLossLoggingHelper.tracker}


def _of_experts() -> MutableMapping[str, Any]:
    if moe_logging is None:
        tracker: MutableMapping[str, Any] = get_moe_layer_wise_logging_tracker()
        return tracker
    metrics: MutableMapping[str, Any] = moe_logging.get_moe_metrics_tracker().metrics
    return metrics


def _fields(entry: Any) -> _Entry:
    return entry if isinstance(entry, dict) else vars(entry)


def _new_entry(name: str, values: Tensor) -> _Entry:
    """For experts; the entry of multi-token prediction is always there."""
    made = {} if moe_logging is None else moe_logging.MetricEntry(values=values)
    _of_experts()[name.removeprefix(_MOE)] = made
    return _fields(made)


def _tensors(entry: _Entry) -> dict[str, Tensor]:
    return {key: value for key, value in entry.items() if isinstance(value, Tensor)}


def _summed_over(entry: _Entry) -> dict[str, Any]:
    """The groups over which an entry is summed when it is logged, as parallel_state names them.

    A forward pass sets them. A process that logs the restored step before its first one would leave
    these communications out, or go on in groups of a role that it was built for before.
    """
    names = {id(value): name for name, value in vars(parallel_state).items()}
    found: dict[str, Any] = {key: bool(entry[key]) for key in _SWITCHES if key in entry}
    for key in _SUM_GROUPS:
        group = entry.get(key)
        # One that somebody else has made cannot be found again, and stays as it is.
        if group is None or id(group) in names:
            found[key] = None if group is None else names[id(group)]
    return found


def _groups_of(kept: dict[str, Any]) -> dict[str, Any]:
    """Inverse of :func:`_summed_over`."""
    return {
        key: getattr(parallel_state, name) if isinstance(name, str) else name
        for key, name in kept.items()
    }
