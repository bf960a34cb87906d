"""The sum of all ranks' gradients of a model's parameters, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from tilewise.arguments import require_type
from tilewise.transport.agreement import agree, settled
from tilewise.transport.means import exchange_tensors, on_every_rank
from tilewise.transport.protocol import Transport, as_bytes


class GradientTerms(Protocol):
    """This rank's terms of the gradients of parameters, and the way in which terms are added.

    Attributes:
        name: on which ranks agree.
    """

    name: str

    def refusal(self, name: str, parameter: Tensor) -> str | None:
        """Return why a parameter's gradient cannot be summed; None if it can."""
        ...

    def take(self, parameter: Tensor) -> Tensor | None:
        """Return the rows of this rank's term, and begin anew; None: it has none."""
        ...

    def blank(self, parameter: Tensor) -> Tensor:
        """The rows of a term that adds nothing."""
        ...

    def merge(self, total: Tensor, term: Tensor) -> None:
        """Add a term's rows to others in place."""
        ...

    def rounded(self, total: Tensor, parameter: Tensor) -> Tensor:
        """Rows of terms as numbers of the parameter's dtype."""
        ...


class OwnGradients:
    """The gradients that parameters have, added in the order of ranks."""

    name = "fast"

    def refusal(self, name: str, parameter: Tensor) -> str | None:
        return None

    def take(self, parameter: Tensor) -> Tensor | None:
        return None if parameter.grad is None else as_rows(parameter.grad)

    def blank(self, parameter: Tensor) -> Tensor:
        return as_rows(torch.zeros_like(parameter))

    def merge(self, total: Tensor, term: Tensor) -> None:
        total += term

    def rounded(self, total: Tensor, parameter: Tensor) -> Tensor:
        return total


def sum_gradients(module: nn.Module, transport: Transport, terms: GradientTerms) -> None:
    """Give every parameter the sum of all ranks' terms as its gradient, the same bits on all.

    A parameter without a term on every rank stays without a gradient.

    Raises:
        ValueError: the same on every rank, if the ranks' parameters differ or one is refused.
    """

    def check() -> dict[str, str]:
        require_type(nn.Module, "module", module, "torch.nn.Linear(64, 64)")
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        for refusal in (terms.refusal(*one) for one in named):
            if refusal is not None:
                raise ValueError(refusal)
        return {
            "call": "sum_gradients",
            "reduction": terms.name,
            "parameters": str([(n, tuple(p.shape), str(p.dtype)) for n, p in named]),
        }

    agree(transport, settled(transport, check), None, "first")
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        return
    own = [terms.take(p) for p in parameters]
    flags = [term is not None for term in own]
    has = torch.tensor(flags, dtype=torch.uint8, device=parameters[0].device)
    somewhere = torch.stack(on_every_rank(transport, has)).amax(0).tolist()
    parameters = [p for p, some in zip(parameters, somewhere, strict=True) if some]
    own = [x for x, some in zip(own, somewhere, strict=True) if some]
    if not parameters:
        return
    rows = [terms.blank(p) if x is None else x for p, x in zip(parameters, own, strict=True)]
    totals = _summed(parameters, rows, transport, terms)
    for parameter, total in zip(parameters, totals, strict=True):
        parameter.grad = total


def as_rows(x: Tensor) -> Tensor:
    """View a parameter as rows [rows, numbers]; one of a single dimension is one row."""
    return x.flatten(0, -2) if x.ndim > 1 else x.reshape(1, -1)


def _summed(
    parameters: Sequence[Tensor], rows: Sequence[Tensor], transport: Transport, terms: GradientTerms
) -> list[Tensor]:
    """Sum each parameter's rows over ranks: rank r sums an n-th of them, and sends it to all."""
    n, rank = transport.world_size, transport.rank
    cuts = [[len(x) * r // n for r in range(n + 1)] for x in rows]

    def part(x: Tensor, cut: Sequence[int], r: int) -> Tensor:
        return x[cut[r] : cut[r + 1]]

    def joined(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([as_bytes(x.contiguous()).reshape(-1) for x in parts])

    mine = [part(x, cut, rank) for x, cut in zip(rows, cuts, strict=True)]
    outgoing = [
        joined([part(x, cut, r) for x, cut in zip(rows, cuts, strict=True)]) for r in range(n)
    ]
    arrived = exchange_tensors(transport, outgoing, [outgoing[rank].numel()] * n)
    totals = []
    everyone = [_parted(data, mine) for data in arrived]
    for parameter, arrived_rows in zip(parameters, zip(*everyone, strict=True), strict=True):
        total = arrived_rows[0].clone()
        for term in arrived_rows[1:]:
            terms.merge(total, term)
        totals.append(terms.rounded(total, parameter))
    results = [
        [part(as_rows(p), cut, r) for p, cut in zip(parameters, cuts, strict=True)]
        for r in range(n)
    ]
    sizes = [sum(x.numel() * x.element_size() for x in of) for of in results]
    arrived = exchange_tensors(transport, [joined(totals)] * n, sizes)
    found = [_parted(data, of) for data, of in zip(arrived, results, strict=True)]
    return [
        torch.cat(parts).view(parameter.shape)
        for parameter, parts in zip(parameters, zip(*found, strict=True), strict=True)
    ]


def _parted(data: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Cut bytes into tensors of the shapes and dtypes of `like`, which lie one after the other."""
    pieces = data.split([x.numel() * x.element_size() for x in like])
    # a copy begins where any dtype may
    return [
        piece.clone().view(x.dtype).view(x.shape) for piece, x in zip(pieces, like, strict=True)
    ]
