"""Make pictures of the pages again, each from runs on this machine: docs/demo.png, docs/elastic.png
and docs/page.png. Without a name all three, in some minutes on two cores.

    .venv/bin/python -m tests.pictures [demo] [elastic] [page]

page.png needs Chromium (scripts/system-packages.sh).
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from deadpool_megatron.events import Kind, read_events
from tests.common.browser import CHROMIUM
from tests.common.wait import wait_for

_ROOT = Path(__file__).parents[2]
_DOCS = _ROOT / "docs"
_DEADPOOL = (sys.executable, "-m", "deadpool_megatron")
_SIZE = "--nodes 4 --spares 2 --nproc-per-node 1"
_TRAINING = "-m deadpool_megatron.trainer @configs/tiny.args --use-distributed-optimizer"
_TRAINING += " --pipeline-model-parallel-size 2 --train-iters 2000"
_SCREEN = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
_SECONDS = 180.0


def main() -> None:
    """Make the pictures that the command line names."""
    for name in sys.argv[1:] or ("demo", "elastic", "page"):
        picture = _DOCS / f"{name}.png"
        match name:
            case "demo":
                _deadpool("demo", "--plot", str(picture))
            case "elastic":
                _deadpool("demo", "--elastic", "--plot", str(picture))
            case _:
                _page(_DOCS / "page.png")


def _page(picture: Path) -> None:
    """Draw the page of a run that lost a node, then a process."""
    directory = Path(tempfile.mkdtemp(prefix="pictures-"))
    run = directory / "runs" / "struck"
    command = ["run", "--quiet", *_SIZE.split(), "--run-dir", str(run), "--", *_TRAINING.split()]
    training = subprocess.Popen([*_DEADPOOL, *command], cwd=_ROOT)
    page = None
    try:
        _await(run, 60)
        _deadpool("kill", str(run), "--node", "1")
        _await(run, 120)
        _deadpool("kill", str(run), "--role", "2")
        _await(run, 180)
        serve = [*_DEADPOOL, "serve", str(run)]
        page = subprocess.Popen(serve, cwd=_ROOT, stdout=subprocess.PIPE, text=True)
        assert page.stdout is not None
        address = page.stdout.readline().strip()
        files = (f"--user-data-dir={directory}/browser", f"--screenshot={picture}")
        shot = [str(CHROMIUM), *_SCREEN, *files, "--window-size=1280,800", address]
        subprocess.run(shot, check=True, capture_output=True)
    finally:
        if page is not None:
            page.kill()
        training.terminate()
        training.wait()
        shutil.rmtree(directory, ignore_errors=True)


def _deadpool(*command: str) -> None:
    subprocess.run([*_DEADPOOL, *command], cwd=_ROOT, check=True)


def _await(run: Path, iteration: int) -> None:
    def is_finished() -> bool:
        events = read_events(run / "events.jsonl") if (run / "events.jsonl").exists() else []
        return any(e.kind is Kind.STEP and (e.iteration or 0) >= iteration for e in events)

    wait_for(f"iteration {iteration}", is_finished, _SECONDS)


if __name__ == "__main__":
    main()
