"""A parity block while it is made: contributions of all roles of a group, summed up in a slot.

What has been combined is never combined twice, because how far each contribution has come is kept
here, piece by piece, beside the digest of everything combined so far; and nothing is combined
before it was check-summed. Should that not hold (a contribution turns out to be other bytes than
announced, an error in the middle of a sum) the whole block is given up and begun again from
nothing. This state lives in memory alone: a vault that restarts begins unfinished blocks again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import xxhash

from deadpool_megatron.layout.places.parity import MEMBERS, Members, ParityGroup, parity_numbers
from deadpool_megatron.layout.records import Generation, RoleLayout
from deadpool_megatron.vault.core.state import VaultState
from deadpool_megatron.vault.shm.segment import Segment, checksum

# Pieces at different places are summed up at the same time, those at the same place in turn.
_STRIPES = 16


class GivenUp(Exception):
    """The block will not be finished, or another connection has taken the contribution over."""


class Damaged(Exception):
    """A piece arrived as other bytes than were sent; ``expected`` and ``found`` are digests."""

    def __init__(self, expected: int, found: int) -> None:
        super().__init__(f"digest {found:016x} instead of {expected:016x}")
        self.expected = expected
        self.found = found


class Stream:
    """How far one role's contribution of one part has come."""

    def __init__(self, role: int, block: int, name: str, nbytes: int, expected: int) -> None:
        self.role = role
        self.block = block
        self.name = name
        self.nbytes = nbytes
        self.expected = expected
        self.offset = 0
        self.owner: object = None
        self.lock = threading.Lock()
        self._digest: Any = xxhash.xxh3_64()

    @property
    def digest(self) -> int:
        """Of all bytes up to the offset."""
        return int(self._digest.intdigest())

    @property
    def done(self) -> bool:
        """True when the whole part has arrived and was what was announced."""
        return self.offset == self.nbytes and self.digest == self.expected

    def digest_with(self, chunk: memoryview, announced: int) -> Any:
        """The digest after ``chunk``. Raises Damaged when that is not the announced one."""
        digest = self._digest.copy()
        digest.update(chunk)
        if digest.intdigest() != announced:
            raise Damaged(announced, digest.intdigest())
        return digest

    def advance(self, count: int, digest: Any) -> None:
        """``count`` more bytes have been combined."""
        self.offset += count
        self._digest = digest


class Assembly:
    """One parity block of one generation in its claimed slot. Thread-safe.

    ``expected``: role -> names of the parts that it contributes. The slot is given back when the
    block is sealed, or was given up and nobody writes to it any more.
    """

    def __init__(
        self,
        state: VaultState,
        segment: Segment,
        slot: int,
        generation: Generation,
        epoch: int,
        group: ParityGroup,
        expected: Mapping[int, frozenset[str]],
    ) -> None:
        # Not at the top: most vaults keep no parity and can do without numpy and its threads.
        from deadpool_megatron.vault.parity.erasure import Coder

        self.epoch = epoch
        self.generation = generation
        self.expected = expected
        self.begun = time.monotonic()
        self.sealed = False
        self.given_up = False
        self._state = state
        self._segment = segment
        self._slot = slot
        self._group = group
        self._number, self._parities = parity_numbers(segment.layout)
        self._coder = Coder(len(group.roles), self._parities)
        self._chunk_bytes = state.settings.chunk_bytes
        self._lock = threading.Lock()
        self._stripes = [threading.Lock() for _ in range(_STRIPES)]
        self._streams: dict[tuple[int, str], Stream] = {}
        self._asked: set[int] = set()
        self._touched: set[tuple[str, int]] = set()
        self._users = 0
        self._sealing = False

    @property
    def over(self) -> bool:
        """True when there is nothing to wait for any more."""
        return self.sealed or self.given_up

    def absent(self) -> list[int]:
        """Roles that have not begun to contribute and have not been asked for it either."""
        with self._lock:
            came = {role for role, _ in self._streams} | self._asked
            return [role for role, names in self.expected.items() if names and role not in came]

    def asked(self, role: int) -> None:
        """The vault of an absent role knows that it is waited for."""
        with self._lock:
            self._asked.add(role)

    def open(self, role: int, parts: Mapping[str, tuple[int, int]], owner: object) -> list[Stream]:
        """The streams of a role, owned by ``owner`` from now on. ``parts``: name -> (nbytes,
        checksum). Raises GivenUp, also when the role now announces other bytes than before."""
        with self._lock:
            if self.over:
                raise GivenUp
            found = []
            for name, (nbytes, digest) in parts.items():
                block = self._group.roles.index(role)
                stream = self._streams.setdefault(
                    (role, name), Stream(role, block, name, nbytes, digest)
                )
                found.append(stream)
        if any((s.nbytes, s.expected) != parts[s.name] for s in found):
            self.give_up()
            raise GivenUp
        for stream in found:
            with stream.lock:
                stream.owner = owner
        return found

    def combine(
        self, stream: Stream, owner: object, chunk: bytearray | memoryview, announced: int
    ) -> None:
        """Check the next piece of a stream and add it to the block.

        ``announced``: digest of the stream up to and with this piece. Raises Damaged for other
        bytes, GivenUp when the piece is not wanted any more.
        """
        with stream.lock, self._writing():
            if stream.owner is not owner:
                raise GivenUp
            digest = stream.digest_with(memoryview(chunk), announced)
            try:
                self._sum(stream, chunk)
            except BaseException:
                self.give_up()
                raise
            stream.advance(len(chunk), digest)

    def _sum(self, stream: Stream, chunk: bytearray | memoryview) -> None:
        index, end = stream.offset // self._chunk_bytes, stream.offset + len(chunk)
        whole = self._segment.data(self._slot, stream.name)
        with self._stripes[index % _STRIPES]:
            target = whole[stream.offset : end]
            if (stream.name, index) in self._touched:
                self._coder.add(target, self._number, stream.block, chunk)
                return
            self._coder.put(target, self._number, stream.block, chunk)
            rest = whole[end : stream.offset + self._chunk_bytes]
            rest[:] = bytes(len(rest))
            self._touched.add((stream.name, index))

    def finish(self) -> bool:
        """Seal the block when everything is in; False when its epoch has been closed."""
        with self._lock:
            missing = any(
                (role, name) not in self._streams or not self._streams[role, name].done
                for role, names in self.expected.items()
                for name in names
            )
            if missing or self._sealing or self.over:
                return True
            self._sealing = True
        try:
            with self._writing():
                self.sealed = self._seal()
        except GivenUp:
            return False
        finally:
            self.give_up()
        return self.sealed

    def _seal(self) -> bool:
        state, segment, slot = self._state, self._segment, self._slot
        contributions: dict[int, dict[str, tuple[int, int]]] = {}
        sizes: dict[str, int] = {}
        for (role, name), stream in sorted(self._streams.items()):
            contributions.setdefault(role, {})[name] = stream.nbytes, stream.expected
            sizes[name] = max(stream.nbytes, sizes.get(name, 0))
        members = Members(self._group.roles, self._number, self._parities, contributions).encode()
        segment.data(slot, MEMBERS, len(members))[:] = members
        # First of all, so that a block which counts always says what it is made of.
        sizes = {MEMBERS: len(members), **sizes}
        digests = {n: checksum(segment.data(slot, n, nbytes)) for n, nbytes in sizes.items()}
        with state.changed:
            if not state.is_open(self.epoch):
                return False

            def seal() -> None:
                for name, nbytes in sizes.items():
                    state.seal_copy(segment, slot, name, nbytes, digests[name], self.epoch)

            state.table.replace(segment, slot, seal)
        state.fail_point_corrupt(
            "vault.received", segment, slot, [n for n in sizes if n != MEMBERS]
        )
        return True

    def give_up(self) -> None:
        """Nothing more is written to the slot once those who do have finished. Idempotent."""
        with self._lock:
            if self.given_up:
                return
            self.given_up = True
            idle = self._users == 0
        if idle:
            self._state.release(self._segment, self._slot)
        with self._state.changed:
            self._state.changed.notify_all()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        with self._lock:
            if self.over or not self._state.is_open(self.epoch):
                raise GivenUp
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                last = self.given_up and self._users == 0
            if last:
                self._state.release(self._segment, self._slot)


def expected_parts(
    state: VaultState, group: ParityGroup, layouts: Mapping[int, RoleLayout]
) -> dict[int, frozenset[str]]:
    """What each role of a group contributes in the open epoch; called under the vault's lock."""
    ledger = state.ledger
    assert ledger is not None
    return {role: frozenset(ledger.coded(layouts[role])) for role in group.roles}
