#!/usr/bin/env python
"""Hold what the package and the proof kit use of torch and NCCL against a CUDA build of torch.

    python scripts/gpu/conformance.py [--json FILE]

Looks at the torch of the Python that runs it; needs no GPU. An environment for that, with another
version of torch, whose wheels for Linux are CUDA builds (5 GB, some minutes):

    python -m venv DIR && DIR/bin/pip install -e '.[all,megatron]' tensorboard 'torch==2.13.*'

  names        what is imported from torch is there, and so are attributes of it
  modules      all modules of the package can be imported
  calls        what is made and called of torch's communicators takes what it is given
  variables    the environment variables that members get stand in the libraries that read them
  symbols      NCCL has the functions that the package calls, or has torch call
  depth        NCCL counts the open groups of a thread as comms/nccl.py expects it to

Each is a process of its own. The JSON has each check with its result, the versions, the SHA-256 of
both libraries and of this script, and the commit of the package.

Exit status: 0 all hold; 1 something does not, and is named; 2 bad arguments, or no CUDA build.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import hashlib
import importlib
import json
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
PACKAGE = ROOT / "deadpool_megatron"
HOLDS = "holds"
_CUDA = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
# The first torch that reads it.
_SINCE = {
    "TORCH_FR_DUMP_ON_TIMEOUT": "2.15",
    "TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC": "2.15",
    "TORCH_NCCL_TEARDOWN_ON_TIMEOUT": "2.15",
}
_OF_THE_DRIVER = "CUDA_DEVICE_MAX_CONNECTIONS"
_SYMBOLS = (
    *("ncclCommInitRankConfig", "ncclCommInitRankScalable", "ncclCommSplit", "ncclCommAbort"),
    *("ncclCommGetAsyncError", "ncclGroupStart", "ncclGroupEnd", "ncclGetVersion"),
)
_CALLS = """
from datetime import timedelta
from torch._C._distributed_c10d import BarrierOptions, HashStore, _dump_nccl_trace_json
from torch.distributed import ProcessGroup, ProcessGroupNCCL
device, kind = torch.device("cuda", 0), ProcessGroup.BackendType.NCCL
options, barrier = ProcessGroupNCCL.Options(), BarrierOptions()
plain = ProcessGroup(HashStore(), 0, 1)
options._timeout = timedelta(seconds=1)
options.global_ranks_in_group = [0]
options.group_name = "name"
options.is_high_priority_stream = False
options.split_from = None
options.split_color = 1
barrier.device = device
barrier.asyncOp = True
barrier.timeout = timedelta(seconds=1)
ProcessGroupNCCL(HashStore(), 0, 1, options)
ProcessGroupNCCL.abort, ProcessGroupNCCL.uid, ProcessGroupNCCL._set_sequence_number_for_group
assert "device" in ProcessGroupNCCL.eager_connect_single_device.__doc__
assert "timedelta" in ProcessGroupNCCL._set_default_timeout.__doc__
assert "ErrorType" in ProcessGroupNCCL.get_error.__doc__
ProcessGroupNCCL.get_runtime_nccl_version()[2]
plain._set_default_backend(kind)
plain.bound_device_id = device
plain._register_backend(device, kind, None)
plain._set_group_name("name")
plain._set_group_desc("what for")
plain._start_coalescing(device)
plain._end_coalescing(device)
_dump_nccl_trace_json(includeCollectives=False, onlyActive=False)
torch.cuda.check_error(0)
torch._C._cudart.cudaHostRegister, torch._C._cudart.cudaHostUnregister
"""
# The error of a call whose arguments were accepted, and that lacks a GPU or a communicator.
_NO_GPU = "no GPUs found|NVIDIA driver|Could not retrieve or create the backend"
Results = dict[str, str]


def used_names(source: str) -> set[str]:
    """Return the dotted names that a module takes from torch."""
    tree, known = ast.parse(source), dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {each.asname or each.name: each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {each.asname or each.name: each.name for each in node.names}
            known |= {alias: f"{node.module}.{name}" for alias, name in names.items()}
    found = set(known.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, *rest = ast.unparse(node).split(".")
            if all(map(str.isidentifier, rest)):
                found.add(".".join([known.get(first, ""), *rest]))
    return {name for name in found if name.split(".")[0] == "torch"}


def missing_prefix(name: str) -> str:
    """Return the shortest prefix of a dotted name that does not exist; empty if the name does."""
    at: Any = torch
    path = "torch"
    for each in name.split(".")[1:]:
        path += f".{each}"
        if not hasattr(at, each):
            with suppress(ImportError):
                importlib.import_module(path)
        if not hasattr(at, each):
            return path
        at = getattr(at, each)
    return ""


def names() -> Results:
    """See the module text."""
    files = [*PACKAGE.rglob("*.py"), *Path(__file__).with_name("proof").glob("*.py")]
    used = set[str]().union(*(used_names(file.read_text()) for file in files))
    return {
        name: _answer(not (gone := missing_prefix(name)), f"no {gone}") for name in sorted(used)
    }


def modules() -> Results:
    """See the module text."""
    found: Results = {}
    importlib.import_module("deadpool_megatron.trainer.megatron_api")  # before Megatron's import
    for file in sorted(set(PACKAGE.rglob("*.py")) - set(PACKAGE.rglob("__main__.py"))):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        try:
            importlib.import_module(name)
            found[name] = HOLDS
        except (Exception, SystemExit) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def calls() -> Results:
    """See the module text."""
    found: Results = {}
    space: dict[str, Any] = {"torch": torch}
    for line in _CALLS.strip().splitlines():
        try:
            exec(line, space)
            found[line] = HOLDS
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            found[line] = _answer(re.search(_NO_GPU, text), text)
    return found


def variables() -> Results:
    """See the module text."""
    from deadpool_megatron.support.environment import VARIABLES

    files = [*_CUDA.parent.glob("libtorch*.so"), *_CUDA.parent.glob("libc10*.so"), nccl_library()]
    texts = [file.read_bytes() for file in files]
    found: Results = {}
    for name in (name for each in VARIABLES for name in (each.name, each.former_name) if name):
        if name == _OF_THE_DRIVER:
            found[name] = f"{HOLDS}: the driver reads it"
        elif torch.__version__ < _SINCE.get(name, "0"):
            found[name] = f"{HOLDS}: torch {_SINCE[name]} reads it"
        else:
            found[name] = _answer(
                any(name.encode() + b"\0" in text for text in texts), "nobody reads it"
            )
    return found


def nccl_library() -> Path:
    """Return the file of NCCL that torch has loaded: torch's own where it is a part of that."""
    loaded = re.findall(r"/\S+/libnccl\.so\S*", Path("/proc/self/maps").read_text())
    return Path(loaded[0]) if loaded else _CUDA


def symbols() -> Results:
    """See the module text."""
    library = ctypes.CDLL(str(nccl_library()))
    return {name: _answer(hasattr(library, name), "is not there") for name in _SYMBOLS}


def depth() -> Results:
    """See the module text."""
    from deadpool_megatron.comms.nccl import is_group_open

    library = ctypes.CDLL(str(nccl_library()))
    start, end = library.ncclGroupStart, library.ncclGroupEnd
    steps: tuple[tuple[str, Callable[[], int], int], ...] = (
        ("an end outside of a group", end, 5),
        ("is_group_open outside of a group", is_group_open, False),
        ("a start that is lost", start, 0),
        ("a start after it", start, 0),
        ("the end of that", end, 0),
        ("is_group_open after a lost start", is_group_open, True),
    )
    return {name: _answer((found := step()) == wanted, str(found)) for name, step, wanted in steps}


def _answer(is_so: object, otherwise: str) -> str:
    return HOLDS if is_so else otherwise


PARTS = {part.__name__: part for part in (names, modules, calls, variables, symbols, depth)}


def facts() -> dict[str, Any]:
    """Return the versions and files that are checked."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    files = (_CUDA, nccl_library(), Path(__file__))
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.distributed.ProcessGroupNCCL.get_runtime_nccl_version())),
        "python": platform.python_version(),
        "sha256": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files},
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
    }


def check(part: str) -> Results:
    """Run one part in a process of its own, print its line, and return its results."""
    began = time.monotonic()
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        try:
            found = process.submit(PARTS[part]).result()
        except Exception as error:
            found = {"all of it": f"{type(error).__name__}: {error}"}
    bad = {name: answer for name, answer in found.items() if not answer.startswith(HOLDS)}
    seconds = time.monotonic() - began
    print(f"{part:10} {len(found):4} looked at, {len(bad):3} not so, {seconds:3.0f} s", flush=True)
    for name, answer in bad.items():
        print(f"  {name}: {answer}", flush=True)
    return found


def main() -> int:
    """Run from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="each check with its result")
    out = parser.parse_args().json
    if torch.version.cuda is None:
        print(f"conformance: torch {torch.__version__} has no CUDA: see --help", file=sys.stderr)
        return 2
    found = facts()
    print(f"torch {found['torch']}, NCCL {found['nccl']}, Python {found['python']}", flush=True)
    checks = {part: check(part) for part in PARTS}
    if out:
        out.write_text(json.dumps({**found, "checks": checks}, indent=1) + "\n")
    answers = [answer for part in checks.values() for answer in part.values()]
    return 0 if all(answer.startswith(HOLDS) for answer in answers) else 1


if __name__ == "__main__":
    sys.exit(main())
