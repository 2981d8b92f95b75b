"""Each command line that README and docs/ show is one that the program takes."""

import argparse
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

from deadpool_megatron import cli
from deadpool_megatron.hookpoints import ALLOW, ALLOW_UNREVIEWED, ALLOW_UNTESTED, FLAG

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


def options_of(command: str) -> set[str]:
    """The options of a command, settings included."""
    parser = cli._parser([command, "--help-all"])
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return set(commands.choices[command]._option_string_actions)


def test_prose_names_options_that_commands_have():
    """Commands in the text of a page, and each setting; not what a version before had."""
    known = {name: options_of(name) for name in cli.COMMANDS}
    every = set().union(*known.values()) | {FLAG, ALLOW, ALLOW_UNREVIEWED, ALLOW_UNTESTED}
    for page in PAGES:
        if page.stem == "simulate" and page.stem not in known:
            continue  # it announces the command
        text = re.sub(r"^\|.*\b0\.5\b.*$", "", page.read_text().partition("## From 0.5")[0])
        for name, shown_options in re.findall(r"`deadpool ([a-z][a-z-]+)((?: [^`]*)?)`", text):
            assert name in known, (page.name, name)
            given = re.findall(r"(?<= )--[a-z-]+", shown_options.partition(" -- ")[0])
            assert set(given) <= known[name] | {"--help", "--help-all"}, (page.name, name, given)
        found = set(re.findall(r"--deadpool-[a-z-]*[a-z]\b", text))
        wrong = {flag for flag in found if not any(each.startswith(flag) for each in every)}
        assert wrong == set(), page.name
