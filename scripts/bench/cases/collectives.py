"""How much longer do collectives take on reconfigurable groups than on stock gloo?

Four ranks, each a fork, call a collective again and again on tensors of a size; then the same on
the other groups, in turns. A tensor holds the parts of all ranks.

  own_cpu_seconds_per_call   of one rank, less those on stock gloo of the same round: dispatch,
                             waits that can be interrupted, records of operations under way
  stock_seconds, seam_seconds              for a call, by the wall clock
  seam_over_stock            the ratio of the two, in pairs
"""

from __future__ import annotations

import argparse
import itertools
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from common.figures import row
from common.frame import Facts, in_turns

from tests.comms import ranks

MINUTES = 3
ROUNDS = 5
QUICK = ("--rounds", "1")
RANKS, CALLS, WARM_UP = 4, 200, 5
KB = (1, 64, 4096)
OPERATIONS = {
    "all-reduce": lambda whole, _: dist.all_reduce(whole),
    "all-gather": dist.all_gather_into_tensor,
    "reduce-scatter": lambda whole, part: dist.reduce_scatter_tensor(part, whole),
}


def measure(args: argparse.Namespace, _: Path) -> Facts:
    """Run both groups in turns."""
    takes = {n: lambda _, n=n: ranks.run(RANKS, calls, n)[0] for n in ("stock", "seam")}
    found = in_turns("groups", args.rounds, takes)
    rows = []
    for index, (name, kb) in enumerate(itertools.product(OPERATIONS, KB)):
        # A row for each round: seconds, seconds of the processor.
        stock, seam = (np.array(each)[:, index] for each in found.values())
        values = {
            "own_cpu_seconds_per_call": (seam - stock)[:, 1].tolist(),
            "stock_seconds": stock[:, 0].tolist(),
            "seam_seconds": seam[:, 0].tolist(),
        }
        rows.append(row(name, values, {"seam_over_stock": [*(seam / stock)[:, 0]]}, kb))
    return {"at": "KB", "rows": rows}


def calls(member: ranks.Member, side: str) -> list[tuple[float, float]]:
    """Return the seconds of a call, and those of the processor, by operation and size in KB."""
    with ranks.plain_gloo(member) if side == "stock" else nullcontext(member.init(epoch=1)):
        return [_seconds(name, kb) for name, kb in itertools.product(OPERATIONS, KB)]


def _seconds(name: str, kb: int) -> tuple[float, float]:
    whole = torch.zeros(kb * 256 // RANKS * RANKS)
    part = whole[: len(whole) // RANKS].clone()
    for number in range(-WARM_UP, CALLS):
        if number == 0:
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
        OPERATIONS[name](whole, part)
    return (time.perf_counter() - began) / CALLS, (time.process_time() - cpu) / CALLS
