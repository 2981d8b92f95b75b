"""The member's side of its vault: fill slots, wait for commits, restore state.

No torch: buffers are memoryviews of shared memory. The client has no thread; the member's main
thread uses it, but another thread may fill a SlotWriter. The vault may die and restart at any time:
the member's data stays in its segment, and the next call connects and registers again.
"""

from __future__ import annotations

import mmap
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deadpool_megatron.file_systems import LIKELY_CLEANERS
from deadpool_megatron.layout.records import BOUNDARIES, Generation, RoleLayout, Seat
from deadpool_megatron.vault.errors import Code, Frozen, Interrupted, RestoreUnavailable, VaultError
from deadpool_megatron.vault.memory import Budget
from deadpool_megatron.vault.shm.segment import PartState, Segment, SlotState, own_name
from deadpool_megatron.vault.slot_memory import park, unpark
from deadpool_megatron.wire import framing

# A stopped vault must not hold up the training thread for longer than this.
_SEND_SECONDS = 1.0
_RETRY_SECONDS = 0.05
# Agent and vault check every ten seconds that the names of their files exist.
_NAMELESS_SECONDS = 30.0
# Another thread may have connected again since the wait began; check again this often.
_CHECK_SECONDS = 0.5
# Sends a message to the vault if it is connected.
Notify = Callable[[Mapping[str, Any]], None]


class VaultClient:
    """A member's connection to its vault, and its slots. ``connect_seconds`` bounds register, which
    waits for the vault. ``memory_bytes``: the limit for all files of the node (0: none).
    """

    def __init__(
        self,
        socket_path: str,
        segment_dir: Path,
        seat: Seat,
        *,
        connect_seconds: float,
        memory_bytes: int = 0,
    ) -> None:
        self._path = socket_path
        self.directory = Path(segment_dir)
        self._budget = Budget(self.directory, memory_bytes)
        self._seat = seat
        self._connect_seconds = connect_seconds
        self._lock = threading.RLock()  # the connection; never held while waiting for the vault
        self._link: socket.socket | None = None
        self._buffer = framing.FrameBuffer()
        self._layout: RoleLayout | None = None
        self._segment: Segment | None = None
        self._parked: Segment | None = None
        self._epoch = 0
        self._restored: Generation | None = None
        self._commit: tuple[int, Generation, str] | None = None  # epoch, generation, boundary
        self._bad: tuple[int, str] | None = None  # epoch, message for people
        self._reply: dict[str, Any] | None = None
        self._nameless_tries = 0  # failed tries since the last connection: the socket has no name

    # Registration.

    def has_segment(self, role: int) -> bool:
        """Return whether the slots of this incarnation for ``role`` exist."""
        return self._own_path(role).exists()

    def park(self, layout: RoleLayout) -> None:
        """Create slots before the role is known: see :func:`slot_memory.park`. Raises
        OutOfSpace."""
        self._parked = park(self.directory, layout, self._seat, self._budget)

    def register(self, layout: RoleLayout, epoch: int, interrupted: int | None = None) -> None:
        """Register this process for its role with the vault, which creates its segment.

        Raises OutOfSpace when shared memory is too small, VaultError when the layout differs from
        that of an existing segment, or when no answer arrives within ``connect_seconds``;
        Interrupted when the descriptor ``interrupted`` becomes readable before.
        """
        path = self._own_path(layout.role)
        if self._segment is None or self._segment.path != path:
            self._segment = None
        self._layout = layout
        self._enter(epoch)
        self._disconnect()
        deadline = time.monotonic() + self._connect_seconds
        answer = self._ask(None, deadline, interrupted, "register")
        if answer["t"] != "registered":
            raise _error_of(answer)
        if self._segment is None:
            parked, self._parked = self._parked, None
            # A mapped segment keeps its address, which a device may have registered.
            if parked is not None and parked.adopt_name(path):
                self._segment = parked
            else:
                self._segment = Segment.open(path, budget=self._budget)
            unpark(self.directory, self._seat)

    def slot_views(self, names: Sequence[str]) -> list[memoryview]:
        """Return the memory of these parts in all slots of this process, parked slots included."""
        segment = self._segment or self._parked
        if segment is None:
            return []
        return [segment.data(slot, name) for slot in range(segment.slots) for name in names]

    def _own_path(self, role: int) -> Path:
        return self.directory / own_name(role, self._seat)

    def _enter(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch, self._restored = epoch, None

    # Writing.

    def report_end(self) -> None:
        """Report to the vault that the run ends, so this epoch will have no newer generation."""
        self.notify({"t": "ended", "epoch": self._epoch})

    def sealed_part(self, generation: Generation, name: str) -> memoryview | None:
        """Return the bytes of a part in this member's segment, None unless they are sealed there.

        They do not change until the role has passed the next gate.
        """
        segment = self._own()
        for slot in range(segment.slots):
            entry = segment.entry(slot, name)
            is_whole = segment.state(slot) is SlotState.SEALED and entry.state is PartState.SEALED
            if is_whole and segment.generation(slot) == generation:
                return segment.data(slot, name, entry.nbytes)
        return None

    def begin(self, generation: Generation, epoch: int) -> SlotWriter:
        """Return the writer of a slot for a new generation, which is computed in ``epoch`` (its
        lineage), or for the restored generation of the epoch, which is recomputed.

        For the slot, see :func:`free_slot`. If a slot holds parts of the restored generation, the
        writer fills the missing parts of that slot instead. Raises Frozen while the epoch is
        closed, VaultError when no slot may be overwritten (a gate was left out).
        """
        if generation.lineage != epoch and generation != self._restored:
            raise VaultError(f"{generation} was not computed in epoch {epoch}")
        if epoch < self._epoch:
            raise Frozen(f"epoch {epoch} is over")
        self._enter(epoch)
        self._pump()
        segment = self._own()
        freezes = segment.freezes()
        if segment.is_frozen():
            raise Frozen(f"epoch {epoch} has been closed")
        for held in range(segment.slots) if generation == self._restored else ():
            # The generation keeps its slot, even if parts of it have been lost.
            if segment.state(held) is SlotState.SEALED and segment.generation(held) == generation:
                return PartsWriter(self.notify, segment, held, generation, epoch)
        newest = self.newest_committed
        known = [generation for generation in (newest and newest[0], self._restored) if generation]
        floor = max(known, default=None)
        slot = free_slot(segment, epoch, floor)
        before = segment.mark_writing(slot)
        # WRITING is stored before FROZEN is read (vault/shm/segment.py). The count also shows that
        # the vault has promised this slot and opened an epoch in the meantime.
        if segment.freezes() != freezes:
            segment.back_out(slot, before)
            raise Frozen(f"epoch {epoch} has been closed")
        segment.begin(slot, generation, epoch)
        return SlotWriter(self.notify, segment, slot, generation, epoch)

    def append(self, generation: Generation, part_name: str, payload: bytes) -> None:
        """Add an extras part to a generation that is sealed or being sealed. ``payload`` must not
        exceed the part's capacity."""
        segment = self._own()
        if segment.is_frozen():
            raise Frozen(f"epoch {self._epoch} has been closed")
        for slot in range(segment.slots):
            state = segment.state(slot)
            is_held = state in (SlotState.FILLED, SlotState.SEALED)
            if is_held and segment.generation(slot) == generation:
                if segment.entry(slot, part_name).state is not PartState.ABSENT:
                    raise VaultError(f"{part_name} of {generation} has been appended already")
                segment.data(slot, part_name)[: len(payload)] = payload
                segment.fill_part(slot, part_name, len(payload), self._epoch)
                self.notify({"t": "filled"})
                return
        raise VaultError(f"{generation} is in no slot of role {segment.layout.role}")

    # Waiting.

    @property
    def newest_committed(self) -> tuple[Generation, str] | None:
        """Return the newest committed generation of this role and epoch, and its boundary."""
        if self._commit is None or self._commit[0] != self._epoch:
            return None
        return self._commit[1], self._commit[2]

    def wait_committed(
        self,
        generation: Generation,
        boundary: str,
        *,
        interrupted: int,
        on_wait: Callable[[float], None],
        report_every_seconds: float,
    ) -> bool:
        """Wait at the commit gate until the generation is committed; False when ``interrupted``
        becomes readable before.

        ``on_wait(seconds so far)`` is called every ``report_every_seconds``: the gate has no time
        limit. Raises VaultError when the generation can never be committed: the vault has found its
        slot damaged, or has restarted and lacks the slot.
        """
        if self._is_committed(generation, boundary):
            return True
        # A vault that spreads this generation over the iteration must send it now.
        self.notify({"t": "waiting", "epoch": self._epoch, "generation": generation.to_list()})
        started = time.monotonic()
        due = started + report_every_seconds
        while True:
            self._pump()
            if self._is_committed(generation, boundary):
                return True
            if self._bad is not None and self._bad[0] == self._epoch:
                raise VaultError(self._bad[1])
            if self._reply is not None and self._reply["t"] == "unregistered":
                raise _error_of(self._reply)
            now = time.monotonic()
            if now >= due:
                on_wait(now - started)
                due = now + report_every_seconds
            if self._link is None:
                self._reconnect()
            if self._poll(interrupted, due - time.monotonic()):
                return False

    def _is_committed(self, generation: Generation, boundary: str) -> bool:
        newest = self.newest_committed
        wanted = generation, BOUNDARIES.index(boundary)
        return newest is not None and (newest[0], BOUNDARIES.index(newest[1])) >= wanted

    # Restoring.

    def restore(
        self,
        layout: RoleLayout,
        epoch: int,
        generation: Generation,
        boundary: str,
        *,
        deadline_seconds: float,
        interrupted: int,
    ) -> RestoredParts:
        """Return the checked shard parts and extras of the generation that ``epoch`` starts from.

        Protects that generation from being overwritten. Raises RestoreUnavailable when a part
        cannot be produced from any source, CutRefused or OutOfSpace, Interrupted, or VaultError
        (deadline, epoch over).
        """
        if self._layout is None or self._layout.role != layout.role:
            self.register(layout, epoch, interrupted)
        self._enter(epoch)
        self._restored = generation
        about = {"generation": generation.to_list(), "boundary": boundary}
        request = {"t": "restore", "epoch": epoch, **about}
        answer = self._ask(request, time.monotonic() + deadline_seconds, interrupted, "restore")
        if answer["t"] == "unavailable":
            tried = tuple((int(n), int(r), str(reason)) for n, r, reason in answer["tried"])
            raise RestoreUnavailable(str(answer["part"]), tried)
        if answer["t"] != "restored":
            raise _error_of(answer)
        return RestoredParts(self.notify, self.directory, answer["parts"], self._segment)

    def close(self) -> None:
        """Close the connection; the segment stays."""
        self._disconnect()
        self._segment = self._parked = None
        unpark(self.directory, self._seat)

    # The connection.

    def notify(self, message: Mapping[str, Any]) -> None:
        """Send a message if the vault is connected; a lost message does no harm."""
        with self._lock:
            if self._link is None:
                self._reconnect()
                return
            try:
                self._link.settimeout(_SEND_SECONDS)
                framing.send(self._link, message)
            except OSError:
                self._pump()  # reads the vault's last messages, as damage is reported only once
                self._reconnect()

    def _own(self) -> Segment:
        if self._segment is None:
            raise VaultError("the member has not registered with its vault")
        return self._segment

    def _disconnect(self) -> None:
        with self._lock:
            if self._link is not None:
                self._link.close()
            self._link = None
            self._buffer = framing.FrameBuffer()
            self._reply = None

    def _reconnect(self) -> None:
        """Connect and register without waiting for the answer; stays unconnected on failure."""
        with self._lock:
            self._disconnect()
            if self._layout is None:
                return
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            link.settimeout(_SEND_SECONDS)
            hello: dict[str, Any] = {"seat": self._seat.to_list(), "layout": self._layout.to_dict()}
            hello["has_slots"] = self._segment is not None
            try:
                link.connect(self._path)
                framing.send(link, {"t": "member", **hello})
            except OSError as error:
                link.close()
                self._nameless_tries += isinstance(error, FileNotFoundError)
                return
            self._link, self._nameless_tries = link, 0

    def _ask(
        self, message: Mapping[str, Any] | None, deadline: float, interrupted: int | None, name: str
    ) -> dict[str, Any]:
        """Send a request (None: only register) until it is answered; ``name``: for errors."""
        sent_on: socket.socket | None = None
        while True:
            if self._link is None:
                self._reconnect()
            if self._link is not None and self._link is not sent_on:
                self._reply = None
                sent_on = self._link
                if message is not None:
                    self.notify(message)
            self._pump()
            reply, self._reply = self._reply, None
            if reply is not None and (message is None or reply["t"] != "registered"):
                return reply
            if self._nameless_tries * _RETRY_SECONDS > _NAMELESS_SECONDS:
                text = f"{self._path} was removed, {LIKELY_CLEANERS}, and not created again in time"
                raise VaultError(f"vault: {name}: {text}")
            left = deadline - time.monotonic()
            if left <= 0:
                raise VaultError(f"vault: no answer to {name} on {self._path} in time")
            if self._poll(interrupted, left):
                raise Interrupted(f"interrupted while waiting for {name}")

    def _poll(self, interrupted: int | None, seconds: float) -> bool:
        """Wait for the vault or the interrupt; True for the interrupt."""
        poll = select.poll()
        if interrupted is not None:
            poll.register(interrupted, select.POLLIN)
        with self._lock:
            if self._link is not None:
                poll.register(self._link, select.POLLIN)
            seconds = min(seconds, _CHECK_SECONDS if self._link is not None else _RETRY_SECONDS)
        ready = poll.poll(max(0.0, seconds) * 1000)
        return any(descriptor == interrupted for descriptor, _ in ready)

    def _pump(self) -> None:
        """Handle all messages that have arrived, without waiting."""
        with self._lock:
            while self._link is not None:
                try:
                    self._link.settimeout(0)
                    piece = self._link.recv(65536)
                    if not piece:
                        self._disconnect()
                        return
                    for message in self._buffer.feed(piece):
                        self._handle(message)
                except BlockingIOError:
                    return
                except (OSError, framing.WireError):
                    self._disconnect()

    def _handle(self, message: dict[str, Any]) -> None:
        kind = message["t"]
        if kind == "committed":
            news = int(message["epoch"]), Generation.from_list(message["generation"])
            # A restarted vault reports older commits first.
            if self._commit is None or news >= self._commit[:2]:
                self._commit = (*news, message["boundary"])
        elif kind == "bad":
            about = f"part {message['part']} of generation {message['generation']}"
            self._bad = int(message["epoch"]), f"{about} was damaged in the member's own slot"
        elif message.get("epoch", self._epoch) == self._epoch:
            self._reply = message  # to a request of this epoch, not to an abandoned request


def _error_of(answer: Mapping[str, Any]) -> VaultError:
    """Return the error of a vault that cannot serve this process."""
    code, text = answer.get("code", Code.FAILED), answer.get("text", answer["t"])
    return VaultError.of(code, f"vault: {text}")


def free_slot(segment: Segment, epoch: int, floor: Generation | None) -> int:
    """Return the slot to overwrite in ``epoch``: an empty slot, or else the slot with the oldest
    generation that is abandoned, or is older than ``floor`` and not the newest sealed generation.
    ``floor``: the newest generation that is committed, or that the epoch started from; without it,
    generations of earlier epochs may be overwritten. Raises VaultError when there is no such slot.
    """
    slots = range(segment.slots)
    sealed = [segment.generation(s) for s in slots if segment.state(s) is SlotState.SEALED]
    newest = max(sealed, default=None)
    free: list[tuple[Generation, int]] = []
    for slot in slots:
        state, found = segment.state(slot), segment.generation(slot)
        if state in (SlotState.EMPTY, SlotState.WRITING):
            free.append((Generation(-1, -1), slot))
        elif state is SlotState.FILLED and found.lineage < epoch:
            free.append((found, slot))  # abandoned
        elif found != newest and (found < floor if floor else found.lineage < epoch):
            free.append((found, slot))
    if not free:
        raise VaultError(
            f"no slot of role {segment.layout.role} may be overwritten: newest committed is {floor}"
        )
    return min(free)[1]


class SlotWriter:
    """The writer of a slot; from ``VaultClient.begin``.

    It may be passed to another thread. After its epoch was closed the writer is stale, and does not
    change a slot that has another generation by now.
    """

    def __init__(
        self, notify: Notify, segment: Segment, slot: int, generation: Generation, epoch: int
    ) -> None:
        self.generation = generation
        self._notify = notify
        self._segment = segment
        self._slot = slot
        self._epoch = epoch
        self._freezes = segment.freezes()

    def part(self, name: str) -> memoryview:
        """Return the writable, uninitialised bytes of a part with its full capacity."""
        return self._segment.data(self._slot, name)

    def fill(self, parts: Mapping[str, int]) -> None:
        """Declare these parts complete (name -> bytes used) and have the vault seal them.

        Raises VaultError when the slot belongs to another generation although the epoch is open:
        the parts would never be sealed, and the gate would wait forever.
        """
        if self._is_owned():
            self._declare(parts)
            self._notify({"t": "filled"})
        elif self._segment.freezes() == self._freezes:  # read last: a close freezes first
            raise VaultError(f"slot {self._slot} is not that of {self.generation} any more")

    def abandon(self) -> None:
        """Release the slot and discard its bytes."""
        if self._is_owned():
            self._segment.set_state(self._slot, SlotState.EMPTY)

    def _declare(self, parts: Mapping[str, int]) -> None:
        self._segment.fill(self._slot, parts, self._epoch)

    def _is_owned(self) -> bool:
        segment, slot = self._segment, self._slot
        started = segment.generation(slot), segment.epoch(slot)
        owned = self.generation, self._epoch
        return segment.state(slot) is SlotState.WRITING and started == owned


class PartsWriter(SlotWriter):
    """The writer of lost parts of a generation, in the slot that holds its other parts.

    No other slot is overwritten: older generations may be needed until this generation is committed
    again. The parts are invalid while they are written; the rest of the slot does not change.
    """

    def part(self, name: str) -> memoryview:
        """Invalidate a damaged part and return its writable bytes."""
        self._segment.invalidate_part(self._slot, name, PartState.ABSENT)
        return super().part(name)

    def abandon(self) -> None:
        """Leave the parts invalid."""

    def _declare(self, parts: Mapping[str, int]) -> None:
        for name, nbytes in parts.items():
            self._segment.fill_part(self._slot, name, nbytes, self._epoch)

    def _is_owned(self) -> bool:
        segment, slot = self._segment, self._slot
        is_sealed = segment.state(slot) is SlotState.SEALED
        return is_sealed and segment.generation(slot) == self.generation


class RestoredParts:
    """Checked read-only bytes of a generation, which the vault keeps until :meth:`close`.

    Parts in the member's ``own`` slots are views of its mapping, which a device may have
    registered.
    """

    def __init__(
        self,
        notify: Notify,
        directory: Path,
        parts: Mapping[str, tuple[str, int, int]],
        own: Segment | None = None,
    ) -> None:
        self._notify = notify
        self._parts: dict[str, memoryview] = {}
        maps: dict[str, memoryview] = {}
        for name, (file_name, offset, nbytes) in parts.items():
            path = directory / file_name
            if file_name not in maps and own is not None and own.maps(path):
                maps[file_name] = own.contents.toreadonly()
            elif file_name not in maps:
                with open(path, "rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                maps[file_name] = memoryview(mapped)
            self._parts[name] = maps[file_name][offset : offset + nbytes]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the parts."""
        return tuple(self._parts)

    def part(self, name: str) -> memoryview:
        """Return the filled bytes of a part. Raises KeyError for an unknown part."""
        return self._parts[name]

    def close(self) -> None:
        """Let the vault reuse the slots. From then on, the bytes of earlier views may change."""
        self._parts.clear()
        self._notify({"t": "release"})
