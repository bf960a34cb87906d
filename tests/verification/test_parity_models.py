"""Models as people write them: projections in the root, in containers, in loops; odd gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tilewise as tw
from tilewise_verify import diagnosis, parity
from tilewise_verify.comparison import Comparison
from tilewise_verify.records import Record

T, HEADS, DIM = 48, 4, 8
WIDTH = HEADS * DIM


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads_first = (x.transpose(-3, -2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(-3, -2)


class Flat(nn.Module):
    """q, k, v and out directly under the root."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.attend: Any = sdpa

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, DIM)) for f in (self.q, self.k, self.v))
        return (self.out(self.attend(q, k, v).flatten(-2)) * w).sum()


class Listed(nn.Module):
    """Two layers, in ModuleLists that the root loops over."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2)])
        self.o = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.attend: Any = sdpa

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        for qkv, out in zip(self.qkv, self.o, strict=True):
            q, k, v = qkv(x).unflatten(-1, (3, HEADS, DIM)).unbind(-3)
            x = x + out(self.attend(q, k, v).flatten(-2))
        return (x * w).sum()


class Keyed(nn.Module):
    """A layer's parts in a ModuleDict, within a ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        names = ("q", "k", "v", "out")
        self.parts = nn.ModuleList(
            [nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names})]
        )
        self.attend: Any = sdpa

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        for part in self.parts:
            q, k, v = (part[name](x).unflatten(-1, (HEADS, DIM)) for name in ("q", "k", "v"))  # pyright: ignore
            x = x + part["out"](self.attend(q, k, v).flatten(-2))  # pyright: ignore
        return (x * w).sum()


class Nested(nn.Module):
    """The flat model as the only child of a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Flat()

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return self.inner(x, w)


MODELS = (Flat, Listed, Keyed, Nested)


def share(model: Any, inputs: Any, rank: int, group: Any, attend: Any = None) -> Any:
    cp = tw.ContextParallel(group, num_tokens=T, mask=tw.Causal())
    holder = model.inner if isinstance(model, Nested) else model
    holder.attend = cp.attention if attend is None else attend(cp)
    return model(cp.shard(inputs["x"], 0), cp.shard(inputs["w"], 0)), cp.position_ids


def made(kind: type[nn.Module]) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(3)
    return kind(), {"x": torch.randn(T, WIDTH), "w": torch.randn(T, WIDTH)}


FAULTS: dict[str, tuple[Any, str]] = {
    "own shard": (lambda cp: sdpa, "shard_only"),
    "no mask": (lambda cp: lambda *x: cp.attention(*x, mask=tw.Full()), "mask_ignored"),
    "scale": (lambda cp: lambda *x: cp.attention(*x, softmax_scale=0.2), "scale_wrong"),
    "window": (
        lambda cp: lambda *x: cp.attention(*x, mask=tw.Causal() & tw.Window(5, 0)),
        "window",
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_right_split_is_equal(kind: type[nn.Module]):
    report = tw.parity(*made(kind), share, world_size=3, backend="loopback")
    assert report.equal, str(report)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named_wherever_projections_stand(kind: type[nn.Module], fault: str):
    attend, cause = FAULTS[fault]

    def split(*given: Any) -> Any:
        return share(*given, attend=attend)

    # Contiguous rows, so that a shard by itself is causal.
    report = tw.parity(*made(kind), split, world_size=3, backend="loopback")
    assert not report.equal
    assert report.cause is not None
    assert report.cause.startswith(cause), str(report)


def test_a_fault_in_the_second_layer_of_a_loop_is_read_there():
    def split(model: Any, inputs: Any, rank: int, group: Any) -> Any:
        calls: list[int] = []

        def attend(cp: tw.ContextParallel) -> Any:
            def call(*x: Tensor) -> Tensor:
                calls.append(1)
                return cp.attention(*x, mask=tw.Causal() if len(calls) % 2 else tw.Full())

            return call

        return share(model, inputs, rank, group, attend)

    report = tw.parity(*made(Listed), split, world_size=3, backend="loopback")
    assert report.cause == "mask_ignored", str(report)
    assert [d.name for d in report.deviations if d.kind == "output"] == ["o.1"]


def test_a_diagnosis_that_fails_does_not_hide_that_runs_differ(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: Any) -> Any:
        raise KeyError("nobody thought of this")

    monkeypatch.setattr(diagnosis.Examination, "diagnosis", fails)
    wrong = lambda *given: share(*given, attend=lambda cp: sdpa)  # noqa: E731
    report = tw.parity(*made(Flat), wrong, world_size=3, backend="loopback")
    assert (report.equal, report.cause) == (False, "unknown")
    assert "the diagnosis failed (KeyError: 'nobody thought of this')" in str(report)
    assert tw.parity(*made(Flat), share, world_size=3, backend="loopback").equal


@pytest.mark.parametrize(("share", "equal"), [(-3.2820207, True), (-3.2810207, False)])
def test_losses_that_cancel_are_compared_by_what_they_add_up(share: float, equal: bool):
    """The runs of an Intel Xeon: 1,536 products, of which disturbed runs show no error by luck."""
    generator = torch.Generator().manual_seed(3)
    out, w = (torch.randn(T, WIDTH, generator=generator).double() for _ in range(2))
    whole = Record(loss=-3.2820213)
    whole.outputs["out"], whole.tables["gradient"]["out"] = out, w
    ranks, noisy = [Record(loss=share / 3) for _ in range(3)], [Record(loss=whole.loss)]
    counted, eps = torch.ones(T, dtype=torch.bool), torch.finfo(torch.float32).eps
    comparison = Comparison(whole, ranks, [torch.arange(T)] * 3, noisy, counted, eps)
    assert (comparison.loss_difference() is None) == equal
    assert (not parity._undiagnosed(KeyError(), comparison, [])) == equal


class TwoHeads(nn.Module):
    """A loss of two terms, the second of a head that predicts a later token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.first, self.second = (nn.Linear(WIDTH, 16) for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor, later: Tensor, parts: int = 1) -> Tensor:
        x = self.embed(input_ids)
        losses = [
            F.cross_entropy(head(x).flatten(0, 1), wanted.flatten(), reduction="sum") / T
            for head, wanted in ((self.first, labels), (self.second, later))
        ]
        return losses[0] + 0.3 * losses[1] / parts


def test_a_term_of_the_loss_that_is_divided_by_ranks_is_not_the_whole_loss():
    def split(model: Any, inputs: Any, rank: int, group: Any) -> Any:
        cp = tw.ContextParallel(group, num_tokens=T)
        return model(**{k: cp.shard(x, 1) for k, x in inputs.items()}, parts=3), cp.position_ids

    torch.manual_seed(0)
    ids = torch.randint(0, 16, (1, T))
    inputs = {"input_ids": ids, "labels": ids.roll(-1, 1), "later": ids.roll(-2, 1)}
    report = tw.parity(TwoHeads(), inputs, split, world_size=3, backend="loopback")
    assert (report.equal, report.cause) == (False, "unknown"), str(report)
    assert "the gradient at second is 0.3333, 0.3333, 0.3333 times what is" in str(report)


def raises(model: Any, inputs: Any, rank: int, group: Any) -> Any:
    raise ValueError("nothing to do")


@pytest.mark.parametrize("backend", ["loopback", "gloo"])
def test_an_error_of_the_split_says_where_it_was_raised(backend: str):
    report = tw.parity(*made(Flat), raises, world_size=2, backend=backend)
    line = raises.__code__.co_firstlineno + 1
    assert f"ValueError: nothing to do ({__file__}:{line}, in raises)" in str(report)


class Pair(nn.Module):
    """Two projections under a root that returns a number alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()).square().sum()


def test_a_model_that_gives_no_rows_is_diagnosed():
    def split(model: Any, inputs: Any, rank: int, group: Any) -> Any:
        cp = tw.ContextParallel(group, num_tokens=16)
        model.second.register_forward_pre_hook(lambda _, args: (1.3 * args[0],))
        return model(cp.shard(inputs["x"], 0)), cp.position_ids

    torch.manual_seed(0)
    report = tw.parity(Pair(), {"x": torch.randn(16, 8)}, split, backend="loopback")
    assert (report.equal, report.cause) == (False, "unknown"), str(report)
    assert "the diagnosis failed" not in str(report)


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize(
    ("factor", "cause"), [(0.25, "gradient_scaled"), (1.0, None), (4.0, "gradient_scaled")]
)
def test_gradients_that_are_reduced_are_no_shares(factor: float, cause: str | None):
    """Each rank has the whole gradient times a number: 1 / n is right as a sum, but it is none."""

    def split(model: Any, inputs: Any, rank: int, group: Any) -> Any:
        cp = tw.ContextParallel(group, num_tokens=16)
        loss = model.layers(cp.shard(inputs["x"], 0)).square().sum() / 64
        loss.backward()
        ranks = tw.ContextParallel(group, num_tokens=4, layout=tw.contiguous(4, 4))
        for p in model.parameters():
            total = ranks.gather(p.grad.flatten()[None]).sum(0)
            p.grad = (factor * total).view_as(p).detach()
        return loss.detach(), cp.position_ids

    torch.manual_seed(0)
    report = tw.parity(Square(), {"x": torch.randn(16, 8)}, split, backend="loopback")
    assert (report.equal, report.cause) == (cause is None, cause), str(report)
    assert cause is None or f"{factor:.4g} times what is right" in str(report)
