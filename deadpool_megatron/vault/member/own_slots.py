"""The segment that one process writes: made with the role, or before there is one."""

from __future__ import annotations

import os
from pathlib import Path

from deadpool_megatron.layout.records import RoleLayout, Seat
from deadpool_megatron.vault.memory.budget import Budget
from deadpool_megatron.vault.shm.affinity import memory_near
from deadpool_megatron.vault.shm.segment import Segment, own_name


class OwnSlots:
    """Segments of the process on ``seat``, in the ``directory`` of its node. One thread.

    ``memory_node``: NUMA node that they are to lie on.
    """

    def __init__(
        self, directory: Path, seat: Seat, budget: Budget, memory_node: int | None
    ) -> None:
        self._directory = directory
        self._seat = seat
        self._budget = budget
        self._memory_node = memory_node
        self._parked: Segment | None = None

    def path(self, role: int) -> Path:
        """Returns where the segment for ``role`` is, or will be."""
        return self._directory / own_name(role, self._seat)

    def park(self, layout: RoleLayout) -> None:
        """Make the slots of a process that waits for a role, most likely one with this ``layout``:
        to fill gigabytes of memory with zeros takes seconds that a recovery need not have.

        Raises NoRoom.
        """
        place = f"{self._seat.node}.{self._seat.slot}"
        for left in self._directory.glob(f".parked-{place}.*"):
            left.unlink(missing_ok=True)  # of an earlier process on this place
        name = f".parked-{place}.{self._seat.incarnation}.seg.{os.getpid()}"
        self._parked = self._create(self._directory / name, layout)

    def take(self, layout: RoleLayout) -> Segment:
        """Returns the segment for a role: the one that is there, else what was parked, if it is
        laid out as this role needs it, else a new one. Raises NoRoom."""
        path, parked = self.path(layout.role), self._parked
        if path.exists():
            return Segment.open(path, budget=self._budget)
        self._parked = None
        if parked is not None:
            if parked.become(path, layout):
                return parked
            parked.unlink()
        return self._create(path, layout)

    def close(self) -> None:
        """Let go of what is parked; segments of roles stay."""
        if self._parked is not None:
            self._parked.unlink()
            self._parked = None

    def _create(self, path: Path, layout: RoleLayout) -> Segment:
        names = [part.name for part in layout.parts]
        with memory_near(self._memory_node):
            return Segment.create(path, layout, self._seat, names, budget=self._budget)
