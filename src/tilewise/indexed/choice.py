"""The choice of an indexer: for each query the keys with the largest scores, the same at any split.

    score = sum over heads of weights relu(q_index . k_index)

Every rank has the index keys that its queries see, and chooses for its own queries. A score's bits
depend on its query and its key alone: scores are made in blocks of one size, of keys at fixed
places of the sequence, as `exact` makes them. Of keys with equal scores those at the lower
positions are chosen.

    keys      | block 0 | block 1 | block 2 |      blocks that no query of a block sees are left out
    queries   -> -> -> scores of a few blocks -> the best k so far

So the scores of a block of queries and of MOST_COLUMNS keys are in memory at a time, no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewise.arguments import dtype_name, require_dense, require_type, whole_number
from tilewise.exact.kernel import WIDTH_UNIT, one_thread
from tilewise.indexed.visible import VisibleKeys, visible_keys
from tilewise.kernels.protocol import accumulator_dtype
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Mask
from tilewise.masks.tables import PerHead
from tilewise.transport.agreement import agree, settled
from tilewise.transport.protocol import Transport

MOST_COLUMNS = 1 << 15
"""Keys whose scores are held at a time, beside the best ones so far."""


class BlockSizes(NamedTuple):
    """Queries and keys of a block of scores."""

    queries: int
    keys: int


SIZES = MappingProxyType({"cpu": BlockSizes(64, 512), "cuda": BlockSizes(256, 4096)})
"""A block has queries x heads x keys products: 8 MB and 256 MB in fp32, of 64 heads."""

LEAST_KEYS = 64
"""Keys of a block of a short sequence."""


def score_bytes(num_heads: int, k: int, device: str = "cpu") -> int:
    """Bytes that scores of one call take at most, in fp32, whatever the length of the sequence.

    Products of one block; scores of MOST_COLUMNS keys, with the best so far, and what `largest`
    makes of them: four numbers of 8 bytes and three truth values each.
    """
    sizes = SIZES[device]
    columns = MOST_COLUMNS + sizes.keys + k
    return sizes.queries * (4 * num_heads * sizes.keys + columns * (3 * 4 + 4 * 8 + 3))


def choose_keys(  # noqa: PLR0913 - an indexer's operands, and the split
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    k: int,
    mask: Mask,
    layout: Layout,
    transport: Transport,
    gather: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """Global positions of the chosen keys of this rank's queries, [(batch,) rows, k].

    Args:
        gather: (index keys of this rank, dimension of their tokens) -> those of all ranks that this
            rank's queries see.
    Raises:
        ValueError: the same on every rank, if one rank's arguments are wrong or the ranks differ.
    """

    def check() -> dict[str, str]:
        num_rows, num_tokens = layout.size(transport.rank), layout.num_tokens
        _check_operands(q_index, k_index, weights, num_rows)
        if whole_number("k", k) > num_tokens:
            raise ValueError(
                f"k ({k}) must be from 1 to the {num_tokens} tokens of the sequence; pass "
                f"min({k}, {num_tokens})"
            )
        if isinstance(mask, PerHead):
            raise ValueError(
                "mask is PerHead, but an indexer has one choice for all heads; pass one mask"
            )
        return {
            "call": "index",
            "layout": layout.fingerprint,
            "k": str(int(k)),
            "heads and width of the indexer": str([*q_index.shape[-2:]]),
            "batch of the indexer": str([*k_index.shape[:-2]]),
            "dtypes of the indexer": ", ".join(
                dtype_name(x.dtype) for x in (q_index, k_index, weights)
            ),
            "mask": repr(mask),
        }

    agree(transport, settled(transport, check), None, "first")
    with torch.no_grad():
        keys = gather(k_index.detach(), k_index.ndim - 2)
        visible = visible_keys(mask, layout, transport.rank)
        if q_index.ndim == 3:
            return chosen_among(q_index, keys, weights, visible, k)
        entries = zip(q_index, keys, weights, strict=True)
        found = [chosen_among(*entry, visible, k) for entry in entries]
        none = q_index.new_empty((*q_index.shape[:-2], k), dtype=torch.int64)
        return torch.stack(found) if found else none


def _check_operands(q_index: Any, k_index: Any, weights: Any, num_rows: int) -> None:
    named = {"q_index": q_index, "k_index": k_index, "weights": weights}
    for name, x in named.items():
        require_type(Tensor, name, x, "this rank's rows")
        require_dense(name, x)
        if not x.is_floating_point():
            raise ValueError(f"{name} is {x.dtype}, but must have floating-point numbers")
        if x.device != q_index.device:
            raise ValueError(f"{name} is on {x.device}, q_index on {q_index.device}; move it there")
    if q_index.ndim not in (3, 4):
        raise ValueError(
            f"q_index is {list(q_index.shape)}, but must be [(batch,) tokens, heads, width]"
        )
    *before, heads, width = q_index.shape
    if before[-1] != num_rows:
        raise ValueError(
            f"q_index has {before[-1]} tokens, but the layout gives this rank {num_rows}"
        )
    if not heads or not width:
        raise ValueError(f"q_index is {list(q_index.shape)}, but needs a head, and a width above 0")
    for name, x, expected in (
        ("k_index", k_index, [*before, width]),
        ("weights", weights, [*before, heads]),
    ):
        if [*x.shape] != expected:
            raise ValueError(
                f"{name} is {list(x.shape)}, but must be {expected} beside q_index "
                f"{list(q_index.shape)}: one key and one weight a head for each token"
            )


def chosen_among(q: Tensor, keys: Tensor, weights: Tensor, visible: VisibleKeys, k: int) -> Tensor:
    """Positions [rows, k] that the queries of one batch entry choose, ascending, then -1.

    Args:
        q: [rows, heads, width].
        keys: [num_tokens, width], of the whole sequence.
        weights: [rows, heads].
        visible: on the CPU.
    """
    dtype = accumulator_dtype(torch.promote_types(q.dtype, keys.dtype))
    sizes = SIZES["cuda" if q.is_cuda else "cpu"]
    least = 1 << (max(len(keys), LEAST_KEYS) - 1).bit_length()
    sizes = sizes._replace(keys=min(sizes.keys, least))  # by the whole sequence alone
    wide = -q.shape[-1] % WIDTH_UNIT
    keys = F.pad(keys.to(dtype), (0, wide, 0, -len(keys) % sizes.keys)).contiguous()
    found = list[Tensor]()
    with nullcontext() if q.is_cuda else one_thread():
        for start in range(0, len(q), sizes.queries):
            rows = slice(start, start + sizes.queries)
            spare = sizes.queries - len(q[rows])
            own = F.pad(q[rows].to(dtype), (0, wide, 0, 0, 0, spare)).contiguous()
            weight = F.pad(weights[rows].to(dtype), (0, 0, 0, spare)).contiguous()
            low, high = (F.pad(x, (0, spare)) for x in visible.of_rows(rows))
            best = _best_keys(own, keys, weight, VisibleKeys(low, high), k, sizes.keys)
            found.append(best[: sizes.queries - spare])
    return torch.cat(found) if found else torch.empty((0, k), dtype=torch.int64, device=q.device)


def _best_keys(
    q: Tensor, keys: Tensor, weights: Tensor, visible: VisibleKeys, k: int, block: int
) -> Tensor:
    """Positions [rows, k] that one block of queries chooses."""
    best = torch.full((len(q), k), -torch.inf, dtype=q.dtype, device=q.device)
    positions = torch.full((len(q), k), -1, dtype=torch.int64, device=q.device)
    for columns, scores in _scores(q, keys, weights, visible, block):
        scores = torch.cat([best, scores], 1)
        places = torch.cat([positions, columns.expand(len(q), -1)], 1)
        chosen = largest(scores, k)
        missing, chosen = chosen < 0, chosen.clamp(min=0)
        best = scores.gather(1, chosen).masked_fill_(missing, -torch.inf)
        positions = places.gather(1, chosen).masked_fill_(missing, -1)
    return positions


def _scores(
    q: Tensor, keys: Tensor, weights: Tensor, visible: VisibleKeys, block: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Positions of some visible blocks of keys, ascending, and their scores [rows, keys]; -inf
    where a key is not visible.
    """
    flat = q.flatten(0, 1)
    held, tables = list[Tensor](), list[Tensor]()
    starts = visible.blocks(len(keys), block)
    visible = VisibleKeys(*(x.to(q.device) for x in visible))
    for start in starts:
        products = torch.mm(flat, keys[start : start + block].T).relu_()
        table = products.view(*q.shape[:2], block).mul_(weights[..., None]).sum(1)
        columns = torch.arange(start, start + block, device=q.device)
        held.append(columns)
        # a score that is not a number is chosen: attention, which meets its key, says so
        table = table.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        tables.append(table.masked_fill_(~visible.contain(columns), -torch.inf))
        if len(held) * block >= MOST_COLUMNS:
            yield torch.cat(held), torch.cat(tables, 1)
            held, tables = [], []
    if held:
        yield torch.cat(held), torch.cat(tables, 1)


def largest(scores: Tensor, k: int) -> Tensor:
    """Columns [rows, k] of the k largest scores of each row, ascending; of equal ones the lowest.

    -inf is never chosen: columns end with -1 where a row has fewer.
    """
    chosen = scores > -torch.inf
    if k < scores.shape[1]:
        least = scores.topk(k, 1, sorted=False).values.amin(1, keepdim=True)
        above, equal = scores > least, (scores == least) & chosen
        missing = k - above.sum(1, keepdim=True)
        chosen = above | (equal & (equal.cumsum(1) <= missing))
    columns = torch.arange(scores.shape[1], device=scores.device).expand(scores.shape)
    found = torch.full((len(scores), k + 1), -1, device=scores.device)
    found.scatter_(1, torch.where(chosen, chosen.cumsum(1) - 1, k), columns)  # the rest: to the end
    return found[:, :k]
