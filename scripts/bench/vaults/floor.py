#!/usr/bin/env python
"""The floor of a vault: its bytes through bare sockets, with its two hashes, and nothing more.

    floor.py LISTENER_FD HOST:PORT FOLDER CONNECTIONS BYTES

On each line of standard input a pass: of each connection the sender hashes its bytes (the checksum
of a seal), then hashes (the tag of a record) and sends pieces; the receiver takes each piece to its
place in memory, and computes both hashes while it is in the cache. It prints the processor seconds
of each pass. Both sides of a link run this program; sender and receiver of a connection have a
thread each, as in a vault. Bytes lie in files of FOLDER, in shared memory.
"""

from __future__ import annotations

import mmap
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import xxhash

from deadpool_megatron.vault.shm.segment import checksum
from deadpool_megatron.wire.framing import receive_into

_DIGEST_BYTES = 8
_PIECE_BYTES = 1 << 20  # as of a record, see wire/sealed_records.py


def memory(path: Path, nbytes: int) -> memoryview:
    """Return shared memory that is all there."""
    path.write_bytes(b"")
    with open(path, "r+b") as file:
        file.truncate(nbytes)
        view = memoryview(mmap.mmap(file.fileno(), nbytes))
    for start in range(0, nbytes, 4096):
        view[start] = start >> 12 & 255
    return view


def send(connection: socket.socket, view: memoryview) -> None:
    """Hash, send, and wait until the receiver has the same bytes."""
    digest = checksum(view)
    for piece in pieces(view):
        xxhash.xxh3_128_digest(piece)
        connection.sendall(piece)
    received = int.from_bytes(connection.recv(_DIGEST_BYTES, socket.MSG_WAITALL))
    assert received == digest, "other bytes have arrived"


def receive(connection: socket.socket, view: memoryview) -> None:
    """Receive and hash, and answer with the hash."""
    digest = xxhash.xxh3_64()
    for piece in pieces(view):
        receive_into(connection, piece)
        xxhash.xxh3_128_digest(piece)
        digest.update(piece)
    connection.sendall(digest.intdigest().to_bytes(_DIGEST_BYTES))


def pieces(view: memoryview) -> Iterator[memoryview]:
    """Yield the bytes of a record each."""
    for start in range(0, len(view), _PIECE_BYTES):
        yield view[start : start + _PIECE_BYTES]


def main(listener_fd: str, address: str, folder: str, connections: str, size: str) -> None:
    """Run passes until the end of the input."""
    count, nbytes = int(connections), int(size)
    host, _, port = address.rpartition(":")
    listener = socket.socket(fileno=int(listener_fd))
    outgoing = [socket.create_connection((host, int(port))) for _ in range(count)]
    incoming = [listener.accept()[0] for _ in range(count)]
    memories = [memory(Path(folder) / f"floor-{number}", nbytes) for number in range(2 * count)]
    print("ready", flush=True)
    for _ in sys.stdin:
        began = time.process_time()
        sides = [(send, to, memories[n]) for n, to in enumerate(outgoing)]
        sides += [(receive, at, memories[count + n]) for n, at in enumerate(incoming)]
        threads = [threading.Thread(target=side[0], args=side[1:]) for side in sides]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(time.process_time() - began, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
