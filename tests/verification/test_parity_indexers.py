"""Parity names faults of layers whose indexer chooses keys, and finds none in right splits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tilewise as tw
from tilewise_verify import hf_shrink

T, WIDTH, K, VOCABULARY = 32, 8, 3, 20


class Verbs:
    """What a layer needs of other tokens, on one process that has them all."""

    positions = key_positions = torch.arange(T)

    def gather(self, x: Tensor) -> Tensor:
        return x

    def choose(self, scores: Tensor) -> Tensor:
        return scores.topk(K, dim=-1).indices


class Split(Verbs):
    """The same on a rank, with a fault."""

    def __init__(self, cp: tw.ContextParallel, fault: str | None):
        self.cp, self.fault = cp, fault
        self.positions = cp.position_ids
        self.key_positions = self.positions if fault == "alone" else torch.arange(T)

    def gather(self, x: Tensor) -> Tensor:
        return x if self.fault == "alone" else self.cp.gather(x)

    def choose(self, scores: Tensor) -> Tensor:
        if self.fault != "ties":
            return super().choose(scores)
        return scores.shape[1] - 1 - scores.flip(-1).topk(K, dim=-1).indices


class Indexer(nn.Module):
    """Keys chosen by scores, which are all equal if it is told so."""

    def __init__(self, tied: bool):
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tied = tied

    def forward(self, x: Tensor, verbs: Verbs) -> Tensor:
        scores = F.softplus(self.q(x) @ verbs.gather(self.k(x)).T)
        if self.tied:
            scores = scores * 0
        hidden = verbs.key_positions > verbs.positions[:, None]
        return verbs.choose(scores.masked_fill(hidden, -torch.inf))


class Layer(nn.Module):
    def __init__(self, tied: bool):
        super().__init__()
        self.qkv, self.indexer = nn.Linear(WIDTH, 3 * WIDTH), Indexer(tied)

    def forward(self, x: Tensor, verbs: Verbs) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        chosen = self.indexer(x, verbs)
        keys, values = verbs.gather(k)[chosen], verbs.gather(v)[chosen]
        scores = torch.einsum("qd,qkd->qk", q, keys) / WIDTH**0.5
        hidden = verbs.key_positions[chosen] > verbs.positions[:, None]
        p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return x + torch.einsum("qk,qkd->qd", p, values)


class Model(nn.Module):
    def __init__(self, tied: bool = False):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(T, WIDTH)
        self.layers = nn.ModuleList([Layer(tied) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor, verbs: Verbs | None = None) -> Tensor:
        verbs = verbs or Verbs()
        x = self.embed(tokens) + self.places(verbs.positions)
        for layer in self.layers:
            x = layer(x, verbs)
        return F.cross_entropy(self.head(x), labels, reduction="sum") / T


def made(tied: bool) -> tuple[Model, dict[str, Tensor]]:
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (T,), generator=draw)
    return Model(tied), {"tokens": tokens, "labels": tokens.roll(-1)}


def share(fault: str | None, make: Callable[[int, int], tw.Layout]) -> Callable[..., Any]:
    def split(model: Any, inputs: dict[str, Tensor], rank: int, group: Any) -> Any:
        cp = tw.ContextParallel(group, num_tokens=T, layout=make(T, 4))
        verbs = Split(cp, fault)
        own = {name: x[cp.position_ids] for name, x in inputs.items()}
        return model(**own, verbs=verbs), cp.position_ids

    return split


@pytest.mark.parametrize("make", [tw.contiguous, tw.zigzag])
@pytest.mark.parametrize(
    ("fault", "tied", "cause"),
    [("alone", False, "index_restarts"), ("ties", True, "index_ties")],
)
def test_a_fault_of_an_indexer_is_named(fault: str, tied: bool, cause: str, make: Any):
    report = tw.parity(*made(tied), share(fault, make), backend="loopback")
    assert (report.equal, report.cause) == (False, cause), str(report)
    assert report.layer == "layers.0", str(report)


@pytest.mark.parametrize("tied", [False, True])
def test_another_way_to_break_ties_is_right_where_there_are_none(tied: bool):
    """And right splits raise no alarm."""
    fault = None if tied else "ties"
    report = tw.parity(*made(tied), share(fault, tw.zigzag), backend="loopback")
    assert report.equal and report.compared > 20, str(report)


def test_a_wrong_attention_is_not_laid_to_the_indexer():
    """Scores of attention are multiplied by another number, where the choice is right."""
    right = share(None, tw.zigzag)

    def split(model: Any, *given: Any) -> Any:
        for layer in model.layers:
            with torch.no_grad():
                layer.register_forward_hook(lambda module, args, out: out + 0.5 * (out - args[0]))
        return right(model, *given)

    report = tw.parity(*made(False), split, backend="loopback")
    assert not report.equal and not str(report.cause).startswith("index"), str(report)


def test_ties_of_a_model_of_transformers(monkeypatch: pytest.MonkeyPatch):
    """With one head many scores are 0: torch's top-k takes any of them, tilewise the first."""
    pytest.importorskip("transformers", reason="needs transformers, of the extra hf")
    from support.indexer_models import build, ids

    with monkeypatch.context() as change:
        change.setattr(hf_shrink, "INDEX_HEADS", 1)
        model = build("DeepseekV32")
    inputs = {"input_ids": ids(), "labels": ids()}
    report = tw.parity(model, inputs)
    assert report.cause == "index_ties" and "self_attn" in str(report.layer), str(report)
    assert tw.parity(build("DeepseekV32"), inputs).equal
