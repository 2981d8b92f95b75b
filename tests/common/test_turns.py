"""The order of tests of which some may be left out."""

from tests.common.turns import in_turn

ITEMS = ["a1", "a2 full", "b1 full", "b2", "b3 full", "c1 full", "d1"]


def _order(by: str) -> list[str]:
    return in_turn(ITEMS, lambda item: "full" in item, lambda item: item[0], by)


def test_turns_run_required_tests_first_and_keep_files_together():
    order = _order("a commit")
    assert order[:3] == ["a1", "b2", "d1"]
    assert sorted(order) == sorted(ITEMS)
    assert order.index("b3 full") == order.index("b1 full") + 1
    assert order == _order("a commit")


def test_turns_begin_with_another_file_at_each_commit():
    assert {_order(str(number))[3][0] for number in range(20)} == {"a", "b", "c"}
    assert in_turn(["a1"], lambda item: False, lambda item: item[0], "") == ["a1"]
