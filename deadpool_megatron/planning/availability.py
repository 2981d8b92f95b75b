"""The share of node hours that train, by the number of spares and of model replicas. Pure.

Nodes fail and return independently of each other, so the number of live nodes has a binomial
distribution. A failed node is away until it is repaired. The calculation ignores the seconds of
a recovery, and the loss of several nodes of a rack at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def training_share(replicas: Sequence[int], nodes: int, spares: int, live_share: float) -> float:
    """Return the mean share of all node hours, those of spares included, that train.

    ``replicas``: the possible numbers of model replicas, ascending; the last needs ``nodes`` nodes.
    A smaller number trains at a proportional rate. ``live_share``: the share of time in which a
    node is live, above 0 and below 1.
    """
    total, nodes_each = nodes + spares, nodes / replicas[-1]
    mean = 0.0
    for live in range(total + 1):
        # Logarithms, as the binomial coefficients of large clusters exceed a float.
        ways = math.lgamma(total + 1) - math.lgamma(live + 1) - math.lgamma(total - live + 1)
        chance = live * math.log(live_share) + (total - live) * math.log1p(-live_share)
        training = max((number for number in replicas if number * nodes_each <= live), default=0)
        mean += math.exp(ways + chance) * training * nodes_each
    return mean / total
