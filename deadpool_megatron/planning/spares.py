"""The chance that a spare is there when it is needed, and the share of time in steps that count.

Each of N + S nodes fails with MTBF M and is back after repair R, whether it trains or waits, and
independently. Seen at any moment it is away with probability q = R / (M + R); this holds for every
distribution of failures and repairs, not only for the exponential one. The number of nodes that are
away is a birth-death process whose stationary law is binomial (for small q: Poisson with mean
(N + S)·q), and training runs while at most S are away:

    available(S) = sum for d = 0..S of C(N+S, d) · q^d · (1-q)^(N+S-d)

Work in segments of length t with overhead c at the end of each, failures at rate L, cost C for each
failure, and a failed segment done again, is useful for the share

    useful = t / ((1/L + C) · (exp(L·(t + c)) - 1))

A hot swap has segments of one step; C is the swap and the finished steps that are computed again. A
restart has segments of one checkpoint interval; C is the restart.
"""

from __future__ import annotations

import math

# Beyond this exp() is a number of no use here: practically no segment is ever finished.
_LARGEST_EXPONENT = 700.0


def away_fraction(node_mtbf_hours: float, repair_hours: float) -> float:
    """Share of the time in which one node is being repaired."""
    return repair_hours / (node_mtbf_hours + repair_hours)


def at_most_away(nodes: int, most: int, fraction: float) -> float:
    """P that at most ``most`` of ``nodes`` are away."""
    if most >= nodes:
        return 1.0
    if most < 0 or fraction >= 1.0:  # a repair that is long enough makes it 1 by rounding
        return 0.0
    here, away = math.log1p(-fraction), math.log(fraction)
    whole = math.lgamma(nodes + 1)
    terms = (
        math.exp(
            whole
            - math.lgamma(count + 1)
            - math.lgamma(nodes - count + 1)
            + count * away
            + (nodes - count) * here
        )
        for count in range(most + 1)
    )
    return min(1.0, math.fsum(terms))


def no_spare_probability(nodes: int, spares: int, fraction: float) -> float:
    """P that a training node which fails finds all spares away."""
    return 1.0 - at_most_away(nodes + spares - 1, spares - 1, fraction)


def useful_fraction(
    failures_per_second: float, segment_seconds: float, overhead_seconds: float, cost_seconds: float
) -> float:
    """Share of the time that is kept; the formula stands in the text of this module."""
    exponent = failures_per_second * (segment_seconds + overhead_seconds)
    if exponent > _LARGEST_EXPONENT:
        return 0.0
    between = 1.0 / failures_per_second + cost_seconds
    return segment_seconds / (between * math.expm1(exponent))


def spares_needed(nodes: int, fraction: float, useful: float, goal: float) -> int | None:
    """Fewest spares with ``available · useful >= goal``; None when no number is enough."""
    if useful < goal:
        return None
    # As many spares as nodes is more than anybody buys; availability then is 1 for any sane q.
    for spares in range(nodes + 1):
        if at_most_away(nodes + spares, spares, fraction) * useful >= goal:
            return spares
    return None
