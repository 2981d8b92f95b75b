"""TLS: wrong files are named at start, strangers stay outside, everything works inside."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from deadpool_megatron.events import Kind
from deadpool_megatron.layout.records import Generation
from deadpool_megatron.settings import Settings, SettingsError
from deadpool_megatron.vault.net.transport import Channel, TcpTransport, realm_of
from deadpool_megatron.wire import auth, framing, tls
from tests.cluster.running import Run, deadpool
from tests.vault.harness import RUN_ID, cluster, train, wait_until
from tests.vault.protected import begin
from tests.wire import certificates
from tests.wire.visitors import SECONDS, SECRET, enter, open_door

Files = dict[str, str]


def contexts(files: Files) -> tls.Tls:
    found = tls.contexts(Settings(**files))  # type: ignore[arg-type]
    assert found is not None
    return found


# At start.


def test_the_documented_lines_make_files_that_work(tls_settings: Files) -> None:
    assert contexts(tls_settings).server.minimum_version is ssl.TLSVersion.TLSv1_3
    assert tls.contexts(Settings()) is None


@pytest.mark.parametrize("name", ["tls_certificate", "tls_key", "tls_authority"])
def test_a_file_that_is_not_there_or_no_pem_is_named(
    tls_settings: Files, tmp_path: Path, name: str
) -> None:
    flag = f"--deadpool-{name.replace('_', '-')}"
    with pytest.raises(SettingsError, match=rf"{flag} .*nowhere cannot be read: No such file"):
        contexts({**tls_settings, name: str(tmp_path / "nowhere")})
    junk = tmp_path / "junk"
    junk.write_text("no certificate")
    junk.chmod(0o600)
    with pytest.raises(SettingsError, match=rf"{flag} .*junk"):
        contexts({**tls_settings, name: str(junk)})
    others = {other: "" for other in tls_settings if other != name}
    with pytest.raises(SettingsError, match=rf"{flag} needs --deadpool-tls-"):
        Settings(**{**tls_settings, **others})  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=rf"{flag} must be an absolute path"):
        Settings(**{**tls_settings, name: "node.pem"})  # type: ignore[arg-type]


def test_files_that_do_not_belong_together(
    tls_settings: Files, foreign_settings: Files, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match="are not a certificate and its key"):
        contexts({**tls_settings, "tls_key": foreign_settings["tls_key"]})
    with pytest.raises(SettingsError, match=r"is not accepted under .*authority\.pem: "):
        contexts({**tls_settings, "tls_authority": foreign_settings["tls_authority"]})
    open_key = tmp_path / "node.key"
    open_key.write_bytes(Path(tls_settings["tls_key"]).read_bytes())
    for mode in (0o604, 0o640):
        open_key.chmod(mode)
        with pytest.raises(SettingsError, match="can be read by others: chmod 600 it"):
            contexts({**tls_settings, "tls_key": str(open_key)})


def test_expired_and_locked_files(tls_settings: Files, tmp_path: Path) -> None:
    # Newer ones of openssl refuse a negative number of days, and know dates.
    newer = "openssl x509 -help 2>&1 | grep -q not_after"
    dates = "-not_before 20200101000000Z -not_after 20200102000000Z"
    when = f"$({newer} && echo {dates} || echo -days -1)"
    change = ("-CAcreateserial -days 400", f"-CAcreateserial {when}")
    with pytest.raises(SettingsError, match="certificate has expired"):
        contexts(certificates.make(tmp_path, change))
    locked = tmp_path / "locked.key"
    command = ["openssl", "pkey", "-in", tls_settings["tls_key"], "-aes128", "-out", str(locked)]
    subprocess.run([*command, "-passout", "pass:x"], check=True)
    with pytest.raises(SettingsError, match="without a passphrase"):
        contexts({**tls_settings, "tls_key": str(locked)})


def test_a_run_with_wrong_files_does_not_start(foreign_settings: Files, tmp_path: Path) -> None:
    files = {**foreign_settings, "tls_key": str(tmp_path / "none")}
    size = ("--nodes", "2", "--nproc-per-node", "1", "--preload", "")
    member = str(Path(certificates.__file__))
    for command in ("run", "agent"):
        place = ("--run-dir", str(tmp_path / command))
        more = ("--node-id", "0") if command == "agent" else ()
        given = (*place, *more, *size)
        done = deadpool(command, *given, *certificates.options(files), "--", member)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert "--deadpool-tls-key" in done.stderr
        assert not (tmp_path / command / "run.json").exists()


# At the coordinator's door.


@pytest.mark.parametrize("who", ["plain", "nameless", "foreign", "wrong secret"])
async def test_strangers_stay_outside(
    tls_settings: Files, foreign_settings: Files, who: str
) -> None:
    known = contexts(tls_settings)
    nameless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nameless.check_hostname = False
    nameless.verify_mode = ssl.CERT_NONE
    sides = {
        "plain": None,
        "nameless": replace(known, client=nameless),
        "foreign": contexts(foreign_settings),
        "wrong secret": known,
    }
    secret = b"wrong" * 8 if who == "wrong secret" else SECRET
    async with open_door(tls=known) as (inside, address):
        with pytest.raises((OSError, framing.WireError)):
            await enter(address, sides[who], secret)
        await inside.until(lambda: inside.refusals)
        (await enter(address, known)).close()
    assert len(inside.refusals) == 1


# Between vaults.


async def test_bulk_bytes_and_frames_of_one_record_arrive(tls_settings: Files) -> None:
    """Both directions, much larger than any buffer; a frame that came along is not waited for."""
    known = contexts(tls_settings)
    listener = socket.create_server(("127.0.0.1", 0))
    there = TcpTransport(listener, SECRET, "run", 0, SECONDS, known)
    payload = bytes(range(256)) * (8 << 12)
    loop = asyncio.get_running_loop()
    connecting = loop.run_in_executor(None, there.connect, 0, *listener.getsockname())
    accepted = await loop.run_in_executor(None, there.accept, SECONDS)
    assert accepted is not None
    await loop.run_in_executor(None, accepted.authenticate)
    near = await connecting
    sending = loop.run_in_executor(None, near.send_bulk, memoryview(payload))
    target = bytearray(len(payload))
    await loop.run_in_executor(None, accepted.receive_bulk, memoryview(target))
    await sending
    assert target == payload
    assert isinstance(near, Channel)
    two = framing.encode({"n": 1}) + framing.encode({"n": 2})
    near.send_bulk(memoryview(two))
    for number in (1, 2):
        assert accepted.readable(SECONDS)
        assert accepted.receive() == {"n": number}
    assert not accepted.readable(0)
    assert not near.readable(0)
    near.shutdown()
    assert accepted.readable(SECONDS)
    with pytest.raises((OSError, framing.WireError)):
        accepted.receive()
    with pytest.raises((OSError, framing.WireError)):
        near.receive()
    near.close()
    accepted.close()
    there.close()


def test_vaults_commit_and_restore_over_tls(tls_settings: Files, tmp_path: Path) -> None:
    with cluster(tmp_path, 2, **tls_settings) as running:
        members = begin(running)
        node = running.nodes[1]
        secret = auth.load_secret(running.directory)
        with pytest.raises((OSError, framing.WireError)):
            auth.connect(("127.0.0.1", node.port), secret, realm_of(RUN_ID, 1), SECONDS)
        wait_until(lambda: node.count("refused: connection") == 1, "it is counted")
        train(members, Generation(1, 1))


@pytest.mark.slow
def test_a_whole_run_under_tls(tls_settings: Files, tmp_path: Path) -> None:
    with Run(tmp_path / "run", nproc=2, options=certificates.options(tls_settings)) as run:
        run.wait_iteration(3)
        assert deadpool("kill", str(run.run.path), "--node", "1").returncode == 0
        run.wait_event(Kind.RECOVERED)
        status = json.loads(deadpool("status", str(run.run.path), "--json").stdout)
        final = run.finish()
    assert final["recoveries"]
    assert status["refusals"] == 0
