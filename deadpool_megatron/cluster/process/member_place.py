"""The place of a member process in its run, handed over in its environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from deadpool_megatron.wire.forms import Coded

VARIABLE = "DEADPOOL_MEMBER"


@dataclass(frozen=True)
class MemberPlace(Coded):
    """One member's place. ``segments``: the node's shared-memory directory. ``world_size``: the
    number of roles at full size; a record has the number of its epoch. ``provisional_role``: the
    role that the coordinator expects for this member. ``agent_fd``: the socket to the agent, valid
    in the member itself.
    """

    node: int
    local_rank: int
    incarnation: int
    segments: Path = Path()
    vault_socket: str = ""
    world_size: int = 1
    members_per_node: int = 1
    provisional_role: int = 0
    agent_fd: int = -1

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> MemberPlace:
        """Return the place of this process. Raises RuntimeError if no agent has started it."""
        if VARIABLE not in environment:
            raise RuntimeError("not started by a deadpool agent: start with 'deadpool run'")
        return MemberPlace.from_dict(json.loads(environment[VARIABLE]))

    def enter(self, agent_fd: int) -> None:
        """Make this the place of the current process."""
        os.environ[VARIABLE] = json.dumps(replace(self, agent_fd=agent_fd).to_dict())
