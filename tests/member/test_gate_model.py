"""The argument of member/protection.py, tried: in whatever order roles go on and copies
arrive, after the loss of any one role all others still hold a generation that its copy holds too.
"""

import random
from dataclasses import dataclass, field

import pytest

from deadpool_megatron.layout.records import is_due
from deadpool_megatron.layout.schemes import max_lost_iterations

ROLES = 3


@dataclass
class Role:
    """``own`` and ``copy``: generations in slots, oldest first; ``pending``: the gate's list."""

    done: int = 0
    passed: int = 0  # the iteration whose gate was passed last
    own: list[int] = field(default_factory=lambda: [0])
    copy: list[int] = field(default_factory=lambda: [0])
    committed: int = 0
    shipping: int | None = None
    pending: list[int] = field(default_factory=list)


class Job:
    """Roles that depend on each other as training makes them."""

    def __init__(self, slots: int, lag: int, every: int, spans_the_world: bool) -> None:
        self.slots, self.lag, self.every, self.spans = slots, lag, every, spans_the_world
        self.roles = [Role(pending=[0] * (lag + 1)) for _ in range(ROLES)]

    def go_on(self, role: Role) -> None:
        """The next thing that this role does, if it can."""
        k = role.done + 1
        if role.passed < k:
            # Forward and backward of k need every peer's update k - 1.
            if min(r.done for r in self.roles) >= k - 1 and self._gate_opens(role, k):
                role.passed = k
            return
        if self.spans and min(r.passed for r in self.roles) < k:
            return  # in the collective
        role.done = k
        if is_due(k, self.every):
            if len(role.own) == self.slots:
                role.own.pop(0)
            role.own.append(k)
            role.pending = [*role.pending, k][-(self.lag + 1) :]

    def _gate_opens(self, role: Role, k: int) -> bool:
        if not is_due(k, self.every) and k > 1:
            return True
        return len(role.pending) <= self.lag or role.pending[0] <= role.committed

    def ship(self, role: Role) -> None:
        """A copy begins to arrive in the oldest slot, or has arrived."""
        if role.shipping is None:
            ahead = [g for g in role.own if g > role.committed]
            if ahead:
                role.shipping = ahead[0]
                if len(role.copy) == self.slots:
                    role.copy.pop(0)
        elif role.shipping in role.own:
            role.copy.append(role.shipping)
            role.committed, role.shipping = role.shipping, None
        else:
            role.shipping = None

    def resume_point(self, lost: Role) -> int | None:
        """The newest generation that all can produce without the node of ``lost``."""
        held = set(lost.copy)
        for role in self.roles:
            if role is not lost:
                held &= set(role.own)
        return max(held, default=None)


def play(job: Job, seed: int, moves: int = 600) -> int | None:
    """The most iterations that a loss would ever have cost; None if it would have cost state."""
    dice = random.Random(seed)
    worst = 0
    eager = [dice.random() for _ in job.roles]  # some roles are quicker, some links slower
    for _ in range(moves):
        number = dice.randrange(ROLES)
        role = job.roles[number]
        (job.go_on if dice.random() < eager[number] else job.ship)(role)
        for lost in job.roles:
            point = job.resume_point(lost)
            if point is None:
                return None
            worst = max(worst, max(r.done for r in job.roles) - point)
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2, 3, 5])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("spans", [True, False])
def test_a_generation_that_all_can_produce_is_always_there(every, lag, spans):
    found = [
        play(Job((2 if spans else 3) + lag, lag, every, spans), seed, 300) for seed in range(60)
    ]
    assert None not in found
    longest = max(worst for worst in found if worst is not None)
    assert longest <= max_lost_iterations(every, lag, spans_the_world=spans)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 3])
def test_with_two_slots_and_no_collective_state_would_be_lost(every):
    """The reason for the third slot; it also shows that the model can fail."""
    assert None in [play(Job(2, 0, every, False), seed) for seed in range(300)]
