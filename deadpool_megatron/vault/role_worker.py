"""The work for a role that is seated on this node in an epoch: restore, seal, start replication.

The slots drive this work, not messages: a message of the member only triggers a check of the slots,
so no work is lost when the vault or the member dies between two steps. The thread that receives the
message seals; the worker's own thread checks once a second for parts that are left to seal.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from deadpool_megatron import failpoints
from deadpool_megatron.layout.records import EpochRecord, Generation, RoleLayout, Seat
from deadpool_megatron.vault.errors import Refused, VaultError
from deadpool_megatron.vault.replicate import Sender, sender_to
from deadpool_megatron.vault.restore import Restorer
from deadpool_megatron.vault.shm.segment import PartState, Segment, SlotState, checksum
from deadpool_megatron.vault.shm.table import Place
from deadpool_megatron.vault.slot_store import SlotStore

log = logging.getLogger(__name__)
# Answers a member that waits for its state, with the places of its parts or with an error.
RestoreAnswer = Callable[[dict[str, Place] | VaultError], None]


class RoleWorker(threading.Thread):
    """Thread of a role and an epoch; ends when the epoch is closed."""

    def __init__(self, store: SlotStore, record: EpochRecord, role: int, seat: Seat) -> None:
        super().__init__(name=f"role-{role}", daemon=True)
        self._store = store
        self._gate = store.gate
        self._ledger = store.ledger
        self._record = record
        self.epoch = record.epoch
        self._restored = record.restore.generation
        self._role = role
        self._seat = seat
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._sealing = threading.Lock()
        self._waiting: list[RestoreAnswer] = []
        self._layout: RoleLayout | None = None
        self._outcome: dict[str, Place] | VaultError | None = None
        self._replicators: list[Sender] = []
        self._refused: set[tuple[int, Generation]] = set()
        self._restorer = Restorer(store, record, role)

    def wake(self) -> None:
        """Check the slots again; from any thread."""
        self._wake.set()

    def restore_for(self, layout: RoleLayout, answer: RestoreAnswer) -> None:
        """Restore the parts for the member; ``answer`` is called once, from this thread."""
        with self._lock:
            self._layout = layout
            self._waiting.append(answer)
        self.wake()

    def cut(self) -> None:
        """Break connections and end soon: the epoch was closed."""
        for replicator in self._replicators:
            replicator.cut()
        self._restorer.cut()
        self.wake()

    def run(self) -> None:
        """Restore and seal until the epoch is closed."""
        while self._gate.is_open(self.epoch):
            self._wake.clear()
            layout = self._known_layout()
            if layout is not None:
                self._start_replicators(layout)
                if self._record.restore.kind in ("memory", "dump"):
                    self._restore(layout)
            self.seal()
            # The time limit bounds what a lost wake-up could cost.
            self._wake.wait(timeout=1.0)
        self.cut()
        self._answer(VaultError(f"epoch {self.epoch} is over"))

    def _known_layout(self) -> RoleLayout | None:
        """Return the layout that the member has sent, or that of the restored parts."""
        is_in_memory, table = self._record.restore.kind == "memory", self._store.table
        if self._layout is None:
            with self._gate.lock:
                own = table.own(self._role, self._seat)
                if own is not None:
                    self._layout = own.layout
                elif is_in_memory:
                    self._layout = table.layout(self._role)
        if self._layout is None and is_in_memory:
            self._layout = self._restorer.describe()
        return self._layout

    def _start_replicators(self, layout: RoleLayout) -> None:
        store = self._store
        try:
            if not self._replicators:
                with self._gate.lock:
                    scheme = self._ledger.require_scheme(self.epoch)
                    targets = scheme.owed(layout).names
                self._replicators = [sender_to(t, store, layout, scheme) for t in targets]
                for replicator in self._replicators:
                    replicator.start()
        except Refused:
            return  # closed just now

    # Restoring.

    def _restore(self, layout: RoleLayout) -> None:
        with self._lock:
            is_requested = bool(self._waiting)
        if not is_requested and self._is_superseded():
            self._outcome = None
            return
        corrupt = self._corrupt_part()
        if corrupt:
            self._outcome = None
        if self._outcome is None and not is_requested and not self._may_restore_early():
            return
        if self._outcome is None or (is_requested and isinstance(self._outcome, VaultError)):
            try:
                self._outcome = self._restorer.obtain(layout)
            except VaultError as error:
                log.warning("role %d: %s", self._role, error)
                self._outcome = error
                if corrupt:  # the commit gate waits for this part: close the epoch
                    restored = self._restored
                    self._store.on_bad(self.epoch, self._role, restored, corrupt)
        self._answer(self._outcome)

    def _is_superseded(self) -> bool:
        """Return whether a generation after the restored generation is committed: then no restore
        needs the restored generation again."""
        with self._gate.lock:
            committed = self._ledger.committed.get(self._role)
        return committed is not None and committed[0] > self._restored

    def _corrupt_part(self) -> str:
        """Return a restored part that was found damaged before it could be sent on, or ''."""
        outcome = self._outcome if isinstance(self._outcome, dict) else {}
        restored = self._restored
        for place in outcome.values():
            segment, slot = place.segment, place.slot
            is_bad = segment.entry(slot, place.name).state is PartState.BAD
            if is_bad and segment.generation(slot) == restored:
                return place.name
        return ""

    def _may_restore_early(self) -> bool:
        """Return whether to restore before the member requests it.

        A member that requests a restore waits, and does not write. Before its request it may be
        stopped between any two stores of the last epoch, so no slot may be used that it may have
        chosen. Two cases are safe: the member has never used a slot, or a slot holds the generation
        already, which the member does not overwrite. After a restart of the vault, a generation
        that the member has passed in this epoch is not restored either.
        """
        restored = self._restored
        with self._gate.lock:
            segment = self._store.table.own(self._role, self._seat)
            if segment is None:
                return True
            slots = range(segment.slots)
            epochs = [segment.epoch(slot) for slot in slots]
            held = [segment.generation(s) for s in slots if segment.state(s) is SlotState.SEALED]
            newer = [s for s in slots if segment.generation(s) > restored]
        if any(epochs[slot] == self.epoch for slot in newer):
            return False
        return restored in held or not any(epochs)

    def _answer(self, outcome: dict[str, Place] | VaultError) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for answer in waiting:
            answer(outcome)

    # Sealing.

    def seal(self) -> None:
        """Seal the parts that the member has finished; from any thread."""
        with self._gate.lock:
            segment = self._store.table.own(self._role, self._seat)
        if segment is not None:
            with self._sealing:
                self._seal(segment)

    def _seal(self, segment: Segment) -> None:
        store, role, epoch = self._store, self._role, self.epoch
        for filled in segment.filled(epoch):
            slot, generation = filled.slot, filled.generation
            if filled.is_foreign and (slot, generation) not in self._refused:
                self._refused.add((slot, generation))
                store.reports.refuse("slot of another epoch", role=role, generation=generation)
            for name in filled.damaged:
                store.on_bad(epoch, role, generation, name)
            if not filled.parts or self._gate.open_epoch != epoch:
                continue
            if failpoints.ACTIVE:
                failpoints.hit("vault.seal", role=role, iteration=generation.iteration)
            digests = {}
            for name, (entry, view) in filled.parts.items():
                digests[name] = found = checksum(view)
                # An earlier vault had sealed the part, whose bytes have changed since: its checksum
                # is right, not the checksum of the present bytes.
                if entry.state is PartState.SEALED and entry.checksum != found:
                    del digests[name]
                    store.mark_bad(Place.of(segment, slot, name, entry), found)
            store.seal_own(segment, filled, digests, epoch)
