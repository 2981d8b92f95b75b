"""The registry of schemes: from an epoch record to the object that carries out its protection.

The modules of a scheme are imported only for records that name it.
"""

from __future__ import annotations

from deadpool_megatron.layout.records import EpochRecord
from deadpool_megatron.settings import SchemeKind
from deadpool_megatron.vault.copies import Copies, Local, LocalTwice, Scheme
from deadpool_megatron.vault.slot_store import SlotStore


def scheme_of(record: EpochRecord, store: SlotStore) -> Scheme:
    """Return the scheme that a record names, for the slots of this node."""
    match record.protection.kind:
        case SchemeKind.PARITY:
            from deadpool_megatron.vault.schemes.parity import Parity

            return Parity(record, store)
        case SchemeKind.LOCAL:
            return Local(record)
        case SchemeKind.LOCAL_TWICE:
            return LocalTwice(record)
    return Copies(record)
