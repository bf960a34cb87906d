"""What makes keys and values of latents: whose gradients it finds, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from support.latents import Layer, draw_layer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tilewise as tw

N, TOKENS, HEADS, WIDTH, HEAD_DIM, V_DIM = 3, 11, 2, 6, 4, 5
SIZES = {"num_kv_heads": HEADS, "head_dim": HEAD_DIM, "v_head_dim": V_DIM}


class Up(nn.Module):
    """A layer that expands; one of its parameters is used by no row."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(WIDTH, HEADS * (HEAD_DIM + V_DIM), dtype=torch.float64)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self.both(rows).unflatten(-1, (HEADS, -1)).split([HEAD_DIM, V_DIM], -1)
        return k, v


def operands(rank: int, layout: tw.Layout) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    whole = (torch.randn(TOKENS, *x, dtype=torch.float64) for x in ((HEADS, HEAD_DIM), (WIDTH,)))
    q, latent = (layout.shard(x, rank, dim=0).clone().requires_grad_() for x in whole)
    return q, latent


def attend(rank: int, group: Any, wire: Any, layout: tw.Layout | None = None, **more: Any) -> Any:
    layout = layout or tw.zigzag(TOKENS, N)
    q, latent = operands(rank, layout)
    call = {"plan": tw.ring(N), "layout": layout, "mask": tw.Causal(), "group": group}
    return tw.attention(more.pop("q", q), more.pop("latent", latent), None, **call, wire=wire)


def grads_of(ways: Callable[[Up], Any], **more: Any) -> list[list[Tensor]]:
    """By rank the gradients of an expanding layer, given to attention in some way."""

    def on_rank(rank: int, group: Any) -> list[Tensor]:
        torch.manual_seed(1)
        up = Up()
        run = attend
        if more.get("checkpointed"):
            run = lambda *args: checkpoint(attend, *args, use_reentrant=False)  # noqa: E731
        run(rank, group, ways(up), more.get("layout")).square().sum().backward()
        return [x.grad for x in up.parameters() if x.grad is not None]

    return tw.loopback(N, on_rank)


def named(up: Up) -> tw.wire.Latent:
    def expand(rows: Tensor, positions: Tensor, weight: Tensor, bias: Tensor) -> Any:
        made = (rows @ weight.T + bias).unflatten(-1, (HEADS, -1))
        return made.split([HEAD_DIM, V_DIM], -1)

    return tw.wire.Latent(expand, params=(up.both.weight, up.both.bias), **SIZES)


WAYS: dict[str, Callable[[Up], tw.wire.Latent]] = {
    "module": lambda up: tw.wire.Latent(up, **SIZES),
    "closure": lambda up: tw.wire.Latent(lambda rows, at: up(rows, at), **SIZES),
    "method": lambda up: tw.wire.Latent(up.forward, **SIZES),
    "kept": lambda up: tw.wire.Latent(up, **SIZES, keep=True),
    "in a set": lambda up: tw.wire.Wires(latent=tw.wire.Latent(up, **SIZES)),  # pyright: ignore
}


@pytest.mark.parametrize("way", WAYS)
def test_weights_are_found_however_they_are_used(way: str):
    want, found = grads_of(named), grads_of(WAYS[way])
    for mine, wanted in zip(found, want, strict=True):
        used = [x for x in mine if x.dtype == torch.float64]
        assert len(used) == 2
        assert all(torch.allclose(*x, atol=1e-13) for x in zip(used, wanted, strict=True))
        assert len(mine) == (2 if way in ("closure", "method") else 3)
        assert all(not x.any() for x in mine if x.dtype != torch.float64)


def test_a_rank_without_rows_has_zeros():
    runs = [[tw.Run(0, TOKENS)], [], []]
    found = grads_of(WAYS["module"], layout=tw.Layout(TOKENS, runs))
    assert all(x.any() for x in found[0][1:])
    assert all(x is not None and not x.any() for mine in found[1:] for x in mine)


def test_checkpointing_gives_the_same_bits():
    want, found = grads_of(WAYS["module"]), grads_of(WAYS["module"], checkpointed=True)
    for mine, wanted in zip(found, want, strict=True):
        assert all(torch.equal(*x) for x in zip(mine, wanted, strict=True))


def test_backward_again_gives_the_same():
    def on_rank(rank: int, group: Any) -> None:
        for keep in (False, True):
            up = Up()
            out = attend(rank, group, tw.wire.Latent(up, **SIZES, keep=keep)).sum()
            first, second = (
                torch.autograd.grad(out, up.both.weight, retain_graph=True) for _ in range(2)
            )
            assert torch.equal(*first, *second) and first[0].any()

    tw.loopback(N, on_rank)


def test_nothing_is_computed_for_gradients_that_nobody_asks_for():
    seen = []

    def expand(rows: Tensor, positions: Tensor) -> Any:
        seen.append(torch.is_grad_enabled() or rows.requires_grad)
        return rows.new_ones(len(rows), HEADS, HEAD_DIM), rows.new_ones(len(rows), HEADS, V_DIM)

    with torch.no_grad():
        out = tw.loopback(1, lambda rank, group: one_rank(group, expand))
    assert not any(seen) and not out[0].requires_grad


def one_rank(group: Any, expand: Any) -> Tensor:
    layout = tw.zigzag(TOKENS, 1)
    q, latent = operands(0, layout)
    call = {"plan": tw.ring(1), "layout": layout, "mask": tw.Causal(), "group": group}
    return tw.attention(q, latent, None, **call, wire=tw.wire.Latent(expand, **SIZES))


def test_a_weight_changed_between_the_passes_is_an_error():
    up = Up()
    out = one_rank(None, up).sum()
    with torch.no_grad():
        up.both.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_gradients_have_no_gradients():
    up = Up()
    (grad,) = torch.autograd.grad(one_rank(None, up).sum(), up.both.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="attention has no second derivative"):
        grad.sum().backward()


def test_operands_may_be_encoded_besides():
    layer, layout, plan = draw_layer(TOKENS), tw.zigzag(TOKENS, N), tw.ring(N)
    narrow, latent = tw.wire.Plain("float32"), layer.wire((layer.w_k, layer.w_v))
    wire = tw.wire.Wires(narrow, narrow, narrow, latent)

    def on_rank(rank: int, group: Any) -> tuple[Tensor, int]:
        q, x = (layout.shard(x, rank, dim=0) for x in (layer.q, layer.latent))
        call = {"plan": plan, "layout": layout, "mask": tw.Causal(), "group": group}
        return tw.attention(q, x, None, **call, wire=wire), group.bytes_sent

    outs, moved = zip(*tw.loopback(N, on_rank), strict=True)
    error = (layout.unshard(outs, dim=0) - layer.dense(tw.Causal()).out).abs().max()
    assert 0 < error < 1e-5
    sizes = tw.wire.Wires(narrow, narrow, narrow, layer.wire((), width=layer.sizes.width))
    work = tw.Workload(TOKENS, *layer.sizes[:3], "float64", v_head_dim=6, wire=sizes)
    assert moved == tw.volume(plan, tw.Workload(**vars_of(work, mask=tw.Causal()))).forward


def vars_of(work: tw.Workload, **more: Any) -> dict[str, Any]:
    names = ("num_tokens", "num_heads", "num_kv_heads", "head_dim", "dtype", "v_head_dim", "wire")
    return {**{name: getattr(work, name) for name in names}, **more}


def ones(rows: Tensor, *widths: int) -> Any:
    return tuple(rows.new_ones(len(rows), HEADS, width) for width in widths)


def latent(expand: Any, **more: Any) -> dict[str, Any]:
    return {"wire": tw.wire.Latent(expand, **{**SIZES, **more})}


def random_keys(rows: Tensor, positions: Tensor) -> Any:
    k, v = ones(rows, HEAD_DIM, V_DIM)
    return k * torch.rand(()).to(k), v


class Alternating:
    """Other values at every second call."""

    calls = 0

    def __call__(self, rows: Tensor, positions: Tensor) -> Any:
        self.calls += 1
        k, v = ones(rows, HEAD_DIM, V_DIM)
        return k * (self.calls % 2), v


RIGHT: Any = lambda rows, at: ones(rows, HEAD_DIM, V_DIM)  # noqa: E731
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a row less": (
        latent(lambda rows, at: ones(rows[:-1], HEAD_DIM, V_DIM)),
        r"expand made k \(\d, 2, 4\) of \d rows, but must make \(\d, 2, 4\)",
    ),
    "an even number": (
        latent(lambda rows, at: ones(rows[: len(rows) // 2 * 2], HEAD_DIM, V_DIM)),
        "and no row more or less",
    ),
    "width of v": (latent(lambda rows, at: ones(rows, HEAD_DIM, 3)), r"expand made v \(\d, 2, 3\)"),
    "only k": (latent(lambda rows, at: ones(rows, HEAD_DIM)), "expand returned tuple, but must"),
    "dtype": (
        latent(lambda rows, at: ones(rows.float(), HEAD_DIM, V_DIM)),
        "expand made k of float32 on cpu, but q is float64",
    ),
    "random": (latent(random_keys), "two answers for the same rows; it must be deterministic"),
    "alternating": (latent(Alternating()), "two answers for the same rows"),
    "fails": (latent(lambda rows, at: rows.nonsense), "no attribute 'nonsense'"),
    "no expand": (latent(None), "the latent has no expand; pass tw.wire.Latent"),
    "width": (latent(RIGHT, width=7), "width of the latent is 7, not 6; make them equal"),
    "head_dim": (latent(RIGHT, head_dim=8), "head_dim of the latent is 8, not 4"),
    "heads": (latent(RIGHT, num_kv_heads=3), r"num_heads \(2\) must be a multiple of .* \(3\)"),
    "dimensions": (
        {**latent(RIGHT), "latent": torch.zeros(4, 1, 6).double()},
        r"q \(\d, 2, 4\) and the latent \(4, 1, 6\) must be \[tokens, heads, head_dim\]",
    ),
    "rows": ({**latent(RIGHT), "latent": torch.zeros(9, 6).double()}, "9 tokens on rank 1.* 4 of"),
    "dtype of latents": (
        {**latent(RIGHT), "latent": torch.zeros(4, 6)},
        r"q, the latent have dtype torch.float64, torch.float32; they must be equal",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_every_rank_hears_what_is_wrong_on_one(what: str):
    def on_rank(rank: int, group: Any) -> str:
        changed = WRONG[what][0] if rank == 1 else latent(RIGHT)
        with pytest.raises(ValueError) as error:
            attend(rank, group, **changed)
        return str(error.value)

    first, *others = tw.loopback(N, on_rank)
    assert others == [first] * (N - 1) and first.startswith("rank 1: ")
    with pytest.raises(ValueError, match=WRONG[what][1]):
        raise ValueError(first)


def test_values_beside_latents_are_refused():
    q = torch.zeros(TOKENS, HEADS, HEAD_DIM)
    call = {"plan": tw.ring(1), "layout": tw.zigzag(TOKENS, 1), "mask": tw.Full()}
    with pytest.raises(ValueError, match=r"v is \(11, 2, 4\), but expand makes v of the latent"):
        tw.attention(q, torch.zeros(TOKENS, WIDTH), q, **call, **latent(RIGHT))
    with pytest.raises(ValueError, match=r"v \(None\) must be a Tensor"):
        tw.attention(q, q, None, **call)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"width": None}, r"width of the latent \(None\) is not known; pass width="),
        ({"width": 8, "num_kv_heads": 3}, "num_kv_heads of the latent is 3, not 2"),
        ({"width": 8, "v_head_dim": 9}, "v_head_dim of the latent is 9, not 4"),
        ({"width": 0}, r"width \(0\) must be at least 1"),
    ],
)
def test_a_workload_knows_the_sizes_of_its_latent(sizes: dict[str, Any], message: str):
    given = {"num_kv_heads": 2, "head_dim": 4, "v_head_dim": 4, **sizes}
    with pytest.raises(ValueError, match=message):
        tw.Workload(TOKENS, 2, 2, 4, wire=tw.wire.Latent(None, **given))


def test_a_workload_holds_no_weights():
    wire = tw.wire.Latent(RIGHT, params=[torch.ones(3)], **SIZES, width=6)
    work = tw.Workload(TOKENS, HEADS, HEADS, HEAD_DIM, v_head_dim=V_DIM, wire=wire)
    assert work.wires.latent == wire and hash(work.wires.latent) == hash(wire)
    assert work.wire.latent.expand is None and not work.wire.latent.params  # pyright: ignore


def checkpointed(function: Any, *tensors: Tensor, reentrant: bool) -> Tensor:
    return checkpoint(function, *tensors, use_reentrant=reentrant)  # pyright: ignore


def offloaded(function: Any, *tensors: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return function(*tensors)


def compiled(function: Any, *tensors: Tensor) -> Tensor:
    """A block that is compiled around attention, which runs outside."""
    inside = torch.compiler.disable(function)
    return torch.compile(lambda *x: inside(*(y * 1.0 for y in x)) * 1.0, backend="eager")(*tensors)


HOOKS: dict[str, Callable[..., Tensor]] = {
    "checkpoint": partial(checkpointed, reentrant=False),
    "reentrant checkpoint": partial(checkpointed, reentrant=True),
    "offloading": offloaded,
    "checkpoint in offloading": lambda f, *x: offloaded(partial(HOOKS["checkpoint"], f), *x),
    "compiled": compiled,
}


class Drawn(NamedTuple):
    """Two layers of latents and a way to split them."""

    layers: list[Layer]
    plan: tw.Plan
    layout: tw.Layout
    mask: tw.Mask

    def attend(self, layer: Layer, group: Any, keep: bool, *given: Tensor) -> Tensor:
        """Args: given: q, the latents, w_k and w_v."""
        wire = layer.wire(given[2:], keep=keep)
        call = {"plan": self.plan, "layout": self.layout, "mask": self.mask, "group": group}
        return tw.attention(*given[:2], None, **call, wire=wire)

    def gradients(self, keep: bool, through: Any) -> list[list[Tensor]]:
        """By rank those of both layers, whose messages must not meet."""

        def on_rank(rank: int, group: Any) -> list[Tensor]:
            leaves: list[Tensor] = []
            total = torch.zeros((), dtype=torch.float64)
            for layer in self.layers:
                rows = (self.layout.shard(x, rank) for x in (layer.q, layer.latent))
                given = [x.clone().requires_grad_() for x in (*rows, layer.w_k, layer.w_v)]
                out = through(partial(self.attend, layer, group, keep), *given)
                total = total + (out * self.layout.shard(layer.dout, rank)).sum()
                leaves += given
            total.backward()
            return [x.grad for x in leaves if x.grad is not None]

        return tw.loopback(self.plan.world_size, on_rank)


def drawn(draw: Random) -> Drawn:
    n = draw.choice((1, 2, 4))
    makers = (tw.ring, tw.all_gather, tw.ulysses, tw.mesh, lambda n: tw.double_ring(n, 1))
    layout = draw.choice((tw.contiguous, tw.zigzag, tw.striped))(draw.choice((5, 12, 17)), n)
    mask = draw.choice((tw.Full(), tw.Causal(), tw.Causal() & tw.Window(3, 0)))
    layers = [draw_layer(layout.num_tokens, seed=draw.randrange(99)) for _ in range(2)]
    return Drawn(layers, draw.choice(makers)(n), layout, mask)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("hooks", HOOKS)
def test_saved_tensors_hooks_of_the_caller_change_nothing(hooks: str, keep: bool):
    draw = Random(f"{hooks} {keep}")
    for _ in range(8):
        case = drawn(draw)
        want = case.gradients(False, lambda function, *given: function(*given))
        found = case.gradients(keep, HOOKS[hooks])
        for mine, wanted in zip(found, want, strict=True):
            assert len(mine) == len(wanted) == 8
            assert all(torch.allclose(*x, rtol=1e-12) for x in zip(mine, wanted, strict=True))


DEPENDENT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda r, at: r - r.mean(0),
    "largest": lambda r, at: r / r.abs().max(),
    "smallest": lambda r, at: r - r.min(),
    "running sum": lambda r, at: r.cumsum(0),
    "number of the row": lambda r, at: r * torch.arange(len(r))[:, None],
    "number of rows": lambda r, at: r * len(r),
    "table by number": lambda r, at: r + torch.linspace(0, 1, 99)[: len(r), None],
    "neighbour": lambda r, at: r + r.roll(1, 0),
    "first row": lambda r, at: r + r[:1],
    "softmax over rows": lambda r, at: r.softmax(0),
    "first position": lambda r, at: r * (1 + at - at[0])[:, None],
}


@pytest.mark.parametrize("what", DEPENDENT)
@pytest.mark.parametrize("tokens_alike", [False, True])
def test_rows_that_depend_on_one_another_are_refused(what: str, tokens_alike: bool):
    def expand(rows: Tensor, positions: Tensor) -> Any:
        made = DEPENDENT[what](rows, positions)[:, None, :HEAD_DIM].expand(-1, HEADS, -1)
        return made, rows.new_ones(len(rows), HEADS, V_DIM)

    def on_rank(rank: int, group: Any) -> str:
        more = {"latent": tw.zigzag(TOKENS, N).shard(torch.ones(TOKENS, WIDTH).double(), rank)}
        with pytest.raises(ValueError) as error:
            attend(rank, group, **latent(expand), **(more if tokens_alike else {}))
        return str(error.value)

    (message,) = set(tw.loopback(N, on_rank))
    assert "other k and v of a row where other rows stand beside it" in message


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_products_that_round_differently_are_taken(dtype: torch.dtype):
    """A large layer after a norm, with rotary parts: single rows differ in their last bits."""
    torch.manual_seed(0)
    weight, norm = torch.randn(512, 8 * 96).to(dtype) / 16, nn.RMSNorm(512, dtype=dtype)
    frequencies = 1e4 ** -torch.linspace(0, 1, 32)

    def expand(rows: Tensor, positions: Tensor) -> Any:
        k, v = (norm(rows) @ weight).unflatten(-1, (8, 96)).split([64, 32], -1)
        angle = positions[:, None] * frequencies
        turn = torch.cat([angle.cos(), angle.sin()], -1)[:, None].to(dtype)
        return k * turn, v

    layout = tw.zigzag(TOKENS, 1)
    wire = tw.wire.Latent(expand, num_kv_heads=8, head_dim=64, v_head_dim=32)
    q, rows = torch.randn(TOKENS, 8, 64).to(dtype), 30 * torch.randn(TOKENS, 512).to(dtype)
    tw.attention(q, rows, None, plan=tw.ring(1), layout=layout, mask=tw.Causal(), wire=wire)
