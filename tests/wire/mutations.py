"""Valid conversations made invalid: bits flipped, cut off, frames out of order, values replaced."""

import copy
import json
import random
import socket
from collections.abc import Mapping, Sequence
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
    """What a stranger sends who has recorded these frames."""
    chosen = list(frames)
    kind = random_.randrange(7)
    if kind == 1:
        random_.shuffle(chosen)
    elif kind == 2:
        chosen.insert(random_.randrange(len(chosen) + 1), random_.choice(chosen))
    elif kind == 3:
        del chosen[random_.randrange(len(chosen))]
    data = bytearray(b"".join(chosen))
    if kind == 4:
        for _ in range(random_.randrange(1, 20)):
            data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
    elif kind == 5:
        del data[random_.randrange(1, len(data)) :]
    elif kind == 6:
        at = random_.randrange(len(data))
        data[at:at] = random_.randbytes(random_.randrange(1, 5000))
    return bytes(data)  # of kind 0: exactly what was recorded


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
    except TimeoutError:
        raise
    except OSError:
        return  # reset: it had not read everything


def strange(message: Mapping[str, Any], random_: random.Random) -> dict[str, Any]:
    """The message with one of its values, at any depth, replaced, or one of its keys missing."""
    changed = json.loads(json.dumps(message))
    places = list(_places(changed))
    container, key = random_.choice(places)
    if isinstance(container, dict) and random_.random() < 0.2:
        del container[key]
    else:
        other = [value for value in STRANGE if value != container[key]]
        container[key] = copy.deepcopy(random_.choice(other))
    return dict(changed)


def _places(value: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if key != "t":
            found.append((value, key))
        if isinstance(inner, dict | list):
            found += _places(inner)
    return found
