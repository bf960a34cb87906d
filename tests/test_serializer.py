"""Values as plain ones and back: every rule, and errors that name the place."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest

import tilewise as tw
from tilewise.masks.tables import MASK_KINDS
from tilewise.serializer import read, write


class Colour(Enum):
    RED = 1
    BLUE = 2


class Point(NamedTuple):
    x: int
    y: float = 0.0


@dataclass(frozen=True)
class Inner:
    backward: bool = field(metadata={"entry": "pass", "words": ("forward", "backward")})
    sizes: tuple[float, ...] = ()


@dataclass(frozen=True)
class Outer:
    name: str
    colour: Colour
    save: Literal["replay", "gathered"]
    pair: tuple[int, str]
    points: tuple[Point, ...]
    by_name: dict[str, int]
    inner: Inner | None = None
    anything: Any = None
    made: object = field(default=None, compare=False)


WHOLE = Outer(
    "a", Colour.BLUE, "replay", (1, "b"), (Point(1, 2.5), Point(3)), {"c": 4}, Inner(True, (1.0,))
)
PLAIN = {
    "name": "a",
    "colour": "BLUE",
    "save": "replay",
    "pair": [1, "b"],
    "points": [[1, 2.5], [3, 0.0]],
    "by_name": {"c": 4},
    "inner": {"pass": "backward", "sizes": [1.0]},
    "anything": None,
}


def test_a_value_is_written_as_its_arguments_and_read_back():
    assert write(WHOLE) == PLAIN
    assert read(Outer, json.loads(json.dumps(PLAIN)), "whole") == WHOLE


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"points": [{"x": 1, "y": 2}]}, {"points": (Point(1, 2.0),)}),  # named, and a whole float
        ({"pair": [2.0, "b"]}, {"pair": (2, "b")}),
        ({"inner": None}, {"inner": None}),
        ({"anything": {"x": [1]}}, {"anything": {"x": [1]}}),
    ],
)
def test_other_ways_to_write_a_value_are_read(changes: dict, want: dict):
    found = read(Outer, PLAIN | changes, "whole")
    assert {name: getattr(found, name) for name in want} == want


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": 1}, "whole.name (1) must be text"),
        ({"colour": "GREEN"}, "whole.colour ('GREEN') must be one of RED, BLUE"),
        ({"save": ["replay"]}, "whole.save (['replay']) must be one of replay, gathered"),
        ({"pair": [1]}, "whole.pair ([1]) must be a list of 2"),
        ({"pair": [1, 2]}, "whole.pair[1] (2) must be text"),
        ({"points": [[1, 2.5], [True, 1]]}, "whole.points[1].x (True) must be a whole number"),
        ({"points": [[1, "2"]]}, "whole.points[0].y ('2') must be a finite number, not text"),
        ({"points": [[1, 10**400]]}, "must be a finite number"),
        ({"points": [[1.5, 0]]}, "whole.points[0].x (1.5) must be a whole number"),
        ({"points": [[float("nan"), 0]]}, "whole.points[0].x (nan) must be a whole number"),
        ({"points": [[1, float("inf")]]}, "whole.points[0].y (inf) must be a finite number"),
        ({"points": {"x": 1}}, "whole.points ({'x': 1}) must be a list"),
        ({"points": [{"y": 1}]}, "whole.points[0] lacks x"),
        ({"by_name": [1]}, "whole.by_name ([1]) must be an object"),
        ({"by_name": {"c": None}}, "whole.by_name.c (None) must be a whole number"),
        ({"inner": {"pass": "sideways"}}, "whole.inner.pass ('sideways') must be one of forward,"),
        ({"inner": {}}, "whole.inner lacks pass"),
        ({"inner": {"pas": 1}}, "whole.inner has no field 'pas'; did you mean pass?"),
        ({"colours": 1}, "whole has no field 'colours'; did you mean colour?"),
        ({"made": 1}, "whole has no field 'made'; its fields are name, "),
        ({"name": "n" * 99 + "'", "pair": 5}, "whole.pair (5) must be a list of 2"),
        ({"by_name": "n" * 99}, "n... must be an object".replace("...", "...)")),
    ],
)
def test_what_is_wrong_is_named_with_its_place_and_value(changes: dict, message: str):
    with pytest.raises(ValueError) as error:
        read(Outer, PLAIN | changes, "whole")
    assert message in str(error.value) and len(str(error.value)) < 160


MASKS = (
    tw.Full(),
    tw.Causal() & tw.Document([0, 3, 8]),
    tw.Window(2, None) | tw.Slices([((0, 4), (0, 4), "bicausal")]),
    tw.PerHead([tw.Causal(), tw.Window(1, 1)]),
    tw.masks.block_sparse(np.eye(3, dtype=bool), 4),
)


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_masks_are_read_back_by_their_kinds(mask: tw.Mask):
    data = json.loads(json.dumps(write(mask, MASK_KINDS)))
    assert data["kind"] == type(mask).__name__
    assert read(tw.Mask, data, "mask", MASK_KINDS) == mask  # pyright: ignore[reportAbstractUsage]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"kind": "Moon"}, r"mask.kind \('Moon'\) must be one of Full, Causal"),
        ({"left": 1}, "mask lacks kind, one of Full, Causal"),
        (
            {"kind": "Window", "left": -1, "right": 0},
            r"Window left \(-1\) must be at least",
        ),
        ({"kind": "And", "a": {"kind": "Full"}, "b": 5}, r"mask.b \(5\) must be an object"),
        (
            {"kind": "Document", "cu_seqlens": "x"},
            r"cu_seqlens \(.x.\) must be a list of whole",
        ),
    ],
)
def test_a_mask_that_is_none_is_refused(data: dict, message: str):
    with pytest.raises(ValueError, match=message):
        read(tw.Mask, data, "mask", MASK_KINDS)
