"""A split model runs on rows that are trees, as TRL packs them."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")
pytest.importorskip("trl", reason="needs trl")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

from support import hybrid_models
from support.hf_models import VOCABULARY, build
from torch import Tensor

import tilewise as tw
from tilewise.integrations.transformers.forward import split_forward

SIZES = ("tree_max_seqlen_q", "tree_max_seqlen_k")


def samples(seed: int = 3) -> list[Tensor]:
    """Two prompts, some samples of which share a second turn."""
    make = torch.Generator().manual_seed(seed)

    def words(count: int) -> Tensor:
        return torch.randint(3, VOCABULARY, (count,), generator=make)

    made = []
    for shared, turn in ((words(9), words(6)), (words(1), words(3))):
        made += [torch.cat([shared, words(n)]) for n in (5, 11)]
        made += [torch.cat([shared, turn, words(n)]) for n in (2, 8, 7)]
    return made


def tree_row(sequences: list[Tensor]) -> dict[str, Any]:
    """The call of TRL's async GRPO, and token_index: which position predicts each token."""
    from trl.experimental.async_grpo.packing import TreeRow

    row = TreeRow()
    for ids in sequences:
        trained = torch.ones(len(ids), dtype=torch.long)
        row.add(
            {
                "input_ids": ids,
                "completion_mask": trained,
                "old_log_probs": torch.zeros(len(ids)),
                "advantage": 1.0,
                "group_id": 0,
            }
        )
    packed = row.pack()
    names = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
    call = {name: packed[name] for name in names}
    call |= {name: packed[name][None] for name in ("input_ids", "position_ids", "shift_labels")}
    call |= dict(zip(SIZES, packed["tree_max_seqlens"].tolist(), strict=True))
    return call | {"token_index": packed["token_index"]}


def weighed(log_probs: Tensor) -> Tensor:
    """A loss that weighs every trained token of every sample differently."""
    return (log_probs * torch.arange(1, len(log_probs) + 1) / len(log_probs)).sum()


def log_probs_apart(model: Any, sequences: list[Tensor]) -> Tensor:
    found = []
    for ids in sequences:
        logits = model(input_ids=ids[None]).logits[0, :-1]
        found.append(logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "mistral"])
def test_log_probs_and_gradients_are_those_of_the_samples_apart(name: str, world_size: int):
    model, sequences = build(name), samples()
    want = log_probs_apart(model, sequences)
    weighed(want).backward()
    targets = torch.cat([ids[1:] for ids in sequences])

    def run(rank: int, group: tw.Group) -> tuple[Tensor, dict[str, Tensor]]:
        split = build(name)
        split_forward(split, group)
        call = tree_row(sequences)
        index = call.pop("token_index")
        logits = split(**call).logits[0, index]
        got = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        weighed(got).backward()
        return got.detach(), {k: x.grad for k, x in split.named_parameters() if x.grad is not None}

    ranks = tw.loopback(world_size, run)
    wanted = {k: x.grad for k, x in model.named_parameters() if x.grad is not None}
    for got, _ in ranks:
        torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=1e-5)
    for key, gradient in wanted.items():  # DDP takes the mean of the ranks' gradients
        mean = torch.stack([gradients[key] for _, gradients in ranks]).mean(0)
        torch.testing.assert_close(mean, gradient, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tree_kv_index": None}, "needs tree_kv_index too"),
        ({"position_ids": None}, "needs position_ids too"),
        ({"labels": True}, "cannot be shifted"),
        ({"rows": 2}, r"2 rows of \d+ tokens, but the tree is one row of"),
        ({"position_ids": 1}, "are not their places in the tree's sequences"),
    ],
    ids=str,
)
def test_rows_that_are_no_such_tree_are_refused_on_every_rank(change: dict, text: str):
    call = tree_row(samples())
    del call["token_index"]
    if change.get("labels"):
        call["labels"] = call["input_ids"]
    elif change.get("rows"):
        for key in ("input_ids", "position_ids", "shift_labels"):
            call[key] = call[key].repeat(2, 1)
    else:
        ((key, value),) = change.items()
        call[key] = None if value is None else call[key] + value

    def run(rank: int, group: tw.Group) -> None:
        model = build("llama")
        split_forward(model, group)
        with pytest.raises(ValueError, match=text):
            model(**copy.copy(call))

    tw.loopback(2, run)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: hybrid_models.build("Qwen3Next"), "sees other tokens by more than a mask"),
        (lambda: build("llama4"), "which takes the place of Causal"),
    ],
    ids=["a state", "chunks"],
)
def test_layers_that_no_tree_can_reach_are_refused(make: Any, text: str):
    call = tree_row(samples())
    del call["token_index"]

    def run(rank: int, group: tw.Group) -> None:
        model = make()
        split_forward(model, group)
        with pytest.raises(ValueError, match=text):
            model(**call)

    tw.loopback(2, run)
