"""The faults of the hosts have their effects: without them no test on these hosts is a proof."""

import ctypes
import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from deadpool_megatron.cluster.process import posix
from tests.common.wait import wait_for
from tests.netns.lab import hosts
from tests.netns.lab.hosts import Host, Hosts

pytestmark = pytest.mark.netns
_PORT = 7000
_ECHO = """
import socket, sys
listener = socket.create_server(("", int(sys.argv[1])))
print("listening", flush=True)
connection, _ = listener.accept()
while piece := connection.recv(100):
    connection.sendall(piece)
"""


@pytest.fixture
def three(tmp_path):
    with Hosts(3, tmp_path) as built:
        yield built


class Conversation:
    """A TCP connection from one host to an echo on another; its near end is a socket of ours."""

    def __init__(self, near: Host, far: Host, folder: Path) -> None:
        output = folder / f"echo-{far.name}"
        far.start([sys.executable, "-c", _ECHO, str(_PORT)], output)
        wait_for("it to listen", lambda: output.exists() and "listening" in output.read_text())
        self.socket = socket_on(near)
        self.socket.settimeout(20)
        self.socket.connect((far.address, _PORT))

    def trip_seconds(self) -> float:
        """A byte there and back."""
        began = time.monotonic()
        self.socket.sendall(b"x")
        assert self.socket.recv(1) == b"x"
        return time.monotonic() - began

    def is_silent(self) -> bool:
        """Check that no byte and no error comes back."""
        self.socket.settimeout(0.5)
        try:
            self.socket.sendall(b"x")
            self.socket.recv(1)
        except TimeoutError:
            return True
        finally:
            self.socket.settimeout(20)
        return False

    def has_ended(self) -> bool:
        """The far end is known to be gone: closed, or reset."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True


def socket_on(host: Host, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """A socket belongs for ever to the network namespace in which it was made."""
    libc = ctypes.CDLL(None, use_errno=True)
    own, other = Path("/proc/self/ns/net"), Path("/run/netns") / host.namespace
    with open(own) as here, open(other) as there:
        assert libc.setns(there.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
        try:
            return socket.socket(type=kind)
        finally:
            libc.setns(here.fileno(), 0)


def test_power_off_is_silence_and_kill_is_not(three, tmp_path):
    killed = Conversation(three[0], three[1], tmp_path)
    off = Conversation(three[0], three[2], tmp_path)
    pid = next(iter(three[2].processes().values()))
    three[1].kill()
    three[2].power_off()
    assert killed.has_ended()
    assert off.is_silent()
    assert not posix.is_alive(pid)
    assert not three[2].is_on


def test_cut_cable_delays_and_loses_nothing(three, tmp_path):
    talk = Conversation(three[0], three[1], tmp_path)
    three[1].cut()
    assert talk.is_silent()
    three[1].mend()
    assert talk.socket.recv(1) == b"x"


def test_mute_host_receives_and_deaf_host_sends(three):
    ends = [socket_on(three[index], socket.SOCK_DGRAM) for index in (0, 1)]
    for end in ends:
        end.bind(("", _PORT))
        end.settimeout(0.5)

    def arrives(sender: int) -> bool:
        receiver = 1 - sender
        ends[sender].sendto(b"x", (three[receiver].address, _PORT))
        try:
            return ends[receiver].recv(1) == b"x"
        except TimeoutError:
            return False

    assert (arrives(0), arrives(1)) == (True, True)
    three.switch.mute("host1")
    assert (arrives(0), arrives(1)) == (True, False)
    three.switch.clear()
    three.switch.deafen("host1")
    assert (arrives(0), arrives(1)) == (False, True)
    three.switch.clear()
    assert (arrives(0), arrives(1)) == (True, True)
    for end in ends:
        end.close()


def test_slow_cable(three, tmp_path):
    three.switch.slow("host1", 0.1)
    talk = Conversation(three[0], three[1], tmp_path)
    assert talk.trip_seconds() >= 0.2


def test_killed_session_leaves_nothing(tmp_path):
    program = textwrap.dedent("""
        import sys, time
        from pathlib import Path
        from tests.netns.lab.hosts import Hosts
        with Hosts(2, Path(sys.argv[1])) as hosts:
            print(" ".join(map(str, [*hosts[0].processes().values()])), flush=True)
            time.sleep(600)
    """)
    session = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert session.stdout is not None
    with session.stdout:
        pids = [int(pid) for pid in session.stdout.readline().split()]
    assert pids
    session.kill()
    session.wait()
    assert posix.wait_until_ended(pids, 20) == []
    hosts.remove_stale()
    assert not list(Path("/run/netns").glob(f"deadpool-test-{session.pid}-*"))
