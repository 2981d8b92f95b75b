"""Shows the facts and problems of this host. 'deadpool agent --check-only' on each node compares
all nodes of a run.

examples:
  deadpool check
  deadpool check --runs runs
  deadpool check --plan configs/65b.yaml
  srun --ntasks-per-node=1 deadpool agent --from-slurm --check-only --run-dir DIR \\
      --nodes 64 --spares 2 --nproc-per-node 8

exit status: 0 nothing is wrong, 1 this host has a problem, 2 bad input
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deadpool_megatron.cli import common
from deadpool_megatron.cluster.run_directory.bad_nodes import noted_against
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.observe.narration import count
from deadpool_megatron.planning.assessment import assess
from deadpool_megatron.planning.sections import read_plan
from deadpool_megatron.preflight import host
from deadpool_megatron.preflight.eligibility import Eligibility, HostFacts, Needs, problems
from deadpool_megatron.preflight.health import NOT_CHECKED
from deadpool_megatron.settings import LONGEST_SECONDS

_NOT_GOOD = 1
_HEADER = ("node", "host", "rack", "GPUs", "/dev/shm free", "memory", "verdict")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    common.add_address(parser)
    add, seconds = parser.add_argument, common.number(float, 0.1, LONGEST_SECONDS)
    text = "plan that has the shared memory a node needs"
    add("--plan", type=Path, metavar="FILE", help=text)
    add("--health-command", default="", metavar="CMD", help="as --deadpool-health-command")
    add("--health-seconds", type=seconds, default=60.0, metavar="S", help="limit for it")
    text = "also check whether a run in RUNS has quarantined this host"
    add("--runs", type=Path, metavar="RUNS", help=text)
    add("--json", action="store_true", help="one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Carry out the sub-command."""
    plan = None if args.plan is None else assess(read_plan(args.plan))
    if args.health_command and not args.json:
        text = f"runs the health command, for {args.health_seconds:g} s at most"
        print(text, file=sys.stderr, flush=True)
    needs = Needs(nodes=1, shm_bytes=0 if plan is None else plan.busiest("memory_bytes")[1])
    facts = host.read_facts(_address(args), args.health_command, args.health_seconds)
    if args.runs is not None:
        os.scandir(args.runs).close()  # a misspelt directory is an error, not an empty answer
        common.warn_of_danger_above(args.runs / "any run")
        facts = replace(facts, noted=noted_against(facts.hostname, args.runs, ""))
    common.check_platform()
    texts = [defect.text for defect in problems(facts, needs)]
    if facts.health_text.startswith(NOT_CHECKED):
        texts.append(f"--health-command: {facts.health_text}")
    if args.json:
        answer = {"ok": not texts, "facts": facts.to_dict(), "problems": texts}
        print(json.dumps(answer, allow_nan=False))
    else:
        print("\n".join(describe_host(facts, texts)))
    return _NOT_GOOD if texts else 0


def judged_nodes(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return the last judgement of each node among the events of a run, in the order of nodes."""
    judgements = {e.node: dict(e.data) for e in events if e.kind is Kind.NODE_JUDGED}
    return [{"node": node, **data} for node, data in sorted(judgements.items())]


def show(nodes: Sequence[Mapping[str, Any]], problem: str, wanted: int) -> None:
    """Print a table of :func:`judged_nodes`, and ``problem`` or that ``wanted`` nodes can train."""
    rows = [_row(entry) for entry in nodes]
    print("\n".join([*common.table(_HEADER, rows), *_remarks(nodes, problem, wanted)]))


def describe_host(facts: HostFacts, problems: Sequence[str]) -> list[str]:
    """Return the lines about one host."""
    address = facts.address or "no address that others reach"
    memlock = "unlimited" if facts.memlock_bytes is None else common.size(facts.memlock_bytes)
    files = "unlimited" if facts.open_files is None else str(facts.open_files)
    rows = [
        ("host", facts.hostname),
        ("address", f"{address} ({facts.interface})" if facts.interface else address),
        ("GPUs", str(facts.gpus)),
        ("/dev/shm", f"{common.size(facts.shm_free_bytes)} free of {common.size(facts.shm_bytes)}"),
        ("memory available", common.size(facts.memory_bytes)),
        ("memory that can be locked", memlock),
        ("open files", files),
        *sorted(facts.versions.items()),
    ]
    width = max(len(title) for title, _ in rows)
    lines = [f"{title.ljust(width)}  {text}" for title, text in rows]
    return [*lines, *([f"problem: {text}" for text in problems] or ["ok"])]


def _address(args: argparse.Namespace) -> str:
    """Return this host's address, empty if other hosts cannot reach it."""
    if args.host is not None:
        common.listen(args.host, 0, flags=("", "--host")).close()
        return str(args.host)
    interface = args.interface or os.environ.get(common.INTERFACE_VARIABLE, "")
    try:
        if interface:
            return common.interface_address(interface)
        return common.host_address(socket.gethostname())
    except common.CommandError:
        if args.interface:
            raise
        return ""


def _row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    facts = entry.get("facts")
    host: tuple[str, ...] = ("-",) * 5
    if facts:
        host = (
            facts["hostname"],
            entry["domain"] or "-",
            str(facts["gpus"]),
            common.size(facts["shm_free_bytes"]),
            common.size(facts["memory_bytes"]),
        )
    return (str(entry["node"]), *host, str(entry["standing"]))


def _remarks(nodes: Sequence[Mapping[str, Any]], problem: str, wanted: int) -> list[str]:
    lines = [
        f"node {entry['node']}: {entry['standing']}: {reason}"
        for entry in nodes
        for reason in entry["reasons"]
    ]
    if problem:
        return [*lines, f"{problem}{_advice(nodes)}"]
    excluded = [entry["standing"] for entry in nodes].count(Eligibility.EXCLUDED)
    spares = count(len(nodes) - excluded - wanted, "spare")
    return [*lines, f"ok: {count(wanted, 'node')} to train on, {spares}, {excluded} excluded"]


def _advice(nodes: Sequence[Mapping[str, Any]]) -> str:
    names = [
        (entry["facts"]["hostname"], entry["standing"]) for entry in nodes if entry.get("facts")
    ]
    # Several nodes may be on one host: a host with a good node is not excluded.
    good = {name for name, standing in names if standing == Eligibility.GOOD}
    if bad := sorted({name for name, _ in names} - good):
        return f": mend what is named above, or take others (sbatch --exclude={','.join(bad)})"
    return ""
