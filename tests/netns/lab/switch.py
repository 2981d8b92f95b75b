"""The network between the hosts: one bridge in a namespace of its own, with faults on its ports.

A fault acts on the cable of a host (the port of the bridge) or between two hosts, never inside a
host, so that both ends of a connection see the effects of a real network. A cut cable takes the
carrier away; a frame that a rule drops just does not arrive, ARP included. The kernels of small
machines lack ``netem``: loss is an nftables rule, delay a process between two TAP devices.
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

_WIRE = Path(__file__).with_name("wire.py")


class Switch:
    """Ports are named like the hosts at their ends. Not thread-safe."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._rules: dict[str, tuple[str, ...]] = {}
        self._wires: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Make the bridge; the namespace is there."""
        self._ip("link add br0 type bridge", "link set br0 up")

    def plug(self, cables: Iterable[tuple[str, str, str, str]]) -> None:
        """Lay cables: (port, namespace of the host, device and hardware address there)."""
        lines = []
        for port, namespace, device, hardware in cables:
            end = f"peer name {device} address {hardware} netns {namespace}"
            lines += [f"link add {port} type veth {end}", f"link set {port} master br0 up"]
        self._ip(*lines)

    def stop(self) -> None:
        """End the wires; the devices go with the namespace."""
        for wire in self._wires.values():
            wire.kill()
            wire.wait()
        self._wires.clear()

    # Faults. Each holds until it is mended.

    def cut(self, *ports: str) -> None:
        """Pull the cables."""
        self._ip(*(f"link set {port} down" for port in ports))

    def mend(self, *ports: str) -> None:
        """Plug the cables in again."""
        self._ip(*(f"link set {port} up" for port in ports))

    def mute(self, port: str) -> None:
        """Drop all frames from the host."""
        self._set(f"mute {port}", f'iifname "{port}" drop')

    def deafen(self, port: str) -> None:
        """Nothing arrives at the host."""
        self._set(f"deaf {port}", f'oifname "{port}" drop')

    def lose(self, port: str, percent: int) -> None:
        """Drop this share of a host's frames, in each direction."""
        chance = f"numgen random mod 100 < {percent} drop"
        self._set(f"lose {port}", f'iifname "{port}" {chance}', f'oifname "{port}" {chance}')

    def slow(self, port: str, one_way_seconds: float) -> None:
        """All frames of a host arrive later by so much, in each direction."""
        inner, outer, bridge = f"{port}-i", f"{port}-o", f"{port}-b"
        self._ip(
            f"link add {bridge} type bridge",
            f"link set {bridge} up",
            f"tuntap add dev {inner} mode tap",
            f"tuntap add dev {outer} mode tap",
            f"link set {inner} master {bridge} up",
            f"link set {outer} master br0 up",
            f"link set {port} master {bridge}",
        )
        command = [*self._inside, sys.executable, str(_WIRE), inner, outer, str(one_way_seconds)]
        wire = subprocess.Popen(command, stdout=subprocess.PIPE)
        self._wires[port] = wire
        assert wire.stdout is not None
        with wire.stdout:
            assert wire.stdout.readline() == b"up\n", "the wire does not come up"

    def hasten(self, port: str) -> None:
        """Undo :meth:`slow`; frames in transit are lost."""
        wire = self._wires.pop(port)
        wire.kill()
        wire.wait()
        ends = [f"link del {port}-{end}" for end in "iob"]
        self._ip(f"link set {port} master br0", *ends)

    def clear(self) -> None:
        """Drop nothing any more (cut and slow cables stay)."""
        self._rules.clear()
        self._load()

    @property
    def _inside(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self._namespace)

    def _set(self, name: str, *rules: str) -> None:
        self._rules[name] = rules
        self._load()

    def _load(self) -> None:
        """The whole table at once: no moment in which half of the rules hold."""
        rules = "\n".join(rule for rules in self._rules.values() for rule in rules)
        table = f"""
        table bridge faults
        delete table bridge faults
        table bridge faults {{
            chain forward {{
                type filter hook forward priority 0
                {rules}
            }}
        }}
        """
        _checked([*self._inside, "nft", "-f", "-"], table)

    def _ip(self, *lines: str) -> None:
        ip_batch(self._namespace, lines)


def ip_batch(namespace: str | None, lines: Iterable[str]) -> None:
    """Commands of ``ip``, carried out by one process, in a namespace or outside of all."""
    place = () if namespace is None else ("-n", namespace)
    _checked(["ip", *place, "-batch", "-"], "".join(line + "\n" for line in lines))


def _checked(command: list[str], text: str) -> None:
    done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr or done.stdout}\n{text}"
