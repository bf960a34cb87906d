"""Inputs that all contenders of a case are given, and the results that they should have, in fp64.

Made once by the caller and left in a file, which the ranks of this machine map: so no contender's
messages or memory are spent on it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.arguments import ITEM_BYTES
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Mask
from tilewise_tools.bench.case import BenchCase

NAMES = ("out", "dq", "dk", "dv")
TOLERANCES = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 4e-2, "float16": 5e-3}.__getitem__
"""Errors up to which a result counts as exact, as inputs are normal and at most rounded once."""


class Inputs(NamedTuple):
    """Whole tensors of a case.

    Attributes:
        q, k, v, dout: [num_tokens, heads, head_dim] of the case's dtype.
        rows: the sampled queries, ascending; where they are not all, the truth is of a loss that
            only they enter.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    rows: Tensor
    truth: dict[str, Tensor]  # fp64; out and dq of these rows, dk and dv of all keys

    def checked_dout(self) -> Tensor:
        """dout where it is sampled, else 0."""
        dout = torch.zeros_like(self.dout)
        dout[self.rows] = self.dout[self.rows]
        return dout

    def errors(self, results: Mapping[str, Tensor], layout: Layout, rank: int) -> dict[str, float]:
        """Largest error of this rank's results, by name, over max(1, largest true value of all)."""
        positions = layout.positions(rank)
        place = torch.full((len(self.q),), -1).scatter(0, self.rows, torch.arange(len(self.rows)))
        sampled = place[positions] >= 0
        errors_by_name = {}
        for name, x in results.items():
            true_values = self.truth[name]
            of_queries = name in ("out", "dq")
            true_rows = (
                true_values[place[positions][sampled]] if of_queries else true_values[positions]
            )
            x = x.detach().cpu().double()
            x = x[sampled] if of_queries else x
            error = (x - true_rows).abs().amax().item() if true_rows.numel() else 0.0
            is_number = not math.isnan(error)  # nan would pass for small in a maximum
            errors_by_name[name] = (
                error / max(1.0, true_values.abs().amax().item()) if is_number else math.inf
            )
        return errors_by_name


def needed_bytes(case: BenchCase) -> int:
    """Memory of the inputs, whole and once more cut over the ranks, with results and truth."""
    queries, keys = case.num_tokens * case.num_heads, case.num_tokens * case.num_kv_heads
    rows = 4 * (queries + keys) * ITEM_BYTES(case.dtype) + 2 * keys * ITEM_BYTES("float64")
    return rows * case.head_dim


def write_inputs(case: BenchCase, mask: Mask, truth_pairs: int, path: Path) -> int:
    """Draw a case's tensors, compute the truth, leave both in a file.

    Returns:
        How many query rows the truth covers.
    """
    make = torch.Generator().manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)

    def normal(heads: int) -> Tensor:
        return torch.randn(case.num_tokens, heads, case.head_dim, generator=make).to(dtype)

    q, k, v = normal(case.num_heads), normal(case.num_kv_heads), normal(case.num_kv_heads)
    dout = normal(case.num_heads)
    count = max(1, min(case.num_tokens, truth_pairs // case.num_tokens))
    rows = torch.randperm(case.num_tokens, generator=make)[:count].sort().values
    truth = dense_truth((q, k, v, dout), rows, mask)
    saved = {"q": q, "k": k, "v": v, "dout": dout, "rows": rows, "truth": truth}
    torch.save(saved, path)
    return count


def read_inputs(path: Path) -> Inputs:
    """The tensors of a file, mapped, not read."""
    saved: dict[str, Any] = torch.load(path, mmap=True, weights_only=True)
    return Inputs(**saved)


def dense_truth(
    whole_tensors: Sequence[Tensor], rows: Tensor, mask: Mask, heads: Iterable[int] | None = None
) -> dict[str, Tensor]:
    """Dense attention of some queries over all keys in fp64, head by head.

    Args:
        whole_tensors: q, k, v and dout [num_tokens, heads, head_dim].
        rows: the queries, of which the truth is.
        heads: query heads that are computed, the share of the others left 0; None: all.
    """
    q, k, v, dout = whole_tensors
    hidden = ~torch.from_numpy(mask.dense(rows.numpy(), range(len(k))))
    scale, ratio = 1 / math.sqrt(q.shape[2]), q.shape[1] // k.shape[1]
    shapes = (len(rows), *q.shape[1:]), (len(rows), *q.shape[1:]), k.shape, v.shape
    truth = {n: torch.zeros(s, dtype=torch.float64) for n, s in zip(NAMES, shapes, strict=True)}
    for head in range(q.shape[1]) if heads is None else heads:
        queries, d = q[rows, head].double(), dout[rows, head].double()
        keys, values = k[:, head // ratio].double(), v[:, head // ratio].double()
        scores = (queries @ keys.T * scale).masked_fill_(hidden, -torch.inf)
        p = scores.softmax(-1).masked_fill_(hidden, 0.0)  # nan on rows that see nothing
        out = p @ values
        ds = p * (d @ values.T - (d * out).sum(-1, keepdim=True)) * scale
        truth["out"][:, head], truth["dq"][:, head] = out, ds @ keys
        truth["dk"][:, head // ratio] += ds.T @ queries
        truth["dv"][:, head // ratio] += p.T @ d
    return truth
