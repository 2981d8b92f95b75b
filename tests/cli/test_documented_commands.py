"""Each command line that README and docs/ show is one that the program takes."""

import argparse
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

from deadpool_megatron import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# A word of a diagram, or of a message that a block shows, follows no name of a command like this.
COMMAND = re.compile(r"^(?:\.venv/bin/)?deadpool ([a-z-]+(?: (?!\().*)?)$", re.MULTILINE)


def shown() -> list[tuple[str, list[str]]]:
    """The page and the tokens of each; those after an ellipsis are the reader's."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            whole = re.sub(r"\$\([^)]*\)", "PRINTED", re.sub(r"\\\n +", "", block))
            for line in COMMAND.findall(re.sub(r" {4,}\S.*", "", whole)):
                tokens = shlex.split(line, comments=True)
                found.append((page.name, [word for word in tokens if word != "..."]))
    return found


def test_the_program_takes_them(monkeypatch, capsys):
    load, taken = cli._module, list[str]()

    def run(args: argparse.Namespace) -> int:
        taken.append(args.subcommand)
        return 0

    def parsed_only(name: str) -> SimpleNamespace:
        return SimpleNamespace(**{**vars(load(name)), "run": run})

    monkeypatch.setattr(cli, "_module", parsed_only)
    for page, tokens in shown():
        assert cli.main(tokens) == 0, (page, tokens, capsys.readouterr().err)
    assert len(taken) > 50
