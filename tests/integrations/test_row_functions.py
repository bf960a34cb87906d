"""Which functions of logits a rank may run on its own rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise.integrations.transformers.row_functions import by_token

LABELS = torch.zeros(1, 8, dtype=torch.int64)
TAKEN: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "argmax": lambda x, _: x.argmax(-1),
    "argmax by number": lambda x, _: torch.argmax(x, dim=2),
    "the largest": lambda x, _: x.max(-1).values,
    "the best three": lambda x, _: x.topk(3).indices,
    "probability": lambda x, _: x.float().softmax(-1).max(-1)[0],
    "entropy": lambda x, _: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1),
    "scaled": lambda x, _: (x / 0.7).half().argmax(-1, keepdim=True),
    "as they are": lambda x, _: x,
}
NOT_TAKEN: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "the last token": lambda x, _: x[:, -1],
    "shifted": lambda x, _: x[:, :-1].argmax(-1),
    "over tokens": lambda x, _: x.argmax(1),
    "over all": lambda x, _: x.argmax(),
    "centred": lambda x, _: x - x.mean(1, keepdim=True),
    "sorted in place": lambda x, _: x.sort(1).values,
    "cumulative": lambda x, _: x.cumsum(1).argmax(-1),
    "labels": lambda x, labels: x.argmax(-1) == labels,
    "their number": lambda x, _: x * x.shape[1],
    "numpy": lambda x, _: torch.from_numpy(x.numpy().argmax(-1)),
    "several": lambda x, _: (x.argmax(-1), x.amax(-1)),
    "turned": lambda x, _: x.transpose(1, 2).argmax(-1),
    "changed": lambda x, _: x.mul_(2).argmax(-1),
    "rolled": lambda x, _: x.roll(1, 1),
    "a constant": lambda x, _: torch.zeros(x.shape[:2]),
    "another's weights": lambda x, _: x * torch.arange(x.shape[1])[:, None],
    "a normed row": lambda x, _: torch.nn.functional.normalize(x, dim=1),
    "an error": lambda x, labels: x[labels],
    "nothing": lambda x, _: None,
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_acts_on_each_token_is_found(name: str):
    logits = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(0))
    result = by_token(TAKEN[name], logits, LABELS)
    assert result is not None
    whole = TAKEN[name](logits, LABELS)
    assert torch.equal(result, whole)
    for t in range(8):
        assert torch.equal(TAKEN[name](logits[:, t : t + 1], LABELS), whole[:, t : t + 1])


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_anything_else_is_not(name: str):
    logits = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    assert by_token(NOT_TAKEN[name], logits, LABELS) is None
    assert torch.equal(logits, before)
