"""torchtitan's two functions, on tilewise, without torchtitan: masks as its models make them.

`python -m benchmarks.slots.torchtitan` trains a step of torchtitan's own model.
"""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import and_masks

import tilewise as tw
from tilewise.integrations.torchtitan import apply_cp_to_forward, prepare_context_parallel_input

N, BATCH, TOKENS = 3, 2, 22
DOCUMENTS = ((0, 9, TOKENS), (0, 4, 5, TOKENS))
SEEN = tuple(tw.Causal() & tw.Document(edges) for edges in DOCUMENTS)


class VarlenMetadata(NamedTuple):
    cu_seq_q: Tensor


def get_causal_mask_mod() -> Any:
    return lambda b, h, q, k: q >= k


def get_document_mask_mod(positions: Tensor) -> Any:
    document = (positions == 0).cumsum(1)
    return lambda b, h, q, k: document[b, q] == document[b, k]


def get_sliding_window_mask_mod(window_size: int) -> Any:
    return lambda b, h, q, k: (k <= q) & (q - k < window_size)


def get_fixed_block_mask_mod(fixed_block_size: int) -> Any:
    return lambda b, h, q, k: q // fixed_block_size == k // fixed_block_size


def get_other_mask_mod() -> Any:
    return lambda b, h, q, k: q != k


def block_mask(*functions: Any) -> Any:
    return SimpleNamespace(mask_mod=and_masks(*functions) if len(functions) > 1 else functions[0])


def positions() -> Tensor:
    rows = [torch.cat([torch.arange(b - a) for a, b in pairwise(edges)]) for edges in DOCUMENTS]
    return torch.stack(rows)


def mesh(rank: int, group: Any) -> Any:
    return SimpleNamespace(
        get_group=lambda: group, size=lambda: group.world_size, get_local_rank=lambda: rank
    )


def split(masks: Any, balancer: str | None = "headtail", window: Any = None, **more: Any) -> Any:
    """Attention of the whole batch through both functions, on ranks of a loopback."""
    make = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(BATCH, TOKENS, h, 8, generator=make, dtype=torch.float64) for h in (4, 2, 2)
    )

    def on_rank(rank: int, group: Any) -> Any:
        inner = nn.Identity()
        if window is not None:
            setattr(inner, "window_size", window)  # noqa: B010 - no parameter, no module
        apply_cp_to_forward([inner], mesh(rank, group))
        ids = torch.arange(BATCH * TOKENS).view(BATCH, -1)
        extra = {"positions": positions(), "attention_masks": masks, "more": 1}
        inputs, labels, extra = prepare_context_parallel_input(
            ids, ids + 1, extra, mesh(rank, group), "cpu", balancer
        )
        given = extra["attention_masks"]
        assert torch.equal(labels, inputs + 1) and extra["more"] == 1
        assert extra["positions"].shape == inputs.shape
        given = given["sliding"] if isinstance(given, dict) else given
        rows = (given.layout.shard(x, rank, 1) for x in (q, k, v))
        out = inner.forward(*rows, attention_masks=given, enable_gqa=True, **more)
        return given.layout, out

    results = tw.loopback(N, on_rank)
    return (q, k, v), results[0][0].unshard([out for _, out in results], dim=1)


def dense(qkv: Any, masks: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in qkv)
    at = range(TOKENS)
    seen = torch.stack([torch.as_tensor(mask.dense(at, at)) for mask in masks])[:, None]
    attention = nn.functional.scaled_dot_product_attention
    return attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("balancer", ["headtail", "ptrr", None])
@pytest.mark.parametrize(
    ("masks", "window", "wanted"),
    [
        (None, None, (tw.Causal(), tw.Causal())),
        (VarlenMetadata(torch.tensor([0, 9, 22, 26, 27, 44])), (-1, 0), SEEN),
        (
            VarlenMetadata(torch.tensor([0, 9, 22, 26, 27, 44])),
            (3, 0),
            tuple(mask & tw.Window(3, 0) for mask in SEEN),
        ),
        (block_mask(get_causal_mask_mod(), get_document_mask_mod(positions())), None, SEEN),
        (
            {"sliding": block_mask(get_sliding_window_mask_mod(4)), "full": None},
            None,
            (tw.Window(3, 0), tw.Window(3, 0)),
        ),
        (
            block_mask(get_causal_mask_mod(), get_fixed_block_mask_mod(6)),
            None,
            (tw.Causal() & tw.Document([0, 6, 12, 18, 22]),) * 2,
        ),
    ],
)
def test_the_layers_own_masks_are_exact_in_any_order_of_tokens(masks, window, wanted, balancer):
    qkv, out = split(masks, balancer, window)
    assert (out - dense(qkv, wanted)).abs().max() < 1e-12


def test_an_epilogue_gets_out_and_lse():
    (q, *_), out = split(None, out_transform=lambda out, lse: out * lse.unsqueeze(-1))
    assert out.shape == q.shape and out.isfinite().all()


@pytest.mark.parametrize(
    ("masks", "balancer", "more", "message"),
    [
        (block_mask(get_other_mask_mod()), None, {}, "function get_other_mask_mod of torchtitan"),
        (torch.ones(2), None, {}, r"attention_masks \(Tensor\) of torchtitan must be a BlockMask"),
        (None, "other", {}, r"context_parallel_load_balancer \('other'\)"),
        (None, None, {"score_mod": abs}, "score_mod of torchtitan's attention is not supported"),
    ],
)
def test_what_cannot_be_honoured_is_named(masks, balancer, more, message):
    with pytest.raises(ValueError, match=message):
        split(masks, balancer, **more)


def test_a_batch_that_was_split_by_torchtitans_function_is_refused():
    def on_rank(rank: int, group: Any) -> None:
        inner = nn.Identity()
        apply_cp_to_forward([inner], mesh(rank, group))
        inner.forward(*torch.zeros(3, 1, 4, 2, 8), attention_masks=None)

    with pytest.raises(ValueError, match="not split by prepare_context_parallel_input of tilewise"):
        tw.loopback(N, on_rank)
