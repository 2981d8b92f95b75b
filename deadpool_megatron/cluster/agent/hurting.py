"""``deadpool kill``: a signal to a part of this node, for a user who wants to see a run recover."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from typing import Any

from deadpool_megatron.cluster.agent.members.members import Member


def hurt(message: Mapping[str, Any], vault: int | None, members: Mapping[int, Member]) -> None:
    """Carry out the order. ``vault``: its process id, None between two; ``members``: by slot."""
    number = signal.Signals[f"SIG{message['signal']}"]
    part = message["part"]
    if part == "role":
        member = members.get(int(message["slot"]))
        if member is not None and member.incarnation == int(message["incarnation"]):
            os.kill(member.pid, number)
        return
    pids = [] if part == "agent" or vault is None else [vault]
    if part == "node":
        pids += [member.pid for member in members.values()]
    if part in ("agent", "node"):  # last, and at once: nothing of the others is reported
        pids.append(os.getpid())
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
