"""The order of tests that may not all have their turn."""

from tests.common.turns import in_turn

ITEMS = ["a1", "a2 full", "b1 full", "b2", "b3 full", "c1 full", "d1"]


def _order(by: str) -> list[str]:
    return in_turn(ITEMS, lambda item: "full" in item, lambda item: item[0], by)


def test_what_has_to_run_comes_first_and_each_room_stays_together():
    order = _order("a commit")
    assert order[:3] == ["a1", "b2", "d1"]
    assert sorted(order) == sorted(ITEMS)
    assert order.index("b3 full") == order.index("b1 full") + 1
    assert order == _order("a commit")


def test_whoever_is_last_in_one_commit_is_first_in_another():
    assert {_order(str(number))[3][0] for number in range(20)} == {"a", "b", "c"}
    assert in_turn(["a1"], lambda item: False, lambda item: item[0], "") == ["a1"]
