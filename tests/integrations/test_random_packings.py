"""Batches of documents of random lengths, packed or padded: split, they are the documents alone."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")

from support.hf_models import VOCABULARY, build
from torch import Tensor

import tilewise as tw
from tilewise.integrations.transformers.forward import split_forward


def documents(draw: Random) -> tuple[list[Tensor], list[Tensor]]:
    """Documents of random lengths, many of them of one token, and labels that partly count."""
    make = torch.Generator().manual_seed(draw.randrange(1 << 30))
    lengths = [draw.choice((1, 2, draw.randint(3, 30))) for _ in range(draw.randint(1, 7))]
    ids = [torch.randint(3, VOCABULARY, (n,), generator=make) for n in [*lengths, 4]]
    labels = [x.clone() for x in ids]
    for row in labels[:-1]:
        row[: draw.choice((1, len(row) // 2 + 1))] = -100
    labels[-1][0] = -100
    return ids, labels


def batch(ids: list[Tensor], labels: list[Tensor], kind: str) -> dict[str, Tensor]:
    if kind == "packed":
        positions = torch.cat([torch.arange(len(x)) for x in ids])
        columns = {"input_ids": torch.cat(ids), "labels": torch.cat(labels)}
        return {name: x[None] for name, x in (columns | {"position_ids": positions}).items()}
    longest = max(map(len, ids))

    def padded(x: Tensor, fill: int) -> Tensor:
        spare = longest - len(x)
        return F.pad(x, (0, spare) if kind == "right" else (spare, 0), value=fill)

    return {
        "input_ids": torch.stack([padded(x, 0) for x in ids]),
        "labels": torch.stack([padded(x, -100) for x in labels]),
        "attention_mask": torch.stack([padded(torch.ones_like(x), 0) for x in ids]),
    }


@pytest.mark.parametrize(
    "seed", [x if x < 8 else pytest.param(x, marks=pytest.mark.slow) for x in range(60)]
)
def test_a_batch_has_the_loss_and_gradients_of_its_documents_alone(seed: int):
    draw = Random(seed)
    whole = build(draw.choice(("llama", "gemma3", "mistral", "qwen2")))  # RoPE: places are relative
    world_size, kind = draw.randint(2, 4), ("packed", "right", "left")[seed % 3]
    ids, labels = documents(draw)
    given = batch(ids, labels, kind)
    apart, total = copy.deepcopy(whole), torch.zeros(())
    for x, y in zip(ids, labels, strict=True):
        logits = apart(x[None], use_cache=False).logits[0]
        total = total + F.cross_entropy(logits[:-1], y[1:], reduction="sum")
    total = total / sum(int((y[1:] != -100).sum()) for y in labels)
    total.backward()

    def on_rank(rank: int, group: Any) -> tuple[Tensor, dict[str, Tensor]]:
        model = copy.deepcopy(whole)
        split_forward(model, group)
        loss = model(**given).loss
        loss.backward()
        return loss.detach(), {name: x.grad for name, x in model.named_parameters()}

    ranks = tw.loopback(world_size, on_rank)
    assert all(float((loss - total.detach()).abs()) < 1e-5 for loss, _ in ranks)
    for name, x in apart.named_parameters():
        mean = sum(grads[name] for _, grads in ranks) / world_size
        assert (mean - x.grad).abs().max() < 1e-5 * max(1, float(x.grad.abs().max())), name
