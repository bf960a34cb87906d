"""The functions that layers with a state call, over the split sequence of a ContextParallel.

Each takes the function that computes a row of whole tokens (a kernel of fla or mamba-ssm, or torch
code of transformers) and runs it on each contiguous piece of this rank's tokens, from a state of
zeros. What a piece does to a state is a linear map; `cp.scan` gives the state before each piece,
and what that adds to the piece's results is linear in it. Nothing here knows of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewise.context_parallel import ContextParallel
from tilewise.tokens.conv import ACTIVATIONS

CuSeqlens = tuple[int, ...]
Rule = Callable[..., Any]


class LocalPiece(NamedTuple):
    """Rows of one piece among this rank's, and whether a document begins with it."""

    rows: slice
    is_first: bool


def local_pieces(cp: ContextParallel, cu_seqlens: CuSeqlens) -> list[LocalPiece]:
    """This rank's pieces, in the order of its rows."""
    pieces, begin = list[LocalPiece](), 0
    for start, stop in cp.pieces(cu_seqlens):
        end = begin + stop - start
        pieces.append(LocalPiece(slice(begin, end), start in cu_seqlens))
        begin = end
    return pieces


def convolution(  # noqa: PLR0913 - the arguments of causal_conv1d_fn, and the split
    cp: ContextParallel,
    cu_seqlens: CuSeqlens,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    activations: Callable[[str], Callable[[Tensor], Tensor]],
) -> Tensor:
    """causal_conv1d_fn: x and the result [batch, channels, rows], weight [channels, width].

    Args:
        activations: from the name of an activation that cp.conv1d does not have to its function.
    """
    rows = cp.layout.size(cp.rank)
    spare = x.shape[2] - rows  # a rank without tokens runs on one row of padding
    known = activation if activation in ACTIVATIONS else None
    mine = x.to(weight.dtype)[:, :, spare:].transpose(1, 2)
    out = cp.conv1d(mine, weight, bias, known, cu_seqlens)
    if activation is not None and known is None:
        out = activations(activation)(out)
    return F.pad(out.transpose(1, 2), (spare, 0)).to(x.dtype)


def delta_rule(  # noqa: PLR0913 - what a delta rule reads, and the split
    cp: ContextParallel,
    cu_seqlens: CuSeqlens,
    rule: Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    **options: Any,
) -> Tensor:
    """A gated delta rule, S_t = (I - b_t k_t k_t^T) diag(exp(g_t)) S_{t-1} + b_t k_t v_t^T.

    A piece that another one precedes is run once, with k_dim more columns of values: these are 0
    and start from the identity, so that their last state is the piece's matrix, and their results
    are what each query reads of the state before the piece.

    Args:
        rule: of (q, k, v, g=, beta=, initial_state=, output_final_state=) to the results and the
            last state [batch, heads, k_dim, v_dim].
        q, k: [batch, rows, key heads, k_dim].
        v: [batch, rows, heads, v_dim]; results are as v.
        g: logarithms of decays, [batch, rows, heads], or [batch, rows, heads, k_dim].
        beta: [batch, rows, heads].
        options: of the rule.
    """
    pieces = local_pieces(cp, cu_seqlens)
    batch, heads, sizes = len(v), v.shape[2], (k.shape[3], v.shape[3])
    dtype = torch.promote_types(v.dtype, torch.float32)
    given = {"output_final_state": True, **options}
    if not pieces:
        out, _ = rule(q, k, v, g=g, beta=beta, initial_state=None, **given)
        return _padding(out, cp, cu_seqlens, dtype, (batch, heads, *sizes), sizes[0])
    outs, reads = list[Tensor](), list[Tensor | None]()
    maps, states = list[Tensor](), list[Tensor]()
    for rows, is_first in pieces:
        q1, k1, v1, g1, beta1 = (x[:, rows] for x in (q, k, v, g, beta))
        if is_first:
            out, state = rule(q1, k1, v1, g=g1, beta=beta1, initial_state=None, **given)
            read, matrix = None, state.new_zeros((batch, heads, sizes[0], sizes[0]))
        else:
            wide = F.pad(v1, (0, sizes[0]))
            identity = torch.eye(sizes[0], device=v.device, dtype=dtype)
            start = F.pad(identity, (sizes[1], 0)).expand(batch, heads, -1, -1).contiguous()
            out, state = rule(q1, k1, wide, g=g1, beta=beta1, initial_state=start, **given)
            out, read = out.split([sizes[1], sizes[0]], -1)
            state, matrix = state.split([sizes[1], sizes[0]], -1)
        outs.append(out)
        reads.append(read)
        maps.append(matrix.to(dtype))
        states.append(state.to(dtype))
    before = cp.scan(
        torch.stack(maps), torch.stack(states), matrix=True, cu_seqlens=cu_seqlens, dim=0
    )
    return _added(outs, before, [_reading(read, "bthk,bhkv->bthv") for read in reads])


def state_space(  # noqa: PLR0913 - the arguments of the scan, and the split
    cp: ContextParallel,
    cu_seqlens: CuSeqlens,
    scan: Rule,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    z: Tensor | None,
    **options: Any,
) -> Tensor:
    """Mamba2's scan, S_t = exp(dt_t a) S_{t-1} + dt_t x_t b_t^T, out_t = S_t c_t.

    Args:
        scan: mamba_chunk_scan_combined's arguments and results.
        x: [batch, rows, heads, head_dim]; results are as x.
        dt: [batch, rows, heads], before its bias and softplus.
        a: [heads].
        b, c: [batch, rows, groups, state_dim]; heads of a group follow one another.
        z: as x, a gate of the results, or None.
        options: of the scan.
    """
    pieces = local_pieces(cp, cu_seqlens)
    heads, dtype = x.shape[2], torch.promote_types(x.dtype, torch.float32)
    shape = len(x), heads, x.shape[3], b.shape[3]
    given = {"return_final_states": True, "dt_bias": dt_bias, "dt_softplus": dt_softplus}
    given |= {"dt_limit": dt_limit, **options}

    def run(rows: slice) -> tuple[Tensor, Tensor]:
        return scan(x[:, rows], dt[:, rows], a, b[:, rows], c[:, rows], **given)

    if not pieces:
        out, _ = run(slice(None))
        out = _padding(out, cp, cu_seqlens, dtype, shape)
        return out if z is None else out * F.silu(z)
    steps = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    steps = (F.softplus(steps) if dt_softplus else steps).clamp(*dt_limit)
    rates = steps.to(dtype) * a.to(dtype)
    outs, readings = list[Tensor](), list[Callable[[Tensor], Tensor] | None]()
    decays, states = list[Tensor](), list[Tensor]()
    for rows, is_first in pieces:
        out, state = run(rows)
        passed = rates[:, rows].cumsum(1).exp()
        outs.append(out)
        states.append(state.to(dtype))
        decays.append(passed[:, -1, :, None, None])
        by_head = c[:, rows].to(dtype).repeat_interleave(heads // c.shape[2], 2)
        read = None if is_first else by_head * passed[..., None]
        readings.append(_reading(read, "bthn,bhpn->bthp"))
    before = cp.scan(torch.stack(decays), torch.stack(states), cu_seqlens=cu_seqlens, dim=0)
    out = _added(outs, before, readings)
    return out if z is None else out * F.silu(z)


def selective_scan(  # noqa: PLR0913 - the arguments of the scan, and the split
    cp: ContextParallel,
    cu_seqlens: CuSeqlens,
    scan: Rule,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    d: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    **options: Any,
) -> Tensor:
    """Mamba's scan, S_t = exp(dt_t a) S_{t-1} + dt_t x_t b_t^T of each channel, out_t = S_t c_t.

    The last state of a piece is read by state_dim tokens more, whose dt is 0: mamba-ssm has no
    gradient of the last state that it returns.

    Args:
        scan: selective_scan_fn's arguments and results.
        x: [batch, channels, rows]; results are as x.
        dt: as x, before its bias and softplus.
        a: [channels, state_dim].
        b, c: [batch, state_dim, rows].
        d: [channels], or None.
        z: as x, a gate of the results, or None.
        options: of the scan.
    """
    pieces = local_pieces(cp, cu_seqlens)
    dtype = torch.promote_types(x.dtype, torch.float32)
    state_dim = a.shape[1]
    steps = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    steps = (F.softplus(steps) if delta_softplus else steps).to(dtype)
    identity = torch.eye(state_dim, device=x.device, dtype=dtype).expand(len(x), -1, -1)

    def run(rows: slice) -> tuple[Tensor, Tensor]:
        """Results of a piece, and its last state [batch, channels, state_dim]."""
        x1, steps1, b1 = (
            F.pad(y[:, :, rows].to(dtype), (0, state_dim)).contiguous() for y in (x, steps, b)
        )
        c1 = torch.cat([c[:, :, rows].to(dtype), identity], 2)
        out = scan(x1, steps1, a.to(dtype), b1, c1, **options)
        return out[:, :, :-state_dim], out[:, :, -state_dim:]

    def reading(rows: slice) -> Callable[[Tensor], Tensor]:
        passed = steps[:, :, rows].cumsum(2)
        c1 = c[:, :, rows].to(dtype)

        def read(state: Tensor) -> Tensor:
            out = torch.zeros_like(passed)
            for n in range(state_dim):  # a tensor of all states would have state_dim times the size
                decay = (passed * a[None, :, n, None].to(dtype)).exp()
                out = out + decay * state[:, :, n, None] * c1[:, None, n]
            return out

        return read

    shape = len(x), x.shape[1], state_dim
    if not pieces:
        out, _ = run(slice(None))
        out = _padding(out.transpose(1, 2), cp, cu_seqlens, dtype, shape).transpose(1, 2)
    else:
        outs, readings = list[Tensor](), list[Callable[[Tensor], Tensor] | None]()
        decays, states = list[Tensor](), list[Tensor]()
        for rows, is_first in pieces:
            out, state = run(rows)
            outs.append(out)
            states.append(state)
            decays.append((steps[:, :, rows].sum(2)[..., None] * a.to(dtype)).exp())
            readings.append(None if is_first else reading(rows))
        before = cp.scan(torch.stack(decays), torch.stack(states), cu_seqlens=cu_seqlens, dim=0)
        out = _added(outs, before, readings, 2)
    if d is not None:
        out = out + x * d[:, None]
    return (out if z is None else out * F.silu(z)).to(x.dtype)


def recurrence(
    cp: ContextParallel,
    cu_seqlens: CuSeqlens,
    scan: Rule,
    x: Tensor,
    gate: Tensor,
    reset: Tensor,
) -> Tensor:
    """A linear recurrence of each channel, S_t = gate_t S_{t-1} + x_t, out_t = S_t (RG-LRU).

    Args:
        scan: of a piece's (x, gate, reset) to its results and its last state [batch, channels].
        x, gate: [batch, rows, channels]; results are as x.
        reset: [batch, rows, 1], true where the state begins anew.
    """
    pieces = local_pieces(cp, cu_seqlens)
    dtype = torch.promote_types(x.dtype, torch.float32)
    if not pieces:
        out, _ = scan(x, gate, reset)
        return _padding(out, cp, cu_seqlens, dtype, (len(x), x.shape[2]))
    outs, readings = list[Tensor](), list[Callable[[Tensor], Tensor] | None]()
    decays, states = list[Tensor](), list[Tensor]()
    for rows, is_first in pieces:
        out, state = scan(x[:, rows], gate[:, rows], reset[:, rows])
        passed = (gate[:, rows] * ~reset[:, rows]).to(dtype).cumprod(1)
        outs.append(out)
        states.append(state.to(dtype))
        decays.append(passed[:, -1])
        readings.append(None if is_first else _reading(passed, "btc,bc->btc"))
    before = cp.scan(torch.stack(decays), torch.stack(states), cu_seqlens=cu_seqlens, dim=0)
    return _added(outs, before, readings)


def lightning(  # noqa: PLR0913 - what the layer has, and the split
    cp: ContextParallel,
    cu_seqlens: CuSeqlens,
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
) -> Tensor:
    """Lightning attention, S_t = exp(-slope) S_{t-1} + k_t v_t^T, out_t = q_t S_t.

    A layer took this rank's rows for one sequence. Results are linear in the state before a piece:
    what the difference to the right one makes is added.

    Args:
        out: [batch, rows, heads, v_dim], the layer's.
        q, k: [batch, rows, heads, k_dim].
        v: as out.
        slopes: [heads], positive.
    """
    pieces = local_pieces(cp, cu_seqlens)
    dtype = torch.promote_types(v.dtype, torch.float32)
    batch, heads, sizes = len(v), v.shape[2], (k.shape[3], v.shape[3])
    if not pieces:
        return _padding(out, cp, cu_seqlens, dtype, (batch, heads, *sizes))
    rates = slopes.to(dtype)
    state = v.new_zeros((batch, heads, *sizes), dtype=dtype)
    taken, decays, states = [state], list[Tensor](), list[Tensor]()
    for rows, _ in pieces:
        k1, v1 = k[:, rows].to(dtype), v[:, rows].to(dtype)
        left = torch.arange(k1.shape[1] - 1, -1, -1, device=k.device)
        kept = (-rates * left[:, None]).exp()[..., None]
        states.append(torch.einsum("bthk,bthv->bhkv", k1 * kept, v1))
        decays.append((-rates * k1.shape[1]).exp()[:, None, None].expand(batch, -1, 1, 1))
        taken.append(decays[-1] * taken[-1] + states[-1])
    before = cp.scan(torch.stack(decays), torch.stack(states), cu_seqlens=cu_seqlens, dim=0)
    outs, readings = list[Tensor](), list[Callable[[Tensor], Tensor] | None]()
    for rows, _ in pieces:
        q1 = q[:, rows].to(dtype)
        passed = torch.arange(1, q1.shape[1] + 1, device=q.device)
        read = q1 * (-rates * passed[:, None]).exp()[..., None]
        outs.append(out[:, rows])
        readings.append(_reading(read, "bthk,bhkv->bthv"))
    return _added(outs, before - torch.stack(taken[:-1]), readings)


def _reading(read: Tensor | None, equation: str) -> Callable[[Tensor], Tensor] | None:
    """The function from the state before a piece to what it adds; None where that is 0."""
    if read is None:
        return None
    return lambda state: torch.einsum(equation, read.to(state.dtype), state)


def _added(
    outs: Sequence[Tensor],
    before: Tensor,
    readings: Sequence[Callable[[Tensor], Tensor] | None],
    dim: int = 1,
) -> Tensor:
    """Results of all pieces with what the states before them add.

    Args:
        before: [pieces, ...]; it always takes part, for the other ranks' sake: its backward pass
            is theirs, too.
    """
    rows = [
        out if read is None else (out + read(state)).to(out.dtype)
        for out, read, state in zip(outs, readings, before, strict=True)
    ]
    return torch.cat(rows, dim) + before[:0].sum().to(outs[0].dtype)


def _padding(
    out: Tensor,
    cp: ContextParallel,
    cu_seqlens: CuSeqlens,
    dtype: torch.dtype,
    state_shape: tuple[int, ...],
    matrix: int = 0,
) -> Tensor:
    """The results of a rank without tokens, 0 on its row of padding; it takes part in the scan.

    Args:
        out: [batch, 1, ...] of the padding, which has the weights' graph.
        matrix: the size of a matrix of decays; 0: decays as state_space and selective_scan have.
    """
    nothing = out[:, :0]
    anchor = nothing.sum().to(dtype)
    states = anchor.expand(0, *state_shape)
    if matrix:
        decays = anchor.expand(0, *state_shape[:2], matrix, matrix)
    elif len(state_shape) == 4:
        decays = anchor.expand(0, *state_shape[:2], 1, 1)
    else:
        decays = states
    before = cp.scan(decays, states, matrix=bool(matrix), cu_seqlens=cu_seqlens, dim=0)
    made = F.pad(nothing, (0, 0) * (out.ndim - 2) + (0, out.shape[1]))
    return made + before.sum().to(out.dtype)
