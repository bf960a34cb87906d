"""A mask or a bias for each batch entry: entries with the same mask and bias share one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from tilewise.arguments import require_type
from tilewise.execution.autograd import Results, attend
from tilewise.execution.call import Call
from tilewise.execution.sinks import kind_of
from tilewise.execution.validation import MOST_SEEDS
from tilewise.masks.base import Mask
from tilewise.transport.agreement import agree, settled
from tilewise.transport.resolve import transport_for

SEEDS_APART = 1 << 50  # of dropout in calls with different masks


def attend_by_entry(  # noqa: PLR0913 - as attend, and masks
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    call: Call,
    masks: Sequence[object] | None,
    sink: Tensor | None = None,
    bias: Tensor | None = None,
) -> Results:
    """out, lse, and the largest score of every head if it is asked for, as `attend` returns them.

    Args:
        q, k, v: with a batch; k may be latents, and v None.
        masks: one for each batch entry; None: all have call's.
        bias: [num_heads, num_tokens, num_kv_tokens], or of each batch entry.
    Raises:
        ValueError: the same on every rank, if one rank's masks or biases are not as many as batch
            entries, or the ranks disagree on them.
    """
    transport = transport_for(call.group)
    biases = bias if bias is not None and bias.ndim == 4 else None
    if biases is not None:
        settled(transport, lambda: _check_biases(biases, q))
    given = [call.mask] * len(q) if masks is None else masks
    masks = settled(transport, lambda: _checked(given, q, k, v))
    facts = {"call": "attention with a mask or a bias for each batch entry", "masks": str(masks)}
    agree(transport, facts | {"bias": str(kind_of(bias))}, mode=call.validate)
    entries: dict[tuple[Mask, int | None], list[int]] = {}
    for entry, mask in enumerate(masks):
        entries.setdefault((mask, None if biases is None else entry), []).append(entry)
    if len(entries) == 1 and biases is None:
        return attend(q, k, v, replace(call, mask=masks[0]), sink, bias)
    parts: list[Results] = []
    for number, ((mask, _), own) in enumerate(entries.items()):
        rows = torch.tensor(own, device=q.device)
        values = None if v is None else v.index_select(0, rows)
        own_sink = sink if sink is None or sink.ndim < 3 else sink.index_select(0, rows)
        seed = call.dropout_seed
        if seed is not None:  # rows of a call are counted from 0: the same pairs would be dropped
            seed = (seed + SEEDS_APART * number) % MOST_SEEDS
        own_bias = bias if biases is None else biases[own[0]]
        one = replace(call, mask=mask, sink=kind_of(own_sink), dropout_seed=seed)
        if own_bias is not None:
            one = replace(one, bias=kind_of(own_bias))
        some = q.index_select(0, rows), k.index_select(0, rows), values
        parts.append(attend(*some, one, own_sink, own_bias))
    order = torch.tensor([entry for own in entries.values() for entry in own]).argsort()
    order = order.to(q.device)
    out, lse = (torch.cat(x).index_select(0, order) for x in list(zip(*parts, strict=True))[:2])
    largest = [torch.stack(x).amax(0) for x in zip(*(kept for *_, kept in parts), strict=True)]
    return out, lse, largest


def _check_biases(biases: Tensor, q: Tensor) -> None:
    if require_type(Tensor, "q", q).ndim < 4 or len(q) != len(biases):
        raise ValueError(
            f"bias is {list(biases.shape)}, one for each batch entry, but q is {list(q.shape)}; "
            f"pass q [{len(biases)}, tokens, heads, head_dim], or a bias of three dimensions"
        )


def _checked(masks: Sequence[object], q: Tensor, k: Tensor, v: Tensor | None) -> tuple[Mask, ...]:
    if not masks:
        raise ValueError("mask is an empty list; pass a mask, or one for each batch entry")
    for entry, mask in enumerate(masks):
        require_type(Mask, f"mask[{entry}]", mask, "tw.Causal()")
    named = {"q": q, "k": k, **({} if v is None else {"v": v})}
    for name, x in named.items():
        batched = require_type(Tensor, name, x).ndim >= (4 if name == "q" or v is not None else 3)
        if not batched or len(x) != len(masks):
            raise ValueError(
                f"mask has {len(masks)} masks, one for each batch entry, but {name} is "
                f"{list(x.shape)}; pass one mask, or {name} [{len(masks)}, tokens, ...]"
            )
    return cast("tuple[Mask, ...]", tuple(masks))
