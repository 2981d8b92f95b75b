"""Commands that are carried out in the process of the test."""

import pytest

from deadpool_megatron import cli
from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.cli.start import launch, node_agent


@pytest.fixture
def carry_out(capsys):
    """Give a command; answers its exit status, output and errors."""

    def give(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = cli.main([*map(str, arguments)])
        except SystemExit as end:  # of the parser
            status = int(end.code or 0)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return give


@pytest.fixture
def complain(carry_out):
    """Give a command that is refused; answers its one line."""

    def refused(*arguments: object) -> str:
        status, out, err = carry_out(*arguments)
        assert (status, out) == (2, "")
        (line,) = err.splitlines()
        assert line.startswith("deadpool")
        return str(line)

    return refused


@pytest.fixture
def nothing_starts(monkeypatch):
    def start(_launcher: launch.Launcher) -> int:
        raise AssertionError("the launcher was reached")

    monkeypatch.setattr(launch.Launcher, "run", start)


@pytest.fixture
def imports_nothing(monkeypatch):
    """An agent whose command is good so far ends where it would import."""

    def import_nothing(*_: object) -> None:
        raise CommandError("so far it is good")

    monkeypatch.setattr(node_agent, "preload_modules", import_nothing)
