"""Lines that scripts/code_lines.py counts."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import code_lines

PYTHON = '''#!/usr/bin/env python
"""One docstring

of three lines."""

# a comment
TEXT = """a value

with a blank line in it"""


def one() -> str:
    """A docstring."""

    "a statement, no docstring"
    return (  # with a comment behind it
        TEXT
    )
'''


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("deadpool_megatron/a.py", PYTHON, 7),
        ("deadpool_megatron/events.schema.json", "{}\n", 0),
        ("deadpool_megatron/a.toml", "# a comment\n\na = 1\n", 1),
        ("deadpool_megatron/a.js", "// a\n/* b\nc */\nlet a;\n\nlet b; // d\n", 2),
        ("deadpool_megatron/a.html", "<!-- a -->\n<p>\n<!-- b\nc -->\n</p>\n", 2),
        ("scripts/a.py", "a = 1\n", 1),
        ("scripts/a.sh", "#!/bin/sh\n# a\n\nls\n", 1),
        ("scripts/a.json", "{}\n", 0),
        ("tests/a.py", PYTHON, 7),
        ("tests/calls/a.txt", "== what is shown\nimport os; x = 1\nx\n    1\n", 2),
        ("docs/a.md", "a\n\nb\n", 3),
    ],
)
def test_lines_of_code_are_counted(tmp_path, name, text, lines):
    file = tmp_path / name
    file.parent.mkdir(parents=True)
    file.write_text(text)
    found = [file for part in code_lines.by_file(tmp_path).values() for file in part.items()]
    assert found == ([(name, lines)] if lines else [])
