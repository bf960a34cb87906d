"""Every strategy in every shape that a world size allows: the one table that all of them pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import tilewise as tw
from tilewise import Plan
from tilewise.strategies import catalog
from tilewise.strategies.catalog import divisors

KV_BYTES = 0.5  # of a KV shard per byte of a query shard, for which schedules are made


class Strategy(NamedTuple):
    """A public strategy and its plans on n ranks."""

    name: str
    plans: Callable[[int], Iterator[Plan]]


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


def _all_gather(n: int) -> Iterator[Plan]:
    yield tw.all_gather(n)
    yield tw.all_gather(n, moves="q")


COMPOSED = {"hierarchical": _hierarchical, "ulysses": _ulysses, "all_gather": _all_gather}
"""Strategies of which the table says which plans they are, such as those that run other plans."""


def _plans(strategy: catalog.StrategyEntry, n: int) -> Iterator[Plan]:
    if strategy.name in COMPOSED:
        return COMPOSED[strategy.name](n)
    found = sorted(strategy.variants(n, KV_BYTES), key=lambda variant: variant.degenerate)
    return (variant.make() for variant in found)


STRATEGIES = tuple(Strategy(s.name, partial(_plans, s)) for s in catalog.STRATEGIES)
MASK_AWARE = (
    *((strategy.name, strategy.make) for strategy in catalog.MASK_AWARE),
    ("needed of q", partial(tw.needed, moves="q")),
)
"""Builders of a plan for one mask and one layout: (mask, layout) -> Plan."""


def plans(n: int, *leave_out: str) -> Iterator[Plan]:
    """The plans of all strategies on n ranks but those named."""
    for strategy in STRATEGIES:
        if strategy.name not in leave_out:
            yield from strategy.plans(n)
