"""A kernel for lists of keys is tried beside plain torch before its first call of a kind."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise.indexed.lists import REFERENCE, ListKernel, proven

NAMES = "out", "lse", "dq", "dk", "dv"


def faulty(wrong: str | None, tried: list[Any]) -> ListKernel:
    """Plain torch, with a wrong result; what it is called with is noted."""

    def spoiled(names: tuple[str, ...], results: tuple[Tensor, ...]) -> Any:
        pairs = zip(names, results, strict=True)
        return tuple(x + 0.2 * x.abs().max() * (name == wrong) for name, x in pairs)

    def forward(*given: Any) -> Any:
        tried.append(given[0].shape)
        out, lse = REFERENCE.forward(*given)
        return out + 0.2 * (wrong == "out"), lse + 0.4 * (wrong == "lse")

    return ListKernel(forward, lambda *given: spoiled(NAMES[2:], REFERENCE.backward(*given)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wrong", NAMES)
def test_a_kernel_with_a_wrong_result_is_refused(wrong: str, dtype: torch.dtype):
    q = torch.zeros(5, 6, 24, dtype=dtype)
    with pytest.raises(ValueError, match=f"gives another {wrong} than plain torch on cpu"):
        proven(faulty(wrong, []), q, 2, 40)


def test_a_kernel_is_tried_once_for_each_kind():
    tried: list[Any] = []
    kernel = faulty(None, tried)
    for q in (torch.zeros(5, 6, 24), torch.zeros(2, 7, 6, 24), torch.zeros(5, 6, 16)):
        assert proven(kernel, q, 2, 40) is kernel
    assert [list(shape) for shape in tried] == [[3, 6, 24], [3, 6, 16]]


def test_plain_torch_is_not_tried(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tilewise.indexed.lists._try", None)
    assert proven(REFERENCE, torch.zeros(5, 6, 24), 2, 40) is REFERENCE
