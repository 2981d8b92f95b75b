"""What is written of a dataclass is read back; anything else is refused."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import pytest

from deadpool_megatron.wire.forms import Coded, Listed


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, order=True)
class Point(Listed):
    x: int
    y: int


@dataclass(frozen=True)
class Figure(Coded):
    name: str
    points: tuple[Point, ...]
    colours: Mapping[int, frozenset[Colour]] = field(default_factory=dict)
    lengths: Mapping[Point, float] = field(default_factory=dict)
    middle: Point | None = None
    more: Any = None


FIGURE = Figure(
    "f", (Point(1, 2),), {3: frozenset({Colour.RED})}, {Point(0, 1): 2.5}, Point(4, 5), [1, {}]
)


def test_a_figure_comes_back() -> None:
    written = FIGURE.to_dict()
    assert written == {
        "name": "f",
        "points": [[1, 2]],
        "colours": {"3": ["red"]},
        "lengths": [[[0, 1], 2.5]],
        "middle": [4, 5],
        "more": [1, {}],
    }
    assert Figure.from_dict(json.loads(json.dumps(written))) == FIGURE
    assert Figure.from_dict({"name": "f", "points": []}) == Figure("f", ())


@pytest.mark.parametrize(
    "change",
    [
        {"points": [[1]]},
        {"points": [[1, "x"]]},
        {"points": None},
        {"colours": {"3": ["blue"]}},
        {"colours": []},
        {"middle": 7},
    ],
)
def test_what_is_none_is_refused(change: Mapping[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        Figure.from_dict({**FIGURE.to_dict(), **change})
    with pytest.raises(KeyError):
        Figure.from_dict({"name": "f"})
