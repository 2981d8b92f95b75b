"""The tables of README.md and docs/ name only existing things.

Each word in code of a cell is judged by its shape: flags, files, tests, dotted names, rows of a
symbol and its file, and other names that a program could hold. A pattern (``<id>``, ``N``), plain
prose, and a column about an earlier version of this package are not judged.
"""

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from deadpool_megatron import __version__, settings
from deadpool_megatron.failures import ExitStatus

ROOT = Path(__file__).parents[1]
PACKAGE, TESTS = ROOT / "deadpool_megatron", ROOT / "tests"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = ("deadpool_megatron", "scripts", "tests", "patches", "configs", "tests")
SUFFIXES = {".py", ".sh", ".toml", ".txt", ".args", ".json", ".jsonl", ".md", ".lock"}
PATTERN = re.compile(r"[<…*]|\.\.\.|N{2,}|-N\b|\b[A-Z]+_?DIR\b")
Row = dict[str, str]


def tables(page: Path) -> Iterator[tuple[int, Row]]:
    """Yield line and cells, by the heading of their column, of each row."""
    heads: list[str] = []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if not line.startswith("|"):
            heads = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        heads = heads or [f"{cell}{at * ' '}" for at, cell in enumerate(cells)]
        if not set(line) <= set("|- "):
            yield number, dict(zip(heads, cells, strict=True))


@functools.cache
def sources() -> dict[Path, str]:
    files = [path for name in CODE for path in (ROOT / name).rglob("*")]
    shown = SUFFIXES | {".js", ".html", ".sbatch", ".yaml", ".patch", ""}
    return {path: path.read_text() for path in files if path.is_file() and path.suffix in shown}


@functools.cache
def vocabulary() -> set[str]:
    """All words of the code, with underscores; flags, and settings without their unit."""
    found = {
        word
        for path, text in sources().items()
        if path != Path(__file__)
        for word in re.findall(r"-{0,2}\w[\w-]*", text)
    }
    found |= {settings.flag_name(name) for name in settings.FIELDS}
    found |= {word.replace("-", "_") for word in found if word[0] != "-"}
    return found | {name.removesuffix("_seconds") for name in settings.FIELDS}


@functools.cache
def definitions(path: Path) -> set[str]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)}


def has_file(name: str) -> bool:
    """A path from a root; a bare name: of any file, or of one in the text of the package."""
    bare = "/" not in name.rstrip("/")
    return any((root / name).exists() for root in (TESTS, PACKAGE, ROOT)) or (
        bare and any(path.name == name or name in text for path, text in sources().items())
    )


def has_symbol(dotted: str) -> bool:
    """A module of ours, or a name in it."""
    path, _, name = dotted.replace(".", "/").rpartition("/")
    files = [ROOT / f"{path}.py", ROOT / path / "__init__.py"]
    return (ROOT / path / f"{name}.py").exists() or any(
        name in definitions(file) for file in files if file.exists()
    )


def is_written(name: str) -> bool:
    return name.replace("-", "_") in vocabulary()


def has_flag(word: str) -> bool:
    flag, _, value = word.partition(" ")
    named = value.partition("=")[0].replace("-", "_")
    if flag == settings.SET_FLAG and named not in settings.FIELDS:
        return f"{named}_seconds" in settings.FIELDS
    flag = flag.partition("=")[0]
    return flag in vocabulary() or ("-" in flag.strip("-") and is_written(flag.strip("-")))


def is_unknown(word: str) -> bool:
    """A word in code that names nothing."""
    if PATTERN.search(word):
        return False
    first = word.split()[0]
    if first.startswith("--") and first != "--":
        return not has_flag(word)
    if first == "deadpool":
        return any(part.startswith("--") and not has_flag(part) for part in word.split())
    if Path(first).suffix in SUFFIXES or re.fullmatch(r"(?:[\w.-]+/)+[\w.-]*", first):
        top = first.partition("/")[0]
        known = Path(first).suffix or any((root / top).exists() for root in (ROOT, TESTS, PACKAGE))
        return bool(known) and not has_file(first)
    name = first.partition("(")[0].partition("{")[0]
    if name.startswith("deadpool_megatron."):
        return not has_symbol(name)
    if name.startswith("test_"):
        return not any(f"def {name}(" in text for text in sources().values())
    if word == first and re.fullmatch(r"\w+", name) and (name != word or "_" in name):
        metric = re.sub(r"^deadpool_|(_timestamp_seconds|_total|_info)$", "", name)
        return not is_written(name) and not is_written(metric)
    return bool(re.fullmatch(r"[a-z]+(?:-[a-z]+)+", word)) and not is_written(word)


def earlier(heading: str) -> bool:
    """A column about an earlier version, or another program."""
    version = re.search(r"\b\d+\.\d+\b", heading)
    other = version is not None and not __version__.startswith(version[0])
    return other or "torchrun" in heading


def problems(page: Path) -> Iterator[str]:
    for number, row in tables(page):
        for heading, cell in row.items():
            for word in re.findall(r"`([^`]+)`", "" if earlier(heading) else cell):
                if is_unknown(word):
                    yield f"{page.name}:{number}: {word}"
        named = {heading.strip(): re.findall(r"`([^`]+)`", cell) for heading, cell in row.items()}
        for symbol in named["symbol"][:1] if {"symbol", "file"} <= named.keys() else ():
            places = [path for path in PACKAGE.rglob("*.py") if symbol in definitions(path)]
            file = PACKAGE / named["file"][0]
            if file not in places or (page.stem == "design" and len(places) > 1):
                yield f"{page.name}:{number}: {symbol} is not defined in {named['file'][0]} alone"
        for package in named.get("package", ()):
            if not any((PACKAGE / f"{package}{end}").exists() for end in ("", ".py")):
                yield f"{page.name}:{number}: there is no package {package}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_name_existing_things(page):
    assert list(problems(page)) == []


def test_pages_name_their_readers():
    begins = {page.stem: page.read_text().partition("\n## ")[0] for page in PAGES[1:]}
    without = {name for name, text in begins.items() if "ou need this page" not in text}
    assert without <= {"index"}


def test_first_hour_has_each_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    section = (ROOT / "docs" / "first-hour.md").read_text().partition("| extra |")[2]
    rows = re.findall(r"^\| (`[^|]+`) \|", section.partition("\n\n")[0], re.MULTILINE)
    found = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert found == project["optional-dependencies"].keys() - {"dev"}


def test_design_has_each_package():
    page = (ROOT / "docs" / "design.md").read_text()
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix in ("", ".py")}
    assert {name for name in names if name[0] != "_" and f"`{name}`" not in page} == set()


def test_files_page_has_each_variable_and_exit_status():
    page = (ROOT / "docs" / "files.md").read_text()
    package = "".join(text for path, text in sources().items() if PACKAGE in path.parents)
    scripts = "".join(path.read_text() for path in (ROOT / "scripts" / "slurm").iterdir())
    variables = set(re.findall(r"\bDEADPOOL_(?!RUN\b)[A-Z_]+\b", package + scripts))
    assert {name for name in variables if f"`{name}`" not in page} == set()
    section = page.partition("## Exit statuses")[2].partition("\n## ")[0]
    assert {status for status in ExitStatus if not re.search(rf"\b{status:d}\b", section)} == set()


@pytest.mark.parametrize(
    "word",
    [
        *("vault/test_gone.py", "--deadpool-gone", "--deadpool-set gone=1", "deadpool run --gone"),
        *("test_that_is_gone_from_here", "deadpool_megatron.vault.gone", "gone_for_good()"),
    ],
)
def test_the_check_finds_names_that_are_gone(word):
    assert is_unknown(word)
