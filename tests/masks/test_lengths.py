"""Sampled document lengths against the published histograms, and the bookkeeping around them."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewise import lengths


def test_histograms_are_the_published_ones():
    assert lengths.corpora() == ("pile", "prolong64k", "prolong512k")
    assert sum(b.num_documents for b in lengths.histogram("pile")) == 153_407_073
    for corpus in lengths.corpora():
        bins = lengths.histogram(corpus)
        assert bins[0].first_length == 0
        for before, after in pairwise(bins):
            assert after.first_length == before.last_length + 1


# A document drawn log-uniformly from a to b has (b - a) / ln(b / a) tokens on average.
@pytest.mark.parametrize(
    ("corpus", "share"), [("pile", 0.010), ("prolong64k", 0.121), ("prolong512k", 0.018)]
)
def test_the_last_bin_holds_its_share_of_the_tokens(corpus: str, share: float):
    bins = lengths.histogram(corpus)
    first = np.array([max(b.first_length, 1) for b in bins], float)
    last = np.array([b.last_length for b in bins], float)
    tokens = np.array([b.num_documents for b in bins]) * (last - first) / np.log(last / first)
    assert tokens[-1] / tokens.sum() == pytest.approx(share, abs=0.0006)


def test_lengths_are_log_uniform_within_their_bin():
    drawn = np.diff(lengths.sample("prolong64k", 200_000_000, seed=0))
    tried = 0
    for b in lengths.histogram("prolong64k"):
        inside = drawn[(drawn >= b.first_length) & (drawn <= b.last_length)]
        if len(inside) > 300 and b.first_length > 50:
            a, tried = b.first_length, tried + 1
            mean = (b.last_length - a) / np.log(b.last_length / a)
            error = inside.std() / len(inside) ** 0.5
            assert abs(inside.mean() - mean) < 5 * error + 1
    assert tried > 8
    last = lengths.histogram("prolong64k")[-1].first_length
    assert drawn[drawn >= last].sum() / drawn.sum() == pytest.approx(0.121, abs=0.02)


def test_the_benchmarks_own_draw_fills_sequences_with_its_last_bin():
    cu = lengths.sample("pile", 1 << 20, seed=0, draw="longca")
    assert cu[0] == 0 and cu[-1] == 1 << 20
    sizes = np.concatenate(
        [np.diff(lengths.sample("pile", 1 << 20, seed=s, draw="longca")) for s in range(20)]
    )
    assert sizes[sizes > 14208].sum() > 0.5 * sizes.sum()
    with pytest.raises(ValueError, match=r"draw \('theirs'\) must be 'tilewise' or 'longca'"):
        lengths.sample("pile", 100, seed=0, draw="theirs")


def test_bins_are_drawn_by_their_number_of_documents():
    drawn = np.diff(lengths.sample("prolong512k", 20_000_000, seed=1))
    bins = lengths.histogram("prolong512k")
    total = sum(b.num_documents for b in bins)
    for b in bins:
        share = b.num_documents / total
        inside = ((drawn >= b.first_length) & (drawn <= b.last_length)).mean()
        assert inside == pytest.approx(share, abs=5 * (share / len(drawn)) ** 0.5 + 1e-4)


@given(
    st.sampled_from(lengths.corpora()),
    st.integers(1, 100_000),
    st.integers(0, 2**32),
    st.none() | st.integers(1, 5000),
    st.sampled_from((0.0, 0.3, 0.6, 1.0)),
)
def test_samples_fill_the_sequence_within_the_cap(corpus, num_tokens, seed, cap, mix):
    cu = lengths.sample(corpus, num_tokens, seed=seed, cap=cap, mix=mix)
    sizes = np.diff(cu)
    assert cu[0] == 0 and cu[-1] == num_tokens and (sizes > 0).all()
    assert {type(x) for x in cu} == {int}
    assert cap is None or sizes.max() <= cap
    assert cu == lengths.sample(corpus, num_tokens, seed=seed, cap=cap, mix=mix)


def test_seeds_differ_and_the_mix_is_of_long_documents():
    assert lengths.sample("pile", 10_000, seed=0) != lengths.sample("pile", 10_000, seed=1)
    sizes = np.diff(lengths.sample("pile", 5_000_000, seed=0, mix=0.6))
    long = sizes[(sizes >= 8192) & (sizes <= 30_000)].sum()
    assert 0.58 < long / 5_000_000 < 0.75
    all_long = np.diff(lengths.sample("pile", 1_000_000, seed=0, mix=1.0))
    assert sorted(all_long)[1] >= 8192, "all but the one that is cut"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("books", 100), r"'books' is not known; take one of pile, prolong64k, prolong512k"),
        (("pile", 0), r"num_tokens \(0\)"),
        (("pile", 10, {"cap": 0}), r"cap \(0\)"),
        (("pile", 10, {"mix": 1.5}), r"mix \(1.5\)"),
    ],
)
def test_bad_arguments_are_refused_with_the_numbers(arguments, message):
    corpus, num_tokens, *rest = arguments
    with pytest.raises(ValueError, match=message):
        lengths.sample(corpus, num_tokens, seed=0, **(rest[0] if rest else {}))


def test_position_ids_start_again_with_every_document():
    assert lengths.position_ids([0, 3, 3, 4, 6]).tolist() == [0, 1, 2, 0, 0, 1]
    assert lengths.position_ids(torch.tensor([0, 2])).tolist() == [0, 1]


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_labels_are_the_next_token_of_the_same_document(kind):
    tokens = kind([[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25]])
    labels = lengths.shift_labels(tokens, [0, 3, 3, 4, 6])
    assert labels.tolist() == [[11, 12, -100, -100, 15, -100], [21, 22, -100, -100, 25, -100]]
    assert tokens[0].tolist() == [10, 11, 12, 13, 14, 15], "the tokens are not changed"
    assert lengths.shift_labels(tokens[0], [0, 0, 6], ignore_index=-1).tolist()[-2:] == [15, -1]


def test_labels_must_be_shifted_before_sharding():
    with pytest.raises(ValueError, match="tokens has 3 tokens, but cu_seqlens ends at 6"):
        lengths.shift_labels(np.arange(3), [0, 6])


def test_a_corpus_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "bad.csv").write_bytes(b"\xff\xfe\x00length")
    with pytest.raises(ValueError, match=r"bad.csv cannot be read: no UTF-8"):
        lengths.histogram(str(tmp_path / "bad.csv"))
    with pytest.raises(ValueError, match=r"none.csv cannot be read: No such file"):
        lengths.histogram(str(tmp_path / "none.csv"))
