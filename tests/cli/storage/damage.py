"""Checkpoints, and what damages them."""

import contextlib
import io
import json
import re
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from deadpool_megatron import cli


def flip(path: Path, position: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 0x10]))


def checkpoint(directory: Path) -> Path:
    state = {"weight": torch.arange(5000.0), "step": torch.tensor(7)}
    dcp.save(state, checkpoint_id=str(directory), no_dist=True)
    torch.save({"iteration": 7}, directory / "common.pt")
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return next(directory.glob("*.distcp"))


def found(directory: Path) -> int:
    """Print what is found, without numbers that torch's versions differ in; the exit status."""
    with contextlib.redirect_stdout(shown := io.StringIO()):
        status = cli.main(["verify", "--json", str(directory)])
    answer = json.loads(shown.getvalue())
    assert answer["ok"] == (status == 0)
    for one in answer["findings"]:
        why = re.sub(r"(?<![\w/.-])\d+|(?<= from ).*", "N", one.get("reason", ""))
        print(one["kind"], one["path"], f"({one['what']}):", one["verdict"], why)
    return status
