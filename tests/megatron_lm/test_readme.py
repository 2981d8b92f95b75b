"""README's way to use it with Megatron-LM works word for word, and loses nothing with a node."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deadpool_megatron.cli.compare import compare_results
from deadpool_megatron.cli.run_result import read_result
from deadpool_megatron.events import Kind, read_events
from tests.faults.harness.jobs import await_event
from tests.megatron_lm.harness.checkout import TAGS, checkout

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.megatron_lm]

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
#: README trains for longer; the learning rate of its configuration warms up for ten
ITERATIONS = 12
SECONDS = 240.0


#: and trains a larger model, whose step takes two slow cores some seconds
SIZES = {
    "--hidden-size": 64,
    "--seq-length": 64,
    "--max-position-embeddings": 64,
    "--global-batch-size": 8,
}


def make_smaller(configuration: Path) -> None:
    """Put :data:`SIZES` in the place of its own."""
    text = configuration.read_text()
    for flag, size in SIZES.items():
        text, found = re.subn(rf"^{flag} \d+$", f"{flag} {size}", text, flags=re.MULTILINE)
        assert found == 1
    configuration.write_text(text)


def the_block() -> list[str]:
    """The commands of README for this machine, one a line."""
    section = README.partition("**Your command on this machine.**")[2]
    found = re.search(r"^```\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1].replace("\\\n", "").splitlines()


@pytest.fixture
def here(tmp_path):
    """A checkout with its environment and Megatron-LM, as in a clone."""
    tree = checkout(TAGS[-1])
    if tree is None:
        pytest.skip(f"no checkout of {TAGS[-1]}")
    (tmp_path / "Megatron-LM").symlink_to(tree)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    make_smaller(tmp_path / "configs" / "megatron-lm" / "small.args")
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    deadpool = programs / "deadpool"
    deadpool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m deadpool_megatron "$@"\n')
    deadpool.chmod(0o755)
    return tmp_path


@contextlib.contextmanager
def shell(here: Path, commands: list[str]) -> Iterator[subprocess.Popen[str]]:
    """One that runs them, and what it has started ends with the block."""
    running = subprocess.Popen(
        ["bash", "-euc", "\n".join([*commands[:-1], f"exec {commands[-1]}"])],
        cwd=here,
        # Four processes share two cores: threads that spin would wait for each other.
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield running
    finally:
        running.terminate()
        running.communicate()


def end_of(running: subprocess.Popen[str]) -> str:
    """Wait for it; returns what it printed."""
    printed, _ = running.communicate(timeout=SECONDS)
    assert running.returncode == 0, printed
    return printed


def run(here: Path, commands: list[str]) -> str:
    """In a shell, to its end; returns what it printed."""
    with shell(here, commands) as running:
        return end_of(running)


@pytest.mark.full(every_time=True)
def test_node_is_killed_as_in_readme(here):
    clone, *commands = the_block()
    assert clone.startswith(f"git clone --depth 1 --branch {TAGS[-1]} https://")
    assert clone.endswith("/Megatron-LM")
    text = "\n".join(commands)
    assert text.count("--train-iters 500") == 1
    text = text.replace("--train-iters 500", f"--train-iters {ITERATIONS}")
    kill = re.search(r"in another terminal: `(\S+deadpool kill [^`]+)`", README)
    assert kill is not None

    with shell(here, text.splitlines()) as running:
        await_event(here / "runs" / "lm", lambda e: e.kind == "step" and e.iteration == 3)
        run(here, [kill[1]])
        printed = end_of(running)
    # What README shows of it.
    for line in (
        r"failure 1 \[node-lost\] on \S+: node 0: connection closed",
        r"recovered in \d+\.\d\d s \((\w+ \d+\.\d\d(, )?)+\); copies complete after",
        rf"iteration {ITERATIONS}  loss \d\.\d+  grad norm \d",
    ):
        assert re.search(line, printed), printed
    # A phase that took less than 5 ms is not printed.
    events = read_events(here / "runs" / "lm" / "events.jsonl")
    (recovered,) = (event for event in events if event.kind == Kind.RECOVERED)
    assert {"close", "rebuild", "restore", "replay"} <= set(recovered.data["phases"])

    run(here, text.replace("--run-dir runs/lm ", "--run-dir runs/plain ").splitlines())
    plain, struck = (read_result(here / "runs" / name) for name in ("plain", "lm"))
    comparison = compare_results(plain, struck)
    assert comparison.identical, "\n".join(map(str, comparison.differences))
    assert comparison.compared["steps"] == ITERATIONS
    assert "identical" in run(here, [".venv/bin/deadpool compare runs/plain runs/lm"])
