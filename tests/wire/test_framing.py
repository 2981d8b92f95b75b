"""Frames out of any bytes that arrive; large frames made in parts; waits for descriptors."""

import asyncio
import fcntl
import itertools
import json
import os
import resource
import select
import socket
import threading
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from deadpool_megatron.wire import framing
from deadpool_megatron.wire.framing import ConnectionClosed, FrameBuffer, WireError, readable

_LIMIT = 2000
_scalars = st.none() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)
_values = _scalars | st.lists(_scalars, max_size=3)
_messages = st.dictionaries(st.text(max_size=8), _values, max_size=3)
Outcome = tuple[list[dict[str, Any]], str]
_leaves = st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers())
_trees = st.dictionaries(
    st.text(), st.recursive(_leaves, lambda inner: st.dictionaries(st.text(), inner), max_leaves=20)
)
_HIGH = 1500


def _damaged(draw: st.DrawFn) -> bytes:
    """Frames, some of them changed by a few bits, cut off, or with junk between them."""
    pieces = draw(
        st.lists(
            _messages.map(framing.encode)
            | st.binary(max_size=30)
            | st.binary(max_size=20).map(
                lambda body: framing.MAGIC + len(body).to_bytes(4, "big") + body
            )
            | st.integers(0, 2**32 - 1).map(lambda size: framing.MAGIC + size.to_bytes(4, "big")),
            max_size=4,
        )
    )
    data = bytearray(b"".join(pieces))
    for position in draw(st.lists(st.integers(0, max(0, 8 * len(data) - 1)), max_size=3)):
        if data:
            data[position // 8] ^= 1 << position % 8
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


_streams = st.composite(_damaged)()


def _by_buffer(data: bytes, cuts: list[int]) -> Outcome:
    buffer, found = FrameBuffer(_LIMIT), []
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    try:
        for start, end in itertools.pairwise(edges):
            found += buffer.feed(data[start:end])
    except ConnectionClosed:
        raise AssertionError("a buffer knows no end") from None
    except WireError:
        return found, "garbage"
    return found, "end"


def _by_reader(data: bytes) -> Outcome:
    async def read() -> Outcome:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        found: list[dict[str, Any]] = []
        while True:
            try:
                found.append(await framing.read_frame(reader, _LIMIT))
            except ConnectionClosed:
                return found, "end"
            except WireError:
                return found, "garbage"

    return asyncio.run(read())


def _by_socket(data: bytes) -> Outcome:
    near, far = socket.socketpair()
    found: list[dict[str, Any]] = []
    with near:
        near.settimeout(20)
        with far:
            writer = threading.Thread(target=_write, args=(far, data))
            writer.start()
            try:
                while True:
                    found.append(framing.receive(near, _LIMIT))
            except ConnectionClosed:
                return found, "end"
            except WireError:
                return found, "garbage"
            finally:
                near.shutdown(socket.SHUT_RDWR)
                writer.join()


def _write(connection: socket.socket, data: bytes) -> None:
    try:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        return  # the reader has seen enough


@settings(max_examples=50)
@given(_messages)
def test_frame_arrives_as_sent(message):
    data = framing.encode(message)
    assert FrameBuffer().feed(data) == [message]


@settings(max_examples=150)
@given(_streams, st.lists(st.integers(0, 5000), max_size=5))
def test_every_reader_gets_the_same_out_of_any_bytes(data, cuts):
    by_reader = _by_reader(data)
    assert by_reader == _by_socket(data)
    in_pieces = _by_buffer(data, cuts)
    assert in_pieces[1] == by_reader[1]
    # Of frames that came in one piece with garbage none is delivered.
    assert in_pieces[0] == by_reader[0][: len(in_pieces[0])]
    if in_pieces[1] == "end":
        assert in_pieces == by_reader
    for message in by_reader[0]:
        assert isinstance(message, dict)


def test_a_long_message_goes_compressed_and_no_further_than_the_limit():
    message = {"t": "record", "seats": [[role // 8, role % 8, 0] for role in range(4000)]}
    data = framing.encode(message)
    assert len(data) < 10_000
    assert FrameBuffer().feed(data) == [message]
    for body in (data[framing.HEADER_BYTES :], data[framing.HEADER_BYTES : -9]):
        with pytest.raises(WireError, match="unpacks to more than 20000 bytes"):
            framing.decode_body(body, 20_000)


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b'{"a":' * 100_000, b'{"n": ' + b"9" * 5000 + b"}", b"\xff\xfe{\x00}\x00"],
    ids=["deep list", "deep object", "long number", "utf-16"],
)
def test_bodies_that_are_expensive_to_read(body):
    try:
        assert isinstance(framing.decode_body(body), dict)
    except WireError:
        return


def test_an_oversized_frame_is_refused_before_it_is_kept():
    header = framing.MAGIC + (framing.MAXIMUM_FRAME_BYTES + 1).to_bytes(4, "big")
    with pytest.raises(WireError, match="is over"):
        FrameBuffer().feed(header)
    with pytest.raises(WireError, match="is over"):
        framing.encode({"a": "x" * framing.MAXIMUM_FRAME_BYTES})
    assert json.loads(framing.encode({"a": 1})[framing.HEADER_BYTES :]) == {"a": 1}


@pytest.mark.slow
@given(_trees, st.integers(0, 3000))
def test_the_text_is_that_of_the_standard_library(values, many):
    whole = {**values, "restore": {"sources": {str(role): values for role in range(many // 50)}}}
    whole["seats"] = {str(role): [role, 0, 1] for role in range(many)}
    assert framing.dumps_in_parts(whole) == json.dumps(whole, separators=(",", ":"))


@pytest.fixture
def many_descriptors():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], _HIGH + 50), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many_descriptors")
def test_a_high_number_is_a_descriptor_like_any_other():
    reader, writer = os.pipe()
    high_reader, high_writer = (fcntl.fcntl(end, fcntl.F_DUPFD, _HIGH) for end in (reader, writer))
    with pytest.raises(ValueError, match="out of range"):
        select.select([high_reader], [], [], 0)
    assert not readable(high_reader, 0)
    assert not readable(high_reader, 0.0001), "a deadline below a millisecond is one"
    assert framing.writable(high_writer, 5.0)
    os.write(high_writer, b"x")
    assert readable(high_reader, 5.0)
    os.read(high_reader, 1)
    os.close(writer)
    os.close(high_writer)
    assert readable(high_reader, 5.0), "the end of the other side is news"
    os.close(reader)
    os.close(high_reader)
