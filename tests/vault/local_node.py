"""A whole vault in the process of the test, on the network of :mod:`tests.vault.fake_network`."""

import shutil
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

from deadpool_megatron.layout.records import Seat
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault import agent_orders, vault_client
from tests.vault.fake_network import FakeNetwork, QuickListener


class LocalNode:
    """Its slots outlive the vault, as those of a vault process do."""

    def __init__(
        self,
        network: FakeNetwork,
        number: int,
        directory: Path,
        settings: Settings,
        hosts: Sequence[str] = ("fake",),
    ) -> None:
        self.network, self.number, self.directory = network, number, directory
        self.settings, self.hosts = settings, hosts
        self.clients: list[vault_client.VaultClient] = []
        self.starts = 0
        self.start()

    def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.starts += 1
        self.socket_path = str(self.directory.parent / f"vault{self.number}-{self.starts}.sock")
        self.listener = QuickListener(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(self.socket_path)
        self.listener.listen()
        transports = [self.network.transport(host, self.number, 5.0) for host in self.hosts]
        self.vault = agent_orders.Vault(
            self.number, self.directory, self.settings, self.listener, *transports
        )
        self.vault.start()
        self.end = threading.Thread(target=self.vault.wait, name=f"vault{self.number}")
        self.end.start()

    def client(self, seat: Seat) -> vault_client.VaultClient:
        """The connection of a member."""
        made = vault_client.VaultClient(self.socket_path, self.directory, seat, connect_seconds=5.0)
        self.clients.append(made)
        return made

    def stop(self) -> None:
        """The vault's process is gone, and with it every member's connection."""
        for client in self.clients:
            client.close()
        self.clients.clear()
        self.vault.stop()
        self.end.join(10)
        self.listener.close()

    def die(self) -> None:
        self.stop()
        shutil.rmtree(self.directory)
