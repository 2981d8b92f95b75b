"""One plan under every scheme, side by side: what each costs and what each survives."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from deadpool_megatron.planning import traffic
from deadpool_megatron.planning.assess import Assessment, assess, busiest, lost_steps
from deadpool_megatron.planning.keys import Plan, PlanError

SCHEMES = ("buddy", "parity", "local", "local-twice", "recompute")


@dataclass(frozen=True)
class Row:
    """A scheme: what was worked out, or why it cannot be."""

    scheme: str
    found: Assessment | None
    refusal: str = ""

    def facts(self) -> dict[str, object]:
        """Plain values for JSON; ``sent_bytes_per_step``: of the busiest node, on average."""
        found = self.found
        if found is None:
            return {"scheme": self.scheme, "ok": False, "error": self.refusal}
        plan, risk = found.plan, found.risk
        ship = busiest(found, "ship_bytes")[1]
        lost = lost_steps(plan, found.placement.slots)
        return {
            "scheme": self.scheme,
            "ok": True,
            "memory_bytes": busiest(found, "memory_bytes")[1],
            "sent_bytes_per_step": ship * traffic.mean_share(plan),
            "commit_of_window": found.timing.commit_seconds / found.timing.window_seconds,
            "loss_probability": list(risk.loss_probability),
            "fatal_domains": len(risk.fatal_domains),
            "domains": len(set(found.placement.domains.values())),
            "most_lost_steps": lost,
            "most_lost_seconds": lost * found.timing.step_seconds,
            "goodput": found.goodput.hot_swap,
            "reaches_goal": found.reaches_goal,
        }


def compare(plan: Plan) -> list[Row]:
    """Every scheme with the numbers of the plan; one that cannot hold says what to change.

    Recompute needs every step's gradients, and so is taken at a cadence of 1.
    """
    rows = []
    for scheme in SCHEMES:
        cadence = 1 if scheme == "recompute" else plan.protection.cadence
        protection = dataclasses.replace(plan.protection, scheme=scheme, cadence=cadence)
        try:
            found = assess(dataclasses.replace(plan, protection=protection))
            rows.append(Row(protection.name, found))
        except PlanError as error:
            rows.append(Row(protection.name, None, str(error)))
    return rows
