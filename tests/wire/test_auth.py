"""The secret and the handshake: recorded, reflected, relayed or guessed proofs are refused."""

import os
import socket

import pytest

from deadpool_megatron.wire import auth, framing
from deadpool_megatron.wire.sealed_records import RecordSocket
from tests.wire.visitors import SECRET


def test_the_secret_is_made_once_and_belongs_to_its_user(tmp_path, monkeypatch):
    monkeypatch.delenv("DEADPOOL_SECRET", raising=False)
    auth.create_secret(tmp_path)
    path = tmp_path / "secret"
    assert path.stat().st_mode & 0o777 == 0o600
    first = auth.load_secret(tmp_path)
    auth.create_secret(tmp_path)
    assert auth.load_secret(tmp_path) == first
    assert [entry.name for entry in tmp_path.iterdir()] == ["secret"]
    for mode in (0o640, 0o604, 0o620, 0o601):
        path.chmod(mode)
        with pytest.raises(auth.AuthenticationError, match="can be read by others: chmod 600 it"):
            auth.load_secret(tmp_path)


@pytest.mark.parametrize("text", ["", "\n", "short", " " * 40])
def test_a_secret_that_could_be_guessed_is_refused(tmp_path, monkeypatch, text):
    (tmp_path / "secret").write_text(text)
    (tmp_path / "secret").chmod(0o600)
    monkeypatch.delenv("DEADPOOL_SECRET", raising=False)
    with pytest.raises(auth.AuthenticationError, match="less than 16 characters") as caught:
        auth.load_secret(tmp_path)
    assert "short" not in str(caught.value)


def test_the_environment_comes_first_and_a_line_end_does_not_count(tmp_path, monkeypatch):
    auth.create_secret(tmp_path)
    with open(tmp_path / "secret", "ab") as file:
        file.write(b"\n")
    monkeypatch.delenv("DEADPOOL_SECRET", raising=False)
    known = auth.load_secret(tmp_path)
    monkeypatch.setenv("DEADPOOL_SECRET", known.decode() + "\n")
    assert auth.load_secret(tmp_path / "elsewhere") == known
    (tmp_path / "elsewhere").mkdir()
    auth.create_secret(tmp_path / "elsewhere")  # another one would only mislead
    monkeypatch.delenv("DEADPOOL_SECRET")
    with pytest.raises(auth.AuthenticationError, match="no run secret: set DEADPOOL_SECRET"):
        auth.load_secret(tmp_path / "elsewhere")


ADDRESS = "10.0.0.1:29400"


def sides(realm: str = "run") -> tuple[auth.Handshake, auth.Handshake]:
    return auth.Handshake(SECRET, realm, ADDRESS), auth.Handshake(SECRET, realm, ADDRESS)


def test_both_sides_prove_themselves():
    connecting, accepting = sides()
    answer = connecting.answer(accepting.challenge(connecting.hello()))
    accepting.verify(answer)


def sides_that_can(monkeypatch, connecting: bool, accepting: bool, address: str = ADDRESS):
    found = []
    for able in (connecting, accepting):
        monkeypatch.setattr(auth, "CAN_GMAC", able)
        found.append(auth.Handshake(SECRET, "run", address))
    return found


@pytest.mark.parametrize(
    ("able", "address", "has_gmac"),
    [
        ((True, True), ADDRESS, True),
        ((True, True), "::1:1", False),
        ((True, True), "127.0.0.1:1", False),
        ((True, False), ADDRESS, False),
        ((False, True), ADDRESS, False),
    ],
)
def test_bulk_bytes_have_a_mac_where_both_sides_can_and_they_leave_the_host(
    monkeypatch, able, address, has_gmac
):
    connecting, accepting = sides_that_can(monkeypatch, *able, address)
    accepting.verify(connecting.answer(accepting.challenge(connecting.hello())))
    checksums = []

    def checksum(data: bytes, **_: int) -> bytes:
        checksums.append(bytes(data))
        return b"sum"

    monkeypatch.setattr("xxhash.xxh3_128_digest", checksum)
    near, far = (RecordSocket.of(each) for each in socket.socketpair())
    with near, far:
        near.begin(connecting.direction("connect"), connecting.direction("accept"))
        far.begin(accepting.direction("accept"), accepting.direction("connect"))
        for data in (b"state", b"of a role"):
            near.send_bulk(memoryview(data))
            assert far.recv_into(target := bytearray(20)) == len(data)
            assert target.startswith(data)
    assert bool(checksums) is not has_gmac


@pytest.mark.parametrize("side", ["hello", "challenge"])
def test_nobody_between_two_sides_takes_the_mac_away(monkeypatch, side):
    connecting, accepting = sides_that_can(monkeypatch, True, True)
    hello = connecting.hello()
    assert hello["gmac"] is True
    challenge = accepting.challenge(hello | {"gmac": side != "hello"})
    with pytest.raises(auth.AuthenticationError):
        connecting.answer(challenge | {"gmac": side != "challenge"})


def test_a_recorded_conversation_cannot_be_played_again():
    connecting, accepting = sides()
    hello = connecting.hello()
    challenge = accepting.challenge(hello)
    answer = connecting.answer(challenge)
    _, fresh = sides()
    fresh.challenge(hello)
    with pytest.raises(auth.AuthenticationError):
        fresh.verify(answer)
    again, _ = sides()
    again.hello()
    with pytest.raises(auth.AuthenticationError):
        again.answer(challenge)


def test_a_proof_sent_back_to_its_maker_is_worth_nothing():
    """A stranger without the secret sends back what it got."""
    _, accepting = sides()
    challenge = accepting.challenge({"t": "hello", "run": "run", "nonce": "0" * 32, "to": ADDRESS})
    for stolen in ({"t": "answer", "proof": challenge["proof"]}, challenge):
        with pytest.raises(auth.AuthenticationError):
            accepting.verify(stolen)
    # Or it opens a second connection, to have its own challenge answered there.
    connecting, _ = sides()
    hello = connecting.hello()
    _, other = sides()
    mirrored = other.challenge(
        {"t": "hello", "run": "run", "nonce": challenge["nonce"], "to": ADDRESS}
    )
    with pytest.raises(auth.AuthenticationError):
        accepting.verify({"t": "answer", "proof": mirrored["proof"]})
    with pytest.raises(auth.AuthenticationError):
        connecting.answer({"t": "challenge", "nonce": hello["nonce"], "proof": mirrored["proof"]})


def test_a_proof_for_one_service_does_not_open_another():
    connecting, _ = sides("run/vault")
    _, accepting = sides("run")
    with pytest.raises(auth.AuthenticationError, match="another run"):
        accepting.challenge(connecting.hello())
    _, vault = sides("run/vault")
    challenge = accepting.challenge({**connecting.hello(), "run": "run"})
    answer = connecting.answer(
        vault.challenge({**connecting.hello(), "nonce": connecting.hello()["nonce"]})
    )
    del challenge
    with pytest.raises(auth.AuthenticationError):
        accepting.verify(answer)


@pytest.mark.parametrize(
    "nonce", [None, "", "0" * 31, "0" * 33, "é" * 32, 5, ["0" * 32], "0|" * 16]
)
def test_improper_nonces(nonce):
    connecting, accepting = sides()
    with pytest.raises(auth.AuthenticationError, match="no proper nonce"):
        accepting.challenge({"t": "hello", "run": "run", "nonce": nonce})
    with pytest.raises(auth.AuthenticationError, match="no proper nonce"):
        connecting.answer({"t": "challenge", "nonce": nonce, "proof": ""})


@pytest.mark.parametrize("proof", ["é" * 64, "\ud800", None, 7, [], {"a": 1}, "", "0" * 10**6])
def test_improper_proofs(proof):
    connecting, accepting = sides()
    accepting.challenge(connecting.hello())
    with pytest.raises(auth.AuthenticationError) as caught:
        accepting.verify({"t": "answer", "proof": proof})
    assert SECRET.decode() not in str(caught.value)
    with pytest.raises(auth.AuthenticationError):
        connecting.answer({"t": "challenge", "nonce": os.urandom(16).hex(), "proof": proof})


def test_listener_refuses_a_peer_without_the_secret():
    """The blocking form, which vaults use: the challenge is followed by a look at the answer."""
    near, far = socket.socketpair()
    with near, far:
        stranger = auth.Handshake(b"another secret", "run", "")
        framing.send(far, stranger.hello())
        framing.send(far, {"t": "answer", "proof": stranger._proof("connect")})
        with pytest.raises(auth.AuthenticationError):
            auth.accept(near, SECRET, "run")
