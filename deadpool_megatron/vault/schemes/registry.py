"""The registry of schemes: from an epoch record to the objects that carry out its protection.

Files of a scheme are imported for the records that need them only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from deadpool_megatron.layout.records import EpochRecord, Generation, Recipe, RoleLayout, Source
from deadpool_megatron.settings import SchemeKind
from deadpool_megatron.vault.copies import Copies, Local, LocalTwice, Scheme
from deadpool_megatron.vault.shm.segment import Segment
from deadpool_megatron.vault.shm.table import Place
from deadpool_megatron.vault.slot_store import SlotStore

Claim = Callable[[RoleLayout], AbstractContextManager[tuple[Segment, int]]]
# Node, role, and the reason why its bytes could not be used.
Tried = tuple[int, int, str]
# By name of the part, or :func:`gradient_chain.key`; None while nothing was obtained.
Obtained = Mapping[str, Place] | None


class Rebuild:
    """A way to produce shard parts of a role that no node holds whole. One thread, except for
    :meth:`cut` and :meth:`accepts`."""

    def chain(self, recipe: Recipe) -> Mapping[Generation, Mapping[str, tuple[Source, ...]]]:
        """Return the parts of several generations from which the member computes the others."""
        return {}

    def obtain(
        self, layout: RoleLayout, part: str, recipe: Recipe, tried: list[Tried], deadline: float
    ) -> Place | None:
        """Produce a part of the restored generation; None if the scheme cannot.

        ``tried``: gets an entry for each place that failed. ``deadline``: monotonic; silent places
        are retried until then. Raises RestoreUnavailable, or VaultError when there is
        no memory or the epoch was closed.
        """
        return None

    def accepts(
        self, segment: Segment, slot: int, digests: Mapping[str, int], obtained: Obtained
    ) -> bool:
        """Return whether the member's result may be sealed; decoded parts were checked before."""
        return True

    def cut(self) -> None:
        """Break all connections, from any thread: the epoch is over."""


class Rebuilds:
    """The schemes that the recipes of a role in an epoch need, created at their first use.

    ``claim``: gives the claimed slot for the role.
    """

    def __init__(self, store: SlotStore, record: EpochRecord, role: int, claim: Claim) -> None:
        self._about = store, record, role
        self._claim = claim
        self._parity: Rebuild | None = None
        self._chain: Rebuild | None = None

    def of(self, recipe: Recipe) -> list[Rebuild]:
        """Return the schemes of a recipe."""
        found: list[Rebuild] = []
        if recipe.decodings:
            if self._parity is None:
                from deadpool_megatron.vault.schemes.parity_decode import Decoder

                self._parity = Decoder(*self._about, self._claim)
            found.append(self._parity)
        if recipe.replay is not None:
            if self._chain is None:
                from deadpool_megatron.vault.schemes.gradients import Replayed

                self._chain = Replayed(*self._about)
            found.append(self._chain)
        return found

    def cut(self) -> None:
        """Break all connections, from any thread: the epoch is over."""
        for made in (self._parity, self._chain):
            if made is not None:
                made.cut()


def scheme_of(record: EpochRecord, store: SlotStore) -> Scheme:
    """Return the scheme that a record names, for the slots of this node."""
    match record.protection.kind:
        case SchemeKind.PARITY:
            from deadpool_megatron.vault.schemes.parity import Parity

            return Parity(record, store)
        case SchemeKind.RECOMPUTE:
            from deadpool_megatron.vault.schemes.gradients import Recompute

            return Recompute(record, store.ledger.rehearsed)
        case SchemeKind.LOCAL:
            return Local(record)
        case SchemeKind.LOCAL_TWICE:
            return LocalTwice(record)
    return Copies(record)
