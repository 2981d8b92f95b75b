"""A run does not end because nobody can read any more what it prints."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys

import pytest

# Stands for `deadpool run` up to its first line; the rest is what every sub-command goes through.
RUN = """
import sys
from deadpool_megatron import cli
from deadpool_megatron.cli.start import run
def prints(args):
    for _ in range(3):
        print("x" * 10_000, flush=True)
        print("y", file=sys.stderr)
    return 7
run.run = prints
sys.exit(cli.main(["run", "--run-dir", "d", "--nodes", "1", "--nproc-per-node", "1"]))
"""


def result(**streams: int) -> int:
    done = subprocess.run([sys.executable, "-c", RUN], check=False, timeout=60, **streams)
    return done.returncode


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_goes_away(stream: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert result(**{stream: writing}) == 7
    finally:
        os.close(writing)


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_does_not_read(stream: str) -> None:
    """As a terminal after Ctrl-S. The launcher would see no agent end, and obey no interrupt."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writing, bytes(4096))
    try:
        assert result(**{stream: writing}) == 7
    finally:
        os.close(writing)
        os.close(reading)


def test_a_disk_is_full() -> None:
    with open("/dev/full", "w") as full:
        assert result(stdout=full.fileno(), stderr=full.fileno()) == 7


def test_streams_that_are_closed_lead_nowhere() -> None:
    """Or the next socket would get their numbers, and what is printed."""
    shown = subprocess.run(
        ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', sys.executable, "-c", RUN],
        check=False,
        timeout=60,
    )
    assert shown.returncode == 7


# Stands for a command that answers with its exit status, too.
ANSWER = """
import sys
from deadpool_megatron import cli
from deadpool_megatron.cli import compare
def prints(args):
    for _ in range(3):
        print("x" * 10_000)
    return 1
compare.run = prints
sys.exit(cli.main(["compare", "a", "b"]))
"""


@pytest.mark.parametrize("buffering", ["", "1"])
def test_who_has_seen_enough_gets_the_exit_status(buffering: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", ANSWER],
        env={**os.environ, "PYTHONUNBUFFERED": buffering},
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
        timeout=60,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


def test_an_answer_that_cannot_be_written_is_no_answer() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", ANSWER],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            timeout=60,
        )
    assert done.returncode == 2
    assert done.stderr.decode().splitlines() == [
        "deadpool compare: its output could not be written: No space left on device"
    ]
