"""The share of node hours that train, by the number of spares and of model replicas. Pure.

Nodes fail and return independently of each other, so the number of live nodes is binomial. A
failure takes the time of its repair; the seconds of a recovery are left out, as is the loss of
several nodes of a rack at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def training_share(replicas: Sequence[int], nodes: int, spares: int, live_share: float) -> float:
    """Return the mean share of all node hours, those of spares included, that train.

    ``replicas``: the possible numbers of model replicas, ascending; the last takes ``nodes`` nodes.
    A smaller number trains at its share of the rate. ``live_share``: hours in which a node is live,
    between 0 and 1, both excluded.
    """
    bought, each = nodes + spares, nodes / replicas[-1]
    mean = 0.0
    for live in range(bought + 1):
        ways = math.lgamma(bought + 1) - math.lgamma(live + 1) - math.lgamma(bought - live + 1)
        chance = live * math.log(live_share) + (bought - live) * math.log1p(-live_share)
        training = max((number for number in replicas if number * each <= live), default=0)
        mean += math.exp(ways + chance) * training * each
    return mean / bought
