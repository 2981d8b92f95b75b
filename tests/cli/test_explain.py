"""``deadpool explain``: each code, and the page that is made of the same table."""

from pathlib import Path

import pytest

from deadpool_megatron.failures import MEANINGS

PAGE = Path(__file__).parents[2] / "docs" / "codes.md"


def test_the_page_of_codes_is_made_from_the_table(carry_out):
    assert carry_out("explain") == (0, PAGE.read_text(), ""), "deadpool explain > docs/codes.md"


@pytest.mark.parametrize("code", MEANINGS)
def test_each_code_is_explained(code, carry_out):
    status, text, _ = carry_out("explain", code)
    assert (status, text.split(":")[0]) == (0, code)
    assert MEANINGS[code].noticed in text


def test_code_of_the_version_before_names_its_successor(carry_out):
    _, text, _ = carry_out("explain", "planned")
    assert carry_out("explain", "drained") == (0, f"since 0.7 drained is planned\n{text}", "")
