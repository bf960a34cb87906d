"""Expansion: keys and values made of latents where a kernel call uses them, and its gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tilewise.arguments import dtype_name
from tilewise.compiler.ops import ExpandKey
from tilewise.kernels.protocol import accumulator_dtype, loadable
from tilewise.wires.latent import Latent

TRIED_ROWS = 3
"""Rows on which an expand is tried before a call; an odd number, so that halves show."""


class Expanded(NamedTuple):
    """Keys and values of one kernel call, [rows, batch, heads, width] each.

    Attributes:
        leaf: the latent rows that they were made of, [rows * batch, width].
        parts: k and v with what torch knows of how they were made.
    """

    k: Tensor
    v: Tensor
    leaf: Tensor
    parts: tuple[Tensor, ...]


class Expansion:
    """A latent's expand in one call of attention, on one rank.

    Args:
        latent: with its width; of a call on shapes alone without expand.
        like: a tensor of the call's dtype and device.
        learns: gradients may be asked for.
        autocast: dtype of the torch.autocast region in which attention was called, if in one.

    Attributes:
        leaves: the tensors that get gradients: params that require one, an nn.Module's own, and
            what else expand was seen to use; known after `probe`.
    """

    def __init__(
        self,
        latent: Latent,
        like: Tensor,
        *,
        learns: bool,
        autocast: torch.dtype | None = None,
    ):
        self.latent, self.dtype = latent, like.dtype
        self._keeps = latent.keep and learns
        self.leaves: tuple[Tensor, ...] = ()
        self._kept: dict[ExpandKey, Expanded] = {}
        self._sums: list[Tensor] = []
        # torch's function of attention gets params as inputs: what is made inside is of its own.
        self._params = [
            x.detach().requires_grad_(x.requires_grad and learns) if isinstance(x, Tensor) else x
            for x in latent.params
        ]
        self._autocast = None if autocast is None else (like.device.type, autocast)

    def probe(self, rows: Tensor, positions: Tensor, *, alone: bool) -> None:
        """Try expand on some rows, and find what it uses.

        Args:
            rows, positions: [n, width], no two of them equal, and [n].
            alone: also check that it makes k and v of each row by itself. It waits for a device.
        Raises:
            ValueError: if it does not make k and v of the rows as the latent says.
        """
        learns = torch.is_grad_enabled()
        probe = rows.detach().requires_grad_(learns)
        first = self._run(probe, positions)
        if alone:
            with torch.no_grad():
                self._check_rows_alone(rows.detach(), positions, first)
        if not learns:
            return
        pairs = zip(self._params, self.latent.params, strict=True)
        given = {id(inner): outer for inner, outer in pairs}
        own = [x for x in given.values() if isinstance(x, Tensor) and x.requires_grad]
        if isinstance(self.latent.expand, torch.nn.Module):
            own += [x for x in self.latent.expand.parameters() if x.requires_grad]
        own += [x for x in _used(first) if x is not probe and id(x) not in given]
        self.leaves = tuple({id(x): x for x in own}.values())

    def _check_rows_alone(
        self, rows: Tensor, positions: Tensor, together: tuple[Tensor, Tensor]
    ) -> None:
        """Raise ValueError unless rows in another order, and one by one, give what they gave."""
        backwards = self._run(rows.flip(0), positions.flip(0))
        one_by_one = [self._run(rows[i : i + 1], positions[i : i + 1]) for i in range(len(rows))]
        pairs = [
            *zip(together, [x.flip(0) for x in backwards], strict=True),
            *zip(together, [torch.cat(x) for x in zip(*one_by_one, strict=True)], strict=True),
        ]
        if all(_nearly_equal(a, b) for a, b in pairs):
            return
        repeats = [self._run(rows, positions) for _ in range(2)]
        same = all(torch.equal(a, b) for x in repeats for a, b in zip(together, x, strict=True))
        raise ValueError(
            "expand makes other k and v of a row where other rows stand beside it; it must be a "
            "function of single rows and their positions, without means, sums or indices over the "
            "rows that it is called with, since every rank calls it with others"
            if same
            else "expand gave two answers for the same rows; it must be deterministic, since every "
            "rank and the backward pass call it again"
        )

    def expand(
        self, key: ExpandKey, rows: Tensor, positions: Tensor, heads: slice, learns: bool
    ) -> Expanded:
        """The keys and values of a kernel call.

        Args:
            key: of the latents that the call reads.
            rows, positions: [rows, batch, 1, width], which may be a buffer of the pass; [rows].
            heads: of all KV heads, those of the call.
            learns: `pull` follows.
        """
        known = self._kept.get(key)
        if known is not None:
            return known
        keeps = self._keeps and not learns
        flat, graph = rows.detach().flatten(0, 2), learns or keeps
        with torch.set_grad_enabled(graph):
            # The rows may lie in a workspace, whose later writes autograd would take for theirs.
            leaf = (flat.clone() if graph else flat).requires_grad_(graph)
            made = self._run(leaf, positions.repeat_interleave(rows.shape[1]))
            parts = tuple([x[:, heads] for x in made])
        k, v = (loadable(x.detach().unflatten(0, rows.shape[:2])) for x in parts)
        expanded = Expanded(k, v, leaf, parts)
        if keeps:
            self._kept[key] = expanded
        return expanded

    def begin_backward(self) -> None:
        self._sums = [torch.zeros_like(x, dtype=accumulator_dtype(x.dtype)) for x in self.leaves]

    def pull(self, expanded: Expanded, dk: Tensor, dv: Tensor) -> Tensor:
        """The gradient of a call's latents, [rows, batch, 1, width]; those of leaves are kept.

        Args:
            dk, dv: as k and v.
        """
        inner = {id(outer): x for x, outer in zip(self._params, self.latent.params, strict=True)}
        sources = [expanded.leaf, *(inner.get(id(x), x) for x in self.leaves)]
        pairs = zip(expanded.parts, (dk, dv), strict=True)
        graded = [(x, dx.flatten(0, 1).to(x.dtype)) for x, dx in pairs if x.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(sources)
        if graded:
            parts, grads = zip(*graded, strict=True)
            # What expand uses may have been made before the call, of something that outlives it.
            found = torch.autograd.grad(parts, sources, grads, retain_graph=True, allow_unused=True)
        for total, grad in zip(self._sums, found[1:], strict=True):
            if grad is not None:
                total.add_(grad)
        first = torch.zeros_like(expanded.leaf) if found[0] is None else found[0]
        return first.unflatten(0, dk.shape[:2]).unsqueeze(2)

    def gradients(self) -> list[Tensor]:
        """This rank's share of the leaves' gradients."""
        return [total.to(x.dtype) for total, x in zip(self._sums, self.leaves, strict=True)]

    def _run(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """k and v of rows, checked."""
        assert self.latent.expand is not None
        with self._region(), saved_tensors_hooks(_as_it_is, _as_it_is):
            made: Any = self.latent.expand(rows, positions, *self._params)
        if not isinstance(made, tuple | list) or len(made) != 2:
            raise ValueError(f"expand returned {type(made).__name__}, but must return k and v")
        heads, widths = self.latent.num_kv_heads, (self.latent.head_dim, self.latent.v_head_dim)
        for name, x, width in zip("kv", made, widths, strict=True):
            wanted = len(rows), heads, width
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            if shape != wanted:
                raise ValueError(
                    f"expand made {name} {shape} of {len(rows)} rows, but must make {wanted}: "
                    "(rows, num_kv_heads, width), and no row more or less"
                )
            if x.dtype != self.dtype or x.device != rows.device:
                raise ValueError(
                    f"expand made {name} of {dtype_name(x.dtype)} on {x.device}, but q is "
                    f"{dtype_name(self.dtype)} on {rows.device}; make them equal"
                )
        return made[0], made[1]

    def _region(self) -> AbstractContextManager[Any]:
        """Autocast as it was where attention was called."""
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(*self._autocast)


def _as_it_is(x: Tensor) -> Tensor:
    """Hook of the graph that expand makes, which is this pass's own.

    Hooks of the caller (activation checkpointing, offloading) would recompute a forward pass, with
    its messages, in the middle of the backward pass that uses the graph.
    """
    return x.detach()


def _nearly_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether tensors differ by no more than products of other shapes round."""
    tolerance = torch.finfo(a.dtype).eps ** 0.5
    most = float(a.detach().abs().nan_to_num(0, 0, 0).max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * most, equal_nan=True)


def _used(made: Sequence[Tensor]) -> Iterator[Tensor]:
    """The leaves that tensors were made of and that require a gradient."""
    nodes = [x.grad_fn for x in made if x.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        for onward, _ in node.next_functions:
            if onward is not None and onward not in seen:
                seen.add(onward)
                nodes.append(onward)
