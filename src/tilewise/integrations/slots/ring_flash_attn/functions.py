"""The attention functions of ring-flash-attn 0.1.8, with its signatures, layouts and results.

Source of the signatures: github.com/zhuzilin/ring-flash-attention (MIT). Windows, dropout, fp32 and
the gradient of softmax_lse are those of the unsplit sequence. A function's name says which tokens
a rank holds; every rank holds as many of each sequence:

    ring        the rank's part of n neighbouring ones of each sequence
    zigzag      parts rank and 2n - 1 - rank of 2n of each sequence
    stripe      tokens rank, rank + n, rank + 2n, ... of each sequence
    llama3      the rank's part of n neighbouring ones of all sequences, one after the other

Args:
    q, k, v: [batch, rows, heads, head_dim]; in varlen and llama3 functions [rows, heads, head_dim].
        A kvpacked or qkvpacked tensor has a dimension of 2 or 3 before heads.
    cu_seqlens: boundaries of this rank's rows of each sequence: the whole ones' divided by n.
    max_seqlen, max_seqlen_q, max_seqlen_k: not needed.
    heads_k_stride: the number of KV heads: all are gathered at once; a divisor of it: they go round
        a ring, in which a rank holds two shards at a time.
    dropout_p: rank 0 draws the seed from torch's CPU generator.
    window_size: (left, right) tokens, inclusive, in the whole sequence; -1 is unbounded.
    return_attn_probs: also return softmax_lse, and None.
    group: what tw.attention takes; None: the default group.
Returns:
    out as q, or (out, softmax_lse, None): [batch, heads, rows], in varlen and llama3 functions
    [heads, rows], natural log, fp32 (fp64 for fp64), differentiable.
Raises:
    ValueError: the same on every rank, before any tensor is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from itertools import pairwise
from typing import Any

from torch import Tensor

import tilewise as tw
from tilewise.arguments import checks_arguments, require_range
from tilewise.integrations.slots.ring_flash_attn.attend import (
    Options,
    PackedRow,
    RankSlices,
    Result,
    TokenSplit,
    attend,
    attend_in_a_row,
    check_halves,
    in_parts,
    outside_graphs,
    slices_of,
    spread_documents,
    unpacked,
)

WindowSize = tuple[int, int]
Function = Callable[..., Result]


def _of_batches(name: str, layout: Callable[[int, int], tw.Layout]) -> Function:
    def split(x: Tensor, n: int) -> TokenSplit:
        tokens = TokenSplit(in_parts(x, n, 4, layout))
        if layout is tw.zigzag:
            check_halves(x.shape[1], "of each sequence")
        return tokens

    def function(  # noqa: PLR0913 - theirs
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: WindowSize = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool | None = False,
        return_attn_probs: bool = False,
        group: tw.transport.Group = None,
    ) -> Result:
        scores = dropout_p, softmax_scale, causal, window_size, alibi_slopes
        options = Options(*scores, deterministic, return_attn_probs, group)
        return attend((q, k, v), split, options)

    return _named(function, name, f"Attention of equal sequences, each {layout.__name__}.")


def _of_documents(name: str, *, halves: bool) -> Function:
    def function(  # noqa: PLR0913 - theirs
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: WindowSize = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool | None = False,
        return_attn_probs: bool = False,
        group: tw.transport.Group = None,
    ) -> Result:
        scores = dropout_p, softmax_scale, causal, window_size, alibi_slopes
        options = Options(*scores, deterministic, return_attn_probs, group)

        def split(x: Tensor, n: int) -> TokenSplit:
            return spread_documents(cu_seqlens, x, n, halves=halves)

        return attend((q, k, v), split, options)

    return _named(function, name, "Attention of packed sequences, each spread over all ranks.")


def llama3_flash_attn_varlen_func(  # noqa: PLR0913 - theirs
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool | None = False,
    return_attn_probs: bool = False,
    group: tw.transport.Group = None,
) -> Result:
    """Attention of one row of packed sequences, in n neighbouring parts.

        lengths = llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, rank, world_size)
        out = llama3_flash_attn_varlen_func(q, k, v, *lengths[:4], 1, lengths[4], causal=True)

    cu_seqlens_q of llama3_flash_attn_prepare_cu_seqlens knows the whole row's boundaries; of others
    the ranks ask each other in every call.
    """
    scores = dropout_p, softmax_scale, causal, window_size, alibi_slopes
    options = Options(*scores, deterministic, return_attn_probs, group)
    slices = RankSlices(cu_seqlens_q, cu_seqlens_k, local_k_slice)
    return attend_in_a_row((q, k, v), slices, heads_k_stride, options)


@outside_graphs
@checks_arguments
def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """Return a rank's arguments of the llama3 functions, from the boundaries of the whole row.

    Returns:
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice.
    Raises:
        ValueError: unless world_size divides the number of tokens, and rank is one of them.
    """
    require_range("rank", rank, 0, world_size - 1)
    edges = tw.Document(cu_seqlens).cu_seqlens
    queries, keys, local_k_slice = slices_of(edges, causal, rank, world_size)
    cu_seqlens_q, cu_seqlens_k = cu_seqlens.new_tensor(queries), cu_seqlens.new_tensor(keys)
    row = PackedRow(edges, causal, cu_seqlens_q._version)
    cu_seqlens_q.tilewise_row = row  # pyright: ignore[reportAttributeAccessIssue]
    longest_q, longest_k = (max(b - a for a, b in pairwise(x)) for x in (queries, keys))
    return cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, local_k_slice


def _kvpacked(function: Function) -> Function:
    def packed(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Result:
        return function(q, *unpacked("kv", kv, 2), *args, **options)

    return _packed(function, packed, "q", "kv")


def _qkvpacked(function: Function) -> Function:
    def packed(qkv: Tensor, *args: Any, **options: Any) -> Result:
        return function(*unpacked("qkv", qkv, 3), *args, **options)

    return _packed(function, packed, "qkv")


def _packed(function: Function, packed: Function, *tensors: str) -> Function:
    """Give the packed form of a function its name, and the signature that help shows."""
    whole = signature(function)
    first, *_ = parameters = [*whole.parameters.values()]
    replaced = [first.replace(name=name) for name in tensors] + parameters[3:]
    packed.__signature__ = whole.replace(parameters=replaced)  # pyright: ignore
    name = function.__name__.replace("_func", f"_{tensors[-1]}packed_func")
    return _named(packed, name, f"{function.__name__} of {' and '.join(tensors)}.")


def _named(function: Function, name: str, text: str) -> Function:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"{text} The top of {__name__} says what it takes."
    return function


ring_flash_attn_func = _of_batches("ring_flash_attn_func", tw.contiguous)
zigzag_ring_flash_attn_func = _of_batches("zigzag_ring_flash_attn_func", tw.zigzag)
stripe_flash_attn_func = _of_batches("stripe_flash_attn_func", tw.striped)
ring_flash_attn_varlen_func = _of_documents("ring_flash_attn_varlen_func", halves=False)
zigzag_ring_flash_attn_varlen_func = _of_documents(
    "zigzag_ring_flash_attn_varlen_func", halves=True
)

ring_flash_attn_kvpacked_func = _kvpacked(ring_flash_attn_func)
zigzag_ring_flash_attn_kvpacked_func = _kvpacked(zigzag_ring_flash_attn_func)
stripe_flash_attn_kvpacked_func = _kvpacked(stripe_flash_attn_func)
ring_flash_attn_varlen_kvpacked_func = _kvpacked(ring_flash_attn_varlen_func)
zigzag_ring_flash_attn_varlen_kvpacked_func = _kvpacked(zigzag_ring_flash_attn_varlen_func)
llama3_flash_attn_varlen_kvpacked_func = _kvpacked(llama3_flash_attn_varlen_func)

ring_flash_attn_qkvpacked_func = _qkvpacked(ring_flash_attn_func)
zigzag_ring_flash_attn_qkvpacked_func = _qkvpacked(zigzag_ring_flash_attn_func)
stripe_flash_attn_qkvpacked_func = _qkvpacked(stripe_flash_attn_func)
ring_flash_attn_varlen_qkvpacked_func = _qkvpacked(ring_flash_attn_varlen_func)
zigzag_ring_flash_attn_varlen_qkvpacked_func = _qkvpacked(zigzag_ring_flash_attn_varlen_func)
llama3_flash_attn_varlen_qkvpacked_func = _qkvpacked(llama3_flash_attn_varlen_func)
