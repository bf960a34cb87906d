"""Data for a split sequence: every rank's share is the whole batch's, and nothing else is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewise as tw
from tilewise.integrations.data import (
    IGNORED,
    ShardingCollator,
    TokenDataset,
    pack,
    shard_inputs,
)

N = 4
CU_SEQLENS = (0, 5, 16, 22)
LAYOUTS = (tw.contiguous(22, N), tw.zigzag(22, N), tw.striped(22, N))


def together(layout: tw.Layout, shares: list[dict[str, torch.Tensor]], name: str) -> torch.Tensor:
    """The whole tensor, without the row of padding of a rank that has no tokens."""
    rows = [share[name][:, : layout.size(rank)] for rank, share in enumerate(shares)]
    return layout.unshard(rows, 1)


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_shares_make_up_the_whole_batch(layout: tw.Layout):
    ids = torch.arange(44).view(2, 22)
    labels = ids.clone()
    labels[1, 7] = IGNORED
    shares = [
        shard_inputs(layout, rank, ids, labels=labels, cu_seqlens=CU_SEQLENS) for rank in range(N)
    ]
    assert torch.equal(together(layout, shares, "input_ids"), ids)
    wanted = torch.full_like(ids, IGNORED)
    for start, stop in ((0, 5), (5, 16), (16, 22)):
        wanted[:, start : stop - 1] = labels[:, start + 1 : stop]
    assert torch.equal(together(layout, shares, "shift_labels"), wanted)
    positions = torch.cat([torch.arange(n) for n in (5, 11, 6)])[None]
    assert torch.equal(together(layout, shares, "position_ids"), positions)
    for share in shares:
        assert torch.equal(share["labels"], share["shift_labels"])
        assert share["num_items_in_batch"] == 2 * (22 - 3) - 1
        assert share["cu_seq_lens_q"].tolist() == share["cu_seq_lens_k"].tolist() == [0, 5, 16, 22]
        assert share["max_length_q"] == share["max_length_k"] == 11


def test_without_labels_there_are_none():
    share = shard_inputs(LAYOUTS[0], 1, torch.arange(22)[None])
    assert not {"labels", "shift_labels", "num_items_in_batch"} & share.keys()
    assert share["position_ids"].tolist() == [[6, 7, 8, 9, 10, 11]]
    assert share["cu_seq_lens_q"].tolist() == [0, 22]


def test_a_rank_without_tokens_gets_one_that_no_loss_counts():
    ids = torch.tensor([[7, 8]])
    layout = tw.zigzag(2, N)
    shares = [shard_inputs(layout, rank, ids, labels=ids) for rank in range(N)]
    assert [share["input_ids"].shape[1] for share in shares] == [1] * N
    assert [share["labels"].tolist() for share in shares[2:]] == [[[IGNORED]]] * 2
    assert sum(int((share["labels"] != IGNORED).sum()) for share in shares) == 1


def test_the_collator_packs_rows_of_different_lengths():
    layout = tw.zigzag(22, N)
    examples = [
        {"input_ids": [1, 2, 3, 4, 5]},
        {"input_ids": list(range(10, 21)), "labels": [IGNORED] * 4 + list(range(14, 21))},
    ]
    shares = [ShardingCollator(layout, rank, pad_token_id=9)(examples) for rank in range(N)]
    whole = together(layout, shares, "input_ids")[0].tolist()
    assert whole == [1, 2, 3, 4, 5, *range(10, 21), *[9] * 6]
    labels = together(layout, shares, "labels")[0].tolist()
    ignored = [IGNORED]
    assert labels == [2, 3, 4, 5, *ignored * 4, *range(14, 21), *ignored * 7]
    assert shares[0]["cu_seq_lens_q"].tolist() == [0, 5, 16, 22]
    assert shares[0]["num_items_in_batch"] == 4 + 7


def test_a_full_row_needs_no_padding():
    share = ShardingCollator(tw.zigzag(5, 1), 0)([{"input_ids": torch.arange(5)}])
    assert share["cu_seq_lens_q"].tolist() == [0, 5]


def test_too_many_examples_are_refused():
    with pytest.raises(ValueError, match=r"the 2 examples have 24 tokens, but.* pack\(lengths, 22"):
        ShardingCollator(LAYOUTS[0], 0)([{"input_ids": [1] * 12}] * 2)


@given(st.lists(st.integers(0, 40), max_size=60))
def test_packing_loses_nothing_and_leaves_little(document_lengths: list[int]):
    groups = pack(document_lengths, 40)
    assert sorted(i for group in groups for i in group) == list(range(len(document_lengths)))
    totals = [sum(document_lengths[i] for i in group) for group in groups]
    assert all(total <= 40 for total in totals)
    # No two sequences would have fitted into one: at most one is half empty.
    assert sum(total <= 20 for total in totals) <= 1


def test_a_document_longer_than_a_sequence_is_refused():
    with pytest.raises(ValueError, match=r"document 1 has 41 tokens, more than num_tokens \(40\)"):
        pack([3, 41], 40)


class Recorder:
    """A stream of tokens that notes which ones were read."""

    def __init__(self, tokens: np.ndarray):
        self.tokens, self.read = tokens, set[int]()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: slice) -> np.ndarray:
        self.read |= set(range(*index.indices(len(self))))
        return self.tokens[index]


STREAM = np.arange(100, 100 + 22 * 3 + 5, dtype=np.uint16)
ENDS = (0, 3, 22, 30, 61, 70, len(STREAM))


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_a_dataset_gives_what_sharding_the_whole_gives(layout: tw.Layout):
    for index, boundaries in enumerate([(0, 3, 22), (0, 8, 22), (0, 17, 22)]):
        ids = torch.from_numpy(STREAM[index * 22 : index * 22 + 22].astype(np.int64))[None]
        for rank in range(N):
            dataset = TokenDataset(STREAM, layout, rank, ENDS)
            want = shard_inputs(layout, rank, ids, labels=ids, cu_seqlens=boundaries)
            got = dataset[index]
            assert len(dataset) == 3 and got.keys() == want.keys()
            for name in want:
                assert torch.equal(got[name], want[name]), name
                assert got[name].dtype == want[name].dtype, name


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=repr)
def test_a_rank_reads_its_own_tokens_and_the_next_ones_for_labels(layout: tw.Layout):
    for rank in range(N):
        stream = Recorder(STREAM)
        _ = TokenDataset(stream, layout, rank)[1]
        rows = set((layout.rows(rank) + 22).tolist())
        assert stream.read == rows | {row + 1 for row in rows if row + 1 < 44}


def test_a_dataset_reads_a_file_through_a_memory_map(tmp_path: Path):
    STREAM.tofile(tmp_path / "tokens.bin")
    tokens = np.memmap(tmp_path / "tokens.bin", np.uint16, "r")
    dataset = TokenDataset(tokens, tw.zigzag(22, N), 2)
    loader = torch.utils.data.DataLoader(dataset, batch_size=None)
    rows = tw.zigzag(22, N).rows(2)
    got = [batch["input_ids"][0].tolist() for batch in loader]
    assert got == [STREAM[rows + 22 * i].tolist() for i in range(3)]


def test_a_dataset_of_fewer_tokens_than_ranks():
    ids = torch.tensor([[100, 101]])
    for rank in range(N):
        got = TokenDataset(STREAM[:2], tw.zigzag(2, N), rank)[0]
        want = shard_inputs(tw.zigzag(2, N), rank, ids, labels=ids)
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="cu_seqlens ends at 9, but there are 71 tokens"):
        TokenDataset(STREAM, LAYOUTS[0], 0, (0, 9))
    with pytest.raises(IndexError, match=r"item \(3\) must be in 0..2"):
        TokenDataset(STREAM, LAYOUTS[0], 0)[3]
    with pytest.raises(ValueError, match=r"input_ids \(22,\): pass \[batch, num_tokens\]"):
        shard_inputs(LAYOUTS[0], 0, torch.arange(22))
    with pytest.raises(ValueError, match="x has 21 tokens"):
        shard_inputs(LAYOUTS[0], 0, torch.zeros(1, 21, dtype=torch.int64))


@pytest.mark.parametrize("rank", range(3))
def test_what_a_model_reads_is_where_the_input_ids_are(rank: int):
    """Boundaries and counts of documents are the host's."""
    ids = torch.zeros(1, 12, dtype=torch.int64, device="meta")
    inputs = shard_inputs(tw.zigzag(12, 3), rank, ids, labels=ids, cu_seqlens=(0, 5, 12))
    on_host = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    assert {name for name, x in inputs.items() if x.device.type == "cpu"} == on_host
