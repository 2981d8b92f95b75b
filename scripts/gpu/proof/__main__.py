"""Runs the parts within one limit, each in a process of its own, and keeps one archive of it all.

A part gets SIGTERM when its time is up and is killed a little later. Its results up to then are
kept: such a part is unfinished, not failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from proof.archive import pack
from proof.device import Device, set_up
from proof.missing import missing
from proof.parts import PARTS, Part
from proof.processes import TimeIsUp, adopt_orphans, end_children, end_in_order, end_with_parent
from proof.result import Task, commit, first_line, read_json, versions, write_json

_KEEP_SECONDS = 1.0
#: between SIGTERM and the kill: this share of the limit, and at most these seconds
_NOTICE_SHARE, _NOTICE_SECONDS = 0.1, 4.0
#: share and maximum of the whole time that are left for the end of the last part and the archive
_END_SHARE, _END_SECONDS = 0.1, 10.0


def main(arguments: Sequence[str]) -> int:
    """Return 0 if nothing failed, 1 if a part did, 2 for bad input, 143 after a signal."""
    options = _parser().parse_args(arguments)
    chosen = [p for p in PARTS if not options.part or p.name in options.part]
    if not options.megatron_lm:
        chosen = [part for part in chosen if part.name != "pretrain"]
    if options.inside:
        return _inside(chosen[0], options)
    if not options.minutes > 0:
        _parser().error("--minutes: more than 0")
    if not chosen:
        _parser().error("--part pretrain: only with --megatron-lm")
    problems = list(missing(options.device, options.out, options.megatron_lm))
    for problem in problems:
        print(f"prove: missing: {problem}", file=sys.stderr)
    return 2 if problems else StepRunner(chosen, options).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu/prove.sh", description="What the GPU path does on this machine."
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="for all of it (default: 8)")
    parser.add_argument("--out", type=Path, default=Path("proof-results"), help="for the archive")
    names = [part.name for part in PARTS]
    parser.add_argument("--part", action="append", choices=names, help="only this one (repeat it)")
    parser.add_argument("--megatron-lm", type=Path, help="a checkout, for its pretrain_gpt.py")
    parser.add_argument("--device", type=Device, default=Device.CUDA, help="cuda, or cpu: rehearse")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    return parser


def _inside(part: Part, options: argparse.Namespace) -> int:
    """Run one part in its own process."""
    end_in_order()
    # The stacks of all threads at that moment are then in its log.
    faulthandler.register(signal.SIGTERM, chain=True)
    end_with_parent()
    task = Task(part.name, options.device, options.inside, options.until, options.megatron_lm)
    set_up(task.device)
    try:
        task.save()
        part.run(task)
        task.finished = True
    except TimeIsUp:
        pass
    except Exception as error:
        traceback.print_exc()
        task.problems.append(first_line(error))
        task.finished = True
    finally:
        task.save()
    return 0


class StepRunner:
    """One run of the chosen parts. Its files are in a folder of its own, which is packed whenever a
    result has changed; at the end only the archive is left."""

    def __init__(self, parts: Sequence[Part], options: argparse.Namespace) -> None:
        self._began = time.monotonic()
        self._parts, self._options = parts, options
        seconds = 60 * options.minutes
        self._end = self._began + seconds - min(_END_SECONDS, _END_SHARE * seconds)
        self._folder = Path(tempfile.mkdtemp(prefix="deadpool-proof-"))
        self._archive: Path = options.out / f"proof-{options.device}.tgz"
        self._known: dict[str, dict[str, Any]] = {p.name: {"state": "not started"} for p in parts}
        self._packed: object = None

    def run(self) -> int:
        """Run all parts, each with its share of the time that is left."""
        end_in_order()
        adopt_orphans()
        print(f"{self._options.minutes:g} minutes for {self._archive}", flush=True)
        ended, status = "when all parts were through", 0
        try:
            self._keep("not yet")
            for number, part in enumerate(self._parts):
                rest = sum(later.seconds for later in self._parts[number:])
                self._run(part, (self._end - time.monotonic()) * part.seconds / rest)
        except TimeIsUp:
            ended, status = "by a signal", 143
        end_children()
        self._keep(ended)
        print(f"{time.monotonic() - self._began:4.0f} s  ended {ended}")
        self._remove_shared_memory()
        shutil.rmtree(self._folder, ignore_errors=True)
        return status or int(any(part["state"] == "failed" for part in self._known.values()))

    def _run(self, part: Part, limit: float) -> None:
        """Run the part in a session of its own; end all processes that it has started."""
        began = time.monotonic()
        until = began + limit - min(_NOTICE_SECONDS, _NOTICE_SHARE * limit)
        command = [sys.executable, "-m", "proof", "--part", part.name, "--until", str(until)]
        command += ["--inside", str(self._folder), "--device", self._options.device]
        if self._options.megatron_lm:
            command += ["--megatron-lm", str(self._options.megatron_lm.absolute())]
        print(f"{limit:4.0f} s  {part.name}: {part.title}", flush=True)
        self._known[part.name] = {"state": "unfinished", "limit_seconds": round(limit, 1)}
        with open(self._folder / f"{part.name}.log", "wb") as log:
            child = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            while child.poll() is None and time.monotonic() < until:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(min(_KEEP_SECONDS, max(0.0, until - time.monotonic())))
                if self._packed != self._times():
                    self._keep("not yet")
        finally:
            is_late = child.poll() is None
            child.terminate()
            with suppress(subprocess.TimeoutExpired):
                child.wait(min(_NOTICE_SECONDS, _NOTICE_SHARE * limit))
            child.kill()
            status = child.wait()
            end_children()
            self._judge(part, "" if is_late else f"its process ended by itself: status {status}")
            self._known[part.name]["seconds"] = round(time.monotonic() - began, 1)
            self._keep("not yet")
            self._remove_shared_memory()

    def _judge(self, part: Part, exit_problem: str) -> None:
        found = read_json(self._folder / f"{part.name}.json")
        is_through = bool(found.get("finished"))
        problems = list(found.get("problems", []))
        if exit_problem and not is_through:
            problems.append(exit_problem)
        state = "failed" if problems else "passed" if is_through else "unfinished"
        findings = found.get("findings", [])
        self._known[part.name] |= {"state": state, "finished": is_through}
        self._known[part.name] |= {"problems": problems, "findings": findings}
        print(f"{'':8}{state}", flush=True)
        for line in [*problems, *findings]:
            print(f"{'':8}- {line}", flush=True)

    def _times(self) -> list[int]:
        paths = [self._folder / f"{name}.json" for name in self._known]
        return [path.stat().st_mtime_ns if path.exists() else 0 for path in paths]

    def _keep(self, ended: str) -> None:
        """Write the summary, and pack all results."""
        self._packed = self._times()
        begun = [name for name, known in self._known.items() if known["state"] != "not started"]
        finished = [name for name in begun if self._known[name].get("finished")]
        values = {
            "commit": commit(),
            "device": self._options.device,
            "minutes": self._options.minutes,
            "seconds": round(time.monotonic() - self._began, 1),
            "ended": ended,
            "finished": finished,
            "unfinished": [name for name in begun if name not in finished],
            "not started": [name for name in self._known if name not in begun],
            "parts": self._known,
            "versions": versions(),
        }
        write_json(self._folder / "summary.json", values)
        pack(self._folder, self._archive)

    def _remove_shared_memory(self) -> None:
        """Remove the segments of runs whose agents were killed."""
        for path in self._folder.rglob("run.json"):
            if run := read_json(path).get("run_id"):
                shutil.rmtree(f"/dev/shm/deadpool-{run}", ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
