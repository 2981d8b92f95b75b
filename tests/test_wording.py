"""The words that users read: pages, ``--help``, messages. No worn idiom, no endless sentence."""

import argparse
import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from deadpool_megatron import cli

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "deadpool_megatron"
#: idioms with a plainer word; who and what as the subject of a statement
WORN = re.compile(
    r"\b(?:go(?:es|ing|ne)? on|went on|anew|for want of|beside|behind|(?:is|are|was|were) told"
    r"|once more|as ever|in the place of|put aside|puts aside)\b"
    r"|(?:^|[.;] )(?:who|what|whoever|whatever) [^.;?:]*[.;]",
    re.IGNORECASE | re.MULTILINE,
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def ceiling(name: str) -> int:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["deadpool"]["ceilings"]
    return int(table[name])


def literals(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string of a module that is no docstring."""
    tree = ast.parse(path.read_text())
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.lineno, node.value


def worn_places() -> Iterator[str]:
    texts = [
        (file, number, line)
        for file in [*PAGES, *sorted(PACKAGE.rglob("*.toml"))]
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if not line.startswith("#")
    ]
    texts += [(file, *each) for file in sorted(PACKAGE.rglob("*.py")) for each in literals(file)]
    for file, number, text in texts:
        for found in WORN.finditer(text):
            yield f"{file.relative_to(ROOT)}:{number}: {found[0]}"


def test_worn_words_only_become_fewer() -> None:
    """Their number stands with the ceilings, which only fall."""
    places = list(worn_places())
    assert len(places) <= ceiling("worn_words"), "\n".join(places)


def sentences(text: str) -> Iterator[str]:
    """Yield those of prose: of paragraphs, items and cells; code blocks and links' targets out."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"(?:[\w-]+, ){5,}[\w-]+", "NAMES", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*[-|#]|\s*\d\. )|\|", text):
        yield from re.split(r"(?<=[.:!?])\s+", " ".join(block.split()))


def help_texts() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each description and option of the command line."""
    waiting = [cli._parser([])]
    while waiting:
        parser = waiting.pop()
        yield parser.prog, (parser.description or "").replace("\n  ", "\n\n")
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                waiting += action.choices.values()
            elif action.help and action.help != argparse.SUPPRESS:
                name = "/".join(action.option_strings) or action.dest
                yield f"{parser.prog} {name}", action.help


def test_sentences_are_short_where_people_begin() -> None:
    texts = [
        (path.name, path.read_text()) for path in PAGES if path.stem in ("README", "first-hour")
    ]
    most, long = ceiling("sentence_words"), list[str]()
    for place, text in [*texts, *help_texts()]:
        long += [f"{place}: {each}" for each in sentences(text) if len(each.split()) > most]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("text", ["It goes on.", "x; what is left is lost.", "Who asks is told."])
def test_the_check_finds_worn_words(text: str) -> None:
    assert WORN.search(text)
