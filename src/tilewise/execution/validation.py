"""Checks of one rank's attention call: every message has the numbers and the fix."""

import math

import torch
from torch import Tensor

from tilewise.arguments import (
    DtypeName,
    dtype_name,
    of_kind,
    positive_number,
    real_number,
    require_dense,
    require_type,
    whole_number,
)
from tilewise.compiler.rank_plan import RankPlan
from tilewise.execution.call import Call
from tilewise.execution.sinks import TensorKind
from tilewise.kernels.bias import Alibi, Bias, DenseBias
from tilewise.kernels.protocol import Scores
from tilewise.layouts.joint import on_every_rank
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Mask
from tilewise.plan.ir import Plan, Side
from tilewise.wires.float8 import Float8
from tilewise.wires.latent import Latent
from tilewise.wires.wire import Plain, Wire

MOST_SEEDS = (1 << 63) - 1


def check_tensors(q: Tensor, k: Tensor, v: Tensor | None, latent: Latent | None = None) -> None:
    """Raise ValueError unless these can be attended with.

    Args:
        k, v: where latent is given, latents [(batch,) tokens, 1, width] and None.
    """
    named = (("q", q), ("k", k), ("v", v)) if latent is None else (("q", q), ("the latent", k))
    for name, x in named:
        array = type(x).__module__ == "numpy"
        example = f"torch.from_numpy({name})" if array else "torch.randn(tokens, heads, head_dim)"
        x = require_type(Tensor, name, x, example)
        require_dense(name, x)
        if hasattr(x, "placements"):  # a DTensor: importing the class takes half a second
            raise ValueError(
                f"{name} is a DTensor; call attention through local_map of "
                "torch.distributed.tensor.experimental, which passes each rank its own rows"
            )
    if latent is not None:
        _check_latents(q, k, v, latent)
    else:
        assert v is not None
        _check_keys_and_values(q, k, v)
    for what, of in (("dtype", lambda x: x.dtype), ("device", lambda x: x.device)):
        found = [of(x) for _, x in named if x is not None]
        if len(set(found)) > 1:
            names = ", ".join(name for name, _ in named)
            raise ValueError(
                f"{names} have {what} {', '.join(map(str, found))}; they must be equal"
            )
    of_kind("dtype", dtype_name(q.dtype), DtypeName)


def _check_latents(q: Tensor, x: Tensor, v: Tensor | None, latent: Latent) -> None:
    if v is not None:
        raise ValueError(
            f"v is {tuple(v.shape)}, but expand makes v of the latent; pass None as v, or leave "
            "out wire=Latent(...)"
        )
    if latent.expand is None:
        raise ValueError("the latent has no expand; pass tw.wire.Latent(expand, ...)")
    given = tuple(x.shape[:-2] + x.shape[-1:])
    if q.ndim not in (3, 4) or x.ndim != q.ndim or x.shape[-2] != 1:
        raise ValueError(
            f"q {tuple(q.shape)} and the latent {given} must be [tokens, heads, head_dim] and "
            "[tokens, width], or both with a batch before"
        )
    if q.shape[:-3] != x.shape[:-3]:
        raise ValueError(f"batch of q ({q.shape[0]}) and the latent ({x.shape[0]}) must be equal")
    latent.check(latent.num_kv_heads, int(q.shape[-1]), latent.v_head_dim, int(x.shape[-1]))


def _check_keys_and_values(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.ndim not in (3, 4) or not q.ndim == k.ndim == v.ndim:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} must all be [tokens, "
            "heads, head_dim] or [batch, tokens, heads, head_dim]"
        )
    if q.shape[-1] != k.shape[-1] or q.shape[-1] < 1:
        raise ValueError(
            f"head_dim of q ({q.shape[-1]}) and k ({k.shape[-1]}) must be equal, and at least 1"
        )
    if v.shape[:-1] != k.shape[:-1] or v.shape[-1] < 1:
        raise ValueError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} must have the same tokens and heads, and v "
            "a head_dim of at least 1"
        )
    if q.shape[:-3] != k.shape[:-3]:
        raise ValueError(f"batch of q ({q.shape[0]}) and k ({k.shape[0]}) must be equal")


def named_operands(q: Tensor, k: Tensor, v: Tensor | None = None) -> dict[str, Tensor | None]:
    """Return the operands by the names that a caller has for them: without v, k are latents."""
    return {"q": q, "the latent": k} if v is None else {"q": q, "k": k, "v": v}


def check_numbers(wire: Wire, **tensors: Tensor | None) -> None:
    """On the CPU refuse numbers that a wire cannot carry.

    On other devices, where nobody looks, what is not finite arrives as NaN.

    Args:
        tensors: [..., tokens, heads, head_dim], by name.
    """
    for name, x in tensors.items():
        if x is None or x.device.type != "cpu":
            continue
        most = torch.finfo(x.dtype).max
        if isinstance(wire, Float8):  # a number is rounded up by a sixteenth of its power of two
            most = 2.0 ** (15 if x.dtype == torch.float16 else 127) * (2 - 2**-4)
        elif isinstance(wire, Plain):
            most = min(most, torch.finfo(getattr(torch, wire.dtype or dtype_name(x.dtype))).max)
        wrong = ~(x.detach().abs() <= most)
        if wrong.any():
            *_, row, head, column = place = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"{name} has {x[tuple(place)].item():g} at row {row}, head {head}, number "
                f"{column}: {wire} carries finite numbers of at most {most:.4g}; mend it, or "
                "leave out wire"
            )


def check_ranks(call: Call, rank: int, world_size: int) -> None:
    """Raise ValueError unless the plans are for the group's ranks and each token is owned by one
    rank.
    """
    kv_layout = call.kv_layout or call.layout
    for plan in (call.plan, call.backward_plan or call.plan):
        if plan.world_size != world_size:
            raise ValueError(
                f"{plan.name} is for {plan.world_size} ranks, but the group has {world_size}; "
                f"make the plan for {world_size}"
            )
        if isinstance(plan, RankPlan) and plan.rank != rank:
            raise ValueError(
                f"the plan was prepared for rank {plan.rank} ({plan.batch}), but this is rank "
                f"{rank}; pass step.prepare({rank})"
            )
    for name, layout in (("layout", call.layout), ("kv_layout", kv_layout)):
        # The keys of one rank are whole, whichever of the queries it has.
        some_queries = world_size == 1 and name == "layout" and call.kv_layout is not None
        if len(layout.replicated):
            raise ValueError(
                f"{name} has tokens that every rank holds, which attention takes outside compiled "
                "code alone; wrap the function that calls it in torch.compiler.disable"
            )
        if not layout.is_partition and not some_queries:
            raise ValueError(
                f"{name} has {sum(layout.sizes)} rows for {layout.num_tokens} tokens; "
                "every token must belong to exactly one rank"
            )


def query_layout(call: Call, num_queries: int) -> Layout:
    """Return the layout of the queries: replicated ones stand at q_positions on every rank."""
    given, keys = call.q_positions, call.kv_layout or call.layout
    if not call.plan.replicated_queries:
        if given is not None:
            raise ValueError(
                "q_positions are for plans with replicated queries (tree), not "
                f"{call.plan.name}; use layout instead"
            )
        return call.layout
    num_keys = keys.num_tokens
    positions = range(num_keys - num_queries, num_keys) if given is None else given
    if len(positions) != num_queries:
        raise ValueError(
            f"q has {num_queries} tokens but q_positions {len(positions)}; pass one for each"
        )
    if positions and not 0 <= min(positions) <= max(positions) < num_keys:
        raise ValueError(
            f"q_positions {min(positions)}..{max(positions)} must lie in 0..{num_keys - 1}"
        )
    return on_every_rank(positions, keys)


def _rows_of_rank(plan: Plan, side: Side, layout: Layout, rank: int) -> int:
    """Return how many rows of queries or keys a layout gives a rank under a plan."""
    owners = enumerate(plan.owners[side])
    return sum(layout.size(shard) for shard, ranks in owners if rank in ranks)


def check_rows(
    q: Tensor,
    k: Tensor,
    layouts: tuple[Layout, Layout],
    plan: Plan,
    rank: int,
) -> None:
    """Refuse q and k that do not have their layouts' rows."""
    for name, x, side in (("q", q, Side.Q), ("k", k, Side.KV)):
        wanted = _rows_of_rank(plan, side, layouts[side], rank)
        if x.shape[-3] != wanted:
            raise ValueError(
                f"{name} has {x.shape[-3]} tokens on rank {rank}, but the layout gives it {wanted} "
                f"of {layouts[side].num_tokens}; pass layout.shard(x, rank), or "
                "cp.shard(x) of a ContextParallel"
            )


def check_own_rows(name: str, x: Tensor, layout: Layout, rank: int) -> None:
    """Refuse a tensor that does not have a rank's rows of a layout."""
    if x.shape[-3] != layout.size(rank):
        raise ValueError(
            f"{name} has {x.shape[-3]} tokens on rank {rank}, but the layout gives it "
            f"{layout.size(rank)} of {layout.num_tokens}; pass layout.shard(x, rank), or "
            "cp.shard(x) of a ContextParallel"
        )


def check_token_dimension(q: Tensor, k: Tensor, call: Call, rank: int) -> None:
    """Refuse q and k whose heads come before their tokens, the order of torch's own attention.

    It comes before checks of heads, which would take one number for the other.
    """
    kv_layout = call.kv_layout or call.layout
    for name, x, layout, side in (("q", q, call.layout, Side.Q), ("k", k, kv_layout, Side.KV)):
        replicated = side is Side.Q and call.plan.replicated_queries
        if replicated or call.plan.num_shards(side) != layout.world_size:
            continue
        rows = _rows_of_rank(call.plan, side, layout, rank)
        if x.shape[-3] != rows == x.shape[-2]:
            raise ValueError(
                f"{name} has {x.shape[-3]} tokens on rank {rank}, but the layout gives it {rows} "
                f"of {layout.num_tokens}; pass layout.shard(x, rank), or cp.shard(x). Dimension "
                f"{x.ndim - 2} of {name} {tuple(x.shape)} has {rows}: if heads come before tokens "
                f"here, pass {name}.transpose({x.ndim - 3}, {x.ndim - 2})"
            )


def check_mask_heads(mask: Mask, num_kv_heads: int) -> None:
    heads = getattr(mask, "heads", None)
    if heads is not None and len(heads) != num_kv_heads:
        raise ValueError(
            f"the mask is for {len(heads)} KV heads, but k has {num_kv_heads}; make them equal"
        )


def check_bias(
    bias: TensorKind | Alibi, shape: tuple[int, int, int], dtype: str, device: str
) -> None:
    """Raise ValueError unless a bias is for these heads and tokens.

    Args:
        shape: (num_heads, num_tokens, num_kv_tokens) of the whole attention.
        dtype, device: of q.
    """
    if isinstance(bias, Alibi):
        if len(bias.slopes) != shape[0]:
            raise ValueError(
                f"tw.alibi has {len(bias.slopes)} slopes, but q has {shape[0]} heads; pass one "
                "slope a head"
            )
        return
    if bias.shape != shape:
        raise ValueError(
            f"bias is {bias}, but must be [num_heads, num_tokens, num_kv_tokens] of the whole "
            f"sequence, {list(shape)}, the same on every rank (heads or queries may be 1), or "
            "[batch, ...] of each batch entry, or tw.alibi(slopes)"
        )
    floats = ("float32", "bfloat16", "float16", *(("float64",) if dtype == "float64" else ()))
    if bias.dtype not in floats:
        raise ValueError(
            f"bias is {bias}, but must be {', '.join(floats[:-1])} or {floats[-1]} beside q of "
            f"{dtype}; convert it"
        )
    if bias.device != device:
        raise ValueError(f"bias is on {bias.device}, but q on {device}; move it there")


def checked_scores(call: Call, head_dim: int, world_size: int) -> Scores:
    """Check what a call does to its scores and weights, and return it.

    Without a seed one process draws it from torch's generator: recomputation restores that one.
    """
    scale = checked_scale(call.softmax_scale, head_dim)
    softcap, seed = checked_softcap(call.softcap), call.dropout_seed
    p = real_number("dropout_p", call.dropout_p)
    if not 0 <= p < 1:
        raise ValueError(f"dropout_p ({p}) must be at least 0 and below 1; leave it out for none")
    if seed is not None:
        seed = whole_number("dropout_seed", seed, 0, MOST_SEEDS - 1)
    bias: Bias | None = DenseBias() if isinstance(call.bias, TensorKind) else call.bias
    if not p:
        return Scores(scale, softcap, max_logit=call.return_max_logit, bias=bias)
    if seed is None and world_size > 1:
        raise ValueError(
            f"dropout_p ({p}) on {world_size} ranks needs a dropout_seed; pass the same on all, "
            "another at every layer and step"
        )
    seed = int(torch.randint(MOST_SEEDS, ())) if seed is None else seed
    return Scores(scale, softcap, p, seed, call.return_max_logit, bias=bias)


def checked_softcap(softcap: float | None) -> float | None:
    if softcap is None:
        return None
    return positive_number("softcap", softcap, "; leave it out for none")


def checked_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return 1 / math.sqrt(head_dim)
    return positive_number("softmax_scale", scale, "; scale or negate q instead")
