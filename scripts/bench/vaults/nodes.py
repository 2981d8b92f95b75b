"""Vault processes on loopback or on links of namespaces, and what their threads cost."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.frame import BenchError, UsageError
from common.machine import threads_of

from deadpool_megatron.layout.records import (
    PartInfo,
    RoleLayout,
)
from deadpool_megatron.vault.control import VaultControl
from tests.netns.lab.hosts import Host, Hosts, missing
from tests.vault import harness

_WATCHED = Path(__file__).with_name("watched.py")
_FLOOR = Path(__file__).with_name("floor.py")
_START_SECONDS = 120.0
_ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
# For a commit; for hangs only, as all limits here.
SECONDS = 600.0
harness.DEADLINE = _START_SECONDS


@dataclass(frozen=True)
class Link:
    """The network of the nodes: loopback, or a host for each, whose sending rate is limited."""

    hosts: Sequence[Host] = ()

    def enter(self, node: int) -> tuple[str, ...]:
        """Return the start of a command that runs on the network of a node."""
        return ("nsenter", f"--net=/run/netns/{self.hosts[node].namespace}") if self.hosts else ()

    def listen(self, node: int) -> socket.socket:
        """Return a listening socket of a node."""
        if not self.hosts:
            return socket.create_server(("127.0.0.1", 0), backlog=128)
        made: list[socket.socket] = []

        def on_host() -> None:  # a thread may be elsewhere than its process
            with open(f"/run/netns/{self.hosts[node].namespace}") as space:
                assert ctypes.CDLL(None).setns(space.fileno(), os.O_RDONLY) == 0
            made.append(socket.create_server((self.hosts[node].address, 0), backlog=128))

        thread = threading.Thread(target=on_host)
        thread.start()
        thread.join()
        return made[0]


@contextlib.contextmanager
def link_of(gbit: float, nodes: int, folder: Path) -> Iterator[Link]:
    """Yield a link of this rate between that many hosts; 0: loopback. Raises UsageError."""
    if not gbit:
        yield Link()
        return
    if reason := missing():
        raise UsageError(f"no hosts can be made here: {reason}")
    with Hosts(nodes, folder) as hosts:
        for host in hosts:
            limit = f"tbf rate {gbit:g}gbit burst 8mb latency 50ms"
            done = host.run(*f"tc qdisc replace dev eth0 root {limit}".split())
            if done.returncode:
                raise BenchError(done.stderr)
        yield Link(list(hosts))


@dataclass
class Node(harness.Node):
    """A node whose vault is a process of its own program on a link."""

    link: Link = field(default_factory=Link)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tcp.close()
        self.tcp = self.link.listen(self.number)
        self.address, self.port = self.tcp.getsockname()
        self.functions = self.run_dir / f"functions{self.number}.json"

    def start(self) -> None:
        """Start the vault and connect to it."""
        unix, tcp = self.unix.fileno(), self.tcp.fileno()
        command = [
            *(*self.link.enter(self.number), sys.executable, str(_WATCHED), str(self.functions)),
            *("--run-dir", str(self.run_dir), "--node", str(self.number)),
            *("--segment-dir", str(self.directory), "--unix-fd", str(unix), "--tcp-fd", str(tcp)),
        ]
        own = {"DEADPOOL_RUN_ID": harness.RUN_ID, "DEADPOOL_SETTINGS": self.settings.to_json()}
        with open(self.run_dir / f"vault{self.number}.log", "ab") as log:
            files = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self.process = subprocess.Popen(  # type: ignore[assignment]
                command, env={**_ENVIRONMENT, **own}, pass_fds=(unix, tcp), **files
            )
        connected = VaultControl.connect(self.socket_path, self.events.append, _START_SECONDS)
        self.control = self.loop(connected)

    def threads(self) -> Counter[str]:
        """Return the processor time of the vault's threads so far, 0 of a killed vault."""
        if self.process.poll() is not None:
            return Counter()
        found = threads_of(Path(f"/proc/{self.process.pid}"))
        return Counter({n: s for n, s in found.items() if not n.endswith(": watch")})

    def by_function(self) -> Counter[str]:
        """Return the processor time so far by thread and function."""
        try:
            found = json.loads(self.functions.read_text())
        except OSError:
            return Counter()
        return Counter({f"{t}: {f}": s for t, each in found.items() for f, s in each.items()})


def threads(vaults: harness.Cluster) -> Counter[str]:
    """Return the processor time of all vaults' threads so far."""
    return sum((node.threads() for node in vaults.nodes), Counter[str]())  # type: ignore[attr-defined]


def layout_of(role: int, nbytes: int, peers: Sequence[int]) -> RoleLayout:
    """Return the layout of a role with a shard of that size."""
    parts = (PartInfo("shard", nbytes, (role,)), PartInfo("extras@step", 8192, (role,)))
    return RoleLayout(role, parts, tuple(peers), 2, f"shard of {nbytes} bytes")


class Floor:
    """The same bytes through bare sockets, between two nodes. A context manager."""

    def __init__(self, link: Link, folder: Path, connections: int, nbytes: int) -> None:
        listeners = [link.listen(node) for node in range(2)]
        self._sides = []
        for node, listener in enumerate(listeners):
            (folder / f"floor{node}").mkdir()
            host, port = listeners[1 - node].getsockname()
            handle = listener.fileno()
            command = [
                *(*link.enter(node), sys.executable, str(_FLOOR), str(handle), f"{host}:{port}"),
                *(str(folder / f"floor{node}"), str(connections), str(nbytes)),
            ]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._sides.append(
                subprocess.Popen(command, env=_ENVIRONMENT, pass_fds=[handle], **pipes)
            )
        for listener in listeners:
            listener.close()

    def __enter__(self) -> Floor:
        self._answers()
        return self

    def __exit__(self, *_: object) -> None:
        for side in self._sides:
            side.kill()
            side.wait()

    def _answers(self) -> list[str]:
        answers = [side.stdout.readline() for side in self._sides if side.stdout]
        if not all(answers):
            raise BenchError("the floor has ended")
        return answers

    def run(self) -> float:
        """Send all bytes once, both ways; return the processor seconds of both ends."""
        for side in self._sides:
            assert side.stdin is not None
            side.stdin.write("\n")
            side.stdin.flush()
        return sum(map(float, self._answers()))
