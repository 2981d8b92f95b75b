"""The words of pages, ``--help`` and messages, and those of the code itself.

python -m tests.test_wording             counts of the code, for each room
python tests/test_wording.py wire vault  the places in these rooms
"""

import argparse
import ast
import re
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
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
#: words in names: pronouns, speech, theatre, morals, housekeeping, bounds in other words than max_;
#: extras_room_mb is a flag, and a key of a plan
NAMES = re.compile(
    r"(?:^|_)(?:ones?(?!_)|whom?|whoever|what|which|whence|mine|theirs|ours|nobody|everybody|everyone"
    r"|(?:un)?told|hears?|heard|hearing|said|unsaid|says?|tells?|telling|speaks?|spoken|speaker|words"
    r"|(?<!at_)most|(?<!at_)least|so_many|why|scene|players?|acting|dialogues?|forgiv\w+|doubt[a-z]*"
    r"|accus[a-z]+|doomed|rotten|vouch[a-z]*|leftovers?|shelf|tidy|brings?|brought|aside|roomy"
    r"|rooms?(?!_mb)"
    r")(?![a-z])"
)
#: idioms of docstrings and comments
PROSE = re.compile(
    r"\b(?:ones|(?:the|this|that|an?|each|every|no|next|last|first|new|old|other|any) one"
    r"|one(?=[.,;:]| (?:that|is|was|has|of|may|can)\b)|who|whom|whoever|nobody|everybody|everyone"
    r"|told|tells?|telling|hears?|heard|said|says?|speaks?|so (?:many|long)|behind|beside|anew"
    r"|for want of|go(?:es|ing|ne)? on|went on|that is to say|put aside|doomed|rotten|vouch\w*"
    r"|leftovers?|forgiv\w+|accus\w+|scenes?|shelf|tidy|brings?|brought|the own|of use|mere"
    r"|all else|(?:begins?|is|are) so(?=[.,;:]| (?:when|where|for)\b))\b"
    r"|(?:^|[.;:] )(?:what|whatever|of (?:the|an?|all|too))\b",
    re.IGNORECASE | re.MULTILINE,
)
#: endings in which two files of the package may not differ
ENDINGS = re.compile(r"(?:s|e|ers?|ments?|ships?|ings?|ed|_files?|_lists?)$")
#: what defines a name, with the field that has it
STORE = ast.Store()
DEFINITIONS = {ast.arg: "arg", ast.Name: "id", ast.Attribute: "attr"} | dict.fromkeys(
    (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef), "name"
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: Pages with longer sentences; may only become fewer.
FOR_EXPERTS = {
    *("compatibility", "control-plane", "design", "elastic", "evaluation", "failures", "figures"),
    *("own-loop", "schemes", "security", "streaming", "testing"),
}


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


def test_worn_words_only_become_fewer():
    """Their number stands with the ceilings, which only fall."""
    places = list(worn_places())
    assert len(places) <= ceiling("worn_words"), "\n".join(places)


def prose(path: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of the docstrings and comments of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.lineno, str(node.value.value).replace("\n", " ")
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string.lstrip("#: ")


def worn_code() -> Iterator[tuple[str, str, str, str]]:
    """Yield kind, room, place and finding of each worn word of the code and of files' names."""
    stems: dict[str, Path] = {}
    for part in ("deadpool_megatron", "scripts", "tests"):
        kind = "package" if part == PACKAGE.name else part
        for file in sorted((ROOT / part).rglob("*.py")):
            tree, name = ast.parse(file.read_text()), file.relative_to(ROOT)
            room = name.parts[1] if kind == "package" else "/".join(name.parts[:-1][:2])
            twin = stems.setdefault(ENDINGS.sub("", file.stem), file) if kind == "package" else file
            if re.search("(?<!word)(?<!fram)ing$", file.stem) or twin.name != file.name:
                yield "file_names", room, str(name), twin.name
            for node in ast.walk(tree):
                attribute = DEFINITIONS.get(type(node))
                if attribute and isinstance(getattr(node, "ctx", STORE), ast.Store):
                    found = getattr(node, attribute) or ""
                    snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", found).lower()
                    if NAMES.search(snake) or (found == "slot" and room == "cluster"):
                        yield f"{kind}_names", room, f"{name}:{node.lineno}", found
            for number, text in prose(file, tree):
                for each in PROSE.finditer(text):
                    yield f"{kind}_prose", room, f"{name}:{number}", each[0]


def test_idioms_of_the_code_only_become_fewer():
    """Below a ceiling is good news: the ceiling in pyproject.toml is lowered to the count."""
    counts = Counter(kind for kind, *_ in worn_code())
    over = {kind: number for kind, number in counts.items() if number > ceiling(kind)}
    assert not over, "`python -m tests.test_wording ROOM` shows those of a room, to be renamed"


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


def test_sentences_are_short_where_people_begin():
    texts = [(path.name, path.read_text()) for path in PAGES if path.stem not in FOR_EXPERTS]
    most, long = ceiling("sentence_words"), list[str]()
    for place, text in [*texts, *help_texts()]:
        long += [f"{place}: {each}" for each in sentences(text) if len(each.split()) > most]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("text", ["It goes on.", "x; what is left is lost.", "Who asks is told."])
def test_the_check_finds_worn_words(text):
    assert WORN.search(text)


if __name__ == "__main__":
    by_kind = defaultdict[str, Counter[str]](Counter)
    for kind, room, place, text in worn_code():
        by_kind[kind][room] += 1
        if room in sys.argv:
            print(f"{place}: {text} ({kind})")
    for kind, rooms in by_kind.items():
        print(f"{kind} {rooms.total()} of {ceiling(kind)}: {dict(rooms.most_common())}")
