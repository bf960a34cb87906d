"""Rounding of the operands of a pass on the wire: errors of what travels, and their norms.

Every rank measures the rows that it sends; the maxima over keys are gathered from all ranks.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from tilewise.compiler.code import Code, Home
from tilewise.compiler.ops import Encode
from tilewise.compiler.resolved import ResolvedPass
from tilewise.execution.encoding import decode, encode
from tilewise.execution.run import part_of
from tilewise.plan.ir import Side
from tilewise.plan.payload import Payload
from tilewise.transport.means import on_every_rank
from tilewise.transport.protocol import Transport
from tilewise.wires.float8 import Float8
from tilewise.wires.wire import Wire

Named = Mapping[str, Tensor]


class Norms(NamedTuple):
    """Euclidean norm, largest number and sum of a row's absolute values, and those of its error.

    The error is that of what travelled, 0 where nothing did.
    """

    norm: Tensor
    most: Tensor
    total: Tensor
    error: Tensor
    error_most: Tensor


class Keys(NamedTuple):
    """Largest over all keys: float64 [1, batch, num_heads] each.

    Attributes:
        matrix, errors: the spectral norms of the matrix of all keys and of that of their errors.
        v_columns: the largest norm of a column of values' errors.
        spread: of a number of v, the largest less the least.
        middle: the mean of v, [1, batch, num_kv_heads, v_head_dim].
        reach: above every |v - middle|, [1, batch, num_kv_heads, 1].
    """

    matrix: Tensor
    errors: Tensor
    v_columns: Tensor
    spread: Tensor
    k: Norms
    v: Norms
    middle: Tensor
    reach: Tensor


def errors(code: Code, named: Sequence[Named]) -> dict[str, Tensor]:
    """x - x' of each of a rank's tensors [rows, batch, heads, width], float64, by name.

    x' is what arrives elsewhere; of several that differ the error is the largest, number by number.

    Args:
        code: of the pass; what it encodes of these tensors is all that travels of them.
    """
    tensors = {name: x for side_tensors in named for name, x in side_tensors.items()}
    error_by_name = {name: torch.zeros_like(x, dtype=torch.float64) for name, x in tensors.items()}
    for op in code.ops:
        if not isinstance(op, Encode):
            continue
        for ref, field in zip(op.source, op.fields, strict=True):
            name = code.tensors[ref.tensor].name
            if code.home(ref) is not Home.GIVEN or field.wire is None:
                continue
            x = part_of(tensors[name], ref)
            if not x.numel():
                continue
            arrives = decode(field, encode(field, x, op.counter), torch.empty_like(x))
            error = x.double() - arrives.double()
            largest = part_of(error_by_name[name], ref)
            largest.copy_(torch.where(error.abs() > largest.abs(), error, largest))
    return error_by_name


def norms(x: Tensor, error: Tensor) -> Norms:
    """Row by row: [rows, batch, heads] of [rows, batch, heads, width]."""
    x = x.double().abs()
    return Norms(norm(x), x.amax(-1), x.sum(-1), norm(error), error.abs().amax(-1))


def keys(
    resolved: ResolvedPass,
    transport: Transport,
    named: Named,
    error: Named,
    num_heads: int,
    zero: bool,
) -> Keys:
    """Measure the keys of all ranks, for each of num_heads query heads.

    Args:
        named: k and v of this rank; error: theirs, as errors gives it.
        zero: values that are 0 take part.
    """
    columns = list[Tensor]()
    for name in ("k", "v"):
        columns += norms(named[name], error[name])
    v = named["v"].double()
    rows = torch.cat([torch.stack(columns, -1), v, -v], -1)
    start = rows.new_full((1, *rows.shape[1:]), -torch.inf)
    # A key that several groups of heads get is rounded at random in each.
    groups = resolved.groups
    copies = groups.groups * resolved.payload.heads(Side.KV) > groups.num_kv_heads
    spectra = (
        _spectrum(named["k"].double()),
        _spectrum(error["k"], stochastic(wire_of(resolved.payload)) and copies),
    )
    sums = torch.cat([v.sum(0), error["v"].square().sum(0), torch.stack(spectra, -1)], -1)
    rank_values = torch.cat([torch.cat([rows, start]).amax(0), sums], -1)
    split = len(columns), *[v.shape[-1]] * 4, 2
    everyone = torch.stack(on_every_rank(transport, rank_values)).split(split, -1)
    by_number, high, low = (x.amax(0, keepdim=True) for x in everyone[:3])
    middle, v_columns, spectra = (x.sum(0, keepdim=True) for x in everyone[3:])
    middle = middle / max(1, resolved.layouts[Side.KV].num_tokens)
    v_columns, spectra = v_columns.amax(-1, keepdim=True).sqrt(), spectra.sqrt()
    if zero:
        high, low = high.clamp_min(0.0), low.clamp_min(0.0)
    value_spread = (high + low).amax(-1, keepdim=True).clamp_min(0.0)
    reach = torch.maximum(high - middle, low + middle).amax(-1, keepdim=True)
    reach = reach.clamp_min(torch.finfo(torch.float32).tiny)
    by_head = torch.cat([spectra, v_columns, value_spread, by_number.clamp_min(0.0)], -1)
    by_head = by_head.repeat_interleave(num_heads // by_head.shape[2], 2)
    matrix, of_errors, v_columns, spread = by_head[..., :4].unbind(-1)
    by_number = iter(by_head[..., 4:].unbind(-1))
    k_norms, v_norms = (Norms(*islice(by_number, len(Norms._fields))) for _ in range(2))
    return Keys(matrix, of_errors, v_columns, spread, k_norms, v_norms, middle, reach)


def wire_of(payload: Payload) -> Wire:
    """The wire of a pass's operands."""
    return payload.wires.backward if payload.backward else payload.wires.forward


def _spectrum(rows: Tensor, unsigned: bool = False) -> Tensor:
    """The squared spectral norm of rows [n, batch, heads, width], or what bounds it.

    Args:
        unsigned: that of the numbers in question is at most as large, the signs are not known.
    """
    if unsigned:
        return rows.square().sum((0, -1))
    gram = torch.einsum("nbhx,nbhy->bhxy", rows, rows)
    if not gram.isfinite().all():
        return torch.full(gram.shape[:2], torch.inf).to(gram)
    return torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0.0)


def stochastic(wire: Wire) -> TypeGuard[Float8]:
    return isinstance(wire, Float8) and wire.stochastic


def norm(x: Tensor) -> Tensor:
    """Return the Euclidean norm of every last row."""
    return torch.linalg.vector_norm(x, dim=-1)
