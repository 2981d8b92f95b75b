"""Start the same command on N + S nodes, each with its own node id. The nodes agree on a
coordinator. The first node creates the run directory, which all of them share.

examples:
  deadpool agent --run-dir /shared/run1 --node-id $SLURM_PROCID --host $(hostname -i) \\
      --nodes 16 --spares 2 --nproc-per-node 8 -- -m deadpool_megatron.trainer @train.txt
  srun --no-kill --kill-on-bad-exit=0 --wait=0 --ntasks-per-node=1 \\
      deadpool agent --from-slurm --run-dir /shared/run1 \\
      --nodes 16 --spares 2 --nproc-per-node 8 -- train.py
  deadpool agent --run-dir /shared/run1 --attach --host $(hostname -i)     one more spare, any time
  srun --ntasks-per-node=1 deadpool agent --from-slurm --check-only \\
      --run-dir /shared/check1 --nodes 16 --spares 2 --nproc-per-node 8

exit status: that of the run, if this node can read it; 2 bad input or environment; 69 this node was
cut off, quarantined, or excluded as not fit; 143 it was ended by SIGTERM (--leave-seconds). With
--check-only the run ends with 0 if there are N good nodes, else with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from deadpool_megatron import arguments, ownership
from deadpool_megatron.cli import common
from deadpool_megatron.cli.prepare import check
from deadpool_megatron.cli.slurm import SlurmNode, complete_size, slurm_environment
from deadpool_megatron.cli.start import preconditions, resume, scripts
from deadpool_megatron.cli.start.agent_process import serve
from deadpool_megatron.cli.start.defaults import resolve
from deadpool_megatron.cli.start.restart import nodes_with_slots, slot_conflict
from deadpool_megatron.cli.start.scripts import DEFAULT_PRELOAD, preload_modules, waits_for_forks
from deadpool_megatron.cluster.agent.options import NO_NUMBER, AgentOptions
from deadpool_megatron.cluster.journal.journal import MAX_NUMBER, Journal
from deadpool_megatron.cluster.journal.terms import newest_term
from deadpool_megatron.cluster.process.fork_server import keep_single_threaded
from deadpool_megatron.cluster.run_directory.cleanup import claim_segments
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo, slots_are_kept
from deadpool_megatron.events import read_events
from deadpool_megatron.layout.records import Restore
from deadpool_megatron.preflight.host import adopt_variables
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire import auth

_PORT_FLAG = "--coordinator-port"
_NO_MAC = (
    "copies of states to other hosts have a checksum, no MAC: pip install cryptography"
    " on all nodes (docs/security.md)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.usage = (
        "deadpool agent --run-dir DIR (--node-id I | --attach | --from-slurm) [options]"
        " [-- COMMAND]"
    )
    add, count = parser.add_argument, common.number(int, 0)
    add("--run-dir", type=Path, required=True, metavar="DIR", help="shared by all nodes")
    number = parser.add_mutually_exclusive_group()
    text = "0 to N + S - 1; for a node that joins later: a number not used before"
    number.add_argument("--node-id", type=common.number(int, 0, MAX_NUMBER), metavar="I", help=text)
    text = "join a running job as one more spare node"
    number.add_argument("--attach", action="store_true", help=text)
    text = "take node id (unless given), address and failure domain from Slurm"
    add("--from-slurm", action="store_true", help=text)
    common.add_size(parser, "with --from-slurm, all nodes of this step except the spares")
    text = "start a new run from the newest state of OLD"
    add("--resume", type=Path, metavar="OLD", help=text)
    common.add_address(parser)
    add("--domain", default="", help="failure domain (rack) of this node")
    text = "after being cut off, join again as a new spare, up to K times (default: 3)"
    add("--rejoin", type=count, default=3, metavar="K", help=text)
    text = "time for this node's roles to move to a spare after SIGTERM, as in an evicted pod"
    text += " (default: 0, it ends at once)"
    add("--leave-seconds", type=common.number(float, 0), default=0.0, metavar="S", help=text)
    text = "address of the coordinator, for a host without the shared run directory"
    add("--coordinator", metavar="HOST:PORT", help=text)
    text = "port of the coordinator on this node (default: a free one)"
    add(_PORT_FLAG, type=common.number(int, 0, 65535), default=0, metavar="N", help=text)
    text = "this node never takes over as coordinator"
    add("--no-standby", action="store_true", help=text)
    text = "end the run as soon as its nodes are judged, and print which are fit to train"
    add("--check-only", action="store_true", help=text)
    text = "with --check-only: one JSON object, no table"
    add("--json", action="store_true", help=text)
    add("--run-id", metavar="ID", help="refuse to serve another run")
    text = "modules imported once per node, in place of the default (see deadpool run)"
    add("--preload", metavar="MODULES", help=text)
    arguments.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until the run is over; return its exit status."""
    common.ignore_notices()
    options = _prepare(args)
    run, info = options.run, options.info
    if not info.check_only:
        modules = scripts.modules(args.preload, DEFAULT_PRELOAD, info.command)
        scripts.announce(info.command, os.environ)
        server = preload_modules(info.settings, modules)
        options = replace(options, server=server, modules=modules)
    with common.refusing_system_errors():
        claim = claim_segments(run, info.run_id)
    if os.getpgid(0) != os.getpid():
        os.setsid()
    # A standby needs the journal, and this host has it only if the run directory is shared.
    has_journal = options.fixed_address is None
    try:
        port = args.coordinator_port if has_journal and not args.no_standby else None
        status = serve(options, port, args.rejoin)
    finally:
        os.close(claim)
    if info.check_only and run.has_final():
        term = newest_term(Journal(run.journal))
        if term is not None and options.node == term.node:  # one report for all nodes
            _show_check(run, info, args)
    return status


@common.refusing_system_errors()
def _prepare(args: argparse.Namespace) -> AgentOptions:
    """Check everything before modules of the user are imported, and create the run if this agent is
    the first. Raises CommandError."""
    common.check_platform()
    run = RunDirectory(args.run_dir)
    ownership.check_directory(run.path)
    if args.check_only and (args.attach or args.resume is not None):
        raise common.CommandError(
            "--check-only is for all nodes at once: not with --attach or --resume"
        )
    slurm = slurm_environment(os.environ) if args.from_slurm else None
    node = _node_id(args, slurm)
    fixed = None if args.coordinator is None else common.parse_address(args.coordinator)
    interface = args.interface or os.environ.get(common.INTERFACE_VARIABLE, "")
    if args.host is None and interface:
        args.host = common.interface_address(interface)
    if args.host is not None:
        preconditions.check_address(run, args.host)
        _check_listening(run, args, args.host)  # before anything is created
    command = scripts.requested_command(args)  # before the first agent adopts it
    if not (run.path / "run.json").exists():
        if fixed is not None:
            _fetch_run(run, args, fixed)
        else:
            _create_run(run, args)
    elif args.resume is not None:
        # Another agent resumes OLD, and may need the part of its state that is on this host.
        resume.dump_remaining_memory(RunDirectory(args.resume))
    info = _run_of(run, args, command)
    run.run_id = info.run_id
    for text in adopt_variables(info.environment):
        print(f"deadpool agent: {text}", file=sys.stderr, flush=True)
    if args.attach and info.directory:  # the paths in the run's command are relative to it
        try:
            os.chdir(info.directory)
        except OSError as error:
            text = f"{info.directory}, where the run was started, is not here ({error.strerror})"
            print(f"deadpool agent: {text}: programs begin in {Path.cwd()}", file=sys.stderr)
    if not info.check_only:  # a check reports the GPUs of its nodes itself
        preconditions.check_communicator(info, os.environ)
    secret = auth.load_secret(run.path)  # fails before modules of a foreign run are imported
    if not nodes_with_slots(info.run_id):  # a node that returns uses the memory of its slots
        preconditions.check_shared_memory(info, 1)
    if not args.domain:
        preconditions.read_domains(info.settings)  # with --domain, this host need not have the file
    host, domain, *more = _place(args, slurm, info.settings)
    preconditions.check_address(run, host)
    address = _check_listening(run, args, host)
    if auth.leaves_host(address) and not auth.CAN_GMAC:
        print(_NO_MAC, file=sys.stderr, flush=True)
    common.warn_of_danger_above(run.path, info)
    if fixed is not None:
        # Fail at once for a wrong address or secret, not only after the time limit.
        common.ask_at(fixed, run, info.run_id, {"command": "info"})
    if not info.check_only and (script := scripts.script_of(info.command)) is not None:
        preconditions.check_command([script])  # another host may have created the run
    return AgentOptions(
        node,
        run,
        info,
        secret,
        host,
        domain,
        fixed_address=fixed,
        leave_seconds=args.leave_seconds,
        more_hosts=tuple(more),
    )


def _node_id(args: argparse.Namespace, slurm: SlurmNode | None) -> int:
    """Return the number of this node, or NO_NUMBER. Raises CommandError if none is given."""
    if args.attach:
        return NO_NUMBER
    if args.node_id is not None:
        return int(args.node_id)
    if slurm is not None:
        return slurm.node_id
    raise common.CommandError("which node is this? give --node-id I, --attach or --from-slurm")


def _place(args: argparse.Namespace, slurm: SlurmNode | None, settings: Settings) -> list[str]:
    """Return the address and the failure domain of this node, then the other addresses for copies.
    Flags take precedence over Slurm's values, and a domains file over Slurm's topology. The domain
    is empty if it is not known."""
    host, domain, first = args.host, args.domain, settings.interface.partition(",")[0]
    # One value is judged below, where it may not matter.
    named = common.local_addresses(settings.interface) if first != settings.interface else []
    if slurm is not None and not settings.domains_file:
        domain = domain or slurm.domain
    if host is None:
        # settings.interface is the name of an interface or an address. A name takes precedence
        # over Slurm's host; an address does not, as it would be the same on every node. Where it
        # has its default, NCCL's choice takes precedence over both.
        is_name = first in (name for _, name in socket.if_nameindex())
        if settings.interface == Settings.interface and (nccl := common.nccl_address(os.environ)):
            host = nccl
        elif slurm is None or is_name:
            host, *_ = common.local_addresses(first)
        else:
            host = common.host_address(slurm.host)
    return [host, domain, *(address for address in named if address != host)]


def _check_listening(run: RunDirectory, args: argparse.Namespace, host: str) -> str:
    """Check that this host has the address and that the port is free. Without this check the vault
    would fail after all imports, or a standby in a takeover. Returns ``ADDRESS:PORT``. Raises
    CommandError."""
    port = 0 if args.no_standby else args.coordinator_port
    if common.coordinator_address(run) == (host, port):
        port = 0  # a coordinator of this run, started by an earlier agent, may still use it
    with common.listen(host, port, flags=(_PORT_FLAG, "--host")) as listener:
        return auth.address_of(listener.getsockname())


def _show_check(run: RunDirectory, info: RunInfo, args: argparse.Namespace) -> None:
    final = run.read_final()
    nodes = check.judged_nodes(read_events(run.events))
    if args.json:
        ok = int(final["exit_status"]) == 0
        answer = {"ok": ok, "reason": final["reason"], "nodes": nodes}
        print(json.dumps(answer, allow_nan=False))
    else:
        check.show(nodes, str(final["reason"]), info.nodes)


def _create_run(run: RunDirectory, args: argparse.Namespace) -> None:
    """Create the run, as its first agent. Raises CommandError."""
    if args.check_only:
        args.command = []
    if args.from_slurm:
        complete_size(args, os.environ)
    args.spares = args.spares or 0
    if args.nodes is None or args.nproc_per_node is None or not (args.command or args.check_only):
        raise common.CommandError(
            f"there is no run in {run.path}: give --nodes, --nproc-per-node and -- COMMAND, or"
            " --coordinator HOST:PORT"
        )
    if (args.node_id or 0) >= (size := args.nodes + args.spares):
        raise common.CommandError(f"--node-id must be between 0 and {size - 1}, got {args.node_id}")
    if not args.check_only:
        if waits_for_forks(args.deadpool_start_method):
            keep_single_threaded()  # the search for the user's module may import its packages
        preconditions.check_command(args.command)
        scripts.adopt(args)
    # ``resumed``: the states to continue from, and the role of rank 0 in them.
    communicator, resumed = arguments.communicator_in(args), (list[Restore](), 0)
    if not args.check_only:
        nproc = args.nproc_per_node
        communicator = preconditions.choose_communicator(communicator, 1, nproc, os.environ)
    settings = arguments.settings_from(args, communicator=communicator)
    # Checkpoints outlive their host, as all hosts share the directory.
    settings = resolve(settings, args.plan, outlives_hosts=True)
    if args.resume is not None:
        agents = args.nodes + args.spares  # the memory of spares is dumped, too
        peers = resume.PeerAgents(run, agents, args.node_id, settings.connect_seconds)
        resumed = resume.resume_point(RunDirectory(args.resume), args, peers)
    info = replace(common.make_info(args, settings, *resumed), check_only=args.check_only)
    preconditions.check_sizes(info)
    preconditions.read_domains(settings)
    run.make()
    resume.copy_frozen_weights(args.resume, run, info.restore)
    resume.copy_notes(args.resume, run)
    auth.create_secret(run.path)  # before run.json, which shows that the directory is complete
    run.create(info)


def _run_of(run: RunDirectory, args: argparse.Namespace, command: Sequence[str]) -> RunInfo:
    """Return the facts of the run. ``command``: that of ``args`` with all switches. Raises
    CommandError if the run is over, or contradicts the command or ``args``."""
    info = run.read_run()
    if run.final.exists():
        advice = (
            "; its state in memory continues in a new directory:"
            f" 'deadpool agent --resume {run.path} --run-dir NEW'"
        )
        raise common.CommandError(
            f"the run in {run.path} is over{advice if slots_are_kept(run) else ''}"
        )
    if args.run_id is not None and args.run_id != info.run_id:
        raise common.CommandError(f"{run.path} belongs to run {info.run_id}, not {args.run_id}")
    if conflict := common.size_conflict(args, info, "nodes", "spares", "nproc_per_node"):
        flag, _, run_value = conflict
        raise common.CommandError(f"the run has {flag} {run_value}")
    # The settings of the run replace those of this command line without a word. But a setting that
    # determines the layout of slots must agree: with slots left in memory, and with other nodes.
    requested, _ = arguments.settings_in(args.options, script=False)
    if other := slot_conflict(info.settings, requested):
        raise common.CommandError(
            f"the run in {run.path} has {other}, which its slots in memory are made with: start the"
            " agent with the value that the run has, or end the run, if it is alive ('deadpool stop"
            f" --dump {run.path}'), and continue with the other one in a new directory:"
            f" 'deadpool agent --resume {run.path} --run-dir NEW'"
        )
    if args.check_only != info.check_only:
        kind = "only a check" if info.check_only else "more than a check"
        raise common.CommandError(f"the run in {run.path} is {kind}: choose another --run-dir")
    if (
        args.command
        and not info.check_only
        and scripts.expanded(scripts.member_command(command)) != info.command
    ):
        raise common.CommandError(f"the run has another command: {' '.join(info.command)}")
    return info


def _fetch_run(run: RunDirectory, args: argparse.Namespace, address: tuple[str, int]) -> None:
    """Fetch the facts of the run from the coordinator, without a shared file system."""
    if args.run_id is None or auth.ENVIRONMENT_NAME not in os.environ:
        raise common.CommandError(
            f"{run.path} is no run directory: share the coordinator's, or give --run-id and"
            f" {auth.ENVIRONMENT_NAME}"
        )
    answer = common.ask_at(address, run, args.run_id, {"command": "info"})
    run.create(RunInfo.from_dict(answer["info"]))
