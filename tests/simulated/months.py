"""A long run at published failure rates, as its users would have it: job after job."""

import random
from collections import Counter

from tests.simulated.clock import Clock
from tests.simulated.hazards import KINDS
from tests.simulated.world import Shape, World

DAY = 86_400.0
#: failures of a node in a day on Meta's RSC-1 (arXiv 2410.21680)
RSC_1 = 6.50 / 1000
#: shares of causes among 419 interruptions of Llama 3 (arXiv 2407.21783, table 5), by what a
#: coordinator sees of them: 54 software bugs as processes that end, 7 NCCL timeouts and 17 GSP
#: errors as processes that stop, 6 silent corruptions as numbers that are not finite, the rest as
#: lost nodes
CAUSES = {"lose-node": 335, "end-member": 54, "suspect-member": 24, "see-nan": 6}
REPAIR_SECONDS = DAY  # until a lost node comes back under another number
DELAY_SECONDS = 0.02
CHECK_EVERY = 400


class Months:
    """Jobs of one size, one after the other."""

    def __init__(self, seed: str, shape: Shape, per_node_day: float = RSC_1) -> None:
        self.shape, self.per_node_day = shape, per_node_day
        self.clock, self.draw = Clock(seed, DELAY_SECONDS), random.Random(seed)
        self.returns: list[float] = []
        self._recoveries, self.ends = 0, Counter[str]()
        self.world = World(shape.config(), self.clock, CHECK_EVERY)

    @property
    def recoveries(self) -> int:
        return self._recoveries + self.world.state.recoveries.count

    def run(self, days: float) -> None:
        """Let failures come at random moments, a coordinator among them as often as a node."""
        until = self.clock.now + days * DAY
        nodes = self.shape.nodes + self.shape.spares
        while self.clock.now < until:
            at = self.clock.now + self.draw.expovariate(nodes * self.per_node_day / DAY)
            self._join_repaired(at)
            self.world.run_until(at)
            a, b = self.draw.randrange(1, 1 << 20), self.draw.randrange(1, 1 << 20)
            kind = self.draw.choices([*CAUSES], [*CAUSES.values()])[0]
            lost = len(self.world.nodes)
            KINDS[kind][1](self.world, a, b)
            if self.draw.random() < 1 / nodes:
                self.world.restart_coordinator(landed=b % 2 == 0, received=b % 3)
            lost -= len(self.world.nodes)
            self.returns += [at + self.draw.expovariate(1 / REPAIR_SECONDS)] * lost
            self.world.settle()
            if self.world.finished is not None:
                self.ends[self.world.finished.reason[:40]] += 1
                self._recoveries += self.world.state.recoveries.count
                self.world = World(self.shape.config(), self.clock, CHECK_EVERY)

    def _join_repaired(self, until: float) -> None:
        """Join the nodes that are repaired by then, each at its time."""
        for at in sorted(self.returns):
            if at < until:
                self.returns.remove(at)
                self.world.run_until(at)
                self.world.join()
