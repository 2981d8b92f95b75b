"""A real etcd on loopback, which can be killed and started again on the same data."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from deadpool_megatron.cluster.journal.etcd import Credentials, EtcdClient, EtcdError
from tests.common.ports import free_port

_PATIENCE_SECONDS = 30.0
_CERTIFICATES = """
openssl req -x509 -newkey ed25519 -nodes -days 400 -subj /CN=a -keyout authority.key -out authority
openssl req -newkey ed25519 -nodes -subj /CN=node -keyout key -out node.csr
openssl x509 -req -in node.csr -CA authority -CAkey authority.key -CAcreateserial -days 400 \\
    -extfile <(echo subjectAltName=IP:127.0.0.1) -out certificate
"""


def certificates_in(directory: Path) -> dict[str, str]:
    """Make the three files of :class:`EtcdServer`."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl")
    command = ["bash", "-ec", _CERTIFICATES]
    subprocess.run(command, cwd=directory, check=True, capture_output=True)
    return {name: str(directory / name) for name in ("certificate", "key", "authority")}


class EtcdServer:
    """One member of its own cluster. Skips the test where there is no ``etcd``.

    ``tls``: certificate, key and authority, which clients have to show certificates of as well.
    """

    def __init__(self, directory: Path, tls: Mapping[str, str] | None = None) -> None:
        if shutil.which("etcd") is None:
            pytest.skip("needs the program etcd (Debian: apt install etcd-server)")
        self._directory = directory
        self._tls = tls
        self.port = free_port()
        self._peer_port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        scheme, secure = "http", []
        if self._tls is not None:
            scheme = "https"
            secure = [
                *("--cert-file", self._tls["certificate"]),
                *("--key-file", self._tls["key"]),
                *("--trusted-ca-file", self._tls["authority"], "--client-cert-auth"),
            ]
        client, peer = f"{scheme}://{self.endpoint}", f"http://127.0.0.1:{self._peer_port}"
        with open(self._directory / "etcd.log", "ab") as log:
            self._process = subprocess.Popen(
                [
                    *("etcd", "--data-dir", str(self._directory / "etcd"), "--logger", "zap"),
                    *("--listen-client-urls", client, "--advertise-client-urls", client),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--initial-cluster", f"default={peer}", "--log-level", "error"),
                    # A single member need not wait for the votes of others.
                    *("--heartbeat-interval", "10", "--election-timeout", "50"),
                    *secure,
                ],
                stdout=log,
                stderr=log,
            )
        probe = EtcdClient([("127.0.0.1", self.port)], self._probing(), 1.0)
        limit = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                probe.get("/ready")
                return
            except EtcdError as error:
                if "refuses" in str(error):  # it has users of its own by now
                    return
                assert time.monotonic() < limit, (self._directory / "etcd.log").read_text()

    def _probing(self) -> Credentials:
        if self._tls is None:
            return Credentials()
        context = ssl.create_default_context(cafile=self._tls["authority"])
        context.load_cert_chain(self._tls["certificate"], self._tls["key"])
        return Credentials(context)

    def stop(self) -> None:
        """SIGSTOP; returns when all its threads stand still."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(_PATIENCE_SECONDS)
