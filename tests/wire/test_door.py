"""The door: strangers wait in small number and not for long; who knows the secret gets in."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from deadpool_megatron.vault.transport import realm_of
from deadpool_megatron.wire import auth, framing
from deadpool_megatron.wire.auth import connect_stream
from deadpool_megatron.wire.door import Door, Lock
from deadpool_megatron.wire.tls import open_stream
from tests.vault.harness import RUN_ID, cluster, wait_until
from tests.wire.visitors import SECONDS, SECRET, Recorder

Address = tuple[str, int]


def behind(
    scenario: Callable[[Recorder, Address], Awaitable[None]],
    most_strangers: int,
    seconds: float = SECONDS,
) -> Recorder:
    """Run a scenario in front of a door."""

    async def run() -> Recorder:
        inside = Recorder()
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        door = Door(listener, Lock(SECRET, "run", None, seconds), inside, most_strangers)
        opened = asyncio.create_task(door.run())
        try:
            await scenario(inside, listener.getsockname())
        finally:
            opened.cancel()
            door.close()
        return inside

    return asyncio.run(run())


async def enter(address: Address) -> asyncio.StreamWriter:
    reader, writer = await open_stream(address, None)
    await connect_stream(reader, writer, SECRET, "run")
    assert await framing.read_frame(reader) == {"t": "welcome"}
    return writer


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_crowd_of_silent_strangers_keeps_nobody_out() -> None:
    async def scenario(_inside: Recorder, address: Address) -> None:
        before = descriptors()
        silent = [socket.create_connection(address) for _ in range(40)]
        (await enter(address)).close()
        # At no time were there more of them than allowed on this side.
        assert descriptors() <= before + len(silent) + 16 + 1
        for connection in silent:
            connection.close()

    inside = behind(scenario, most_strangers=16)
    assert len(inside.served) == 1
    crowded = [why for why in inside.refusals if why.startswith("too many strangers")]
    assert 25 <= len(crowded) <= 40, "it came after them and had to wait for its turn"


def test_a_knock_is_no_refusal_but_half_a_word_is() -> None:
    async def scenario(inside: Recorder, address: Address) -> None:
        socket.create_connection(address).close()
        with socket.create_connection(address) as connection:
            connection.sendall(b"D")
        await inside.until(lambda: inside.refusals)
        (await enter(address)).close()

    inside = behind(scenario, most_strangers=4)
    assert inside.refusals == ["ConnectionCut: connection closed"]


def test_a_crowd_of_agents_gets_in_one_after_the_other() -> None:
    """As many as all agents of a large run that come back at once: none of them is put out."""

    async def scenario(inside: Recorder, address: Address) -> None:
        await asyncio.gather(*(enter(address) for _ in range(200)))
        assert len(inside.served) == 200

    assert behind(scenario, most_strangers=4).refusals == []


def test_who_drips_is_put_out_at_the_limit_for_all_of_it() -> None:
    async def scenario(inside: Recorder, address: Address) -> None:
        reader, writer = await asyncio.open_connection(*address)
        for byte in framing.encode({"t": "hello", "run": "run", "nonce": "0" * 32}):
            writer.write(bytes([byte]))
            await asyncio.sleep(0.01)
            if inside.refusals:
                break
        await inside.until(lambda: inside.refusals)
        with contextlib.suppress(ConnectionResetError):  # a byte of ours was still on its way
            assert await reader.read() == b""

    inside = behind(scenario, most_strangers=4, seconds=0.2)
    assert inside.refusals == ["no complete greeting within 0.2 s"]


def test_strangers_leave_no_descriptor_behind() -> None:
    async def scenario(inside: Recorder, address: Address) -> None:
        (await enter(address)).close()
        before = descriptors()
        for payload in (b"", b"DPM1", b"GET /", framing.encode({"t": "hello", "run": "x"})):
            with socket.create_connection(address) as connection:
                connection.sendall(payload)
        await inside.until(lambda: len(inside.refusals) == 3)
        for _ in range(3):
            await asyncio.sleep(0)
        gc.collect()
        assert descriptors() <= before

    behind(scenario, most_strangers=4)


def test_strangers_at_a_vault(tmp_path: Path) -> None:
    """More silent ones than it lets wait: its buddy still gets through, they are all counted."""
    with cluster(tmp_path, 1) as running:
        node = running.nodes[0]
        address = ("127.0.0.1", node.port)
        silent = [socket.create_connection(address, 5) for _ in range(100)]
        secret = auth.load_secret(running.directory)
        auth.connect(address, secret, realm_of(RUN_ID), SECONDS).close()
        for connection in silent:
            connection.close()
        wait_until(lambda: node.count("refused: connection") == len(silent), "they are counted")


@pytest.mark.parametrize("realm", ["run", "other/vault"])
def test_a_vault_is_no_other_service(tmp_path: Path, realm: str) -> None:
    """Who means the coordinator, or another run's vault, does not come to this one."""
    with cluster(tmp_path, 1) as running:
        secret = auth.load_secret(running.directory)
        with pytest.raises(framing.WireError):
            auth.connect(("127.0.0.1", running.nodes[0].port), secret, realm, SECONDS)
