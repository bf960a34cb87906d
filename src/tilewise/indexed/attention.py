"""Attention to chosen keys: the rows that this rank's queries name are fetched, and attended to.

No plan has a part in it. Each rank fetches the keys and values (or latents) of the keys chosen for
its queries, each once, or all rows where most are named; then its queries attend to them here.
Gradients of keys and values return the way they came, and their owners add them in the order of
ranks.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewise.arguments import dtype_name, require_type
from tilewise.execution.call import Call
from tilewise.execution.sinks import check_sink, with_sink
from tilewise.execution.validation import check_own_rows, check_tensors, checked_scale
from tilewise.indexed.chosen import Chosen
from tilewise.indexed.lists import ListKernel, attend_to_lists, list_kernel, proven
from tilewise.indexed.visible import visible_keys
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Full, Mask
from tilewise.masks.tables import PerHead
from tilewise.plan.payload import head_groups
from tilewise.tokens.named_rows import NamedRows, fetch_rows
from tilewise.transport.agreement import agree, settled
from tilewise.transport.resolve import transport_for
from tilewise.wires.latent import Latent

REFUSED = (
    ("backward_plan", None, "no plan has a part in it"),
    ("kv_layout", None, "queries and keys are of one sequence"),
    ("wire_dtype", None, "no partial result travels"),
    ("save", None, "backward sends no row again"),
    ("q_positions", None, "queries have the layout's positions"),
    ("reduction", "fast", "its bits depend on the split"),
    ("return_max_logit", False, "it is not kept"),
    ("bias", None, "the scores of a list take none"),
    ("softcap", None, "the scores of a list take none"),
    ("dropout_p", 0.0, "the weights of a list take none"),
)
"""Options that attention to chosen keys does not take: name, usual value, and why."""


class _Operands(NamedTuple):
    """This rank's rows, checked.

    Attributes:
        keys: what travels of each token: k and v side by side, or the latent.
    """

    q: Tensor
    keys: Tensor
    scale: float
    kernel: ListKernel


def attend_to_chosen(
    q: Tensor, k: Tensor, v: Tensor | None, chosen: Chosen, call: Call, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's queries, each of which attends to the keys chosen for it.

    Args:
        k, v: or latents [(batch,) tokens, width] and None, with call's wire a Latent.
        call: layout, softmax_scale, group, validate, kernel, sink and wire count.
    Raises:
        ValueError: the same on every rank, before rows travel, if one rank's operands or choice do
            not fit, or the ranks differ.
    """
    transport, latent = transport_for(call.group), call.wire
    rank, layout = transport.rank, call.layout

    def check() -> tuple[_Operands, dict[str, str]]:
        _check_options(call, latent)
        require_type(Layout, "layout", layout)
        if layout.world_size != transport.world_size or not layout.is_partition:
            raise ValueError(
                f"layout is {layout!r}, but must give every token to exactly one of the group's "
                f"{transport.world_size} ranks"
            )
        rows = k
        if isinstance(latent, Latent) and isinstance(k, Tensor):
            rows = k.unsqueeze(-2)
        check_tensors(q, rows, v, latent if isinstance(latent, Latent) else None)
        check_own_rows("q", q, layout, rank)
        check_own_rows("k", rows, layout, rank)
        num_heads, head_dim = int(q.shape[-2]), int(q.shape[-1])
        if isinstance(latent, Latent):
            num_kv_heads, v_head_dim = latent.num_kv_heads, latent.v_head_dim
        else:
            assert v is not None, "checked"
            num_kv_heads, v_head_dim = int(k.shape[-2]), int(v.shape[-1])
        head_groups(num_heads, num_kv_heads, 1)
        if call.sink is not None:
            batch = int(q.shape[0]) if q.ndim == 4 else None
            check_sink(call.sink, num_heads, dtype_name(q.dtype), q.device.type, batch)
        scale = checked_scale(call.softmax_scale, head_dim)
        kernel = list_kernel(call.kernel, q.device.type, q.dtype, head_dim, v_head_dim)
        proven(kernel, q, num_kv_heads, v_head_dim)
        _check_choice(chosen, q, layout, rank)
        parts = [k] if v is None else [k.flatten(-2), v.flatten(-2)]
        width = None if v is None else [*v.shape[-2:]]
        return _Operands(q, torch.cat(parts, -1), scale, kernel), {
            "call": "attention to chosen keys",
            "layout": layout.fingerprint,
            "keys of a query": str(chosen.positions.shape[-1]),
            "q": str([*q.shape[:-3], *q.shape[-2:]]),
            "k": str([*rows.shape[:-3], *rows.shape[-2:]]),
            "v": str(width if latent is None else latent),
            "dtype": dtype_name(q.dtype),
            "softmax_scale": str(scale),
            "sink": str(call.sink),
            "within": repr(chosen.within),
            "window": str(chosen.window),
        }

    operands, fields = settled(transport, check)
    agree(transport, fields, None, call.validate)
    dim = q.ndim - 3
    positions = _with_window(chosen, layout, rank).to(q.device)
    rows = fetch_rows(operands.keys, positions, layout, transport, dim, verb="rows of chosen keys")
    if isinstance(latent, Latent):
        keys, values = _expanded(latent, rows, q, call.autocast)
    else:
        assert v is not None
        shapes = k.shape[-2:], v.shape[-2:]
        parts = rows.table.split([shape.numel() for shape in shapes], -1)
        keys, values = (x.unflatten(-1, shape) for x, shape in zip(parts, shapes, strict=True))
    places = rows.places.flatten(0, -2).sort(-1).values  # a choice is a set: one order of sums
    queries = q.flatten(0, -3) if q.ndim == 4 else q
    out, lse = attend_to_lists(queries, keys, values, places, operands.scale, operands.kernel)
    out, lse = out.reshape(*q.shape[:-1], values.shape[-1]), lse.reshape(q.shape[:-1])
    return (out, lse) if sink is None else with_sink(out, lse, sink)


def _with_window(chosen: Chosen, layout: Layout, rank: int) -> Tensor:
    """The positions that queries attend to: those chosen, and those of the window beside them."""
    positions, mask = chosen.positions, chosen.within
    if chosen.window is None:
        return positions
    own = layout.positions(rank).to(positions.device)[:, None]
    near = own - torch.arange(min(chosen.window, layout.num_tokens), device=own.device)
    seen = near >= 0
    if mask is not None and mask != Full():
        seen = seen & _visible(mask, near, layout, rank)
    near = near.masked_fill(~seen, -1).to(positions.dtype)
    near = near.expand(*positions.shape[:-1], -1)
    # one that is chosen and near stands in the list once
    both = (positions <= own) & (positions > own - chosen.window)
    return torch.cat([positions.masked_fill(both, -1), near], -1)


def _expanded(
    latent: Latent, rows: NamedRows, q: Tensor, autocast: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Keys and values of the latents in a table.

    Args:
        autocast: dtype of the torch.autocast region in which attention was called, if in one.
    """
    assert latent.expand is not None, "checked"
    table, positions = rows.table, rows.positions
    if not len(table):  # functions such as view fail on no rows
        table, positions = F.pad(table, (0, 0, 0, 1)), positions.new_zeros(1)
    with nullcontext() if autocast is None else torch.autocast(q.device.type, autocast):
        k, v = latent.expand(table, positions, *latent.params)
    wanted = [
        (len(table), latent.num_kv_heads, width) for width in (latent.head_dim, latent.v_head_dim)
    ]
    if [tuple(k.shape), tuple(v.shape)] != wanted or {k.dtype, v.dtype} != {q.dtype}:
        raise ValueError(
            f"expand made k {tuple(k.shape)} and v {tuple(v.shape)} of {len(table)} rows, but "
            f"must make {wanted[0]} and {wanted[1]}, of {q.dtype}"
        )
    return k, v


def _check_options(call: Call, wire: object) -> None:
    for name, usual, why in REFUSED:
        value = getattr(call, name)
        if value is not usual and value != usual:
            raise ValueError(
                f"{name} ({value!r:.60}) is not taken with mask=tw.Chosen(...): {why}; leave it out"
            )
    if wire is not None and not isinstance(wire, Latent):
        raise ValueError(
            f"wire ({wire!r:.60}) is not taken with mask=tw.Chosen(...), but tw.wire.Latent is: "
            "rows travel in their own dtype; leave it out"
        )


def _check_choice(chosen: Chosen, q: Tensor, layout: Layout, rank: int) -> None:
    """Raise ValueError unless positions are a set of visible keys for each query."""
    positions, num_tokens = chosen.positions, layout.num_tokens
    if positions.shape[:-1] != q.shape[:-2]:
        raise ValueError(
            f"chosen positions are {list(positions.shape)}, but q is {list(q.shape)}; pass a list "
            f"of keys for each query, {[*q.shape[:-2], 'k']}"
        )
    if positions.shape[-1] > num_tokens:
        raise ValueError(
            f"each query chooses {positions.shape[-1]} keys of {num_tokens} tokens; a key can be "
            f"chosen once: pass lists of at most {num_tokens}"
        )
    if not positions.numel():
        return
    ordered = positions.sort(-1).values
    seen = positions < 0
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if chosen.within is not None and chosen.within != Full():
        seen = seen | _visible(chosen.within, positions, layout, rank)
    else:
        seen = torch.ones_like(seen)
    wrong = (positions < -1) | (positions >= num_tokens)
    if not bool(wrong.any() | twice.any() | ~seen.all()):
        return
    for cells, values, why in (
        (wrong, positions, f"must be from 0 to {num_tokens - 1}, or -1 for no key"),
        (
            ~seen,
            positions,
            f"{chosen.within!r} hides from it: choose visible keys, as cp.index does",
        ),
        (twice, ordered[..., 1:], "it names twice: pass each key once"),
    ):
        if bool(cells.any()):
            *_, row, column = place = cells.nonzero()[0].tolist()
            query, key = int(layout.rows(rank)[row]), int(values[tuple(place)])
            raise ValueError(
                f"the query at position {query} chooses key {key}, which {why} (row {row}, column "
                f"{column} of the chosen positions)"
            )


def _visible(mask: Mask, positions: Tensor, layout: Layout, rank: int) -> Tensor:
    """Return which chosen keys the mask shows their queries, bool as positions."""
    mask.check_tokens(layout.num_tokens)
    if isinstance(mask, PerHead):
        raise ValueError(
            "the mask is PerHead, but all heads attend to the same chosen keys; make cp with one "
            "mask for all heads"
        )
    visible = visible_keys(mask, layout, rank)
    return type(visible)(*(x.to(positions.device) for x in visible)).contain(positions)
