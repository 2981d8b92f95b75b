"""The process of an agent: one for each node on a host."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
import time

from deadpool_megatron import failpoints
from deadpool_megatron.cluster import posix
from deadpool_megatron.cluster.agent import Agent
from deadpool_megatron.cluster.agent_options import AgentOptions


class NodeTaken(Exception):
    """Another agent serves the node of this number on this host."""


def _claim_node(options: AgentOptions) -> int:
    """Lock the node's segments for this process; a second agent would overwrite its memory."""
    options.segments.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(options.segments / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise NodeTaken(f"node {options.node} already has an agent on this host") from error
    return lock


def run_agent(options: AgentOptions) -> int:
    """Run an agent in this process, which has one thread; answers its exit status.

    Raises NodeTaken.
    """
    posix.set_process_name(f"dp-agent{options.node}")
    lock = _claim_node(options)
    failpoints.load()
    failpoints.set_context(run_dir=str(options.run.path), node=options.node, process="agent")
    started = time.monotonic()
    code = asyncio.run(Agent(options).run())
    os.close(lock)
    print(f"agent ended after {time.monotonic() - started:.1f} s", file=sys.stderr)
    return code
