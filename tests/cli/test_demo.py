"""``deadpool demo`` against a made-up ``deadpool run``: what it shows, decides and leaves."""

from __future__ import annotations

import argparse
import json
import os
import pty
import sys
from pathlib import Path

import pytest
import synthetic_run

from deadpool_megatron.cli import demo
from deadpool_megatron.cli.screen import PlainScreen
from deadpool_megatron.cli.watch import Narrator, RunFailedError, watch_run

SYNTHETIC = Path(synthetic_run.__file__)


@pytest.fixture(autouse=True)
def _synthetic_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def command(directory: Path, iterations: int) -> list[str]:
        return [
            *(sys.executable, str(SYNTHETIC)),
            *("--run-dir", str(directory), "--train-iters", str(iterations)),
        ]

    monkeypatch.setattr(demo, "launch_command", command)
    monkeypatch.setattr(demo, "CONFIG", SYNTHETIC)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(demo.tempfile, "tempdir", str(tmp_path))


def run_demo(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    demo.add_parser(parser.add_subparsers())
    return demo.run(parser.parse_args(["demo", "--iterations", "12", *argv]))


def test_an_identical_run_ends_with_the_verdict_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts_file, picture = tmp_path / "facts.json", tmp_path / "picture.png"
    assert run_demo("--json", str(facts_file), "--plot", str(picture)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("bit-identical: yes")
    assert lines[-2] == "steps recomputed: 1"
    live = [line for line in lines if line.lstrip().startswith("+")]
    assert "SIGKILL to every process of the node" in live[0]
    told = [line.split()[2] for line in live[1:]]
    phases = [name for name in told if name in demo.PHASES]
    assert phases == list(synthetic_run.PHASES)
    assert told[0] == "lost"
    assert told[-1] == "training"
    facts = json.loads(facts_file.read_text())
    assert facts["bit_identical"] is True
    assert facts["killed_in_iteration"] == 7
    assert facts["steps_recomputed"] == 1
    assert facts["kill_to_next_step_seconds"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["facts.json", "picture.png"]


def test_other_numbers_are_said_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SYNTHETIC_TROUBLE", "diverge")
    base = tmp_path / "both"
    assert run_demo("--run-dir", str(base)) == 1
    text = capsys.readouterr().out
    assert "bit-identical: no" in text
    assert "first difference: iteration 7: loss" in text
    assert (base / "struck" / "final.json").exists()


def test_a_failed_run_shows_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SYNTHETIC_TROUBLE", "fail")
    assert run_demo("--run-dir", str(tmp_path / "both")) == 1
    error = capsys.readouterr().err
    assert "undisturbed run: the run ended with exit status 1" in error
    assert "| the last thing it said" in error


def test_a_silent_run_is_interrupted_and_may_clean_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYNTHETIC_TROUBLE", "hang")
    directory = tmp_path / "run"
    command = demo.launch_command(directory, 12)
    with pytest.raises(RunFailedError, match="no news from the run for"):
        watch_run(command, os.environ, directory, Narrator(PlainScreen()), silence_seconds=2.0)
    assert (directory / "interrupted").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--iterations", "7"), "--iterations must be at least 8, got 7"),
        (("--json", "/no/such/folder/x.json"), "the folder of /no/such/folder/x.json"),
        (("--run-dir", str(SYNTHETIC.parent)), "is not empty; choose another --run-dir"),
    ],
)
def test_bad_arguments_are_one_line(
    argv: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo(*argv) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_terminal_gets_a_progress_bar() -> None:
    program = (
        "from deadpool_megatron.cli.screen import make_screen\n"
        "screen = make_screen()\n"
        "screen.begin(4)\n"
        "screen.step(4, 1.25)\n"
        "screen.say('a line')\n"
        "screen.end()\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        os.execv(sys.executable, [sys.executable, "-c", program])
    shown = b""
    while True:
        try:
            found = os.read(terminal, 4096)
        except OSError:  # Linux answers EIO when the other side is closed
            break
        if not found:
            break
        shown += found
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0
    for part in ("━", "4/4", "loss 1.2500", "a line"):
        assert part in shown.decode()
