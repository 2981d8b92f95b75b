"""Hosts on one machine: each a set of namespaces with its own network, processes, name and memory.

A host has an own network stack with one cable to the switch, an own process tree whose end takes
every process along, an own host name and /etc/hosts, and an own /dev/shm. The rest of the file
system is shared by all, like the file system of a cluster. All hosts share one clock.

A killed test session leaves no process: every host dies with the process that made it. The next
session removes its names under /run/netns, which contain the number of their process.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from deadpool_megatron.cluster.process import posix
from tests.netns.lab.switch import Switch, ip_batch

TOOLS = ("ip", "nft", "nsenter", "ss", "unshare")
_NAMES = Path("/run/netns")
_PREFIX = "deadpool-test"
_HIDDEN = Path(__file__).with_name("hidden.py")
_SHARED_MEMORY = "256m"
_PATIENCE_SECONDS = 20.0
# Process 1 of a host; bash reaps what others leave to it.
_INIT = f"""
set -e
hostname "$1"
mount --bind "$2" /etc/hosts
mount -t tmpfs -o size={_SHARED_MEMORY} shm /dev/shm
echo up
exec > /dev/null
sleep infinity &
wait
"""


def missing() -> str:
    """Why there can be no hosts here; empty if there can."""
    if os.geteuid() != 0:
        return "needs root"
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"needs {', '.join(lacking)}" if lacking else ""


class Host:
    """One host; its commands die with it. Made by :class:`Hosts`."""

    def __init__(self, name: str, address: str, namespace: str, switch: Switch) -> None:
        self.name = name
        self.address = address
        self.namespace = namespace
        self._switch = switch
        self._outer: subprocess.Popen[bytes] | None = None
        self._first = 0
        self._covers: list[subprocess.Popen[bytes]] = []

    def boot(self, names: Path) -> None:
        """Begin to boot; ``names`` becomes /etc/hosts."""
        spaces = ("--uts", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc")
        self._outer = subprocess.Popen(
            [
                *("nsenter", f"--net={_NAMES / self.namespace}", "unshare", *spaces),
                *("bash", "-c", _INIT, "init", self.name, str(names)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            preexec_fn=functools.partial(posix.die_with_parent, os.getpid()),
        )

    def wait_up(self) -> None:
        """Until commands can run on it."""
        assert self._outer is not None
        assert self._outer.stdout is not None
        with self._outer.stdout:
            assert self._outer.stdout.readline() == b"up\n", f"{self.name} does not boot"
        (self._first,) = _children(self._outer.pid)

    @property
    def is_on(self) -> bool:
        """Whether it has been booted and not been switched off."""
        return self._outer is not None and self._outer.poll() is None

    def start(
        self,
        command: Sequence[str],
        output: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command on the host, in the working directory of the caller.

        ``output`` gets what it prints, appended; the answer is its exit status's owner here.
        """
        with open(output or os.devnull, "ab") as file:
            return subprocess.Popen(
                [*self._enter, *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=None if environment is None else dict(environment),
                start_new_session=True,
                preexec_fn=functools.partial(posix.die_with_parent, os.getpid()),
            )

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command on the host to its end."""
        return subprocess.run(
            [*self._enter, *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_SECONDS,
            check=False,
        )

    def processes(self) -> dict[int, int]:
        """All processes: number on the host -> number here."""
        place = Path(f"/proc/{self._first}/ns/pid").readlink()
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if (entry / "ns" / "pid").readlink() == place:
                    found[_number_inside(entry)] = int(entry.name)
            except OSError:
                continue  # ended just now
        return found

    def running(self) -> list[str]:
        """Names of all processes."""
        names = []
        for pid in self.processes().values():
            try:
                names.append(Path(f"/proc/{pid}/comm").read_text().strip())
            except OSError:
                continue  # ended just now
        return names

    # Faults.

    def power_off(self) -> None:
        """Gone without a word: the cable is dead before the processes are."""
        self._switch.cut(self.name)
        self.kill()

    def kill(self) -> None:
        """End all processes at once; the kernel still closes their connections."""
        assert self._outer is not None
        self._outer.kill()
        self._outer.wait()
        for cover in self._covers:
            cover.wait()

    def cut(self) -> None:
        """Pull the cable."""
        self._switch.cut(self.name)

    def mend(self) -> None:
        """Plug the cable in again."""
        self._switch.mend(self.name)

    def reset_connections(self, other: Host, port: int) -> int:
        """Reset every TCP connection to a port of another host, on both ends; answers how many."""
        done = self.run("ss", "-K", "-H", "-t", "dst", other.address, "dport", "=", f":{port}")
        assert done.returncode == 0, done.stderr
        return len(done.stdout.splitlines())

    def hide(self, directory: Path, how: str) -> None:
        """Make a directory unreachable for this host only; ``how``: see hidden.py."""
        cover = subprocess.Popen(
            [*self._enter, sys.executable, str(_HIDDEN), str(directory), how],
            stdout=subprocess.PIPE,
            preexec_fn=functools.partial(posix.die_with_parent, os.getpid()),
        )
        assert cover.stdout is not None
        with cover.stdout:
            assert cover.stdout.readline() == b"up\n", f"{directory} cannot be hidden"
        self._covers.append(cover)

    def reveal(self, directory: Path) -> None:
        """Undo :meth:`hide`; processes that wait for the directory get an error."""
        done = self.run("umount", "-l", str(directory))
        assert done.returncode == 0, done.stderr
        for cover in self._covers:
            for child in _children(cover.pid):
                posix.kill(child)
            cover.wait()
        self._covers.clear()

    @property
    def _enter(self) -> tuple[str, ...]:
        assert self._first, f"{self.name} is not up"
        spaces = ("--net", "--uts", "--pid", "--mount", f"--wd={Path.cwd()}")
        return ("nsenter", "--target", str(self._first), *spaces, "--")


class Hosts:
    """Hosts ``host0``, ``host1``, ... on one switch. A context manager; its end leaves nothing.

    ``cables`` of a host, each in a subnet of its own; the port of its ``eth2`` is ``host0-2``.
    """

    def __init__(self, count: int, directory: Path, cables: int = 1) -> None:
        remove_stale()
        self._more = range(1, cables)
        own = f"{_PREFIX}-{os.getpid()}-{posix.start_time(os.getpid())}-{time.monotonic_ns()}"
        self._names = directory / "hosts"
        self._switch_namespace = f"{own}-switch"
        self.switch = Switch(self._switch_namespace)
        self._hosts = [
            Host(f"host{index}", f"10.77.0.{index + 1}", f"{own}-host{index}", self.switch)
            for index in range(count)
        ]

    def __enter__(self) -> Hosts:
        try:
            self._build()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    def _build(self) -> None:
        lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in self._hosts)]
        self._names.write_text("\n".join(lines) + "\n")
        spaces = [self._switch_namespace, *(host.namespace for host in self._hosts)]
        ip_batch(None, [f"netns add {space}" for space in spaces])
        for host in self._hosts:
            host.boot(self._names)
        self.switch.start()
        self.switch.plug(
            (host.name, host.namespace, "eth0", f"02:00:00:00:00:{index + 1:02x}")
            for index, host in enumerate(self._hosts)
        )
        for host in self._hosts:
            ip_batch(
                host.namespace,
                ["link set lo up", f"address add {host.address}/24 dev eth0", "link set eth0 up"],
            )
        for cable, (index, host) in itertools.product(self._more, enumerate(self._hosts)):
            hardware = f"02:00:00:00:{cable:02x}:{index + 1:02x}"
            self.switch.plug([(f"{host.name}-{cable}", host.namespace, f"eth{cable}", hardware)])
            address = f"10.77.{cable}.{index + 1}/24 dev eth{cable}"
            ip_batch(host.namespace, [f"address add {address}", f"link set eth{cable} up"])
        for host in self._hosts:
            host.wait_up()

    def down(self) -> None:
        """Switch everything off; also half-built."""
        self.switch.stop()
        for host in self._hosts:
            if host.is_on:
                host.kill()
        for host in self._hosts:
            _remove(host.namespace)
        _remove(self._switch_namespace)


def remove_stale() -> None:
    """Remove what sessions left that were killed."""
    for path in _NAMES.glob(f"{_PREFIX}-*"):
        pid, started = path.name.removeprefix(f"{_PREFIX}-").split("-")[:2]
        if not posix.is_alive(int(pid), int(started)):
            _remove(path.name)


def _remove(namespace: str) -> None:
    """End all processes of a network namespace and remove its name, if it exists."""
    if not (_NAMES / namespace).exists():
        return
    listed = subprocess.run(
        ["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False
    )
    pids = [int(pid) for pid in listed.stdout.split()]
    for pid in pids:
        posix.kill(pid)
    posix.wait_until_ended(pids, _PATIENCE_SECONDS)
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def _number_inside(entry: Path) -> int:
    """The process's number in its own pid namespace."""
    for line in (entry / "status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    raise ProcessLookupError(entry.name)
