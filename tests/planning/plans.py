"""Small plans for the tests of this folder: changed by key, sections by name."""

from typing import Any

from deadpool_megatron.planning.assessment import assess
from deadpool_megatron.planning.sections import Plan, PlanError, make_plan

BASE: dict[str, dict[str, Any]] = {
    "model": {"parameters": 10**10},
    "parallel": {"tp": 2, "pp": 2, "dp": 4},
    "cluster": {
        "nodes": 8,
        "gpus_per_node": 2,
        "spares": 1,
        "host_memory_gb": 500,
        "nic_gb_s": 10,
        "pcie_gb_s": 20,
        "checksum_gb_s": 5,
        "step_seconds": 20,
        "forward_backward_fraction": 0.9,
    },
}


def make(**sections: dict[str, Any]) -> Plan:
    """The base with ``section={key: value}`` put over it; None takes a key away."""
    names = BASE.keys() | sections.keys()
    return make_plan({name: BASE.get(name, {}) | sections.get(name, {}) for name in names})


def refusals(*plans: dict[str, dict[str, Any]]) -> None:
    """Print for each plan, changed as by :func:`make`, why it does not hold."""
    for sections in plans:
        try:
            print(assess(make(**sections)).verdict())
        except PlanError as error:
            print(error)
