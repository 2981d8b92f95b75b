"""Valid conversations made invalid: bits flipped, cut off, frames out of order, values replaced."""

import errno
import json
import random
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deadpool_megatron.wire import auth, framing

# Not among them: any value that could be meant.
STRANGE: tuple[Any, ...] = (
    *(None, [], {}, [[]], "", "x", "\u0000", "é" * 300, -1, 2**63, 2**70, -(2**70)),
    *(float("inf"), float("-inf"), float("nan"), 1.5, [None], {"a": {"b": []}}, "9" * 5000),
)


def recorded_handshake(address: tuple[str, int], secret: bytes, realm: str) -> list[bytes]:
    """The two frames of the connecting side, out of a conversation that was accepted."""
    with socket.create_connection(address, 20) as connection:
        handshake = auth.Handshake(secret, realm, auth.address_of(connection.getpeername()))
        hello = framing.encode(handshake.hello())
        connection.sendall(hello)
        answer = framing.encode(handshake.answer(framing.receive(connection)))
        connection.sendall(answer)
    return [hello, answer]


def damaged(frames: Sequence[bytes], random_: random.Random) -> bytes:
    """Return bytes that a stranger could send after recording these frames: some of them in any
    order, with flipped bits, other bytes between them, or cut off."""
    data = bytearray(b"".join(random_.choices(frames, k=random_.randrange(1, 4))))
    for _ in range(random_.choice((0, 0, 9))):
        data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
    at = random_.randrange(1, len(data))
    data[at:at] = random_.randbytes(random_.choice((0, 0, 3000)))
    return bytes(data[: random_.choice((len(data), at))])


def tell(address: tuple[str, int], data: bytes) -> None:
    """Send it all and wait until the other side has ended the connection."""
    with socket.create_connection(address, 20) as connection:
        drain(connection, data)


def drain(connection: socket.socket, data: bytes = b"") -> None:
    """Send it, and wait until the other side has read everything and ended the connection."""
    connection.settimeout(20)
    try:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass
    except OSError as error:  # reset, before the shutdown or later: it had not read everything
        if not isinstance(error, ConnectionError) and error.errno != errno.ENOTCONN:
            raise


def strange(message: Mapping[str, Any], random_: random.Random) -> dict[str, Any]:
    """Return the message with a value, at any depth, replaced, or without a key."""
    changed: dict[str, Any] = json.loads(json.dumps(message))
    container, key = random_.choice([*_places(changed)])
    if isinstance(container, dict) and random_.random() < 0.2:
        del container[key]
    else:
        container[key] = random_.choice([value for value in STRANGE if value != container[key]])
    return changed


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if key != "t":
            yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)
