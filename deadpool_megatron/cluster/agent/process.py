"""The process of an agent: one for each node on a host."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from deadpool_megatron import failpoints
from deadpool_megatron.cluster.agent.agent import Agent
from deadpool_megatron.cluster.agent.options import AgentOptions
from deadpool_megatron.cluster.journal.journal import Journal
from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.run_directory import cleanup, directory as run_files, orphaned_slots
from deadpool_megatron.cluster.run_directory.bad_nodes import noted_against
from deadpool_megatron.cluster.run_directory.cleanup import node_directories, remove_segments
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.layout.records import EpochRecord
from deadpool_megatron.preflight import host
from deadpool_megatron.process_names import set_process_name
from deadpool_megatron.support import environment as nccl_environment
from deadpool_megatron.vault.disk.dump import dump_kept, inventory_of
from deadpool_megatron.vault.errors import SegmentError


def run_agent(options: AgentOptions) -> int:
    """Run an agent in this process, and return its exit status.

    It takes over the slots that a former agent of this node has left, or those of another node of
    this host whose agent has ended. Raises NodeTaken, or SegmentError for unreadable slots.
    """
    set_process_name(f"dp-agent{options.node}")
    info = options.info
    # Child processes inherit these variables, by which they are found later.
    os.environ[run_files.ENVIRONMENT_DIRECTORY] = str(options.run.path)
    os.environ[run_files.ENVIRONMENT_RUN_ID] = info.run_id
    if nccl_environment.is_needed(info.settings.communicator):
        # In the agent's own environment, as a parked process imports torch before it becomes a
        # member and gets the environment of that member.
        nccl_environment.complete(os.environ)
    if info.nproc_per_node > 1:
        # As torchrun does: with torch's default each process would take all cores of the node.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    needed = posix.needed_by_agent(info.nodes + info.spares, info.nproc_per_node)
    if problem := posix.raise_limit(needed):
        print(f"deadpool: {problem}", file=sys.stderr, flush=True)
    lock = orphaned_slots.claim(options.segments, options.node)
    run_id = info.run_id
    orphaned_slots.end_orphaned_processes(options.run, run_id, options.node, options.segments)
    former = orphaned_slots.adopt_slots(options.run, run_id, options.segments, options.siblings)
    if former is not None:
        print(f"node {options.node} adopts the slots of node {former}", file=sys.stderr)
    failpoints.load()
    failpoints.set_context(run_dir=str(options.run.path), node=options.node, process="agent")
    started = time.monotonic()
    inventory = inventory_of(options.node, options.segments)
    # Before the loop: nvidia-smi and the health command may take long.
    options = replace(options, gpus=host.visible_gpus(os.environ))
    settings = info.settings
    if settings.check != "off":
        facts = host.read_facts(options.host, settings.health_command, settings.health_seconds)
        noted = noted_against(facts.hostname, options.run.path.parent, run_id)
        options = replace(options, facts=replace(facts, noted=noted))

    async def serve() -> int:
        return await Agent(options, inventory).run()

    code = asyncio.run(serve())
    os.close(lock)
    seconds = time.monotonic() - started
    print(f"agent ended after {seconds:.1f} s with exit status {code}", file=sys.stderr)
    return code


def last_record(run: RunDirectory) -> EpochRecord | None:
    """Return the newest record of a run. Raises JournalError."""
    newest = Journal(run.journal).newest("epoch")
    return None if newest is None else EpochRecord.from_dict(newest[1])


def dump_orphans(
    run: RunDirectory,
    info: RunInfo,
    kept: Mapping[int, int],
    progress: Callable[[float], None] = lambda _: None,
) -> list[str]:
    """Write the kept generations in directories without a live agent, and return the files.
    ``progress`` gets the fraction done (0 to 1) before each directory.

    A directory is removed from memory once it is written. Raises SegmentError with one line for
    unreadable directories, which stay, after all others have been written. Raises another
    VaultError at once when a directory cannot be written.
    """
    written, unread = [], []
    directories = node_directories(info.run_id)
    for at, directory in enumerate(directories):
        progress(at / len(directories))
        number = directory.name.removeprefix("node")
        if not number.isdigit() or not any(directory.glob("*.seg")):
            continue
        try:
            lock = orphaned_slots.claim(directory, int(number))
        except (orphaned_slots.NodeTaken, FileNotFoundError):
            continue
        try:
            orphaned_slots.end_orphaned_processes(run, info.run_id, int(number), directory)
            written += dump_kept(int(number), directory, info.settings, kept, run.dump)
            cleanup.copy_logs(run, directory)
            remove_segments(directory)
        except SegmentError as error:
            unread.append(str(error))
        finally:
            os.close(lock)
    if unread:
        raise SegmentError("; ".join(unread))
    return written
