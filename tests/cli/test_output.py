"""What commands print: no one ends, nor changes its exit status, because nobody can read it."""

import os
import subprocess
import sys

import pytest

from deadpool_megatron import cli

# Stands for what a sub-command does.
COMMAND = """
import sys
from deadpool_megatron import cli
def prints(args):
    for _ in range(3):
        print("x" * 10_000, flush=True)
        print("y", file=sys.stderr)
    return 7
cli._module(cli.COMMANDS[sys.argv[1]]).run = prints
sys.exit(cli.main())
"""
RUN = ["run", "--run-dir", "d", "--nodes", "1", "--nproc-per-node", "1"]
COMPARE = ["compare", "a", "b"]


def result(command: list[str], shell: str = 'exec "$0" "$@"') -> int:
    whole = ["sh", "-c", shell, sys.executable, "-c", COMMAND, *command]
    return subprocess.run(whole, check=False, timeout=60, capture_output=True).returncode


@pytest.mark.parametrize("command", [RUN, COMPARE], ids=lambda command: command[0])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_commands_outlive_their_reader(command, stream):
    reading, writing = os.pipe()
    os.close(reading)
    whole = [sys.executable, "-c", COMMAND, *command]
    done = subprocess.run(whole, check=False, timeout=60, **{stream: writing})
    os.close(writing)
    assert done.returncode == 7


# The disk is full; and streams that are closed, whose numbers the next sockets would get.
@pytest.mark.parametrize("shell", [">/dev/full 2>/dev/full", "<&- >&- 2>&-"])
def test_commands_run_without_a_writable_output(shell):
    assert result(RUN, f'exec "$0" "$@" {shell}') == 7


def test_commands_fail_if_their_answer_cannot_be_written():
    assert result(COMPARE, 'exec "$0" "$@" >/dev/full') == 2


def test_help_of_every_command_has_its_usage(capsys):
    for command in ([], *([name] for name in cli.COMMANDS)):
        with pytest.raises(SystemExit) as stop:
            cli.main([*command, "--help"])
        assert stop.value.code == 0
        shown = capsys.readouterr().out
        assert "usage: deadpool" in shown
        assert command or all(f"  {topic}:\n" in shown for topic in cli.TOPICS)
