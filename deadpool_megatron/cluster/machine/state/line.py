"""The line of a run: how far it has come, what it can continue from, and its protection."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from deadpool_megatron.layout.planner import is_kept
from deadpool_megatron.layout.records import Generation, Restore
from deadpool_megatron.layout.schemes import ProtectionPlan

_NOTHING = Generation(0, 0)


@dataclass(frozen=True)
class KeptLine:
    """``kept``: see layout.planner.keep_line. ``newest``: last iteration reported by an open
    epoch. ``valid``: what the run can fall back to on disk, the newest first; ``seen``: whether
    that was looked at since the last epoch was closed. ``struck``: paths of checkpoints that could
    not be loaded; ``doubted``: of the last one that is left, which gets another try. ``ever_ran``:
    whether an epoch was ever open. ``told``: the last iteration reported by the newest epoch that
    has reported any: it is behind ``newest`` after a return to an old checkpoint.
    """

    kept: Mapping[int, int] = field(default_factory=dict)
    newest: int = 0
    valid: tuple[Restore, ...] = ()
    seen: bool = False
    struck: frozenset[str] = frozenset()
    doubted: str = ""
    ever_ran: bool = False
    told: Generation = _NOTHING

    @property
    def is_empty(self) -> bool:
        """Return whether nothing was ever computed."""
        return not self.ever_ran and not self.newest

    @property
    def durable(self) -> Restore | None:
        """The first of what the run can fall back to."""
        return next(iter(self.valid), None)

    def reported(self, generation: Generation) -> KeptLine:
        """Returns the line when an iteration was reported."""
        newest, told = max(self.newest, generation.iteration), max(self.told, generation)
        return replace(self, newest=newest, told=told)

    def with_valid(self, restore: Restore) -> KeptLine:
        """Returns the line when a checkpoint became valid: whatever had its name was another."""
        k = restore.generation.iteration
        left = [one for one in self.valid if one.path != restore.path]
        older = [one for one in left if one.generation.iteration < k]
        newer = [one for one in left if one not in older]
        return replace(self, valid=(*newer, restore, *older), struck=self.struck - {restore.path})

    def without(self, paths: Collection[str]) -> KeptLine:
        """Returns the line without the checkpoints that have these paths."""
        return replace(self, valid=tuple(one for one in self.valid if one.path not in paths))

    def doubting(self, path: str) -> KeptLine:
        """Returns the line after the checkpoint at ``path`` could not be loaded: it is struck off.
        The last one only at the second time: the fault may have been a device's."""
        left = self.without({path})
        if not left.valid and self.valid and path != self.doubted:
            return replace(self, doubted=path)
        return replace(left, struck=self.struck | {path})

    def keeps(self, generation: Generation) -> bool:
        """Returns whether training continued from this generation, or may."""
        return is_kept(self.kept, generation)


@dataclass(frozen=True)
class ChosenProtection:
    """``plan``: for the next record. ``why``: why it is another one than the last. ``told``: the
    one that was reported last."""

    plan: ProtectionPlan = field(default_factory=ProtectionPlan)
    why: str = ""
    told: ProtectionPlan | None = None

    def changed(self, plan: ProtectionPlan, why: str) -> ChosenProtection:
        """Returns the choice of another plan."""
        return replace(self, plan=plan, why=why)
