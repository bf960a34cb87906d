"""Colours are told apart by deutan, protan and tritan eyes, and what stands on them can be read."""

from itertools import product

import numpy as np
import pytest

import tilewise as tw
from tilewise_tools.mask_report.view import assigned
from tilewise_verify import palette
from tilewise_verify.palette import contrast, ink_on, rank_colours, rgb

Array = np.ndarray
LEAST = 10.0  # CIEDE2000; 2.3 is what is just seen
SIGHTS = {  # Machado, Oliveira, Fernandes 2009, severity 1, of linear red, green, blue
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deutan": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritan": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750),
       (0.0193339, 0.1191920, 0.9503041))  # fmt: skip
WHITE = (0.95047, 1.0, 1.08883)  # D65


def lab(colours: list[str], sight: str) -> Array:
    """CIE-Lab [colours, 3] as an eye sees them."""
    srgb = np.array([rgb(colour) for colour in colours])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(linear @ np.array(SIGHTS[sight]).T, 0, 1)
    t = seen @ np.array(XYZ).T / WHITE
    f = np.where(t > 216 / 24389, np.cbrt(t), (24389 / 27 * t + 16) / 116)
    return np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], -1)


def ciede2000(a: Array, b: Array) -> Array:
    """Distance of CIE-Lab colours [..., 3]; Sharma, Wu, Dalal 2005."""
    (l1, a1, b1), (l2, a2, b2) = np.moveaxis(a, -1, 0), np.moveaxis(b, -1, 0)
    mean = (np.hypot(a1, b1) + np.hypot(a2, b2)) / 2
    g = 0.5 * (1 - np.sqrt(mean**7 / (mean**7 + 25.0**7)))
    a1, a2 = a1 * (1 + g), a2 * (1 + g)
    c1, c2 = np.hypot(a1, b1), np.hypot(a2, b2)
    h1, h2 = (np.degrees(np.arctan2(y, x)) % 360 for y, x in ((b1, a1), (b2, a2)))
    turn = (h2 - h1 + 180) % 360 - 180
    turn = np.where(c1 * c2 == 0, 0, turn)
    dl, dc, dh = l2 - l1, c2 - c1, 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn) / 2)
    lightness, chroma = (l1 + l2) / 2, (c1 + c2) / 2
    far = np.abs(h1 - h2) > 180
    h = (h1 + h2) / 2 + np.where(far, np.where(h1 + h2 < 360, 180, -180), 0)
    h = np.where(c1 * c2 == 0, h1 + h2, h)
    cos = lambda times, shift: np.cos(np.radians(times * h + shift))  # noqa: E731
    t = 1 - 0.17 * cos(1, -30) + 0.24 * cos(2, 0) + 0.32 * cos(3, 6) - 0.2 * cos(4, -63)
    sl = 1 + 0.015 * (lightness - 50) ** 2 / np.sqrt(20 + (lightness - 50) ** 2)
    sc, sh = 1 + 0.045 * chroma, 1 + 0.015 * chroma * t
    spread = 30 * np.exp(-(((h - 275) / 25) ** 2))
    rt = -2 * np.sqrt(chroma**7 / (chroma**7 + 25.0**7)) * np.sin(np.radians(2 * spread))
    dl, dc, dh = dl / sl, dc / sc, dh / sh
    return np.sqrt(dl**2 + dc**2 + dh**2 + rt * dc * dh)


def nearest(colours: list[str]) -> dict[str, float]:
    """The least distance of any two, by eye."""
    found = {}
    for sight in SIGHTS:
        seen = lab(colours, sight)
        apart = ciede2000(seen[:, None], seen[None])
        found[sight] = float(apart[~np.eye(len(colours), dtype=bool)].min())
    return found


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, 2.5, 0), (73, 25, -18), 27.1492),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
        ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514), 0.9082),
    ],
)
def test_the_distance_is_that_of_its_papers_examples(a: tuple, b: tuple, wanted: float):
    assert ciede2000(np.array(a, float), np.array(b, float)) == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    "colours",
    [
        [light for light, _ in palette.SERIES],
        [dark for _, dark in palette.SERIES],
        [*palette.RANKS],
        [*palette.RAMP, *palette.FAULTS],
        [palette.NEUTRAL, *(light for light, _ in palette.SERIES[:5])],
        [palette.ATTENDED, palette.FORBIDDEN, palette.MISSED, palette.EMPTY],
    ],
    ids=["series", "series on dark", "ranks", "levels", "families", "pairs"],
)
def test_any_two_colours_of_a_picture_are_told_apart_by_every_eye(colours: list[str]):
    assert min(nearest(colours).values()) >= LEAST, nearest(colours)


@pytest.mark.parametrize("n", [17, 64, 256])
def test_ranks_beyond_the_colours_differ_from_their_neighbours(n: int):
    for sight in SIGHTS:
        seen = lab(rank_colours(n), sight)
        for step in (1, 2, 4, 8, 16):
            assert ciede2000(seen[step:], seen[:-step]).min() >= 8.5, (sight, step)


@pytest.mark.parametrize(
    "plan",
    [tw.ring(24), tw.mesh(36), tw.mesh(64, q_tile=4), tw.ulysses(4, inner=tw.mesh(16))],
    ids=str,
)
def test_cells_of_two_ranks_side_by_side_are_told_apart(plan: tw.Plan):
    n = plan.world_size
    for table in assigned(plan, min(2, plan.num_head_groups), range(n)):
        ranks, places = np.unique(table, return_inverse=True)  # a page colours those that there are
        places = places.reshape(table.shape)
        pairs = {
            (min(i, j), max(i, j))
            for a, b in ((places[1:], places[:-1]), (places[:, 1:], places[:, :-1]))
            for i, j in zip(a.ravel().tolist(), b.ravel().tolist(), strict=True)
            if i != j
        }
        left, right = np.array(sorted(pairs)).T
        for sight in SIGHTS:
            seen = lab(rank_colours(len(ranks)), sight)
            assert ciede2000(seen[left], seen[right]).min() >= LEAST, sight


def test_what_stands_on_a_colour_can_be_read():
    steps = ("00", "33", "66", "77", "99", "cc", "ff")
    every = ["#" + "".join(parts) for parts in product(steps, repeat=3)]
    for colour in (*every, *palette.RANKS, *palette.RAMP, *palette.FAULTS, palette.NEUTRAL):
        assert contrast(ink_on(colour), colour) >= 4.5, colour


def test_marks_and_words_of_pages_stand_out_from_their_ground():
    for scheme in (0, 1):
        grounds = [palette.GROUNDS[name][scheme] for name in ("ground", "card")]
        assert all(contrast(pair[scheme], grounds[1]) >= 3 for pair in palette.SERIES)
        for ground in grounds:
            for ink in ("ink", "quiet", "accent"):
                assert contrast(palette.GROUNDS[ink][scheme], ground) >= 4.5, (ink, ground)
