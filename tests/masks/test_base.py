"""Masks as values: equality, reprs, composition and what they refuse."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.drawn_masks import NUM_TOKENS, masks

from tilewise.masks.base import Causal, Document, Full, Mask, Window
from tilewise.masks.tables import KINDS, Blocks, PerHead, Slices

ROWS = np.arange(NUM_TOKENS)


def square(mask: Mask, num_tokens: int) -> np.ndarray:
    return mask.dense(range(num_tokens), range(num_tokens))


def grid(rows: str) -> np.ndarray:
    """A bool table from a drawing."""
    return np.array([[c == "#" for c in row] for row in rows.split()])


@pytest.mark.parametrize(
    ("mask", "drawing"),
    [
        (Causal(), "#... ##.. ###. ####"),
        (Window(1, 0), "#... ##.. .##. ..##"),
        (Window(0, None), "#### .### ..## ...#"),
        (Document([0, 1, 1, 3]), "#... .##. .##. ...."),
        (Causal() & Document([0, 2, 4]), "#... ##.. ..#. ..##"),
        (Causal() | Window(0, 1), "##.. ###. #### ####"),
        (Slices([((0, 3), (0, 4), "causal")]), "##.. ###. #### ...."),
        (Slices([((0, 3), (0, 4), "invcausal")]), "#### .### ..## ...."),
        (Slices([((0, 3), (0, 4), "bicausal")]), "##.. .##. ..## ...."),
        (Slices([((0, 4), (1, 3), "causal")]), ".... .... .#.. .##."),
        (Blocks([[True, False], [False, True]], [0, 1, 4], [0, 3, 4]), "###. ...# ...# ...#"),
    ],
)
def test_dense_is_the_drawing(mask: Mask, drawing: str):
    assert (square(mask, 4) == grid(drawing)).all()


@given(masks(), masks())
def test_and_or_are_the_logical_ones(a: Mask, b: Mask):
    left, right = a.dense(ROWS, ROWS), b.dense(ROWS, ROWS)
    span = (0, NUM_TOKENS)
    assert (a & b).area(span, span) == (left & right).sum()
    assert (a | b).area(span, span) == (left | right).sum()


@given(masks())
def test_pickled_masks_are_equal_and_reprs_are_the_same(mask: Mask):
    assert len(mask.strips()) >= 0 and hash(mask) == hash(mask)  # fills its caches
    again = pickle.loads(pickle.dumps(mask))
    assert again == mask and hash(again) == hash(mask) and repr(again) == repr(mask)
    assert not {"_hash", "_normal"} & set(mask.__getstate__()), "caches must stay at home"


@given(masks(), masks())
def test_reprs_differ_if_masks_do(a: Mask, b: Mask):
    assert (repr(a) == repr(b)) == (a == b)


def test_long_documents_have_short_reprs_that_tell_them_apart():
    lengths = np.arange(5000)
    a, b = Document(lengths), Document(np.append(lengths[:-2], [4997, 4999]))
    assert a != b and repr(a) != repr(b)
    assert repr(a).startswith("Document(4999 documents, 4999 tokens, ") and len(repr(a)) < 80
    table = np.eye(50, dtype=bool)
    assert len(repr(Blocks(table, range(51), range(51)))) < 80
    many = Slices([((i, i + 1), (0, 9), "full") for i in range(50)])
    assert len(repr(many)) < 80 and many != Slices(many.slices[:-1])


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda x: np.array(x, "i4")])
def test_cu_seqlens_of_any_kind_make_the_same_document_mask(kind):
    mask = Document(kind([0, 3, 3, 7]))
    assert mask == Document([0, 3, 3, 7]) and mask.cu_seqlens == (0, 3, 3, 7)
    assert {type(x) for x in mask.cu_seqlens} == {int}
    assert mask.dense(torch.arange(7), torch.arange(7)).sum() == 9 + 16


def test_masks_are_frozen():
    with pytest.raises(AttributeError):
        Window(1, 2).left = 3  # type: ignore[misc]
    assert len({Full(), Full(), Causal(), Window(1, 2), Window(1, 2), Window(1, None)}) == 4
    with pytest.raises(TypeError):
        Causal() & 3  # type: ignore[operator]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Window(-1, 0), r"Window left \(-1\) must be at least 0"),
        (lambda: Window(None, -2), r"Window right \(-2\) must be at least 0"),
        (lambda: Document([1, 4]), "starts at 1, but must start at 0"),
        (lambda: Document([]), "starts at nothing"),
        (lambda: Document([0, 5, 3]), "descends from 5 to 3 at index 2"),
        (lambda: Slices([((0, 3), (4, 2), "full")]), r"slice 0: k_range \(4, 2\)"),
        (lambda: Slices([((-1, 3), (0, 2), "full")]), r"slice 0: q_range \(-1, 3\)"),
        (
            lambda: Slices([((0, 3), (0, 2), "diagonal")]),
            "'diagonal' is not known",
        ),
        (
            lambda: Slices([((0, 9), (0, 3), "full"), ((4, 5), (2, 9), "full")]),
            r"\(0, 3\), 'full'\) and \(\(4, 5\), \(2, 9\), 'full'\) both allow query 4, key 2",
        ),
        (lambda: Blocks([[True]], [0, 2, 4], [0, 4]), r"block_mask is \(1, 1\), .* make \(2, 1\)"),
        (lambda: Blocks([[True]], [0, 4], [1, 4]), r"k_edges must ascend from 0, not \(1, 4\)"),
        (lambda: PerHead([]), "PerHead has 0 masks"),
        (lambda: PerHead([Full()]) & PerHead([Full(), Full()]), "of 1 and 2 heads"),
        (lambda: PerHead([PerHead([Full()])]), "head 0 of PerHead"),
    ],
)
def test_bad_values_are_refused_with_the_numbers(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (Document([0, 4, 9]), "cu_seqlens ends at 9, but there are 10 queries"),
        (Causal() & Document([0, 12]), "cu_seqlens ends at 12"),
        (Slices([((0, 11), (0, 3), "full")]), "q_range ends at 11, past the 10 tokens"),
        (Slices([((0, 3), (0, 11), "full")]), "k_range ends at 11, past the 10 tokens"),
        (
            Blocks([[True]], [0, 8], [0, 10], overhang=2),
            "blocks end at 8, but there are 10 queries",
        ),
        (Blocks([[True]], [0, 10], [0, 13], overhang=2), "at most 2 tokens past it"),
        (PerHead([Full(), Document([0, 9])]), "ends at 9"),
    ],
)
def test_masks_that_do_not_fit_the_sequence_are_refused_at_use(mask, message):
    with pytest.raises(ValueError, match=message):
        mask.check_tokens(10)


def test_masks_that_fit_pass():
    for mask in (Full(), Window(99, 0), Document([0, 10, 10]), Slices([((3, 10), (0, 2), "full")])):
        (mask | Causal()).check_tokens(10)
    Blocks([[True]], [0, 12], [0, 10], overhang=2).check_tokens(10)
    Slices([((0, 3), (0, 9), "full")]).check_tokens(3, 9)
    with pytest.raises(ValueError, match="there are 7 keys"):
        Document([0, 10]).check_tokens(10, 7)


ranges = st.tuples(st.integers(0, 9), st.integers(0, 5)).map(lambda r: (r[0], r[0] + r[1]))
entries = st.tuples(ranges, ranges, st.sampled_from(KINDS))


@given(st.lists(entries, max_size=4))
def test_slices_overlap_if_and_only_if_a_pair_is_allowed_twice(slices):
    tables = [square(Slices([entry]), 15).astype(int) for entry in slices]
    twice = sum(tables, np.zeros((15, 15), int)) > 1
    if not twice.any():
        mask = Slices(slices)
        assert (square(mask, 15) == sum(tables, np.zeros((15, 15), int))).all()
        return
    with pytest.raises(ValueError, match=r"both allow query \d+, key \d+") as error:
        Slices(slices)
    words = str(error.value).split("both allow query ")[1].split(";")[0]
    q, k = (int(x) for x in words.split(", key "))
    assert twice[q, k]


@given(st.lists(masks(), min_size=1, max_size=3), masks(), st.booleans())
def test_per_head_masks_act_head_by_head(heads: list[Mask], plain: Mask, first: bool):
    by_head = PerHead(heads)
    span, edges = (0, NUM_TOKENS), [0, 4, 9, NUM_TOKENS]
    for operation in (np.logical_and, np.logical_or):
        symbol = Mask.__and__ if operation is np.logical_and else Mask.__or__
        mask = symbol(plain, by_head) if first else symbol(by_head, plain)
        dense = mask.dense(ROWS, ROWS)
        expected = operation(
            np.stack([h.dense(ROWS, ROWS) for h in heads]), plain.dense(ROWS, ROWS)
        )
        assert isinstance(mask, PerHead) and (dense == expected).all()
        assert mask.area(span, span) == pytest.approx(dense.sum() / len(heads), rel=1e-15)
        any_head = np.zeros_like(dense[0])
        for q, k in itertools.product(range(NUM_TOKENS), repeat=2):
            any_head[q, k] = grid_area(mask, q, k)
        assert (any_head == dense.any(0)).all()
        coverage = mask.coverage(edges, edges)
        for i, j in itertools.product(range(3), repeat=2):
            cell = dense[:, edges[i] : edges[i + 1], edges[j] : edges[j + 1]]
            assert coverage[i, j] == (0 if not cell.any() else 2 if cell.all() else 1)


def grid_area(mask: Mask, q: int, k: int) -> bool:
    """Is the pair in some strip of what any head needs?"""
    s = mask.strips()
    inside = (s.q0 <= q) & (q < s.q1) & (s.lo + s.lo_slope * q <= k) & (k < s.hi + s.hi_slope * q)
    return bool(inside.sum() == 1)


def test_per_head_area_is_a_whole_number_where_it_can_be():
    assert PerHead([Full(), Causal()]).area((0, 3), (0, 3)) == 7.5
    whole = PerHead([Full(), Document([0, 1, 2, 3])]).area((0, 3), (0, 3))
    assert whole == 6 and isinstance(whole, int)
    assert PerHead([Full(), Causal()]).areas([0, 3], [0, 1, 3]).tolist() == [[3, 4.5]]


@pytest.mark.parametrize("table", [[["0", "1"]], [[0.5, 1.0]], [[float("nan"), 1.0]], [[2, 1]]])
def test_a_block_mask_of_anything_but_bools_is_refused(table: list):
    with pytest.raises(ValueError, match=r"block_mask \(.*\) must hold True and False"):
        Blocks(table, [0, 4], [0, 4, 8])


@pytest.mark.parametrize(
    "use",
    [
        lambda a, b: a and b,
        lambda a, b: a or b,
        lambda a, b: not a,
        lambda a, b: a if b else None,
        lambda a, b: any([a, b]),
    ],
)
def test_masks_are_neither_true_nor_false(use):
    for mask in (Causal(), Document([0, 4]), PerHead([Full()])):
        with pytest.raises(TypeError, match=r"write a & b and a \| b"):
            use(mask, Full())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Window("1", 0), r"Window left \('1'\) must be a whole number"),
        (lambda: Window(0, 1.5), r"Window right \(1.5\) must be a whole number"),
        (
            lambda: Document([0, 3.5, 8]),
            r"cu_seqlens \(\[0, 3.5, 8\]\) must be a list of whole numbers",
        ),
        (lambda: Document(8), r"cu_seqlens \(8\) must be a list of whole numbers"),
        (lambda: Slices([((0, 8), (0, 8))]), r"slice 0 \(\(\(0, 8\), \(0, 8\)\)\) must be"),
        (lambda: Slices([3]), r"slice 0 \(3\) must be \(q_range, k_range, kind\)"),
        (lambda: Slices([((0, 8, 9), (0, 8), "full")]), r"slice 0: q_range \(0, 8, 9\) must be"),
        (lambda: Slices([((0, 8), (0, "8"), "full")]), r"slice 0: k_range .* whole numbers"),
        (
            lambda: Blocks([[True]], [0, 4.5], [0, 4]),
            r"q_edges \(\[0, 4.5\]\) must be a list of whole",
        ),
    ],
)
def test_numbers_of_a_mask_that_are_none_are_named(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()
