"""Canonical calls on this GPU: any split has the bits of one rank."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw

pytest.importorskip("triton")

from support.triton_whole_rows import DOCUMENTS, MORE, QUICK, Case, errors

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150, method="thread")]
BOUNDS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LARGE = {
    "large": Case(
        tw.Causal(),
        2000,
        (8, 2),
        (128, 128),
        plans=(
            (tw.all_gather(4), tw.zigzag),
            (tw.ulysses(2, inner=tw.all_gather(2)), tw.contiguous),
        ),
    ),
    "documents": Case(DOCUMENTS, widths=(64, 64), plans=((tw.all_gather(8), tw.striped),)),
}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", [*QUICK, *MORE, *LARGE])
def test_any_split_has_the_bits_of_one_rank(name: str, dtype: torch.dtype):
    case = {**QUICK, **MORE, **LARGE}[name]
    found = errors(case, torch.empty(0, dtype=dtype, device="cuda"))
    assert max(found.values()) < BOUNDS[dtype], found
