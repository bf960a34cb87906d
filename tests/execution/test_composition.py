"""Attention inside what models are built of: FSDP2, tensor parallelism, DTensor, compiler, saving.

Each case runs on 2 x 2 processes and is compared with the same model in one process, nothing split.
"""

import copy
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from processes.launcher import run_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import tilewise as tw

BATCH, TOKENS, HEADS, KV_HEADS, HEAD_DIM = 2, 23, 4, 2, 8
WIDTH = HEADS * HEAD_DIM
Attention = Callable[..., Tensor]


class Block(nn.Module):
    """Attention and a feed-forward layer, both residual; heads are whatever its weights give."""

    def __init__(self, sinks: bool = False) -> None:
        super().__init__()
        self.sink = nn.Parameter(torch.linspace(-1, 1, HEADS).double()) if sinks else None
        linear = partial(nn.Linear, bias=False, dtype=torch.float64)
        self.q, self.o = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.k, self.v = (linear(WIDTH, KV_HEADS * HEAD_DIM) for _ in range(2))
        self.up, self.down = linear(WIDTH, 2 * WIDTH), linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, attend: Attention) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HEAD_DIM)) for f in (self.q, self.k, self.v))
        out = attend(q, k, v) if self.sink is None else attend(q, k, v, sink=self.sink)
        x = x + self.o(out.flatten(-2))
        return x + self.down(self.up(x).tanh())


class Model(nn.Module):
    def __init__(self, save: str = "all") -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(save == "sinks") for _ in range(2)])
        self.save = save

    def forward(self, x: Tensor, attend: Attention) -> Tensor:
        for block in self.blocks:
            x = self.saving(block)(x, attend)
        return x

    def saving(self, block: nn.Module) -> Callable[[Tensor, Attention], Tensor]:
        if self.save in ("all", "sinks"):
            return block
        chosen = {"context_fn": selective} if self.save == "selective" else {}
        return partial(checkpoint, block, use_reentrant=False, **chosen)


def selective() -> tuple:
    """Save what attention returns, compute all else anew."""

    def policy(ctx, op, *args, **kwargs) -> CheckpointPolicy:
        saved = op == torch.ops.tilewise.attention.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def dense(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Tensor:
    q, k, v = (x.transpose(-2, -3) for x in (q, k, v))
    if sink is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(-2, -3)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, -3) for x in (k, v))
    scores = q @ k.mT * HEAD_DIM**-0.5
    scores = scores.masked_fill(~torch.ones_like(scores).tril().bool(), -torch.inf)
    column = sink[:, None, None].expand(*scores.shape[:-1], 1)
    return (torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v).transpose(-2, -3)


def tensors() -> tuple[Tensor, Tensor]:
    """The input of all ranks, and the gradient of its output."""
    make = torch.Generator().manual_seed(1)
    x = torch.randn(2, BATCH, TOKENS, WIDTH, generator=make, dtype=torch.float64)
    return x[0], x[1]


def models(save: str) -> tuple[Model, dict[str, Tensor]]:
    """A model, the same on every rank, and the gradients and loss of an unsplit run of it."""
    torch.manual_seed(0)
    model = Model(save)
    whole = copy.deepcopy(model)
    x, dout = tensors()
    loss = (whole(x, dense) * dout).sum()
    loss.backward()
    grads = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    return model, {**grads, "loss": loss.detach()}


def shard_parameters(model: Model, mesh: DeviceMesh) -> None:
    """FSDP2 by block; gradients are sums over ranks, each of which has its share of the loss."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)


def split_heads(model: Model, mesh: DeviceMesh) -> None:
    """Tensor parallelism: each rank has some heads and some hidden features."""
    columns = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
    rows = dict.fromkeys(("o", "down"), RowwiseParallel())
    for block in model.blocks:
        parallelize_module(block, mesh, {**columns, **rows})


def differences(model: Model, loss: Tensor, wanted: dict[str, Tensor]) -> float:
    """The largest error of the loss and of every parameter's gradient."""
    got = {"loss": loss}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        got[name] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
    assert got.keys() == wanted.keys()
    return max(float((got[name] - wanted[name]).abs().max()) for name in wanted)


def train(cp: tw.ContextParallel, model: Callable, rows: slice, ranks: dist.ProcessGroup) -> Tensor:
    """One backward pass of this rank's rows and tokens; the loss of all ranks of a group."""
    x, dout = (cp.shard(whole[rows], dim=1) for whole in tensors())
    loss = (model(x, cp.attention) * dout).sum()
    loss.backward()
    loss = loss.detach().clone()
    dist.all_reduce(loss, group=ranks)
    return loss


def fsdp(save: str) -> float:
    """Data and context parallel; parameters sharded over all four ranks."""
    model, wanted = models(save)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    shard_parameters(model, init_device_mesh("cpu", (4,)))
    cp = tw.ContextParallel(mesh["cp"], num_tokens=TOKENS, mask=tw.Causal())
    row = mesh["dp"].get_local_rank()
    return differences(model, train(cp, model, slice(row, row + 1), dist.group.WORLD), wanted)


def tensor_parallel(save: str) -> float:
    """Heads split over two ranks, tokens over two; parameters sharded over both."""
    model, wanted = models(save)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    split_heads(model, mesh["tp"])
    shard_parameters(model, mesh["cp"])
    cp = tw.ContextParallel(mesh["cp"], num_tokens=TOKENS, mask=tw.Causal())
    loss = train(cp, model, slice(None), mesh["cp"].get_group())
    return differences(model, loss, wanted)


def compiled(save: str) -> float:
    """As fsdp, every block compiled whole before its parameters are sharded."""
    model, wanted = models(save)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    shard_parameters(model, init_device_mesh("cpu", (4,)))
    strategy = tw.mesh(2, q_tile=2)
    cp = tw.ContextParallel(mesh["cp"], num_tokens=TOKENS, mask=tw.Causal(), strategy=strategy)
    row = mesh["dp"].get_local_rank()
    return differences(model, train(cp, model, slice(row, row + 1), dist.group.WORLD), wanted)


def dtensors(kind: str) -> float:
    """DTensors in and out, tokens split along one axis of the mesh and heads along the other."""
    num_tokens = TOKENS + 1  # even: local_map computes global shapes as if all shards were equal
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    placed = [Shard(0), Shard(1)]
    layout = tw.contiguous(num_tokens, 2)  # as Shard(0) splits
    cp = tw.ContextParallel(mesh["cp"], num_tokens=num_tokens, mask=tw.Causal(), layout=layout)
    attend = local_map(cp.attention, placed, in_placements=(placed,) * 3, device_mesh=mesh)
    make = torch.Generator().manual_seed(2)
    shapes = [(num_tokens, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    *operands, dout = (torch.randn(s, generator=make, dtype=torch.float64) for s in shapes)
    split = [distribute_tensor(x, mesh, placed).requires_grad_() for x in operands]
    whole = [x.requires_grad_() for x in operands]
    out, wanted = attend(*split), dense(*whole)
    (out * distribute_tensor(dout, mesh, placed)).sum().full_tensor().backward()
    (wanted * dout).sum().backward()
    pairs = [(out, wanted), *((a.grad, b.grad) for a, b in zip(split, whole, strict=True))]
    assert out.placements == tuple(placed)
    return max(float((a.full_tensor() - b).abs().max()) for a, b in pairs)


CASES: list[tuple[Callable[[str], float], str]] = [
    *((fsdp, save) for save in ("all", "nothing", "selective", "sinks")),
    *((tensor_parallel, save) for save in ("all", "selective")),
    (dtensors, "local_map"),
]


def several(rank: int, cases: list[tuple[Callable[[str], float], str]]) -> list[float]:
    """One world for many cases: starting one takes longer than they do."""
    warnings.simplefilter("ignore")  # of torch's own, about its compiler
    return [case(kind) for case, kind in cases]


def refusals(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    half = DeviceMesh("cpu", [0, 1])
    cp = tw.ContextParallel(mesh["cp"], num_tokens=TOKENS)
    x = distribute_tensor(torch.randn(TOKENS, HEADS, HEAD_DIM), mesh, (Shard(0), Shard(1)))
    attempts = [
        lambda: tw.ContextParallel(mesh, num_tokens=TOKENS),
        lambda: tw.ContextParallel(init_device_mesh("cpu", (2, 2)), num_tokens=TOKENS),
        lambda: mesh["dp"],
        lambda: cp.attention(x, x, x),
        lambda: tw.ContextParallel(half, num_tokens=TOKENS).world_size,
    ]
    said = []
    for attempt in attempts:
        try:
            said.append(str(attempt()))
        except (ValueError, KeyError) as error:
            said.append(str(error))
    return said


def cases_and_refusals(rank: int) -> tuple[list[float], list[str]]:
    return several(rank, CASES), refusals(rank)


@pytest.fixture(scope="module")
def ranks() -> list[tuple[list[float], list[str]]]:
    return run_processes(4, cases_and_refusals)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{f.__name__}-{k}" for f, k in CASES])
def test_a_model_split_in_two_ways_is_the_unsplit_one(number: int, ranks):
    assert max(errors[number] for errors, _ in ranks) < 1e-11


@pytest.mark.slow
def test_a_compiled_model_within_fsdp_is_the_unsplit_one():
    cases = [(compiled, "all"), (compiled, "selective")]
    for errors in run_processes(4, several, cases):
        assert max(errors) < 1e-11


def test_a_mesh_or_tensor_that_does_not_fit_is_refused(ranks):
    (_, inside), *_, (_, outside) = ranks
    named, unnamed, missing, dtensor, _ = inside
    assert "2 dimensions ('cp', 'tp'); pass one of them, as in mesh[\"cp\"]" in named
    assert "mesh_dim_names=" in unnamed
    assert "'dp'" in missing and "['cp', 'tp']" in missing
    assert "q is a DTensor; call attention through local_map" in dtensor
    assert inside[-1] == "2" and outside[:-1] == inside[:-1]
    assert "rank 3 is not in the mesh of ranks [0, 1]" in outside[-1]
