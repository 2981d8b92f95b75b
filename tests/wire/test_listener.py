"""The listener: few strangers wait, and not for long; peers with the secret get in."""

import asyncio
import contextlib
import resource
import socket
from pathlib import Path

import pytest

from deadpool_megatron.vault.transport import realm_of
from deadpool_megatron.wire import auth, framing
from deadpool_megatron.wire.sealed_records import open_stream
from tests.vault.harness import RUN_ID, cluster, wait_until
from tests.wire.visitors import SECONDS, Address, enter, open_door


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def many_files():
    """For the strangers' ends, which are in the same process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8192)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("strangers", [800, pytest.param(1500, marks=pytest.mark.full)])
@pytest.mark.usefixtures("many_files")
async def test_silent_connections_stay_in_the_kernel(strangers):
    """All agents come back after a takeover, with 256 strangers let in, as of 1024 open files."""

    async with open_door(max_pending=256) as (inside, address):
        silent = [socket.create_connection(address, SECONDS) for _ in range(strangers)]
        writers = await asyncio.gather(*(enter(address) for _ in range(16)))
        assert len(inside.served) == 16
        for connection in (*silent, *writers):
            connection.close()
    # Of more than the kernel remembers some are handed over; they go before any agent does.
    assert strangers > 1000 or inside.refusals == []


def crowd(address: Address, count: int, data: bytes) -> list[socket.socket]:
    connections = [socket.create_connection(address) for _ in range(count)]
    for connection in connections:
        connection.sendall(data)
    return connections


async def test_crowd_of_strangers_does_not_block_an_agent():
    async with open_door(max_pending=16) as (inside, address):
        before = descriptors()
        strangers = crowd(address, 40, b"D")
        (await enter(address)).close()
        # At no time were there more of them than allowed on this side.
        assert descriptors() <= before + len(strangers) + 16 + 1
        for connection in strangers:
            connection.close()
    assert len(inside.served) == 1
    crowded = [text for text in inside.refusals if text.startswith("too many unauthenticated")]
    assert 25 <= len(crowded) <= 40, "it came after them and had to wait for its turn"


async def come_again(connection: socket.socket, data: bytes) -> None:
    """A stranger that connects again whenever its connection is closed."""
    address, loop = connection.getpeername(), asyncio.get_running_loop()
    while True:
        with connection, contextlib.suppress(ConnectionResetError):
            connection.setblocking(False)
            await loop.sock_recv(connection, 1)
        connection = socket.create_connection(address)
        connection.sendall(data)


@pytest.mark.slow
@pytest.mark.usefixtures("many_files")
async def test_returning_strangers_do_not_block_agents():
    """Put out one after the other, with a last call for each, they held every place for ever."""

    async with open_door(max_pending=100) as (inside, address):
        data = b"D"
        connections = crowd(address, 600, data)
        strangers = [asyncio.create_task(come_again(each, data)) for each in connections]
        # At twenty a second the strangers before the agents would take more than this time.
        async with asyncio.timeout(SECONDS):
            writers = await asyncio.gather(*(enter(address) for _ in range(16)))
        for stranger in strangers:
            stranger.cancel()
        await asyncio.gather(*strangers, return_exceptions=True)
        for writer in writers:
            writer.close()
    assert len(inside.served) == 16


async def test_listener_closes_peers_of_the_fullest_address():
    """A flood from an address takes the places of its own connections."""

    async with open_door(max_pending=8) as (inside, address):
        lonely = socket.create_connection(address, SECONDS, ("127.0.0.2", 0))
        lonely.sendall(b"D")  # the oldest of all
        strangers = crowd(address, 30, b"D")
        (await enter(address)).close()
        assert len(inside.refusals) >= 20
        lonely.setblocking(False)
        with pytest.raises(BlockingIOError):
            lonely.recv(1)  # it is still let wait
        for connection in (lonely, *strangers):
            connection.close()


async def test_a_knock_is_no_refusal_but_half_a_word_is():
    async with open_door(max_pending=4) as (inside, address):
        socket.create_connection(address).close()
        with socket.create_connection(address) as connection:
            connection.sendall(b"D")
        await inside.until(lambda: inside.refusals)
        (await enter(address)).close()
    assert inside.refusals == ["ConnectionCut: connection closed"]


OLDER = b"DPM1\x00\x00\x00\x0d" + b'{"t":"hello"}'


async def test_peer_of_another_version_is_informed():
    """In a form that any version can read: the version is in the first bytes."""

    async with open_door(max_pending=4) as (inside, address):
        reader, writer = await open_stream(address)
        writer.write(OLDER)
        assert (await framing.read_frame(reader))["t"] == "other-version"
        assert await reader.read() == b""
        writer.close()
        await inside.until(lambda: inside.refusals)
    (text,) = inside.refusals
    assert "the other end speaks 'DPM1', this one 'DPM4': install one version" in text


async def test_a_crowd_of_agents_gets_in_one_after_the_other():
    """As many as all agents of a large run that come back at once: none of them is put out."""

    async with open_door(max_pending=4) as (inside, address):
        writers = await asyncio.gather(*(enter(address) for _ in range(200)))
        assert len(inside.served) == 200
        for writer in writers:
            writer.close()
    assert inside.refusals == []


def test_strangers_at_a_vault(tmp_path):
    """More silent peers than it lets wait: its buddy still gets in, and all of them are counted."""
    with cluster(tmp_path, 1) as running:
        node = running.nodes[0]
        address = ("127.0.0.1", node.port)
        silent = [socket.create_connection(address, 5) for _ in range(100)]
        for connection in silent:
            connection.sendall(b"D")
        secret = auth.load_secret(running.directory)
        auth.connect(address, secret, realm_of(RUN_ID, 0), SECONDS).close()
        for connection in silent:
            connection.close()
        wait_until(lambda: node.count("refused: connection") == len(silent), "they are counted")


@pytest.mark.parametrize("realm", ["run", "other/vault0", realm_of(RUN_ID, 1)])
def test_a_vault_is_no_other_service(tmp_path, realm, monkeypatch):
    """A peer that dials the coordinator or another vault is refused, also
    where addresses are translated."""
    monkeypatch.setenv(auth.NAT_VARIABLE, "1")
    with cluster(tmp_path, 1) as running:
        secret = auth.load_secret(running.directory)
        with pytest.raises(framing.WireError):
            auth.connect(("127.0.0.1", running.nodes[0].port), secret, realm, SECONDS)
