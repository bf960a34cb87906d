"""Tiny models whose layers choose keys by an indexer, and their documents run alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import Tensor

import tilewise as tw
from tilewise_verify.hf_proof import tiny_model

NAMES = ("AXK2", "DeepseekV32", "Dots3Note", "GlmMoeDsa", "HYV4")
CU_SEQLENS = (0, 9, 31, 40)
SHARED: dict[str, Any] = {"indexer_types": ["full", "shared"] * 39}
"""Of GlmMoeDsa: every second layer uses the choice of the one before it."""
WITH_SHARED: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in NAMES),
    ("GlmMoeDsa", SHARED),
]


def model_class(name: str) -> Any:
    return getattr(transformers, f"{name}ForCausalLM")


def build(name: str, top_k: int = 5, **changes: Any) -> Any:
    """A tiny model whose indexer has so many heads that equal scores are rare."""
    config = model_class(name).config_class()
    text = config.get_text_config(decoder=True)
    for field, value in changes.items():
        setattr(text, field, value)
    model = tiny_model(model_class(name), config)
    for module in model.modules():
        if isinstance(getattr(module, "index_topk", None), int):
            module.index_topk = top_k
    return model


def ids(num_rows: int = 1) -> Tensor:
    make = torch.Generator().manual_seed(3)
    return torch.randint(5, 120, (num_rows, 40), generator=make)


def alone(model: Any, tokens: Tensor, cu_seqlens: tuple[int, ...]) -> Tensor:
    """The loss of a row's documents, each run alone."""
    count, total = len(tokens) - len(cu_seqlens) + 1, torch.zeros(())
    for start, stop in pairwise(cu_seqlens):
        row = tokens[None, start:stop]
        out = model(row, labels=row, num_items_in_batch=torch.tensor(count), use_cache=False)
        total = total + out.loss
    return total


def compare(
    whole: Any,
    losses: list[float],
    grads: list[dict[str, Tensor]],
    want: Tensor,
    needed: str = "kv_b_proj",
) -> None:
    """Loss and each gradient, to 1e-5; among them one of a name that is needed."""
    assert abs(sum(losses) - float(want)) < 1e-5 * max(1.0, float(want))
    expected = {n: x.grad for n, x in whole.named_parameters() if x.grad is not None}
    assert any(needed in n for n in expected)
    for name, grad in expected.items():
        found = sum(mine[name] for mine in grads if name in mine)
        assert (found - grad).abs().max() < 1e-5 * max(1.0, float(grad.abs().max())), name


def rows_with_documents(whole: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Two rows that begin their documents elsewhere: ids, positions, and logits of each document
    alone."""
    tokens, edges = ids(2), (CU_SEQLENS, (0, 23, 40))
    positions = torch.stack([torch.from_numpy(tw.lengths.position_ids(x)) for x in edges])
    want = []
    for row, cu_seqlens in zip(tokens, edges, strict=True):
        parts = [whole(row[None, a:b], use_cache=False).logits for a, b in pairwise(cu_seqlens)]
        want.append(torch.cat(parts, 1)[0].detach())
    return tokens, positions, torch.stack(want)
