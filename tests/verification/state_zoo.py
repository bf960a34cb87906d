"""A small hybrid model and its splits: states, short convolutions, documents, one fault each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from verification.zoo import Wrong

import tilewise as tw
from tilewise.transport.resolve import transport_for

VOCABULARY, WIDTH, HEADS, DIM, KERNEL = 40, 16, 2, 4, 4
T = 48


class Verbs:
    """What layers need of other tokens, on one process that has them all.

    Attributes:
        pieces: (start, stop) of documents.
    """

    def __init__(self, cu_seqlens: Sequence[int]):
        self.pieces = [*pairwise(cu_seqlens)]

    def sizes(self, x: Tensor) -> list[int]:
        """Tokens of the pieces; one piece is all rows, whatever their number."""
        return [b - a for a, b in self.pieces] if len(self.pieces) > 1 else [len(x)]

    def conv(self, x: Tensor, weight: Tensor) -> Tensor:
        """Short causal convolution of x [tokens, channels]."""
        parts = [F.pad(part.T, (KERNEL - 1, 0))[None] for part in x.split(self.sizes(x))]
        made = [F.conv1d(part, weight[:, None], groups=len(weight)) for part in parts]
        return torch.cat(made, -1)[0].T

    def states(self, maps: Tensor, updates: Tensor) -> Tensor:
        """The states before the pieces."""
        return torch.zeros_like(updates)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        documents = torch.repeat_interleave(torch.tensor(self.sizes(q)))
        allowed = torch.ones(len(q), len(q)).tril().bool() & (documents[:, None] == documents)
        heads_first = [x.transpose(0, 1) for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*heads_first, attn_mask=allowed)
        return out.transpose(0, 1)


class Mixer(nn.Module):
    """A layer that goes over tokens in order.

    kind: "delta": a gated delta rule after a convolution of q, k, v; "decay": a decaying sum of
    outer products (GLA) without a convolution; "early": a decaying sum of what modules make of a
    convolution's result, as Mamba does it; "conv": a gated short convolution (LFM2).
    """

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.verbs = kind, Verbs((0, T))
        wide = HEADS * DIM
        self.inner = nn.Linear(WIDTH, WIDTH if kind in ("early", "conv") else 3 * wide)
        self.gates = nn.Linear(WIDTH, WIDTH if kind == "conv" else 2 * HEADS)
        self.late = nn.Linear(WIDTH, 3 * wide) if kind == "early" else None
        if kind != "decay":
            self.filter = nn.Parameter(torch.randn(self.inner.out_features, KERNEL))
        self.out = nn.Linear(WIDTH if kind == "conv" else wide, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed, gates = self.inner(x), self.gates(x).sigmoid()
        if self.kind != "decay":
            mixed = self.verbs.conv(mixed, self.filter)
        if self.kind == "conv":
            return self.out(mixed * gates)
        mixed = mixed if self.late is None else self.late(F.silu(mixed))
        q, k, v = mixed.unflatten(-1, (3, HEADS, DIM)).unbind(-3)
        decay, rate = (0.8 + 0.2 * gates).unflatten(-1, (2, HEADS)).unbind(-2)
        rate = rate if self.kind == "delta" else torch.zeros_like(rate)
        k = F.normalize(k, dim=-1)
        sizes = self.verbs.sizes(x)
        columns = [column.split(sizes) for column in (q, k, v, decay, rate)]
        pieces = [*zip(*columns, strict=True)]
        none = torch.zeros(HEADS, DIM, DIM).to(x)
        maps, updates = zip(*(recurrence(*piece, none)[1:] for piece in pieces), strict=True)
        before = self.verbs.states(torch.stack(maps), torch.stack(updates))
        parts = [recurrence(*piece, s)[0] for piece, s in zip(pieces, before, strict=True)]
        return self.out(torch.cat(parts).flatten(-2))


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + k_t v_t^T, out_t = q_t S_t; out, map, last state."""
    total, outs = torch.eye(DIM).to(q).expand(HEADS, -1, -1), []
    for t in range(len(q)):
        key = k[t, :, :, None]
        step = decay[t, :, None, None] * (
            torch.eye(DIM).to(q) - rate[t, :, None, None] * key @ key.mT
        )
        state, total = step @ state + key @ v[t, :, None], step @ total
        outs.append((q[t, :, None] @ state)[:, 0])
    return torch.stack(outs), total, state


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.verbs = Verbs((0, T))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * HEADS * DIM), nn.Linear(HEADS * DIM, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).unbind(1)
        return self.out(self.verbs.attention(q, k, v).flatten(-2))


class Hybrid(nn.Module):
    """A layer of attention between two of a kind; its loss is a sum over count."""

    def __init__(self, kind: str, cu_seqlens: tuple[int, ...]):
        super().__init__()
        torch.manual_seed(7)
        self.cu_seqlens = cu_seqlens
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Mixer(kind), Attention(), Mixer(kind)])
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in self.layers)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        for layer in self.layers:
            layer.verbs = Verbs(cu_seqlens)  # pyright: ignore

    def forward(self, input_ids: Tensor, labels: Tensor, count: int | None = None) -> Tensor:
        x = self.embed(input_ids[0])
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x))
        total = F.cross_entropy(self.head(x), labels[0], reduction="sum")
        return total / ((labels != -100).sum() if count is None else count)


class SplitVerbs(Verbs):
    """Verbs of a rank, with a fault."""

    def __init__(self, cp: tw.ContextParallel, cu_seqlens: tuple[int, ...], fault: str):
        super().__init__(cu_seqlens)
        self.cp, self.fault = cp, fault
        self.cu_conv = self.cu_state = cu_seqlens
        rank_pieces = [cp.layout.positions(rank) for rank in range(cp.world_size)]
        starts = {int(x[0]) for x in rank_pieces if len(x)}
        starts |= {int(b) for x in rank_pieces for a, b in pairwise(x.tolist()) if b != a + 1}
        by_piece = tuple(sorted({*cu_seqlens, *starts}))
        whole = (0, cp.layout.num_tokens)
        if fault in ("halo_missing", "conv by shard, state over documents"):
            self.cu_conv = by_piece
        if fault == "halo of another document":
            self.cu_conv = whole
        if fault in ("state over documents", "conv by shard, state over documents"):
            self.cu_state = whole
        if fault == "borders by shard":
            self.cu_conv = self.cu_state = by_piece
        if fault == "borders_invented":
            self.cu_conv = self.cu_state = tuple(sorted({*cu_seqlens, 21, 38}))
        if fault == "divided borders":
            size = cp.layout.num_tokens // cp.world_size
            own = {r * size + x // cp.world_size for r in range(cp.world_size) for x in cu_seqlens}
            self.cu_conv = self.cu_state = tuple(sorted({*own, 0, cp.layout.num_tokens}))
        self.pieces = cp.pieces(self.cu_state)

    def conv(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.cp.conv1d(x, weight, cu_seqlens=self.cu_conv)

    def states(self, maps: Tensor, updates: Tensor) -> Tensor:
        given = {"matrix": True, "cu_seqlens": self.cu_state, "dim": 0}
        if self.fault == "state_gradient_lost":
            return self.cp.scan(maps.detach(), updates.detach(), **given)
        before = self.cp.scan(maps, updates, **given)
        if self.fault == "state_restarts":
            return before * 0
        if self.fault == "state of this rank":
            states = [torch.zeros_like(updates[0])]
            for a, b in zip(maps[:-1], updates[:-1], strict=True):
                states.append(a @ states[-1] + b)
            return torch.stack(states) + 0 * before
        return before

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.cp.attention(q, k, v)


def duplicated(
    forward: Any, cp: tw.ContextParallel, factor: float, reduced: bool, x: Tensor
) -> Tensor:
    """A layer that every rank runs over the rows of all ranks, of which it keeps its own."""
    rows = cp.gather(x)
    if not reduced:  # what this rank's rows give to others' is dropped
        rows = rows.detach().index_copy(0, cp.position_ids, x)
    return forward(Wrong.apply(rows, factor))[cp.position_ids]


def made(kind: str, cu_seqlens: tuple[int, ...] = (0, T)) -> tuple[Hybrid, dict[str, Tensor]]:
    make = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (1, cu_seqlens[-1]), generator=make)
    labels = ids.roll(-1, 1)
    labels[:, [edge - 1 for edge in cu_seqlens[1:]]] = -100
    return Hybrid(kind, cu_seqlens), {"input_ids": ids, "labels": labels}


def share(
    model: Hybrid,
    inputs: Mapping[str, Tensor],
    rank: int,
    group: Any,
    fault: str = "",
    layout: Any = tw.contiguous,
    first: int = 0,
) -> Any:
    """One rank's share of the loss, with a fault in the layers from `first` on."""
    cu_seqlens, n = model.cu_seqlens, transport_for(group).world_size
    mask = tw.masks.causal_document(cu_seqlens)
    num_tokens = cu_seqlens[-1]
    cp = tw.ContextParallel(group, num_tokens=num_tokens, mask=mask, layout=layout(num_tokens, n))
    for i, layer in enumerate(model.layers):
        wrong = fault if i >= first else ""
        if wrong in ("alone", "inflated", "not reduced") and isinstance(layer, Mixer):
            layer.verbs = Verbs((0, cp.layout.size(rank)) if wrong == "alone" else cu_seqlens)
            if wrong != "alone":
                how = (float(n), True) if wrong == "inflated" else (1.0, False)
                layer.forward = partial(duplicated, layer.forward, cp, *how)  # pyright: ignore
        else:
            layer.verbs = SplitVerbs(cp, cu_seqlens, wrong)  # pyright: ignore
    count = int((inputs["labels"] != -100).sum())
    ids, labels = (cp.shard(inputs[name], 1) for name in ("input_ids", "labels"))
    return model(ids, labels, count), cp.position_ids


class StateCase(NamedTuple):
    """A fault in a layer of a kind; thread: a public one that tells of it."""

    fault: str
    kind: str
    cause: str
    cu_seqlens: tuple[int, ...] = (0, T)
    layout: Any = tw.contiguous
    first: int = 0
    thread: str = ""
    world_size: int = 4

    @property
    def layer(self) -> str:
        return f"layers.{0 if not self.first else 2}"

    @property
    def split(self) -> Any:
        return partial(share, fault=self.fault, layout=self.layout, first=self.first)


PACKED, RL_ROW = (0, 19, T), (0, 37, 88, 128)
STATE_CASES = (
    StateCase("state_restarts", "delta", "state_restarts", PACKED, tw.zigzag),
    StateCase("state_gradient_lost", "delta", "state_gradient_lost", PACKED, tw.zigzag, 1),
    StateCase("halo_missing", "delta", "halo_missing", PACKED, tw.zigzag),
    StateCase("borders_invented", "delta", "borders_invented", PACKED, tw.zigzag),
    StateCase("state_restarts", "decay", "state_restarts", first=1),
    StateCase("state_gradient_lost", "decay", "state_gradient_lost", layout=tw.zigzag, first=1),
    StateCase("halo_missing", "early", "halo_missing", PACKED, first=1),
    StateCase("halo_missing", "conv", "halo_missing", PACKED, tw.zigzag),
    StateCase("halo of another document", "conv", "halo_missing", PACKED, tw.zigzag),
    StateCase("halo of another document", "delta", "halo_missing", PACKED, tw.zigzag),
    StateCase("borders_invented", "conv", "borders_invented", PACKED),
    StateCase("borders by shard", "delta", "borders_invented", PACKED),
    StateCase("state over documents", "decay", "documents_ignored", PACKED, tw.zigzag),
    StateCase("alone", "delta", "state_restarts", thread="LlamaFactory #10727"),
    StateCase("alone", "delta", "order_sensitive_layer", (0, T), tw.zigzag, 0, "rtp-llm #876"),
    StateCase(
        "state of this rank", "delta", "state_restarts", (0, T), tw.zigzag, 1, "rtp-llm #876"
    ),
    StateCase(
        "conv by shard, state over documents",
        "delta",
        "documents_ignored",
        RL_ROW,
        thread="prime-rl #3003",
        world_size=2,
    ),
    StateCase("halo_missing", "delta", "halo_missing", (0, T), thread="prime-rl #3003"),
    StateCase("divided borders", "delta", "borders_invented", PACKED, thread="ISEEKYAN #111"),
    StateCase("inflated", "delta", "gradient_scaled", first=1, thread="slime #1748"),
    StateCase("not reduced", "delta", "state_gradient_lost", first=1, thread="slime #1748"),
)
