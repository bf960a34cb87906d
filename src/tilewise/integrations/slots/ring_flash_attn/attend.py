"""One call of tw.attention for all functions of ring-flash-attn: its options, layouts and masks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar, get_type_hints

import torch
from torch import Tensor

import tilewise as tw
from tilewise.arguments import is_dense, of_kind, require_type, whole_number
from tilewise.integrations.seeds import agreed_seed
from tilewise.kernels.bias import Alibi
from tilewise.masks.base import as_ints
from tilewise.tokens.moves import gather_moves
from tilewise.tokens.rows import move_rows
from tilewise.transport.agreement import settled

Edges = tuple[int, ...]
Function = TypeVar("Function", bound=Callable[..., Any])
Result = Tensor | tuple[Tensor, Tensor, None]


class Options(NamedTuple):
    """The arguments that all of ring-flash-attn's functions share, and two that it lacks."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    alibi_slopes: Tensor | None
    deterministic: bool | None
    return_attn_probs: bool
    group: tw.transport.Group
    softcap: float | None = None
    sink: Tensor | None = None


class TokenSplit(NamedTuple):
    """Tokens of every rank.

    Args:
        documents: boundaries of packed sequences in the whole one; None: it is one sequence.
    """

    layout: tw.Layout
    documents: Edges | None = None


class RankSlices(NamedTuple):
    """Arguments of a llama3 function: this rank's share of a row, and the keys that it needs."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    local_k_slice: slice


class PackedRow(NamedTuple):
    """Boundaries of a whole row of packed sequences, noted on the tensor of one rank's share.

    Args:
        version: of the tensor, which tells one that was changed since.
    """

    documents: Edges
    causal: bool
    version: int


def outside_graphs(function: Function) -> Function:
    """Keep a function out of compiled graphs: they cannot hold what ranks agree on in a call."""
    reason = "ranks agree on a call when it is made: compile with fullgraph=False"
    uncompiled: Any = torch.compiler.disable(function, reason=reason)
    return uncompiled


@outside_graphs
def attend(
    qkv: tuple[Tensor, Tensor, Tensor],
    split: Callable[[Tensor, int], TokenSplit],
    options: Options,
    strategy: Callable[[int], tw.Plan] = tw.ring,
) -> Result:
    """Attention of this rank's rows, in ring-flash-attn's form.

    Args:
        split: from q (or k, where it has other rows) and the number of ranks to the tokens of all.
    """
    transport, (q, k, v) = tw.transport.transport_for(options.group), qkv
    n = transport.world_size

    def checked() -> tuple[TokenSplit, TokenSplit, tw.masks.Mask, Alibi | None]:
        _check_kinds(qkv, options)
        if options.deterministic:
            raise ValueError(
                "deterministic=True of ring-flash-attn is not supported: results are merged in a "
                "fixed order, but what a device's kernel does in its backward pass is not checked; "
                "pass False"
            )
        tokens = split(q, n)
        keys = tokens if k.shape[-3] == q.shape[-3] else split(k, n)
        mask = _mask(tokens.documents, options.causal, *options.window_size)
        if keys is not tokens and mask != tw.Full():
            raise ValueError(
                f"k has {k.shape[-3]} rows, but q has {q.shape[-3]}: of keys of another length all "
                "are seen; pass causal=False and window_size=(-1, -1)"
            )
        bias = None
        if options.alibi_slopes is not None:
            if tokens.documents is not None or keys is not tokens:
                raise ValueError(
                    "alibi_slopes of ring-flash-attn is not supported for packed sequences, nor "
                    "for keys of another length than queries; pass None"
                )
            bias = tw.alibi(options.alibi_slopes)
        return tokens, keys, mask, bias

    tokens, keys, mask, bias = settled(transport, checked)
    out, lse = tw.attention(
        q,
        k,
        v,
        plan=_plan(strategy, n),
        layout=tokens.layout,
        kv_layout=None if keys is tokens else keys.layout,
        mask=mask,
        group=transport,
        softmax_scale=options.softmax_scale,
        softcap=options.softcap,
        sink=options.sink,
        bias=bias,
        dropout_p=options.dropout_p,
        dropout_seed=agreed_seed(options.group) if options.dropout_p else None,
        return_lse=True,
    )
    return (out, lse.transpose(-1, -2), None) if options.return_attn_probs else out


@outside_graphs
def attend_in_a_row(
    qkv: tuple[Tensor, Tensor, Tensor],
    slices: RankSlices,
    heads_k_stride: int,
    options: Options,
) -> Result:
    """Attention of the llama3 functions: one row of packed sequences in n neighbouring parts.

    Args:
        heads_k_stride: of all KV heads or more: they are gathered at once. Fewer are to save
            memory: keys and values go round a ring, of which a rank holds two shards.
    """
    transport, (q, k, _) = tw.transport.transport_for(options.group), qkv
    settled(transport, lambda: _check_kinds(qkv, options))
    documents = _documents_of(slices, q, options.causal, transport)

    def stride() -> int:
        if k.shape[-2] % whole_number("heads_k_stride", heads_k_stride):
            raise ValueError(
                f"heads_k_stride ({heads_k_stride}) must divide {k.shape[-2]} KV heads"
            )
        return heads_k_stride

    strategy = tw.all_gather if settled(transport, stride) == k.shape[-2] else tw.ring
    return attend(qkv, lambda x, n: TokenSplit(in_parts(x, n, 3), documents), options, strategy)


def _check_kinds(qkv: tuple[Tensor, Tensor, Tensor], options: Options) -> None:
    """Raise ValueError for arguments that are of another kind than those of ring-flash-attn."""
    for name, x in zip("qkv", qkv, strict=True):
        if isinstance(x, ValueError):  # found by `unpacked`
            raise x
        require_type(Tensor, name, x, "this rank's rows")
    for name, kind in get_type_hints(Options).items():
        of_kind(name, getattr(options, name), kind)


def unpacked(name: str, x: Any, num_parts: int) -> Sequence[Any]:
    """The parts of a kvpacked or qkvpacked tensor; of another one errors for `attend` to raise."""
    if isinstance(x, Tensor) and is_dense(x) and x.ndim > 3 and x.shape[-3] == num_parts:
        return x.unbind(-3)
    shape = list(x.shape) if isinstance(x, Tensor) and is_dense(x) else type(x).__name__
    return [ValueError(f"{name} ({shape}) must be [..., {num_parts}, heads, head_dim]")] * num_parts


def in_parts(
    x: Tensor, n: int, ndim: int, layout: Callable[[int, int], tw.Layout] = tw.contiguous
) -> tw.Layout:
    """Return the layout of the whole sequence, when every one of n ranks has as many rows as x.

    Args:
        ndim: number of dimensions that x must have: [(batch,) rows, heads, head_dim].
        layout: makes the layout of (num_tokens, n).
    """
    if x.ndim != ndim:
        batch = "batch, " * (ndim > 3)
        raise ValueError(f"x is {list(x.shape)}, but must be [{batch}rows, heads, head_dim]")
    return _layout(layout, x.shape[-3] * n, n)


def spread_documents(cu_seqlens: Tensor, x: Tensor, n: int, *, halves: bool) -> TokenSplit:
    """Packed sequences, each of which is spread over all ranks.

    Args:
        cu_seqlens: boundaries of this rank's rows of each.
        halves: each rank has two parts of each, one from either end; else one.
    """
    in_parts(x, n, 3)
    edges = tw.Document(cu_seqlens).cu_seqlens
    if edges[-1] != len(x):
        raise ValueError(
            f"cu_seqlens ends at {edges[-1]}, but there are {len(x)} rows; pass the boundaries of "
            "this rank's rows, those of the whole sequences divided by the number of ranks"
        )
    if halves:
        for document, (start, stop) in enumerate(pairwise(edges)):
            check_halves(stop - start, f"of sequence {document}")
    return TokenSplit(_spread(edges, n, halves), tuple(n * edge for edge in edges))


def check_halves(rows: int, what: str) -> None:
    """Raise ValueError unless a zigzag layout can give this rank so many rows of a sequence."""
    if rows % 2:
        raise ValueError(
            f"this rank has {rows} rows {what}, which must be two equal parts; pad it to a "
            "multiple of 2 x the number of ranks"
        )


def slices_of(edges: Edges, causal: bool, rank: int, n: int) -> tuple[Edges, Edges, slice]:
    """Boundaries of a rank's queries, of the keys that they need, and which keys those are.

    Args:
        edges: boundaries of the whole row.
    """
    if edges[-1] % n or not edges[-1]:
        raise ValueError(
            f"cu_seqlens ends at {edges[-1]}, but {n} ranks must have equally many tokens, at "
            "least one; pad the last sequence"
        )
    rows = edges[-1] // n
    first, stop = rank * rows, (rank + 1) * rows
    left, right = bisect_left(edges, first), bisect_left(edges, stop)
    left -= edges[left] != first
    start, last = edges[left], stop if causal else edges[right]
    inner = edges[left + 1 : right]
    queries = (0, *(edge - first for edge in inner), rows)
    return queries, (0, *(edge - start for edge in inner), last - start), slice(start, last)


def _documents_of(
    slices: RankSlices, q: Tensor, causal: bool, transport: tw.transport.Transport
) -> Edges:
    """Boundaries of the whole row: noted on cu_seqlens_q, or asked of all ranks."""
    row = getattr(slices.cu_seqlens_q, "tilewise_row", None)
    if isinstance(row, PackedRow) and row.version == slices.cu_seqlens_q._version:
        if row.causal != causal:
            text = (
                f"causal ({causal}) must be {row.causal}, as llama3_flash_attn_prepare_cu_seqlens"
            )
            settled(transport, lambda: _raise(f"{text} was given"))
        return row.documents
    n, rank = transport.world_size, transport.rank

    def starts() -> Tensor:
        edges = tw.Document(slices.cu_seqlens_q).cu_seqlens
        if q.ndim != 3 or edges[-1] != len(q):
            raise ValueError(f"cu_seqlens_q ends at {edges[-1]}, but q is {list(q.shape)}")
        marks = q.new_zeros(len(q), dtype=torch.int64)
        marks[[edge for edge in edges[1:] if edge < len(q)]] = 1
        own = require_type(slice, "local_k_slice", slices.local_k_slice, "slice(0, 8)")
        marks[:1] = own.start == rank * len(q)
        return marks

    marks = settled(transport, starts)
    moves = gather_moves(_layout(tw.contiguous, len(q) * n, n), None)
    documents = (*move_rows(marks, moves, transport).nonzero().flatten().tolist(), len(q) * n)

    def check() -> None:
        queries, keys, wanted = slices_of(documents, causal, rank, n)
        edges = [dict.fromkeys(as_ints(x)) for x in (slices.cu_seqlens_q, slices.cu_seqlens_k)]
        if [*map(tuple, edges), slices.local_k_slice] != [queries, keys, wanted]:
            raise ValueError(
                f"cu_seqlens_k and local_k_slice ({slices.local_k_slice}) are not those of "
                f"llama3_flash_attn_prepare_cu_seqlens with causal={causal}, which gives {wanted}"
            )

    settled(transport, check)
    return documents


def _raise(message: str) -> None:
    raise ValueError(message)


@lru_cache(maxsize=64)
def _plan(strategy: Callable[[int], tw.Plan], n: int) -> tw.Plan:
    """The plan, the same object in every call: what is derived from it is kept with it."""
    return strategy(n)


@lru_cache(maxsize=256)
def _layout(layout: Callable[[int, int], tw.Layout], num_tokens: int, n: int) -> tw.Layout:
    return layout(num_tokens, n)


@lru_cache(maxsize=256)
def _spread(edges: Edges, n: int, halves: bool) -> tw.Layout:
    if halves:
        return tw.zigzag_documents([n * edge for edge in edges], n)
    parts = [*pairwise(edges)]
    runs = [
        [tw.layouts.Run(n * start + rank * (stop - start), stop - start) for start, stop in parts]
        for rank in range(n)
    ]
    return tw.Layout(n * edges[-1], runs, "ring_documents")


@lru_cache(maxsize=256)
def _mask(documents: Edges | None, causal: bool, left: int, right: int) -> tw.masks.Mask:
    masks: list[tw.masks.Mask] = [tw.Causal()] if causal else []
    if left >= 0 or (right >= 0 and not causal):
        before, after = (None if x < 0 else x for x in (left, right))
        masks.append(tw.Window(before, None if causal else after))
    if documents is not None and len(documents) > 2:
        masks.append(tw.Document(documents))
    mask = masks.pop() if masks else tw.Full()
    for other in masks:
        mask = other & mask
    return mask
