"""``deadpool agent`` on a host with made-up facts: ``made_up_agent.py FACTS ARGUMENTS``.

FACTS: fields of HostFacts, as JSON.
"""

import dataclasses
import json
import sys
from typing import Any

from deadpool_megatron import cli
from deadpool_megatron.preflight import host
from deadpool_megatron.preflight.eligibility import HostFacts

USUAL = {"memory_bytes": 10**12, "shm_bytes": 10**12, "shm_free_bytes": 10**12, "open_files": 4096}


def main() -> int:
    made_up: dict[str, Any] = json.loads(sys.argv[1])
    read = host.read_facts

    def read_facts(address: str, *_health: object) -> HostFacts:
        return dataclasses.replace(read(address), **{**USUAL, **made_up})

    host.read_facts = read_facts
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
