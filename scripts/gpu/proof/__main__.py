"""Runs the parts, each in a process of its own with its own limit, and says what each found."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from proof.device import Device, Size
from proof.parts import PARTS, Part
from proof.result import Findings, Result, commit, make_result, read_result, versions

PART_SECONDS = 450.0
_NOTICE_SECONDS = 20.0


def main(arguments: Sequence[str]) -> int:
    """Returns 0 if all parts that could be run have passed, 1 if one has not, 2 for bad input."""
    options = _parser().parse_args(arguments)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    chosen = [part for part in PARTS if part.name in (options.part or [p.name for p in PARTS])]
    if options.inside:
        return _inside(chosen[0], options.device, options.megatron_lm, out)
    # Who is ended ends the part that is under way, which has a session of its own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    versions()
    for part in chosen:
        path = _path(out, part, options.device)
        known = read_result(path)
        is_known = known is not None and known.commit == commit() and not known.not_run
        if is_known and not options.again:
            print(f"{part.name}: there already, {path}", flush=True)
            continue
        path.unlink(missing_ok=True)
        print(f"{part.name}: {part.title}", flush=True)
        _run(part, options, out, path)
    results = [read_result(_path(out, part, options.device)) for part in chosen]
    _print_table(chosen, results)
    return 0 if all(r is not None and (r.passed or r.not_run) for r in results) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu/prove.sh", description="What the GPU path does on this machine."
    )
    parser.add_argument("--device", type=Device, default=Device.CUDA, help="cuda, or cpu: rehearse")
    parser.add_argument("--out", type=Path, default=Path("runs/proof"), help="where results go")
    names = [part.name for part in PARTS]
    parser.add_argument("--part", action="append", choices=names, help="only this one (repeat it)")
    parser.add_argument("--again", action="store_true", help="also what has a result already")
    parser.add_argument("--megatron-lm", type=Path, help="a checkout, for its pretrain_gpt.py")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser


def _path(out: Path, part: Part, device: Device) -> Path:
    return out / f"{part.name}-{device}.json"


def _run(part: Part, options: argparse.Namespace, out: Path, path: Path) -> None:
    """The part in a session of its own; what it has left running is ended with it."""
    command = [sys.executable, "-m", "proof", "--inside", "--part", part.name]
    command += ["--device", options.device, "--out", str(out)]
    if options.megatron_lm:
        command += ["--megatron-lm", str(options.megatron_lm)]
    began = time.monotonic()
    log = out / f"{part.name}-{options.device}.log"
    with open(log, "wb") as output:
        child = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        problem = f"ended without a result: status {child.wait(PART_SECONDS)}, see {log}"
    except subprocess.TimeoutExpired:
        problem = f"not done after {PART_SECONDS:g} s, see {log}"
        os.killpg(child.pid, signal.SIGTERM)
        try:
            child.wait(_NOTICE_SECONDS)
        except subprocess.TimeoutExpired:
            pass
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if not path.exists():
        seconds = time.monotonic() - began
        found = Findings(problems=[problem])
        make_result(part.name, options.device, found, seconds).write(path)


def _inside(part: Part, device: Device, megatron_lm: Path | None, out: Path) -> int:
    """In the process of the part."""
    began = time.monotonic()
    found = part.run(device, Size.of(device), megatron_lm, out)
    seconds = time.monotonic() - began
    make_result(part.name, device, found, seconds).write(_path(out, part, device))
    return 0


def _print_table(parts: Sequence[Part], results: Sequence[Result | None]) -> None:
    print()
    for part, result in zip(parts, results, strict=True):
        if result is None:
            print(f"{part.name:8} no result")
            continue
        if result.not_run:
            print(f"{part.name:8} not run           {result.not_run}")
            continue
        verdict = "passed" if result.passed else "FAILED"
        print(f"{part.name:8} {verdict:7} {result.seconds:6.1f} s  {part.title}")
        for problem in result.problems:
            print(f"         {problem}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
