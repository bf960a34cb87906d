"""Every strategy in every shape that a world size allows: the one table that all of them pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import tilewise as tw
from tilewise import Plan


class Strategy(NamedTuple):
    """A public strategy and its plans on n ranks."""

    name: str
    plans: Callable[[int], Iterator[Plan]]


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _ring(n: int) -> Iterator[Plan]:
    yield tw.ring(n)
    yield tw.ring(n, moves="q")


def _mesh(n: int) -> Iterator[Plan]:
    for a in divisors(n):
        for schedule in ("greedy", "eager", "kv_first", "gather"):
            yield tw.mesh(n, q_tile=a, schedule=schedule)
        yield tw.mesh(n, q_tile=a, kv_bytes=0.5, backward=True)


def _hierarchical(n: int) -> Iterator[Plan]:
    for k, nodes in enumerate(divisors(n)):
        size = n // nodes
        a, b = divisors(nodes)[-2:][0], divisors(size)[-2:][0]
        pairs = [
            (tw.ring(nodes, moves="q"), tw.ring(size)),
            (tw.mesh(nodes, q_tile=a), tw.ring(size)),
            (tw.ring(nodes), tw.ring(size, moves="q")),
            (tw.mesh(nodes, q_tile=a, schedule="gather"), tw.all_gather(size)),
            (tw.all_gather(nodes), tw.mesh(size, q_tile=b)),
            (tw.attention2d(a, nodes // a), tw.double_ring(b, size // b)),
            (tw.ring(nodes), tw.mesh(size, q_tile=b, schedule="gather")),
        ]
        for outer, inner in pairs[k % 3 :: 3]:
            yield tw.hierarchical(outer, inner)


def _ulysses(n: int) -> Iterator[Plan]:
    yield tw.ulysses(n)
    for degree in divisors(n)[1:-1]:
        inner = n // degree
        yield tw.ulysses(degree, inner=tw.ring(inner))
        yield tw.ulysses(degree, inner=tw.mesh(inner, q_tile=divisors(inner)[-2]))
        yield tw.ulysses(degree, inner=tw.balanced_ring(inner))
        yield tw.ulysses(degree, inner=tw.ulysses(inner))
        size = divisors(inner)[len(divisors(inner)) // 2]
        rings = tw.ring(inner // size, moves="q"), tw.ring(size)
        yield tw.ulysses(degree, inner=tw.hierarchical(*rings))


STRATEGIES = (
    Strategy("ring", _ring),
    Strategy("all_gather", lambda n: iter([tw.all_gather(n)])),
    Strategy("double_ring", lambda n: (tw.double_ring(d, n // d) for d in divisors(n))),
    Strategy("balanced_ring", lambda n: iter([tw.balanced_ring(n)])),
    Strategy("attention2d", lambda n: (tw.attention2d(d, n // d) for d in divisors(n))),
    Strategy("mesh", _mesh),
    Strategy("hierarchical", _hierarchical),
    Strategy("ulysses", _ulysses),
    Strategy("tree", lambda n: iter([tw.tree(n)])),
)


MASK_AWARE = (("needed", tw.needed), ("tiled", tw.tiled))
"""Builders of a plan for one mask and one layout: (mask, layout) -> Plan."""


def plans(n: int, *leave_out: str) -> Iterator[Plan]:
    """The plans of all strategies on n ranks but those named."""
    for strategy in STRATEGIES:
        if strategy.name not in leave_out:
            yield from strategy.plans(n)
