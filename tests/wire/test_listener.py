"""The door: strangers wait in small number and not for long; who knows the secret gets in."""

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
async def test_who_says_nothing_stays_in_the_kernel(strangers):
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


async def test_a_crowd_of_strangers_keeps_nobody_out():
    async with open_door(max_pending=16) as (inside, address):
        before = descriptors()
        strangers = crowd(address, 40, b"D")
        (await enter(address)).close()
        # At no time were there more of them than allowed on this side.
        assert descriptors() <= before + len(strangers) + 16 + 1
        for connection in strangers:
            connection.close()
    assert len(inside.served) == 1
    crowded = [why for why in inside.refusals if why.startswith("too many unauthenticated peers")]
    assert 25 <= len(crowded) <= 40, "it came after them and had to wait for its turn"


async def come_again(connection: socket.socket, data: bytes) -> None:
    """A stranger who connects anew whenever he is put out."""
    address, loop = connection.getpeername(), asyncio.get_running_loop()
    while True:
        with connection, contextlib.suppress(ConnectionResetError):
            connection.setblocking(False)
            await loop.sock_recv(connection, 1)
        connection = socket.create_connection(address)
        connection.sendall(data)


@pytest.mark.slow
@pytest.mark.usefixtures("many_files")
async def test_strangers_who_come_again_keep_nobody_out():
    """Put out one after the other, with a last call for each, they held every place for ever."""

    async with open_door(max_pending=100) as (inside, address):
        data = b"D"
        connections = crowd(address, 600, data)
        strangers = [asyncio.create_task(come_again(one, data)) for one in connections]
        # Twenty a second would be more than this time for those who stand before the agents.
        async with asyncio.timeout(SECONDS):
            writers = await asyncio.gather(*(enter(address) for _ in range(16)))
        for stranger in strangers:
            stranger.cancel()
        await asyncio.gather(*strangers, return_exceptions=True)
        for writer in writers:
            writer.close()
    assert len(inside.served) == 16


async def test_the_one_who_goes_is_of_the_address_with_most_strangers():
    """Who floods from one address takes the places of his own connections."""

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


async def test_who_speaks_another_version_hears_so():
    """In a form that tells it, whatever its own is: the first bytes say the version."""

    async with open_door(max_pending=4) as (inside, address):
        reader, writer = await open_stream(address)
        writer.write(OLDER)
        assert (await framing.read_frame(reader))["t"] == "other-version"
        assert await reader.read() == b""
        writer.close()
        await inside.until(lambda: inside.refusals)
    (why,) = inside.refusals
    assert "the other end speaks 'DPM1', this one 'DPM3': install one version" in why


async def test_a_crowd_of_agents_gets_in_one_after_the_other():
    """As many as all agents of a large run that come back at once: none of them is put out."""

    async with open_door(max_pending=4) as (inside, address):
        writers = await asyncio.gather(*(enter(address) for _ in range(200)))
        assert len(inside.served) == 200
        for writer in writers:
            writer.close()
    assert inside.refusals == []


def test_strangers_at_a_vault(tmp_path):
    """More silent ones than it lets wait: its buddy still gets through, they are all counted."""
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
    """Whoever means the coordinator, another run's vault, or that of another node, does not come to
    this one; nor where addresses are translated."""
    monkeypatch.setenv(auth.TRANSLATED, "1")
    with cluster(tmp_path, 1) as running:
        secret = auth.load_secret(running.directory)
        with pytest.raises(framing.WireError):
            auth.connect(("127.0.0.1", running.nodes[0].port), secret, realm, SECONDS)
