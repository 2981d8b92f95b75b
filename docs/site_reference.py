"""Hook of mkdocs: the pages of reference that are generated, never written, and pages that moved.

``PAGES`` has the text of each page; a line ``<!-- generated: NAME -->`` of any page is replaced by
the text of that name in ``PARTS``. The address of a page in ``MOVED`` leads to the one that has
its text. Sources are the parsers of the command line, the settings, the
table of Megatron-LM's flags, the table of failures, and the docstrings of the public classes.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from deadpool_megatron import arguments, cli, settings
from deadpool_megatron.failures import MEANINGS
from deadpool_megatron.hookpoints import ALLOW, ALLOW_UNREVIEWED
from deadpool_megatron.support import environment, flags

ROOT = Path(__file__).parents[1] / "deadpool_megatron"
_MARK = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)
_API = {
    "member/loop.py": ("Program", "SteppedLoop", "ProtectedLoop", "StepRunner"),
    "member/session.py": ("Session",),
    "torch_native/loop.py": ("TorchProgram", "TorchLoop"),
}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of markdown."""
    lines = [list(head), ["---"] * len(list(head)), *map(list, rows)]
    cells = (" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines)
    return "\n".join(f"| {line} |" for line in cells) + "\n"


def codes() -> str:
    """Return the table of `deadpool explain`."""
    rows = (
        (f"`{code}`", row.called, row.noticed, row.to_do or "nothing")
        for code, row in MEANINGS.items()
    )
    return table(("code", "meaning", "evidence", "what to do"), rows)


def nccl() -> str:
    """Return the variables that members get, and the versions of NCCL that are refused."""
    rows = (
        (
            f"`{'`, `'.join(filter(None, (row.name, row.former_name)))}`",
            row.value,
            row.reason,
            (f"{', '.join(row.conflicting)} is " if row.conflicting else "") + row.policy.value,
        )
        for row in environment.VARIABLES
    )
    versions = ((version.shown, version.reason) for version in environment.REFUSED_VERSIONS)
    return (
        table(("variable", "members get", "why", "another value"), rows)
        + "\n"
        + table(("NCCL", "why refused"), versions)
    )


def command_line() -> str:
    """Return the help of each command, and the settings."""
    text = ["# Command line\n\nThe `--help` of each command, by topic, then the settings.\n"]
    for topic, commands in cli.TOPICS.items():
        text.append(f"## {topic[0].upper()}{topic[1:]}\n")
        for name in commands:
            shown = _help(name).format_help().rstrip()
            text.append(f"### deadpool {name}\n\n```text\n{shown}\n```\n")
    return "\n".join([*text, settings_chapter()])


def _help(name: str) -> argparse.ArgumentParser:
    """Return the parser of a command."""
    parser = cli._parser([name])
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    found: argparse.ArgumentParser = commands.choices[name]
    found.formatter_class = lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=100)
    return found


def settings_chapter() -> str:
    """Return the settings: flags by topic, values of ``--deadpool-set``, the order of limits."""
    text = [
        "## Settings\n",
        "Flags of `deadpool run` and `deadpool agent`, before the `--`, or among the script's"
        " arguments. Times are in seconds; 1 GB is 10^9 bytes. Most runs need none of them. A"
        " value that breaks the order at the end of this page is refused at the start.\n",
    ]
    comments = dict(_comments())
    for topic, names in _topics():
        text.append(f"### Flags: {topic}\n")
        rows = ((f"`{settings.flag_name(n)}`", *_defaults(n), _meaning(n)) for n in names)
        text.append(table(("flag", "default", "with NCCL", "meaning"), rows))
    text.append(
        "### Values of `--deadpool-set`\n\nGive `--deadpool-set NAME=VALUE`, as often as needed. A"
        " value that follows a flag is proportional to it: twice the flag is twice the value.\n"
    )
    values = (
        (f"`{_dashed(name)}`", *_defaults(name), _follows(name), comments[name])
        for name in settings.FIELDS
        if not settings.has_flag(name)
    )
    text.append(table(("name", "default", "with NCCL", "follows", "meaning"), values))
    text.append("### Order of the limits\n\nEach limit must be long enough for those inside it.\n")
    order = (
        (f"`{_dashed(longer)}`", f"{factor:g} x `{_dashed(shorter)}`", reason)
        for shorter, longer, factor, reason in settings._LADDER
    )
    text.append(table(("limit", "at least", "because"), order))
    return "\n".join(text)


def _topics() -> Iterator[tuple[str, list[str]]]:
    topic, names = "", list[str]()
    for name in filter(settings.has_flag, settings.FIELDS):
        if name in arguments._TOPICS:
            if names:
                yield topic, names
            topic, names = arguments._TOPICS[name], []
        names.append(name)
    yield topic, names


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _meaning(name: str) -> str:
    return str(settings.FIELDS[name].metadata["help"])


def _defaults(name: str) -> tuple[str, str]:
    """Return the default of a setting, and that with NCCL if it differs."""
    usual, nccl = (getattr(settings.Settings(communicator=kind), name) for kind in ("gloo", "nccl"))
    usual = settings.FIELDS[name].default if name == "communicator" else usual
    text = f"{usual:g}" if isinstance(usual, float) else str(usual) or "none"
    differs = nccl != usual and name != "communicator"
    return text, f"{nccl:g}" if differs else ""


def _follows(name: str) -> str:
    entry = settings.FIELDS[name].metadata
    parts = [settings.flag_name(entry["of"])] if entry.get("of") else []
    parts += [f"at least {settings.flag_name(entry['floor'])}"] if entry.get("floor") else []
    return re.sub(r"(--[\w-]+)", r"`\1`", ", ".join(parts))


def _comments() -> Iterator[tuple[str, str]]:
    """Yield the name and the comment of each setting without a flag."""
    waiting: list[str] = []
    for line in (ROOT / "settings.py").read_text().splitlines():
        if found := re.fullmatch(r"    #:? +(.*)", line):
            waiting.append(found[1])
        else:
            if found := re.match(r"    (\w+): [\w.]+ = _(?:fixed|limit)\(", line):
                yield found[1], " ".join(waiting)
            waiting = []


def flags_page() -> str:
    """Return the flags of Megatron-LM by level."""
    text = [
        "# Flags of Megatron-LM\n",
        "What protection does with each flag. `deadpool support -- pretrain_gpt.py ARGS` judges a"
        " command line by these tables, without starting anything.\n",
    ]
    reasons = {
        flags.Level.REFUSED: "Refused: its state is not protected, or a recovery cannot reset it",
        flags.Level.READ: "To be allowed by name: written from the source, tested in parts",
        flags.Level.SET: "Set by deadpool, with a line",
        flags.Level.ACCEPTED: "Accepted, never run: no CPU can",
    }
    for level, title in reasons.items():
        rows = (
            (f"`{row.shown.replace(', ', '`, `')}`", row.reason, _remedy(row))
            for row in flags.ROWS
            if row.level is level
        )
        text += [f"## {title}\n", table(("flag", "why", "what to do"), rows)]
    for title, families in (("Run on a CPU", flags.REVIEWED), ("Not reviewed", flags.UNREVIEWED)):
        note = f" `{ALLOW_UNREVIEWED} FLAG` accepts one." if title[0] == "N" else ""
        rows = ((f.title, f.reason, f"`{'`, `'.join(f.flags)}`") for f in families)
        text += [f"## {title}\n", f"By family.{note}\n", table(("family", "why", "flags"), rows)]
    return "\n".join(text)


def _remedy(row: flags.FlagRow) -> str:
    match row.level:
        case flags.Level.READ:
            return f"`{ALLOW} {row.name}`"
        case flags.Level.SET:
            return row.becomes
    return "nothing" if row.level is flags.Level.ACCEPTED else row.remedy


def python_api() -> str:
    """Return the public classes with their methods and docstrings."""
    text = list[str]()
    for file, names in _API.items():
        classes = {
            node.name: node
            for node in ast.parse((ROOT / file).read_text()).body
            if isinstance(node, ast.ClassDef)
        }
        for name in names:
            text += [f"### {name}\n", _prose(classes[name])]
            text += filter(None, map(_member, classes[name].body))
    return "\n".join(text)


def _member(node: ast.stmt) -> str:
    """Return a public method or annotated attribute; empty for anything else."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return f"`{node.target.id}: {ast.unparse(node.annotation)}`\n"
    if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
        return ""
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"#### {node.name}\n\n`{node.name}({ast.unparse(node.args)}){result}`\n\n{_prose(node)}"


def _prose(node: ast.ClassDef | ast.FunctionDef) -> str:
    """Return a docstring, with roles of Sphinx as code."""
    text = ast.get_docstring(node) or ""
    return re.sub(r":\w+:`~?\.*([^`]+)`", r"`\1`", text).replace("``", "`") + "\n"


PARTS: dict[str, Callable[[], str]] = {"codes": codes, "nccl": nccl, "python-api": python_api}
PAGES: dict[str, Callable[[], str]] = {
    "command-line.md": command_line,
    "flags.md": flags_page,
}
MOVED = {
    "faq": "#questions",
    "health": "monitoring/#health-of-nodes",
    "limits": "requirements/#limits",
    "proof-kit": "testing/#on-a-machine-with-a-gpu",
    "python-api": "own-loop/#python-api",
    "settings": "command-line/#settings",
    "simulate": "planning/#simulate-a-run",
    "walkthrough": "failures/#a-failure-file-by-file",
    "words": "concepts/#words",
}
# A link to a heading of the old page leads to that heading.
_REDIRECT = "<script>location = new URL({0!r}, document.baseURI).href.replace(/#.*/, '') + "
_REDIRECT += "(location.hash || {1!r})</script><a href={0!r}>This page has moved.</a>"


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages."""
    from mkdocs.structure.files import File

    for name, text in PAGES.items():
        files.append(File.generated(config, name, content=text()))
    for name, address in MOVED.items():
        page = _REDIRECT.format(f"../{address}", f"#{address.partition('#')[2]}")
        files.append(File.generated(config, f"{name}/index.html", content=page))
    return files


def on_page_markdown(markdown: str, **_others: Any) -> str:
    """Replace the marks of a page."""
    return _MARK.sub(lambda mark: PARTS[mark[1]](), markdown)
