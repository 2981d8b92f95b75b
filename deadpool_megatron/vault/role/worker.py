"""The work for one role seated on this node in one epoch: restore, seal, have it shipped.

Driven by what the slots say, not by messages: a message of the member only says "look again", so
nothing is lost when the vault or the member dies between two steps. The thread that has got the
message seals; that of the worker looks once a second whether there is anything left to seal.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from deadpool_megatron import failpoints
from deadpool_megatron.layout.records import SUMS_PART, EpochRecord, Generation, RoleLayout, Seat
from deadpool_megatron.layout.replaying import key
from deadpool_megatron.vault.core.state import VaultState
from deadpool_megatron.vault.errors import Refused, VaultError
from deadpool_megatron.vault.net.transport import Transport
from deadpool_megatron.vault.replicate import Sender
from deadpool_megatron.vault.role.restore import Obtainer
from deadpool_megatron.vault.shm.segment import PartState, Segment, SlotState, checksum, settle
from deadpool_megatron.vault.shm.table import Place

log = logging.getLogger(__name__)
# Answers a member that waits for its state: the places, or why there are none.
RestoreAnswer = Callable[[dict[str, Place] | VaultError], None]


class RoleWorker(threading.Thread):
    """Thread of one role and epoch; ends when the epoch is closed."""

    def __init__(
        self, state: VaultState, transport: Transport, record: EpochRecord, role: int, seat: Seat
    ) -> None:
        super().__init__(name=f"role-{role}", daemon=True)
        self._state = state
        self._transport = transport
        self._record = record
        self._role = role
        self._seat = seat
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._sealing = threading.Lock()
        self._waiting: list[RestoreAnswer] = []
        self._layout: RoleLayout | None = None
        self._outcome: dict[str, Place] | VaultError | None = None
        self._shippers: list[Sender] = []
        self._refused: set[tuple[int, Generation]] = set()
        self._obtainer = Obtainer(state, transport, record, role)

    @property
    def epoch(self) -> int:
        """The epoch this worker belongs to."""
        return self._record.epoch

    def poke(self) -> None:
        """Look at the slots again; from any thread."""
        self._wake.set()

    def want(self, layout: RoleLayout, answer: RestoreAnswer) -> None:
        """The member waits for its parts; ``answer`` is called from this thread, once."""
        with self._lock:
            self._layout = layout
            self._waiting.append(answer)
        self.poke()

    def cut(self) -> None:
        """The epoch was closed: break connections and end soon."""
        for shipper in self._shippers:
            shipper.cut()
        self._obtainer.cut()
        self.poke()

    def run(self) -> None:
        """Until the epoch is closed."""
        while self._state.is_open(self.epoch):
            self._wake.clear()
            layout = self._known_layout()
            if layout is not None:
                self._start_shippers(layout)
                if self._record.restore.kind in ("memory", "dump"):
                    self._restore(layout)
            self.seal()
            # The time limit bounds what a lost wake-up could cost.
            self._wake.wait(timeout=1.0)
        self.cut()
        self._answer(VaultError(f"epoch {self.epoch} is over"))

    def _known_layout(self) -> RoleLayout | None:
        """As the member has said, or as what is restored of the role is laid out."""
        is_in_memory, table = self._record.restore.kind == "memory", self._state.table
        if self._layout is None:
            with self._state.lock:
                own = table.own(self._role, self._seat)
                if own is not None:
                    self._layout = own.layout
                elif is_in_memory:
                    self._layout = table.layout(self._role)
        if self._layout is None and is_in_memory:
            self._layout = self._obtainer.describe()
        return self._layout

    def _start_shippers(self, layout: RoleLayout) -> None:
        if not self._shippers:
            self._shippers = self._senders(layout)
        try:
            for shipper in self._shippers:
                if shipper.ident is None:
                    shipper.start()
        except RuntimeError as error:  # the host has no thread left: once more in a second
            log.warning("role %d: nobody brings its copies yet: %s", self._role, error)

    def _senders(self, layout: RoleLayout) -> list[Sender]:
        state = self._state
        try:
            with state.lock:
                scheme = state.scheme(self.epoch)
                targets = scheme.owed(layout, self._record.restore.generation).names
        except Refused:
            return []
        return [scheme.sender(state, self._transport, layout, target) for target in targets]

    # Restoring.

    def _restore(self, layout: RoleLayout) -> None:
        with self._lock:
            wanted = bool(self._waiting)
        if not wanted and self._is_over():
            # What was recomputed from is gigabytes, and mapped as long as somebody holds it.
            self._outcome = None
            return
        rotten = self._rotten()
        if rotten:
            self._outcome = None
        if self._outcome is None and not wanted and not self._may_restore_unasked():
            return
        if self._outcome is None or (wanted and isinstance(self._outcome, VaultError)):
            try:
                self._outcome = self._obtainer.obtain(layout)
            except VaultError as error:
                log.warning("role %d: %s", self._role, error)
                self._outcome = error
                if rotten:  # nobody asks for it, but the gate waits: another epoch is needed
                    restored = self._record.restore.generation
                    self._state.on_bad(self.epoch, self._role, restored, rotten)
        self._answer(self._outcome)

    def _is_over(self) -> bool:
        """Return whether something newer than what was restored is committed: nobody asks for it
        again."""
        with self._state.lock:
            committed = self._state.committed.get(self._role)
        return committed is not None and committed[0] > self._record.restore.generation

    def _rotten(self) -> str:
        """A part that was restored, and found damaged before it could be sent on; empty if none."""
        outcome = self._outcome if isinstance(self._outcome, dict) else {}
        restored = self._record.restore.generation
        for place in outcome.values():
            segment, slot = place.segment, place.slot
            is_bad = segment.entry(slot, place.name).state is PartState.BAD
            if is_bad and segment.generation(slot) == restored:
                return place.name
        return ""

    def _may_restore_unasked(self) -> bool:
        """Return whether to restore before the member asks for it.

        A member that asks waits, and writes nothing. Before that it may be stopped between any two
        stores of the epoch before. So no slot is begun that it may have chosen: either it has never
        used any, or one holds the generation already, which it does not overwrite. Nor is
        anything brought that it has left behind in this epoch, when the vault was restarted.
        """
        restored = self._record.restore.generation
        with self._state.lock:
            segment = self._state.table.own(self._role, self._seat)
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
        """Seal what the member has finished; from any thread."""
        with self._state.lock:
            segment = self._state.table.own(self._role, self._seat)
        if segment is not None:
            with self._sealing:
                self._seal(segment)

    def _seal(self, segment: Segment) -> None:
        for slot in sorted(range(segment.slots), key=segment.generation):
            names = self._filled(segment, slot)
            if names and self._state.is_open(self.epoch):
                generation = segment.generation(slot)
                failpoints.hit("vault.seal", role=self._role, iteration=generation.iteration)
                settle()
                digests = {
                    name: checksum(segment.data(slot, name, segment.entry(slot, name).nbytes))
                    for name in names
                }
                for name in names:
                    if not self._is_as_sealed(segment, slot, name, digests[name]):
                        del digests[name]
                with self._state.lock:
                    # Not after a close: the slot may be that of the next epoch's worker by now.
                    if not self._state.is_open(self.epoch):
                        return
                    if not self._is_replayed_well(segment, slot, digests):
                        continue
                self._state.seal_own(segment, slot, generation, self.epoch, digests)

    def _is_as_sealed(self, segment: Segment, slot: int, name: str, found: int) -> bool:
        """False for a part that an earlier vault had sealed when it died, and that has changed
        since: its checksum is worth more than a new one of what is there now."""
        entry = segment.entry(slot, name)
        if entry.state is not PartState.SEALED or entry.checksum == found:
            return True
        place = Place(segment, slot, name, entry.nbytes, entry.checksum, entry.epoch)
        self._state.mark_bad(place, found)
        return False

    @property
    def _may_replay(self) -> bool:
        """True when the member of this role recomputes the generation that the epoch begins with;
        of a dump nobody knows before its files have been read."""
        if self._record.restore.kind == "dump" and not isinstance(self._outcome, dict):
            return True
        recipe = self._record.restore.recipes.get(self._role)
        return recipe is not None and recipe.replay is not None

    def _is_replayed_well(self, segment: Segment, slot: int, digests: dict[str, int]) -> bool:
        """False when the member has recomputed something else than the owner had."""
        generation = self._record.restore.generation
        if segment.generation(slot) != generation:
            return True
        if not any(name in digests for name in segment.layout.shard_parts):
            return True  # extras that were appended
        outcome = self._outcome if isinstance(self._outcome, dict) else {}
        place = outcome.get(key(generation, SUMS_PART))
        if place is None:  # nothing was recomputed, or what it has to be like is not here yet
            return not self._may_replay
        # Whatever the plan is now: the recipe may be of an epoch before.
        from deadpool_megatron.vault.schemes.recompute import replayed_otherwise

        if wrong := replayed_otherwise(segment, slot, digests, place):
            self._state.reports.refuse("a replay with other bytes", role=self._role, part=wrong[0])
            self._state.on_bad(self.epoch, self._role, generation, wrong[0])
        return not wrong

    def _filled(self, segment: Segment, slot: int) -> list[str]:
        """Parts that the member has finished in this epoch and nobody has sealed yet."""
        state, generation = segment.state(slot), segment.generation(slot)
        if state is SlotState.FILLED:
            # A vault that died while it sealed has left some parts SEALED in a FILLED slot.
            ready: tuple[PartState, ...] = (PartState.FILLED, PartState.SEALED)
            if segment.epoch(slot) != self.epoch or generation.lineage != self.epoch:
                if (slot, generation) not in self._refused:
                    self._refused.add((slot, generation))
                    about = {"role": self._role, "generation": generation}
                    self._state.reports.refuse("slot of another epoch", **about)
                return []
        elif state is SlotState.SEALED:
            ready = (PartState.FILLED,)
        else:
            return []
        names = []
        for part in segment.layout.parts:
            entry = segment.entry(slot, part.name)
            if entry.state is PartState.FILLED and entry.checksum:
                # Of another generation: the header is damaged, if it has not just been taken anew.
                if segment.entry(slot, part.name) == entry:
                    self._state.on_bad(self.epoch, self._role, generation, part.name)
            elif entry.state in ready and entry.epoch == self.epoch and entry.nbytes <= part.nbytes:
                names.append(part.name)
        return names
