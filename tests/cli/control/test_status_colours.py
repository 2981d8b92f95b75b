"""``deadpool status`` on a terminal."""

from deadpool_megatron.cluster.run_directory.directory import write_json
from tests.cli.start.refused import old_run

FINAL = {"exit_status": 75, "reason": "no spare", "iterations": 7}


def test_status_has_colours_on_a_terminal_unless_the_user_has_none(
    tmp_path, carry_out, monkeypatch
):
    run = old_run(tmp_path / "run")
    write_json(run.final, FINAL)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert carry_out("status", run.path)[1].startswith("\x1b[1;33mover")
    monkeypatch.setenv("NO_COLOR", "1")
    assert carry_out("status", run.path)[1].startswith("over")
