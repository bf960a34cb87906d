"""The functions that layers with a state call, over the split sequence of a ContextParallel.

Each takes the function that computes a row of whole tokens (a kernel of fla or mamba-ssm, or torch
code of transformers) and runs it on each contiguous piece of this rank's tokens, from a state of
zeros. What a piece does to a state is a linear map; `cp.scan` gives the state before each piece,
and what that adds to the piece's results is linear in it. Nothing here knows of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import tilewise as tw
from tilewise.tokens.conv import ACTIVATIONS

CuSeqlens = tuple[int, ...]
Rule = Callable[..., Any]


class LocalPiece(NamedTuple):
    """Rows of one piece among this rank's, and whether a document begins with it."""

    rows: slice
    is_first: bool


def local_pieces(cp: tw.ContextParallel, cu_seqlens: CuSeqlens) -> list[LocalPiece]:
    """This rank's pieces, in the order of its rows."""
    pieces, begin = list[LocalPiece](), 0
    for start, stop in cp.pieces(cu_seqlens):
        end = begin + stop - start
        pieces.append(LocalPiece(slice(begin, end), start in cu_seqlens))
        begin = end
    return pieces


class PieceScan(NamedTuple):
    """A rule's results on one piece, and what the state before it changes.

    Attributes:
        out: as if the state before were 0.
        state, decay: S -> decay * S + state (decay @ S with matrices) over the piece.
        read: from the state before to what it adds to out; None: nothing.
    """

    out: Tensor
    state: Tensor
    decay: Tensor
    read: Callable[[Tensor], Tensor] | None


def convolution(  # noqa: PLR0913 - the arguments of causal_conv1d_fn, and the split
    cp: tw.ContextParallel,
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
    cp: tw.ContextParallel,
    cu_seqlens: CuSeqlens,
    rule: Rule,
    /,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    chunk_size: int | None = None,
) -> tuple[Tensor, None]:
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
        use_qk_l2norm_in_kernel, chunk_size: of the rule.
    Returns:
        Results, and None for the last state.
    """
    pieces = local_pieces(cp, cu_seqlens)
    batch, heads, sizes = len(v), v.shape[2], (k.shape[3], v.shape[3])
    dtype = torch.promote_types(v.dtype, torch.float32)
    given: dict[str, Any] = {"output_final_state": True}
    given |= {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
    given |= {} if chunk_size is None else {"chunk_size": chunk_size}
    if not pieces:
        out, _ = rule(q, k, v, g=g, beta=beta, initial_state=None, **given)
        return _padding(out, cp, cu_seqlens, dtype, (batch, heads, *sizes), sizes[0]), None
    scans = list[PieceScan]()
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
        reading = _reading(read, "bthk,bhkv->bthv")
        scans.append(PieceScan(out, state.to(dtype), matrix.to(dtype), reading))
    return _joined(cp, cu_seqlens, scans, matrix=True), None


def state_space(  # noqa: PLR0913 - the arguments of the scan, and the split
    cp: tw.ContextParallel,
    cu_seqlens: CuSeqlens,
    scan: Rule,
    /,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    chunk_size: int,
    D: Tensor | None = None,  # noqa: N803 - as layers pass it
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, inf),
) -> Tensor:
    """Mamba2's scan, S_t = exp(dt_t a) S_{t-1} + dt_t x_t b_t^T, out_t = S_t c_t.

    Args:
        scan: mamba_chunk_scan_combined's arguments and results.
        x: [batch, rows, heads, head_dim]; results are as x.
        dt: [batch, rows, heads], before its bias and softplus.
        a: [heads].
        b, c: [batch, rows, groups, state_dim]; heads of a group follow one another.
        chunk_size, D: of the scan.
        z: as x, a gate of the results, or None.
    """
    pieces = local_pieces(cp, cu_seqlens)
    heads, dtype = x.shape[2], torch.promote_types(x.dtype, torch.float32)
    shape = len(x), heads, x.shape[3], b.shape[3]
    given = {"return_final_states": True, "dt_bias": dt_bias, "dt_softplus": dt_softplus}
    given |= {"dt_limit": dt_limit, "chunk_size": chunk_size, "D": D}

    def run(rows: slice) -> tuple[Tensor, Tensor]:
        return scan(x[:, rows], dt[:, rows], a, b[:, rows], c[:, rows], **given)

    if not pieces:
        out, _ = run(slice(None))
        out = _padding(out, cp, cu_seqlens, dtype, shape)
        return out if z is None else out * F.silu(z)
    steps = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    steps = (F.softplus(steps) if dt_softplus else steps).clamp(*dt_limit)
    rates = steps.to(dtype) * a.to(dtype)
    scans = list[PieceScan]()
    for rows, is_first in pieces:
        out, state = run(rows)
        passed = rates[:, rows].cumsum(1).exp()
        by_head = c[:, rows].to(dtype).repeat_interleave(heads // c.shape[2], 2)
        reading = _reading(None if is_first else by_head * passed[..., None], "bthn,bhpn->bthp")
        scans.append(PieceScan(out, state.to(dtype), passed[:, -1, :, None, None], reading))
    out = _joined(cp, cu_seqlens, scans)
    return out if z is None else out * F.silu(z)


def selective_scan(  # noqa: PLR0913 - the arguments of the scan, and the split
    cp: tw.ContextParallel,
    cu_seqlens: CuSeqlens,
    scan: Rule,
    /,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    D: Tensor | None = None,  # noqa: N803 - as layers pass it
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
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
        D: [channels], or None.
        z: as x, a gate of the results, or None.
        use_mambapy, use_associative_scan: of the scan.
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
        options = {"use_mambapy": use_mambapy, "use_associative_scan": use_associative_scan}
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
        scans = list[PieceScan]()
        for rows, is_first in pieces:
            decay = (steps[:, :, rows].sum(2)[..., None] * a.to(dtype)).exp()
            scans.append(PieceScan(*run(rows), decay, None if is_first else reading(rows)))
        out = _joined(cp, cu_seqlens, scans, dim=2)
    if D is not None:
        out = out + x * D[:, None]
    return (out if z is None else out * F.silu(z)).to(x.dtype)


def recurrence(
    cp: tw.ContextParallel,
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
    scans = list[PieceScan]()
    for rows, is_first in pieces:
        out, state = scan(x[:, rows], gate[:, rows], reset[:, rows])
        passed = (gate[:, rows] * ~reset[:, rows]).to(dtype).cumprod(1)
        reading = _reading(None if is_first else passed, "btc,bc->btc")
        scans.append(PieceScan(out, state.to(dtype), passed[:, -1], reading))
    return _joined(cp, cu_seqlens, scans)


def lightning(  # noqa: PLR0913 - what the layer has, and the split
    cp: tw.ContextParallel,
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
    taken = [v.new_zeros((batch, heads, *sizes), dtype=dtype)]
    scans = list[PieceScan]()
    for rows, _ in pieces:
        q1, k1, v1 = (x[:, rows].to(dtype) for x in (q, k, v))
        count = q1.shape[1]
        left = torch.arange(count - 1, -1, -1, device=k.device)
        kept = (-rates * left[:, None]).exp()[..., None]
        state = torch.einsum("bthk,bthv->bhkv", k1 * kept, v1)
        decay = (-rates * count).exp()[:, None, None].expand(batch, -1, 1, 1)
        passed = torch.arange(1, count + 1, device=q.device)
        reading = _reading(q1 * (-rates * passed[:, None]).exp()[..., None], "bthk,bhkv->bthv")
        scans.append(PieceScan(out[:, rows], state, decay, reading))
        taken.append(decay * taken[-1] + state)
    return _joined(cp, cu_seqlens, scans, taken=taken[:-1])


def _reading(read: Tensor | None, equation: str) -> Callable[[Tensor], Tensor] | None:
    """Return the function from the state before a piece to what that state adds to the piece's
    results.

    Args:
        read: the tensor by which tokens read the state; None: they read nothing, returns None.
        equation: of einsum, for read and state.
    """
    if read is None:
        return None
    return lambda state: torch.einsum(equation, read.to(state.dtype), state)


def _joined(
    cp: tw.ContextParallel,
    cu_seqlens: CuSeqlens,
    scans: Sequence[PieceScan],
    *,
    matrix: bool = False,
    dim: int = 1,
    taken: Sequence[Tensor] | None = None,
) -> Tensor:
    """Results of all pieces, along dim, with what the states before them add.

    Args:
        taken: the states that the results were computed with; None: 0.
    """
    decays = torch.stack([scan.decay for scan in scans])
    states = torch.stack([scan.state for scan in scans])
    before = cp.scan(decays, states, matrix=matrix, cu_seqlens=cu_seqlens, dim=0)
    if taken is not None:
        before = before - torch.stack(list(taken))
    rows = [
        scan.out if scan.read is None else (scan.out + scan.read(state)).to(scan.out.dtype)
        for scan, state in zip(scans, before, strict=True)
    ]
    # The states always take part, for the other ranks' sake: their backward pass is theirs, too.
    return torch.cat(rows, dim) + before[:0].sum().to(rows[0].dtype)


def _padding(
    out: Tensor,
    cp: tw.ContextParallel,
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
