"""``deadpool check`` on a node with made-up facts: ``made_up_node.py FACTS.json ARGUMENTS``.

FACTS.json: node id -> {"facts": fields of NodeFacts, "rate": bytes per second of its link}. Some
bytes really flow; what is reported does not depend on how busy the machine is.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import socket
import sys
from pathlib import Path
from typing import Any

from deadpool_megatron.preflight.machine import Instruments, RealInstruments

from deadpool_megatron.cli import check
from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.preflight import stream
from deadpool_megatron.preflight.facts import NodeFacts

USUAL = {"memory_bytes": 10**12, "shm_bytes": 10**12, "shm_free_bytes": 10**12, "open_files": 4096}
USUAL_RATE = 1e9


class MadeUp(Instruments):
    """Node i listens on 127.0.0.(i+1)."""

    def __init__(self, node: int, made_up: dict[str, Any]) -> None:
        self._node = node
        self._made_up = made_up

    def facts(self, address: str, domain: str) -> NodeFacts:
        real = RealInstruments().facts(address, domain)
        changes = {**USUAL, "hostname": f"host{self._node}", **self._of(self._node, "facts", {})}
        return dataclasses.replace(real, **changes)

    def measure(self, connection: socket.socket) -> tuple[float, float]:
        RealInstruments().measure(connection)
        peer = int(connection.getpeername()[0].split(".")[-1]) - 1
        rate = min(self._of(node, "rate", USUAL_RATE) for node in (self._node, peer))
        return rate, rate

    def _of(self, node: int, key: str, usual: Any) -> Any:
        return self._made_up.get(str(node), {}).get(key, usual)


def main() -> int:
    parser = argparse.ArgumentParser()
    check.add_parser(parser.add_subparsers())
    args = parser.parse_args(["check", *sys.argv[2:]])
    stream.MOST_BYTES = 4 << 20
    made_up = json.loads(Path(sys.argv[1]).read_text())
    try:
        return check.check(args, MadeUp(args.node_id, made_up))
    except CommandError as error:
        print(f"deadpool check: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
