"""A small model and its splits: right ones, and wrong ones with one fault each, all our own.

Every fault is as small as it can be: one argument dropped, one factor, one missing call.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import tilewise as tw
from tilewise.transport.resolve import transport_for

T, VOCABULARY, HEADS, KV_HEADS, DIM = 32, 40, 4, 2, 8
WIDTH = HEADS * DIM
LATENT, VALUE = 12, 6  # of "mla"
EDGES = 0, 13, T
MOST_TOKENS = 64
SHARED = 5  # tokens that every rank holds, of `joint`
WINDOW = 5


class Settings(NamedTuple):
    """What the unsplit model is like."""

    window: int | None = None
    documents: tuple[int, ...] = ()  # edges
    strict: bool = False  # no query sees its own key
    sink: bool = False
    softcap: float | None = None
    dropout: float = 0.0
    conv: bool = False
    learned: bool = False  # positions, instead of rotations
    kind: str = "separate"  # projections; "fused": one; "grouped": by KV head; "mha"; "mla"
    dtype: torch.dtype = torch.float32

    @property
    def kv_heads(self) -> int:
        return HEADS if self.kind in ("mha", "mla") else KV_HEADS

    @property
    def mask(self) -> tw.Mask:
        mask = tw.Causal() if self.window is None else tw.Causal() & tw.Window(self.window, 0)
        return mask & tw.Document(self.documents) if self.documents else mask

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        allowed = torch.as_tensor(self.mask.dense(queries, keys))
        return allowed & (queries[:, None] != keys) if self.strict else allowed


def attend(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, settings: Settings, sink: Tensor | None
) -> Tensor:
    """Dense attention; operands [batch, tokens, heads, width]."""
    ratio = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(ratio, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * DIM**-0.5
    if settings.softcap:
        scores = settings.softcap * torch.tanh(scores / settings.softcap)
    least = torch.finfo(scores.dtype).min if settings.strict else -torch.inf
    scores = scores.masked_fill(~allowed, least)
    if sink is not None:
        column = sink[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column.to(scores)], -1)
    p = scores.softmax(-1).nan_to_num()
    return torch.einsum("bhqk,bkhd->bqhd", p[..., : k.shape[1]], v)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    angle = positions[:, None] * 50.0 ** -(torch.arange(DIM // 2) / (DIM // 2))
    cos, sin = (f(angle)[:, None].to(x) for f in (torch.cos, torch.sin))
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Attention(nn.Module):
    """attention is what a split replaces."""

    def __init__(self, settings: Settings):
        super().__init__()
        self.settings = settings
        if settings.kind == "mha":
            self.mha = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        else:
            widths = {
                "separate": {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM},
                "mla": {"q": HEADS * DIM, "down": LATENT, "kv": HEADS * (DIM + VALUE)},
            }.get(settings.kind, {"qkv": (HEADS + 2 * KV_HEADS) * DIM})
            for name, width in widths.items():
                setattr(self, name, nn.Linear(LATENT if name == "kv" else WIDTH, width))
            value = VALUE if settings.kind == "mla" else DIM
            self.out = nn.Linear(HEADS * value, WIDTH)
        self.sink = nn.Parameter(torch.zeros(HEADS)) if settings.sink else None
        self.attention: Any = None

    def operands(self, x: Tensor) -> list[Tensor]:
        """q, k and v [batch, tokens, heads, width]."""
        kind, heads = self.settings.kind, self.settings.kv_heads
        if kind == "mha":
            projected = nn.functional.linear(x, self.mha.in_proj_weight, self.mha.in_proj_bias)
            return [t.unflatten(-1, (HEADS, DIM)) for t in projected.chunk(3, -1)]
        if kind == "mla":
            keys = self.kv(self.down(x)).unflatten(-1, (HEADS, -1))
            return [self.q(x).unflatten(-1, (HEADS, DIM)), *keys.split([DIM, VALUE], -1)]
        if kind == "fused":
            parts = self.qkv(x).split([WIDTH, heads * DIM, heads * DIM], -1)
        elif kind == "grouped":
            groups = self.qkv(x).unflatten(-1, (heads, -1))
            parts = groups.split([HEADS // heads * DIM, DIM, DIM], -1)
            parts = [part.flatten(-2) for part in parts]
        else:
            parts = self.q(x), self.k(x), self.v(x)
        return [t.unflatten(-1, (-1, DIM)) for t in parts]

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.settings.kind == "mha" and self.attention is None:
            forbidden = ~self.settings.allowed(positions, positions)
            return self.mha(x, x, x, attn_mask=forbidden, need_weights=False)[0]
        q, k, v = self.operands(x)
        if not self.settings.learned:
            q, k = rotated(q, positions), rotated(k, positions)
        if self.attention is not None:
            out = self.attention(q, k, v, self.sink)
        else:
            allowed = self.settings.allowed(positions, positions)
            out = attend(q, k, v, allowed, self.settings, self.sink)
        return (self.mha.out_proj if self.settings.kind == "mha" else self.out)(out.flatten(-2))


class Layer(nn.Module):
    def __init__(self, settings: Settings):
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(settings)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm(x), positions))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """Its loss: a mean over labels that are not -100, or a sum over count."""

    def __init__(self, settings: Settings = Settings()):  # noqa: B008 - a frozen value
        super().__init__()
        self.settings = settings
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(MOST_TOKENS, WIDTH) if settings.learned else None
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3) if settings.conv else None
        self.layers = nn.ModuleList(Layer(settings) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        positions: Tensor | None = None,
        count: Tensor | None = None,
    ) -> Tensor:
        positions = torch.arange(input_ids.shape[1]) if positions is None else positions
        x = self.embed(input_ids)
        if self.places is not None:
            x = x + self.places(positions)
        if self.conv is not None:
            x = x + self.conv(nn.functional.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
        for layer in self.layers:
            x = layer(x, positions)
        return self.loss(self.head(x), labels, count)

    def loss(self, logits: Tensor, labels: Tensor, count: Tensor | None) -> Tensor:
        total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / ((labels != -100).sum() if count is None else count)


def made(
    settings: Settings = Settings(),  # noqa: B008 - a frozen value
    batch: int = 1,
    num_tokens: int = T,
) -> tuple[Model, dict[str, Tensor]]:
    """A model with weights large enough that attention matters, and a batch."""
    torch.manual_seed(5)
    model = Model(settings)
    with torch.no_grad():
        for x in model.parameters():
            x.copy_(1.5 * x + 0.05 * torch.randn(x.shape))
    make = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (batch, num_tokens), generator=make)
    labels = torch.full_like(ids, -100)
    labels[:, :-1] = ids[:, 1:]
    return model.to(settings.dtype), {"input_ids": ids, "labels": labels}


class Wrong(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float | Tensor) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return grad * ctx.factor, None


def merged(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, detach: bool) -> Tensor:
    """Attention to four parts of the keys, merged by their log-sum-exps."""
    ratio, outs, lses = q.shape[2] // k.shape[2], [], []
    for some in torch.arange(k.shape[1]).chunk(4):
        keys, values = (x[:, some].repeat_interleave(ratio, 2) for x in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * DIM**-0.5
        scores = scores.masked_fill(~allowed[:, some], -1e30)
        outs.append(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), values))
        lse = scores.logsumexp(-1).transpose(1, 2)
        lses.append(lse.detach() if detach else lse)
    share = torch.stack(lses).softmax(0)
    return (torch.stack(outs) * share[..., None]).sum(0)


def own_block_scaled(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, is_own: Tensor) -> Tensor:
    """Dense attention whose scores are doubled at a rank's own keys."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * DIM**-0.5 * (1 + is_own.long())
    p = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", p, v)


def dropped(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, kept: Tensor) -> Tensor:
    """Dense attention of which weights are dropped with probability 0.2."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * DIM**-0.5
    p = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", p * kept / 0.8, v)


def shared_attention(
    cp: tw.ContextParallel,
    settings: Settings,
    fault: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Any,
) -> Tensor:
    """Keys and values of all ranks gathered, then dense attention, with a fault."""
    num_tokens = cp.layout.num_tokens
    here, everywhere = cp.position_ids, torch.arange(num_tokens)
    if fault in ("dq_wrong", "dk_wrong", "dv_wrong"):
        factor = {"dq_wrong": 0.5, "dk_wrong": 1.5, "dv_wrong": 0.0}[fault]
        which = ("dq_wrong", "dk_wrong", "dv_wrong").index(fault)
        q, k, v = (Wrong.apply(x, factor if i == which else 1.0) for i, x in enumerate((q, k, v)))
    if fault == "shared_gradient_lost" and cp.rank:
        own = cp.position_ids < SHARED
        k, v = (torch.where(own[:, None, None], x.detach(), x) for x in (k, v))
    keys, values = cp.unshard(k, 1), cp.unshard(v, 1)
    allowed = settings.allowed(here, everywhere)
    size = -(-num_tokens // cp.world_size)
    ranks = torch.empty(num_tokens, dtype=torch.int64)
    for rank in range(cp.world_size):
        ranks[cp.layout.positions(rank)] = rank
    local = everywhere % size
    if fault == "mask_ignored":
        allowed = torch.ones_like(allowed)
    elif fault == "own_key_seen":
        allowed = settings._replace(strict=False).allowed(here, everywhere)
    elif fault == "window_ignored":
        allowed = settings._replace(window=None).allowed(here, everywhere)
    elif fault == "window_longer":
        allowed = settings._replace(window=WINDOW + 1).allowed(here, everywhere)
    elif fault == "border_lost":
        edges = settings.documents[0], *settings.documents[2:]
        allowed = settings._replace(documents=edges).allowed(here, everywhere)
    elif fault == "causal_within":
        allowed = torch.where(ranks == cp.rank, allowed, True)
    elif fault == "order_of_ranks":
        allowed = torch.where(ranks == cp.rank, allowed, ranks < cp.rank)
    elif fault == "key_positions_lost":
        row = torch.empty(num_tokens, dtype=torch.int64)
        for rank in range(cp.world_size):
            own = cp.layout.positions(rank)
            row[own] = torch.arange(len(own))
        allowed = torch.arange(len(here))[:, None] >= row
    elif fault in ("neighbours", "shard_skipped"):
        allowed = allowed & ((ranks == cp.rank) | (ranks == cp.rank - 1))
    elif fault == "window_per_block":
        near = (here % size)[:, None] - local <= WINDOW
        allowed = settings._replace(window=None).allowed(here, everywhere) & near
    elif fault == "documents_ignored":
        allowed = settings._replace(documents=()).allowed(here, everywhere)
    elif fault == "shard_only":
        allowed = allowed & (ranks == cp.rank)
    elif fault == "sink_dropped":
        sink = None
    elif fault == "sink_larger":
        sink = sink + 1.5
    elif fault == "softcap_dropped":
        settings = settings._replace(softcap=None)
    elif fault == "scale_wrong":
        q = q * 1.4
    elif fault == "gqa_shifted":
        keys, values = keys.roll(1, 2), values.roll(1, 2)
    elif fault == "counted_twice":
        again = everywhere[ranks == 0]
        keys, values = (torch.cat([x, x[:, again]], 1) for x in (keys, values))
        allowed = torch.cat([allowed, allowed[:, again]], 1)
    elif fault == "shared_counted_per_rank":
        again = everywhere[:SHARED].repeat(cp.world_size - 1)
        keys, values = (torch.cat([x, x[:, again]], 1) for x in (keys, values))
        allowed = torch.cat([allowed, allowed[:, again]], 1)
    elif fault == "lse_gradient_lost":
        return merged(q, keys, values, allowed, detach=True)
    elif fault == "padding_attended":
        zeros = keys.new_zeros(keys.shape[0], 3, *keys.shape[2:])
        keys, values = torch.cat([keys, zeros], 1), torch.cat([values, zeros], 1)
        allowed = torch.cat([allowed, torch.ones(len(here), 3, dtype=torch.bool)], 1)
    elif fault == "right merge":
        return merged(q, keys, values, allowed, detach=False)
    elif fault == "mean_of_ranks":
        members = [allowed & (ranks == rank) for rank in range(cp.world_size)]
        outs = [attend(q, keys, values, member, settings, sink) for member in members]
        count = sum(member.any(1) for member in members)
        return sum(outs) / count[:, None, None]
    elif fault == "weights_dropped":
        draw = torch.rand(allowed.shape, generator=torch.Generator().manual_seed(cp.rank))
        return dropped(q, keys, values, allowed, draw > 0.2)
    elif fault == "scale_on_one" and cp.rank == 2:
        q = q * 2
    elif fault == "heads_shifted_on_one" and cp.rank == 1:
        keys, values = keys.roll(1, 2), values.roll(1, 2)
    elif fault == "weights_dropped_on_one" and cp.rank == 1:
        draw = torch.rand(allowed.shape, generator=torch.Generator().manual_seed(3))
        return dropped(q, keys, values, allowed, draw > 0.2)
    elif fault == "bf16_on_one" and cp.rank == 1:
        operands = (x.bfloat16() for x in (q, keys, values))
        return attend(*operands, allowed, settings, sink).to(q)
    elif fault == "leaks_from_others":
        leaks = settings._replace(documents=()).allowed(here, everywhere) & (ranks != cp.rank)
        allowed = allowed | leaks
    elif fault == "own_values_of_another" and cp.rank:
        other = values[:, cp.layout.positions(cp.rank - 1)]
        values = values.index_copy(1, here, other)
    elif fault == "own_block_scaled":
        return own_block_scaled(q, keys, values, allowed, ranks == cp.rank)
    elif fault == "first_key_lost":
        allowed[here > 0, 0] = False
    out = attend(q, keys, values, allowed, settings, sink)
    if fault == "head_copied_on_others" and cp.rank:
        out = torch.cat([out[:, :, 1:2], out[:, :, 1:]], 2)
    if fault == "query_heads_permuted":
        out = out.flip(2)
    if fault == "halved":
        out = out * 0.5
    if fault == "rows_silent" and cp.rank == 1:
        out = out * (torch.arange(out.shape[1]) > 2)[:, None, None]
    if fault == "heads_missing":
        out = out * (torch.arange(HEADS) < HEADS - 1)[:, None]
    return out


def tilewise_attention(
    cp: tw.ContextParallel,
    settings: Settings,
    strategy: tw.Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
) -> Tensor:
    options = {"mask": settings.mask, "sink": sink, "softcap": settings.softcap}
    given = {"plan": strategy, "layout": cp.layout, "group": cp.group}
    return tw.attention(q, k, v, **given, **options)


def share(
    model: Model,
    inputs: Mapping[str, Tensor],
    rank: int,
    group: Any,
    fault: str = "",
    layout: Any = tw.zigzag,
    given: bool = False,
    first: int = 0,
    strategy: tw.Plan | None = None,
) -> Any:
    """One rank's share of the loss, with one fault in the layers from `first` on.

    Args:
        given: whether positions are returned.
        strategy: of tilewise; None: keys and values are gathered.
    """
    settings = model.settings
    num_tokens = inputs["input_ids"].shape[1]
    world_size = transport_for(group).world_size
    cp = tw.ContextParallel(group, num_tokens=num_tokens, layout=layout(num_tokens, world_size))
    ids, labels = (cp.shard(inputs[name], 1) for name in ("input_ids", "labels"))
    positions = cp.position_ids
    count = (inputs["labels"] != -100).sum()
    for i, layer in enumerate(model.layers):
        wrong = fault if i >= first else ""
        attention = partial(shared_attention, cp, settings, wrong)
        if strategy is not None:
            attention = partial(tilewise_attention, cp, settings, strategy)
        layer.attention.attention = attention
    if fault == "positions_wrong":
        positions = torch.arange(len(positions))
    elif fault == "labels_shifted":
        labels = torch.full_like(ids, -100)
        labels[:, :-1] = ids[:, 1:]
    elif fault == "labels_rolled":
        labels = ids.roll(-1, 1)
    elif fault == "labels_not_shifted":
        labels = ids
    elif fault == "loss_scaled":
        count = (labels != -100).sum()
    elif fault == "loss_per_token":
        count = 1.01 * count  # as of tokens, some of which predict nothing
    elif fault == "dropout_differs":
        torch.manual_seed(rank)
    if len(cp.layout.replicated) and rank:  # the loss of shared rows counts once
        labels = labels.masked_fill(positions < SHARED, -100)
    if fault == "noise_per_rank" and rank:
        noise = torch.randn(ids.shape[1], WIDTH, generator=torch.Generator().manual_seed(rank))
        model.layers[0].register_forward_pre_hook(lambda _, args: (args[0] + noise, *args[1:]))
    if fault == "factor" and rank:
        scaled = lambda _, args: ((0.9 + 0.1 * rank) * 1.05 * args[0], *args[1:])  # noqa: E731
        model.layers[0].register_forward_pre_hook(scaled)
    if fault == "wrong_derivative" and rank == 1:  # in two rows, none of them the last of a rank
        factors = torch.ones(len(positions), 1)
        factors[2:4] = -1
        model.head.register_forward_hook(lambda *x: Wrong.apply(x[-1], factors))
    if fault == "no_label_nan":
        labels = torch.full_like(labels, -100) if rank == 0 else labels
        count = (labels != -100).sum()
    if fault == "other_gelu" and rank == 1:
        model.layers[0].mlp[1].approximate = "tanh"
    loss = model(ids, labels, positions, count)
    if fault == "loss_term_per_rank":  # as routers' losses are: a product of two means
        first = model.layers[0].mlp[0].weight
        loss = loss + 0.1 * first.square().mean() * (1 + ids.float().mean() / VOCABULARY) ** 2
    if fault == "loss_dropped" and rank == 2:
        loss = loss * 0
    if fault in ("gradient_scaled", "gradient_uneven"):
        loss = Wrong.apply(loss, 4.0 if fault == "gradient_scaled" or rank == 0 else 1.0)
    if fault in ("missing_all_reduce", "reduced"):
        loss.backward()
        reduce(model, cp, leave_out="mlp_norm" if fault == "missing_all_reduce" else None)
        loss = loss.detach()
    return (loss, cp.position_ids) if given else loss


def reduce(model: nn.Module, cp: tw.ContextParallel, leave_out: str | None) -> None:
    """Sum gradients over ranks: a mean of one count each, times the ranks."""
    for name, parameter in model.named_parameters():
        if parameter.grad is None or (leave_out and leave_out in name):
            continue
        flat = parameter.grad.reshape(-1)
        everyone = tw.contiguous(cp.world_size * len(flat), cp.world_size)
        whole = tw.ContextParallel(cp.group, num_tokens=everyone.num_tokens, layout=everyone)
        total = whole.unshard(flat, 0).reshape(cp.world_size, -1).sum(0)
        parameter.grad.copy_(total.reshape(parameter.grad.shape))


def joint(num_tokens: int, n: int) -> tw.Layout:
    return tw.joint(tw.contiguous(num_tokens - SHARED, n), replicated=range(SHARED))


class Case(NamedTuple):
    """A fault, the model that shows it, and the layer in which it is."""

    fault: str
    layer: str | None
    settings: Settings = Settings()
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed

    @property
    def split(self) -> Any:
        return partial(share, fault=self.fault, **self.options)


FIRST, SECOND = "layers.0.attention", "layers.1.attention"
LATER = {"first": 1, "layout": tw.contiguous}
JOINT = {"first": 1, "layout": joint, "given": True}
CASES = (
    Case("mask_ignored", FIRST),
    Case("window_ignored", SECOND, Settings(window=WINDOW), LATER),
    Case("window_per_block", FIRST, Settings(window=WINDOW), {"layout": tw.contiguous}),
    Case("documents_ignored", FIRST, Settings(documents=EDGES)),
    Case("sink_dropped", FIRST, Settings(sink=True)),
    Case("softcap_dropped", SECOND, Settings(softcap=2.0), LATER),
    Case("scale_wrong", SECOND, Settings(), LATER),
    Case("shard_only", FIRST),
    Case("counted_twice", FIRST),
    Case("gqa_shifted", FIRST, Settings(kind="fused")),
    Case("query_heads_permuted", FIRST),
    Case("query_heads_permuted", SECOND, Settings(kind="mla"), LATER),
    Case("shard_skipped", SECOND, Settings(), LATER),
    Case("key_positions_lost", FIRST),
    Case("key_positions_lost", SECOND, Settings(), LATER),
    Case("loss_term_per_rank", None),
    Case("heads_missing", SECOND, Settings(), LATER),
    Case("dq_wrong", SECOND, Settings(), LATER),
    Case("dk_wrong", SECOND, Settings(kind="fused"), LATER),
    Case("dv_wrong", SECOND, Settings(), LATER),
    Case("lse_gradient_lost", SECOND, Settings(), LATER),
    Case("positions_wrong", FIRST),
    Case("positions_wrong", "places", Settings(learned=True)),
    Case("labels_shifted", None, Settings(), {"layout": tw.contiguous}),
    Case("loss_scaled", None),
    Case("gradient_scaled", None),
    Case("no_label_nan", None, Settings(), {"layout": tw.contiguous}),
    Case("dropout_differs", "layers.0.dropout", Settings(dropout=0.2)),
    Case("padding_attended", FIRST),
    Case("order_sensitive_layer", "conv", Settings(conv=True)),
    Case("missing_all_reduce", "layers.0.mlp_norm"),
    Case("shared_counted_per_rank", SECOND, Settings(), JOINT),
    Case("shared_gradient_lost", SECOND, Settings(), JOINT),
    Case("noise_per_rank", "layers.0.norm", Settings(), {"layout": tw.contiguous}),
)

THREE, STRICT = Settings(documents=(0, 9, 20, T)), Settings(window=WINDOW, strict=True)
VARIANTS = (
    (Case("window_longer", SECOND, Settings(window=WINDOW), LATER), "window_ignored"),
    (Case("border_lost", SECOND, THREE, LATER), "documents_ignored"),
    (Case("causal_within", FIRST), "mask_ignored"),
    (Case("order_of_ranks", SECOND, Settings(), {"first": 1}), "positions_wrong"),
    (Case("neighbours", SECOND, Settings(), LATER), "shard_skipped"),
    (Case("weights_dropped", FIRST), "dropout_differs"),
    (Case("weights_dropped", SECOND, Settings(kind="fused"), LATER), "dropout_differs"),
    (Case("labels_shifted", None, Settings(), {"layout": tw.striped}), "labels_shifted"),
    (Case("labels_shifted", None, Settings(), {"layout": tw.zigzag}), "labels_shifted"),
    (Case("mean_of_ranks", SECOND, Settings(), LATER), "unknown"),
    (Case("halved", FIRST), "unknown"),
    (Case("mask_ignored", SECOND, Settings(strict=True), LATER), "mask_ignored"),
    (Case("own_key_seen", SECOND, Settings(strict=True), LATER), "mask_ignored"),
    (Case("window_ignored", SECOND, STRICT, LATER), "window_ignored"),
    (Case("shard_only", SECOND, Settings(strict=True), LATER), "shard_only"),
    (Case("sink_larger", SECOND, Settings(sink=True), LATER), "sink_dropped"),
    (Case("loss_dropped", None), "unknown"),
    (Case("labels_rolled", None, Settings(), {"layout": tw.striped}), "labels_shifted"),
    (Case("labels_not_shifted", None, Settings(), {"layout": tw.contiguous}), "labels_shifted"),
    (Case("gradient_uneven", None), "gradient_scaled"),
    (Case("loss_per_token", None), "loss_scaled"),
    (Case("factor", "layers.0.norm", Settings(), {"layout": tw.contiguous}), "unknown"),
    (Case("rows_silent", SECOND, Settings(), LATER), "unknown"),
    # of some ranks alone
    (Case("scale_on_one", SECOND, Settings(), LATER), "scale_wrong"),
    (Case("heads_shifted_on_one", SECOND, Settings(), LATER), "gqa_shifted"),
    (Case("weights_dropped_on_one", SECOND, Settings(), LATER), "dropout_differs"),
    (Case("bf16_on_one", SECOND, Settings(), LATER), "unknown"),
    (Case("leaks_from_others", SECOND, Settings(documents=EDGES), LATER), "documents_ignored"),
    (Case("own_values_of_another", SECOND, Settings(), LATER), "unknown"),
    (Case("own_block_scaled", SECOND, Settings(), LATER), "unknown"),
    (Case("first_key_lost", SECOND, Settings(), LATER), "unknown"),
    (Case("head_copied_on_others", SECOND, Settings(kind="mha", learned=True), LATER), "unknown"),
    (Case("other_gelu", "layers.0.mlp.1", Settings(), {"layout": tw.contiguous}), "unknown"),
    (Case("wrong_derivative", "(the model)", Settings(), {"layout": tw.contiguous}), "unknown"),
)
"""Faults that differ a little from those of CASES, and the cause that they are."""
