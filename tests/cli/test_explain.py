"""``deadpool explain``: each code, and the page that has the same table and quotes messages."""

import re
from pathlib import Path

import pytest

from deadpool_megatron import cli
from deadpool_megatron.failures import MEANINGS
from tests.common.pages import DOCS, site_reference

PAGE = (DOCS / "troubleshooting.md").read_text()


def test_the_table_of_the_page_is_the_output(carry_out):
    assert carry_out("explain") == (0, site_reference().codes(), "")
    shown = site_reference().on_page_markdown(PAGE)
    assert all(f"\n| `{code}` |" in shown for code in MEANINGS)


def test_symptoms_are_messages_of_the_program():
    package = Path(cli.__file__).parents[1]
    files = [*package.rglob("*.py"), *package.rglob("*.toml")]
    sources = re.sub(r'"\s*f?"', "", "".join(file.read_text() for file in files))
    symptoms = re.findall(r"^\| ([^|]+) \|", PAGE.partition("## Codes")[0], re.MULTILINE)
    quoted = [message for cell in symptoms for message in re.findall(r"`([^`]+)`", cell)]
    assert len(quoted) > 10
    for message in quoted:
        parts = re.split(r"\.\.\.|\b[NM]\b|RUN|\d of \d|, ", message)
        assert all(part.strip() in sources for part in parts), message


@pytest.mark.parametrize("code", MEANINGS)
def test_each_code_is_explained(code, carry_out):
    status, text, _ = carry_out("explain", code)
    assert (status, text.split(":")[0]) == (0, code)
    assert MEANINGS[code].noticed in text


def test_code_of_the_version_before_names_its_successor(carry_out):
    _, text, _ = carry_out("explain", "planned")
    assert carry_out("explain", "drained") == (0, f"since 0.7 drained is planned\n{text}", "")
