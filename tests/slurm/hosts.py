"""Hosts on one machine: each with network, processes, name, mounts and shared memory of its own.

All of them hang on one bridge; the file system is shared, as a cluster's is. A host's first process
owns its process namespace: killing it ends everything on that host in one instant. Needs root.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deadpool_megatron.cluster import posix

NETWORK = "10.77.0"
_PREFIX = "dpslurm"
_NAMESPACES = Path("/run/netns")
_SHARED_MEMORY = "size=512m"
_PATIENCE_SECONDS = 20.0
_numbers = itertools.count()


def execute(*command: str) -> str:
    """A short command that has to succeed; answers what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout


def remove_leftovers() -> None:
    """Namespaces of test sessions that were killed; their processes died with them."""
    names = [path.name for path in _NAMESPACES.glob(f"{_PREFIX}-*")]
    for name in names:
        if not Path(f"/proc/{name.split('-')[1]}").exists():
            execute("ip", "netns", "del", name)


@dataclass
class Host:
    """One host; ``first`` is None while its power is off."""

    name: str
    address: str
    namespace: str
    first: subprocess.Popen[bytes] | None = None
    inner: int = 0


class Hosts:
    """Hosts by name, each with an address. Use as a context manager; not thread-safe."""

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        self.directory = directory
        self._prefix = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
        self._switch = f"{self._prefix}-sw"
        self._hosts = {
            name: Host(name, f"{NETWORK}.{number}", f"{self._prefix}-{name}")
            for number, name in enumerate(names, start=1)
        }

    def __enter__(self) -> Hosts:
        remove_leftovers()
        lines = [f"{host.address} {host.name}" for host in self._hosts.values()]
        (self.directory / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        try:
            execute("ip", "netns", "add", self._switch)
            self._ip(self._switch, "link add br0 type bridge", "link set br0 up")
            for host in self._hosts.values():
                self._connect(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connect(self, host: Host) -> None:
        execute("ip", "netns", "add", host.namespace)
        self._ip(
            self._switch,
            f"link add {host.name} type veth peer name eth0 netns {host.namespace}",
            f"link set {host.name} master br0 up",
        )
        self._ip(
            host.namespace,
            f"addr add {host.address}/24 dev eth0",
            "link set lo up",
            "link set eth0 up",
        )

    @staticmethod
    def _ip(namespace: str, *commands: str) -> None:
        text = "\n".join(commands)
        done = subprocess.run(
            ["ip", "-n", namespace, "-batch", "-"], input=text, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{namespace}: {text}: {done.stderr}"

    def address(self, name: str) -> str:
        """The host's address on the bridge."""
        return self._hosts[name].address

    def is_up(self, name: str) -> bool:
        """Whether the host's power is on."""
        return self._hosts[name].first is not None

    def boot(self, name: str, command: str, environment: Mapping[str, str] | None = None) -> None:
        """Switch a host on; the shell command runs on it as its service. Returns when it is up."""
        host = self._hosts[name]
        assert host.first is None, f"{name} is on"
        ready = self.directory / f"{name}.up"
        ready.unlink(missing_ok=True)
        setup = (
            f"hostname {name} && mount --bind {self.directory}/hosts /etc/hosts"
            f" && mount -t tmpfs -o {_SHARED_MEMORY} shm /dev/shm && touch {ready}"
            # As process 1 it has to reap orphans; the session ends with it, whatever they do.
            f" && {command} & while true; do wait; sleep 0.2; done"
        )
        # A test session that is killed takes its hosts with it.
        enter = ("setpriv", "--pdeathsig", "KILL", "nsenter", f"--net=/run/netns/{host.namespace}")
        own = ("unshare", "--uts", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc")
        with open(self.directory / f"{name}.console", "ab") as console:
            host.first = subprocess.Popen(
                [*enter, *own, "bash", "-c", setup],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
            )
        limit = time.monotonic() + _PATIENCE_SECONDS
        while not ready.exists():
            assert host.first.poll() is None, (self.directory / f"{name}.console").read_text()
            assert time.monotonic() < limit, f"{name} did not boot"
            time.sleep(0.005)
        pid = host.first.pid
        host.inner = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def command(self, name: str, *command: str) -> list[str]:
        """The command line that runs ``command`` on a host, in the present directory."""
        host = self._hosts[name]
        assert host.first is not None, f"{name} is off"
        enter = ("nsenter", "--target", str(host.inner), "--net", "--uts", "--pid", "--mount")
        return [*enter, f"--wd={Path.cwd()}", "--", *command]

    def power_off(self, name: str) -> None:
        """Silence, as when a power cord is pulled: the cable first, or the kernel would say FIN."""
        self.cut(name)
        self.kill(name)

    def kill(self, name: str) -> None:
        """End everything on the host, while its network goes on: connections are closed."""
        host = self._hosts[name]
        if host.first is not None:
            host.first.kill()
            host.first.wait()
            # The first process of the host dies by its parent's death; its children before it.
            posix.wait_gone([host.inner], _PATIENCE_SECONDS)
            host.first = None

    def cut(self, name: str) -> None:
        """Pull the network cable: nobody hears anything, not even a reset."""
        self._ip(self._switch, f"link set {name} down")

    def mend(self, name: str) -> None:
        """Put the cable back; returns when both ends carry again, which takes a kernel a second."""
        self._ip(self._switch, f"link set {name} up")
        limit = time.monotonic() + _PATIENCE_SECONDS
        for namespace, end in ((self._switch, name), (self._hosts[name].namespace, "eth0")):
            while "state UP" not in execute("ip", "-n", namespace, "-o", "link", "show", end):
                assert time.monotonic() < limit, f"{end} of {name} does not carry"
                time.sleep(0.02)

    def close(self) -> None:
        """Switch everything off and remove the network. Can be repeated."""
        for name in self._hosts:
            self.kill(name)
        for namespace in (*(host.namespace for host in self._hosts.values()), self._switch):
            if (_NAMESPACES / namespace).exists():
                execute("ip", "netns", "del", namespace)
