"""Messages after the handshake arrive as they were sent, in order, once, or not at all."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from deadpool_megatron.wire import auth, framing
from deadpool_megatron.wire.auth import AuthenticationError
from deadpool_megatron.wire.sealed_records import AlteredError, Direction, RecordSocket, Unsealer
from tests.wire.visitors import SECONDS, SECRET, enter, open_door

KEY = b"k" * 32
Change = Callable[[list[bytes]], list[bytes]]


def sealed(*contents: bytes) -> list[bytes]:
    direction = Direction(KEY)
    return [direction.seal(content) for content in contents]


@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(1, 50))
def test_pieces_of_any_size_give_the_same_bytes(contents, size):
    data, unsealer, found = b"".join(sealed(*contents)), Unsealer(Direction(KEY)), b""
    for start in range(0, len(data), size):
        found += unsealer.feed(data[start : start + size])
    assert found == b"".join(contents)
    assert unsealer.is_at_boundary


@given(st.data())
def test_any_changed_bit_is_noticed(data):
    contents = data.draw(st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=3))
    whole = bytearray(b"".join(sealed(*contents)))
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    whole[bit // 8] ^= 1 << (bit % 8)
    unsealer = Unsealer(Direction(KEY))
    try:
        found = unsealer.feed(bytes(whole))
    except AlteredError:
        return
    # A longer length waits for bytes that do not come; the records before it are unchanged.
    assert b"".join(contents).startswith(found)
    assert len(found) < len(b"".join(contents))


@pytest.mark.parametrize("has_gmac", [False, True])
@given(st.binary(min_size=1, max_size=200), st.data())
def test_any_changed_bit_of_bulk_bytes_is_noticed(has_gmac, content, data):
    header = len(content) | 1 << 31
    tag = Direction(KEY, has_gmac=has_gmac).tag(header, content)
    changed = bytearray(content)
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    changed[bit // 8] ^= 1 << (bit % 8)
    Direction(KEY, has_gmac=has_gmac).check(header, content, tag)
    with pytest.raises(AlteredError):
        Direction(KEY, has_gmac=has_gmac).check(header, changed, tag)


def test_no_nonce_is_used_twice_with_a_key(monkeypatch):
    """Else an AES-GMAC gives its key away."""
    used = []

    class Cipher:
        def __init__(self, key: bytes) -> None:
            self.key = key

        def encrypt(self, nonce: bytes, data: bytes, associated: bytes) -> bytes:
            used.append((self.key, nonce))
            return data + associated

    monkeypatch.setattr("cryptography.hazmat.primitives.ciphers.aead.AESGCM", Cipher)
    for key in (b"there" * 8, b"back" * 8):
        direction = Direction(key, has_gmac=True)
        for content in (b"one", b"one", b"two"):
            direction.tag(len(content) | 1 << 31, content)
            direction.tag(len(content), content)
    assert len({*used}) == len(used) == 6


CHANGES: dict[str, Change] = {
    "sent again": lambda sent: [sent[0], sent[0], *sent[1:]],
    "left out": lambda sent: sent[1:],
    "moved": lambda sent: [sent[1], sent[0], *sent[2:]],
    "put in": lambda sent: [sent[0], Direction(b"other").seal(b"x"), *sent[1:]],
    "of the other direction": lambda sent: [Direction(b"back").seal(b"one"), *sent[1:]],
    "another kind": lambda sent: [bytes([sent[0][0] | 0x80]) + sent[0][1:], *sent[1:]],
}


@pytest.mark.parametrize("change", CHANGES)
def test_altered_records_are_refused(change):
    unsealer = Unsealer(Direction(KEY))
    with pytest.raises(AlteredError):
        unsealer.feed(b"".join(CHANGES[change](sealed(b"one", b"two", b"three"))))


def test_no_length_is_believed_beyond_that_of_a_frame():
    for header in (b"\x7f\xff\xff\xff", b"\x80\x20\x00\x01"):
        with pytest.raises(AlteredError):
            Unsealer(Direction(KEY)).feed(header)


def pair() -> tuple[RecordSocket, RecordSocket]:
    """Both ends of an authenticated connection over the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepted: list[RecordSocket] = []

        def accept() -> None:
            accepted.append(RecordSocket.of(listener.accept()[0]))
            accepted[0].settimeout(SECONDS)
            auth.accept(accepted[0], SECRET, "run")

        thread = threading.Thread(target=accept)
        thread.start()
        connecting = auth.connect(listener.getsockname(), SECRET, "run", SECONDS)
        thread.join()
    return connecting, accepted[0]


def test_frames_and_bulk_over_sockets():
    ours, theirs = pair()
    bulk = random.Random(1).randbytes((5 << 20) + 77)
    with ours, theirs:

        def answer() -> None:
            framing.send(theirs, framing.receive(theirs))
            target = bytearray(len(bulk))
            for start in range(0, len(bulk), 3 << 20):  # not as it was cut on the way
                framing.receive_into(theirs, memoryview(target)[start : start + (3 << 20)])
            theirs.send_bulk(memoryview(target))

        thread = threading.Thread(target=answer)
        thread.start()
        framing.send(ours, {"n": 1, "text": "x" * 100_000})
        assert framing.receive(ours)["n"] == 1
        ours.send_bulk(memoryview(bulk))
        back = bytearray(len(bulk))
        framing.receive_into(ours, memoryview(back))
        thread.join()
        assert back == bulk
        framing.send(ours, {"n": 2})
        framing.send(ours, {"n": 3})
        assert [framing.receive(theirs)["n"] for _ in range(2)] == [2, 3]
        ours.close()
        with pytest.raises(framing.ConnectionClosed):
            framing.receive(theirs)


class Between:
    """A relay from a dialler to a listener that changes the bytes."""

    def __init__(self, target: tuple[str, int], change: Callable[[bytes], bytes]) -> None:
        self._target = target
        self._change = change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        threading.Thread(target=self._run, daemon=True).start()

    def __enter__(self) -> Between:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _run(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(self._target)
        threading.Thread(target=self._pump, args=(far, near, False), daemon=True).start()
        self._pump(near, far, True)

    def _pump(self, source: socket.socket, sink: socket.socket, forth: bool) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(self._change(data) if forth else data)
        except OSError:
            pass
        finally:
            for connection in (source, sink):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


async def test_relay_without_the_secret_is_refused(monkeypatch):
    """It has the port of a former coordinator, and passes the handshake on."""
    monkeypatch.delenv(auth.NAT_VARIABLE, raising=False)
    async with open_door() as (inside, address):
        with (
            Between(address, lambda data: data) as relay,
            pytest.raises((framing.WireError, OSError)),
        ):
            await enter(relay.address)
        (await enter(address)).close()
    assert len(inside.served) == 1
    assert "it is relayed, or addresses are translated" in inside.refusals[0]


async def test_relay_that_rewrites_the_address_is_refused(monkeypatch):
    """The proof is of the address that was dialled, not of that in the message."""
    monkeypatch.delenv(auth.NAT_VARIABLE, raising=False)
    place: list[Between] = []
    async with open_door() as (inside, address):

        def other(data: bytes) -> bytes:
            old = f"127.0.0.1:{place[0].address[1]}".encode()
            return data.replace(old, f"127.0.0.1:{address[1]}".encode())

        with Between(address, other) as relay:
            place.append(relay)
            with pytest.raises((AuthenticationError, OSError)):
                await enter(relay.address)
    assert inside.served == []


def test_addresses_are_written_in_one_way():
    assert auth.address_of(("10.0.0.1", 5)) == "10.0.0.1:5"
    assert auth.address_of(("::ffff:10.0.0.1", 5, 0, 0)) == "10.0.0.1:5"
    assert auth.address_of(("fe80::1%eth0", 5, 0, 2)) == auth.address_of(("FE80:0::1", 5, 0, 0))
    assert auth.address_of("") == ""


async def test_listener_on_all_addresses_knows_the_dialled_address():
    async with open_door(host="0.0.0.0") as (_, (_, port)):
        for address in ("127.0.0.1", "127.0.0.2", "localhost"):
            (await enter((address, port))).close()
