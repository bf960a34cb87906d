"""Train a small hybrid model with its sequence split: a delta rule, short convolutions, attention.

    python examples/hybrid.py                               # ranks are threads
    torchrun --nproc-per-node 4 examples/hybrid.py          # ranks are processes

Two documents are packed into one row, whose border lies inside a shard of the zigzag layout. The
model is trained split and unsplit; the losses must be equal.
"""

import copy
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import tilewise as tw

VOCABULARY, WIDTH, HEADS, DIM, KERNEL = 48, 32, 2, 8, 4
NUM_TOKENS, CU_SEQLENS, STEPS, TOLERANCE = 70, (0, 29, 70), 5, 1e-9


class DeltaRule(nn.Module):
    """A gated delta rule after a short convolution (Yang et al. 2024, arXiv 2412.06464).

    S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T,  out_t = q_t S_t.
    """

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * DIM)
        self.filter = nn.Parameter(0.5 * torch.randn(3 * HEADS * DIM, KERNEL))
        self.gates = nn.Linear(WIDTH, 2 * HEADS)
        self.out = nn.Linear(HEADS * DIM, WIDTH)

    def forward(self, x: Tensor, cp: tw.ContextParallel) -> Tensor:
        mixed = cp.conv1d(self.qkv(x), self.filter, activation="silu", cu_seqlens=CU_SEQLENS)
        q, k, v = mixed.unflatten(-1, (3, HEADS, DIM)).unbind(1)
        gates = self.gates(x).sigmoid().unflatten(-1, (2, HEADS)).unbind(1)
        sizes = [stop - start for start, stop in cp.pieces(CU_SEQLENS)]
        columns = [column.split(sizes) for column in (q, F.normalize(k, dim=-1), v, *gates)]
        pieces = list(zip(*columns, strict=True))
        # Each piece from nothing, for the linear map that it is; then from the state before it.
        maps = [delta_rule(*piece, torch.zeros(HEADS, DIM, DIM).to(x)) for piece in pieces]
        decays = torch.stack([decay for _, decay, _ in maps])
        updates = torch.stack([state for _, _, state in maps])
        before = cp.scan(decays, updates, matrix=True, cu_seqlens=CU_SEQLENS, dim=0)
        parts = [delta_rule(*piece, state)[0] for piece, state in zip(pieces, before, strict=True)]
        return self.out(torch.cat(parts).flatten(1))


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """out of a piece of tokens, its map of states [heads, d, d], and the state after it.

    Args:
        q, k, v: [tokens, heads, d].
        a, b: [tokens, heads].
        state: before the first token, [heads, d, d].
    """
    decay, out = torch.eye(DIM).to(q).expand(HEADS, -1, -1), []
    for t in range(len(q)):
        key, gate, rate = k[t, :, :, None], a[t, :, None, None], b[t, :, None, None]
        step = gate * (torch.eye(DIM).to(q) - rate * key @ key.mT)
        state, decay = step @ state + rate * key @ v[t, :, None], step @ decay
        out.append((q[t, :, None] @ state)[:, 0])
    return torch.stack(out), decay, state


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * DIM)
        self.out = nn.Linear(HEADS * DIM, WIDTH)

    def forward(self, x: Tensor, cp: tw.ContextParallel) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).unbind(1)
        return self.out(cp.attention(q, k, v).flatten(1))


class Hybrid(nn.Module):
    """Two layers of the delta rule around one of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([DeltaRule(), Attention(), DeltaRule()])
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in self.layers)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, cp: tw.ContextParallel) -> Tensor:
        """This rank's share of the mean loss of next tokens; tokens: its rows."""
        x = self.embedding(tokens)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x), cp)
        labels = cp.roll(tokens, -1, 0, CU_SEQLENS)
        total = F.cross_entropy(self.head(x), labels, reduction="sum")
        return cp.mean(total, (labels != -100).sum())


def train(group: object = None, layout: tw.Layout | None = None) -> list[float]:
    """The losses of a few steps on this rank of a group."""
    make = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (NUM_TOKENS,), generator=make)
    mask = tw.masks.causal_document(CU_SEQLENS)
    cp = tw.ContextParallel(group, num_tokens=NUM_TOKENS, mask=mask, layout=layout)  # pyright: ignore
    model = copy.deepcopy(initial())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(cp.shard(tokens, 0), cp)
        loss.backward()
        cp.sum_gradients(model)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def initial() -> Hybrid:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Hybrid().double()


def main() -> None:
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        losses = train(layout=tw.zigzag(NUM_TOKENS, dist.get_world_size()))
    else:
        layout = tw.zigzag(NUM_TOKENS, 4)
        losses = tw.loopback(4, lambda rank, group: train(group, layout))[0]
    whole = tw.loopback(1, lambda rank, group: train(group))[0]
    off = max(abs(a - b) for a, b in zip(losses, whole, strict=True))
    if not dist.is_initialized() or dist.get_rank() == 0:
        for step, (split, unsplit) in enumerate(zip(losses, whole, strict=True)):
            print(f"step {step}: loss {split:.6f} split, {unsplit:.6f} unsplit")
    if off > TOLERANCE:
        raise SystemExit(f"losses differ by {off:.3g}, more than {TOLERANCE:g}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
