"""Facts of the run that never change."""

from __future__ import annotations

from dataclasses import dataclass

from deadpool_megatron.layout.records import Generation, Restore
from deadpool_megatron.settings import Settings

INITIAL = Restore("initial", Generation(0, 0))


@dataclass(frozen=True)
class Config:
    """Facts of the run. Nodes 0 .. ``nodes`` - 1 are wished for training, the rest are spares.

    ``start``: what epoch 1 begins with (kind initial, durable or dump). ``restarted``: all
    processes of the run had ended, the agents come up again; ``begins_anew``: with the settings of
    a new start, which count from now on. ``check_only``: the run ends when its nodes are judged.
    """

    nodes: int
    spares: int
    nproc: int
    settings: Settings
    dump_directory: str
    start: Restore = INITIAL
    restarted: bool = False
    begins_anew: bool = False
    check_only: bool = False

    @property
    def world_size(self) -> int:
        """Number of roles."""
        return self.nodes * self.nproc

    def provisional_role(self, node: int, slot: int) -> int:
        """The role a member builds for before it has a seat: its stage class is likely needed."""
        return (node % self.nodes) * self.nproc + slot
