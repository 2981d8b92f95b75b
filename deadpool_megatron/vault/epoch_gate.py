"""The epoch gate: which epoch is open on this node, and which roles and nodes are part of it.

Closing is atomic with respect to sealing because both happen under one lock: a seal checks the
epoch, writes the header and enters the ledger without releasing the lock. The lock is never held
over a checksum, a socket call or the reservation of memory.
"""

from __future__ import annotations

import threading
import time

from deadpool_megatron.layout.records import EpochRecord, Seat
from deadpool_megatron.vault.errors import Refusal, VaultError
from deadpool_megatron.vault.lanes import Lanes
from deadpool_megatron.vault.transport import Channel


class EpochGate:
    """Epochs of one node. Thread-safe.

    ``lock`` is the only lock of the vault's shared state: it guards this gate, the commit ledger,
    and the slots with their table. ``changed`` is notified whenever a thread that waits for it may
    be able to continue. ``lanes``: none in a process without a vault, which dumps slots.
    """

    def __init__(self, node: int, lanes: Lanes) -> None:
        self.node = node
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.record: EpochRecord | None = None
        self.open_epoch = 0
        self.closed_epoch = 0
        self.closed_at = 0.0  # monotonic
        self.lanes = lanes

    def judge(self, epoch: int) -> Refusal | None:
        """Return None for the open epoch, EARLY for an epoch whose record has not arrived yet,
        STALE for an epoch that is over."""
        with self.lock:
            if epoch == self.open_epoch:
                return None
            newest = max(self.open_epoch, self.closed_epoch)
            return Refusal.EARLY if epoch > newest else Refusal.STALE

    def is_open(self, epoch: int) -> bool:
        """Return whether parts of this epoch may be sealed."""
        return self.open_epoch == epoch

    def require_open(self, epoch: int) -> None:
        """Raise VaultError when nothing of this epoch may be sealed any more."""
        if not self.is_open(epoch):
            raise VaultError(f"epoch {epoch} was closed")

    def pause(self, epoch: int, seconds: float) -> None:
        """Wait before a retry; closing the epoch ends the wait."""
        with self.changed:
            self.changed.wait_for(lambda: not self.is_open(epoch), timeout=seconds)

    def open(self, record: EpochRecord) -> None:
        """Open the epoch of a record after preparing its slots; called under the lock."""
        self.open_epoch = record.epoch
        self.changed.notify_all()

    def close(self, epoch: int) -> bool:
        """Close an epoch and all older epochs; False when a newer epoch is open. Called under the
        lock."""
        if epoch < self.open_epoch:
            return False
        self.closed_epoch = max(self.closed_epoch, epoch)
        self.open_epoch = 0
        self.closed_at = time.monotonic()
        self.changed.notify_all()
        return True

    def own_roles(self) -> dict[int, Seat]:
        """Return the roles that are seated on this node in the current record."""
        if self.record is None:
            return {}
        return {r: seat for r, seat in self.record.seats.items() if seat.node == self.node}

    def dial(self, node: int) -> Channel:
        """Connect to the vault of a node of the record. Raises OSError, WireError, or VaultError
        for a node that is not live."""
        address = self.record.nodes.get(node) if self.record is not None else None
        if address is None or not self.lanes.lanes:
            raise VaultError("not a live node")
        return self.lanes.dial(node, (address.host, address.vault_port))
