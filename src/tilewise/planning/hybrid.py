"""Planning a model whose layers are not all attention: which tokens a rank holds, layer by layer.

    work = HybridWork(attention, 12, (StateLayer(32, 128, 128),) * 36)
    best = search_hybrid(work, tw.Machine.preset("h100x8"), world_size=32)[0]
    print(best.reason)

A layer with a state passes it on from piece to piece; attention wants equal work under a causal
mask. So the whole model runs on contiguous tokens, or on zigzag ones, of which a rank has two
pieces; or attention alone runs on zigzag tokens: each of its layers moves q, k and v there, and out
back, which is ContextParallel's attention_layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, NamedTuple

from tilewise.arguments import (
    ITEM_BYTES,
    MOST_RANKS,
    check_fields,
    checks_arguments,
    whole_number,
)
from tilewise.compiler.row_moves import RowMoves
from tilewise.layouts.layout import Layout, contiguous, zigzag
from tilewise.planning.candidate import Candidate
from tilewise.planning.indexed_layers import IndexedLayer, indexed_cost
from tilewise.planning.pass_model import pad_to_equal_shards
from tilewise.planning.search import promising, search
from tilewise.simulation.machine import Machine
from tilewise.simulation.row_moves import simulate_moves
from tilewise.tokens.moves import halo_moves, relayout_moves, scan_moves
from tilewise.workload import Workload

CHUNK = 64  # tokens that a scan's kernel takes at once
Name = Literal["contiguous", "zigzag", "relayout"]


class Layouts(NamedTuple):
    """The kinds of layout of a choice: of the model's tokens, and of the rows within attention."""

    tokens: Literal["contiguous", "zigzag"]
    attention: Literal["contiguous", "zigzag"]

    def make(self, num_tokens: int, world_size: int) -> tuple[Layout, Layout]:
        """The two layouts of a sequence."""
        tokens, attention = (_MAKE[name](num_tokens, world_size) for name in self)
        return tokens, attention


_MAKE = MappingProxyType({"contiguous": contiguous, "zigzag": zigzag})
CHOICES: Mapping[Name, Layouts] = MappingProxyType(
    {
        "contiguous": Layouts("contiguous", "contiguous"),
        "zigzag": Layouts("zigzag", "zigzag"),
        "relayout": Layouts("contiguous", "zigzag"),
    }
)
WORDS: Mapping[Name, str] = MappingProxyType(
    {
        "contiguous": "contiguous tokens for the whole model",
        "zigzag": "zigzag tokens for the whole model",
        "relayout": "contiguous tokens, and a relayout to zigzag ones around each layer of "
        "attention",
    }
)


@dataclass(frozen=True)
class StateLayer:
    """A layer that carries a state [num_heads, key_dim, value_dim] along the sequence.

    Args:
        num_heads: 0: a short convolution alone.
        decay: how tokens change the state before them: by a "number" of each head (Mamba2), a
            "row" of key_dim numbers (gated linear attention) or a "matrix" (delta rules).
        conv_channels, conv_width: of the short convolution before it; 0: none.
        dtype: in which states travel.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    decay: Literal["number", "row", "matrix"] = "matrix"
    conv_channels: int = 0
    conv_width: int = 4
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("key_dim", "value_dim", "conv_width"):
            whole_number(name, getattr(self, name))
        for name in ("num_heads", "conv_channels"):
            whole_number(name, getattr(self, name), 0)
        check_fields(self)

    @property
    def scan_bytes(self) -> int:
        """Bytes of one message of a scan: the state and the decay of a piece."""
        decay = {"number": 1, "row": self.key_dim, "matrix": self.key_dim**2}[self.decay]
        numbers = self.num_heads * (self.key_dim * self.value_dim + decay)
        return numbers * ITEM_BYTES(self.dtype)

    @property
    def flop(self) -> float:
        """Forward FLOP of a token, in chunks: scores and results inside one, and its state.

        A delta rule solves a triangular system of a chunk as well, and a piece that another one
        precedes has key_dim more columns of values, for its matrix.
        """
        key, value = self.key_dim, self.value_dim
        if self.decay != "matrix":
            return 2.0 * self.num_heads * (CHUNK * (key + value) + 2 * key * value)
        value += key
        return 2.0 * self.num_heads * (CHUNK * (3 * key + 2 * value) + 3 * key * value)


@dataclass(frozen=True)
class HybridWork:
    """A training step of a model with layers of attention and layers with a state.

    `hf.hybrid_work(model, num_tokens)` reads it from a model of transformers.

    Args:
        attention: of one layer of attention; its layout does not count.
        num_attention_layers: how many there are.
        states: the layers with a state or a convolution, one entry for each.
        indexed: the layers whose indexer chooses keys, one entry for each.
    """

    attention: Workload
    num_attention_layers: int
    states: tuple[StateLayer, ...]
    indexed: tuple[IndexedLayer, ...] = ()

    def __post_init__(self) -> None:
        whole_number("num_attention_layers", self.num_attention_layers, 0)

    @property
    def relayout_bytes(self) -> tuple[int, int]:
        """Bytes of a token that move before a layer of attention (q, k and v), and after (out)."""
        work, item_bytes = self.attention, ITEM_BYTES(self.attention.dtype)
        v_head_dim = work.v_head_dim or work.head_dim
        keys = work.num_kv_heads * (work.head_dim + v_head_dim)
        out = work.num_heads * v_head_dim
        return item_bytes * (work.num_heads * work.head_dim + keys), item_bytes * out


class HybridSeconds(NamedTuple):
    """Simulated seconds of a step, both passes, of all layers.

    Attributes:
        attention: of its plan.
        scan, halo: of what states and convolutions send.
        relayout: of rows that move around layers of attention.
        indexed: of layers whose indexer chooses keys: what travels, and their kernels.
        local: of the scans' own kernels, as tiles of CHUNK queries and keys: an assumption that is
            the same for every choice.
    """

    attention: float
    scan: float
    halo: float
    relayout: float
    indexed: float
    local: float


@dataclass(frozen=True)
class HybridCandidate:
    """A way to lay a hybrid model's tokens out, and what a step takes.

        cp = tw.ContextParallel(group, num_tokens=n, mask=tw.Causal(), layout=best.layout,
                                attention_layout=best.attention_layout)

    Attributes:
        name: "contiguous" or "zigzag": the whole model; "relayout": contiguous tokens, and zigzag
            ones within layers of attention.
        layout, attention_layout: of the model's tokens, and within layers of attention.
        attention: the plan of these.
        parts: seconds by what takes them.
        sent_bytes: of the rank that sends most, by the same parts but the last.
        reason: why the best one is, beside the others.
    """

    name: Name
    layout: Layout
    attention_layout: Layout
    attention: Candidate
    parts: HybridSeconds
    sent_bytes: tuple[int, int, int, int, int]
    reason: str = field(default="", compare=False)

    @property
    def seconds(self) -> float:
        return sum(self.parts)


@checks_arguments
def search_hybrid(
    work: HybridWork, machine: Machine, *, world_size: int, memory_bytes: int | None = None
) -> list[HybridCandidate]:
    """Rank the ways to lay a hybrid model's tokens out by simulated time, the fastest first.

    Attention is searched on each layout (`tw.search`); halos, scans and relayouts are simulated as
    the row moves that the verbs make, on equal shards; states pass every border, as in one
    document. Nothing overlaps between layers; projections and other layers take the same time on
    each layout, and are left out.

    Raises:
        ValueError: as tw.search.
    """
    whole_number("world_size", world_size, most=MOST_RANKS)
    num_tokens = work.attention.num_tokens
    plans = {
        name: search(
            replace(work.attention, layout=make(num_tokens, world_size)),
            machine,
            world_size=world_size,
            memory_bytes=memory_bytes,
        )[0]
        for name, make in _MAKE.items()
    }
    attention = {name: (plan.seconds, plan.sent_bytes) for name, plan in plans.items()}
    priced = _priced(work, machine, world_size, attention, counts_bytes=True)
    reason = _reason({name: parts for name, (parts, _) in priced.items()})
    candidates = [
        HybridCandidate(
            name,
            *CHOICES[name].make(num_tokens, world_size),
            plans[CHOICES[name].attention],
            parts,
            sent_bytes,
            reason,
        )
        for name, (parts, sent_bytes) in priced.items()
    ]
    return sorted(candidates, key=lambda candidate: candidate.seconds)


class HybridChoice(NamedTuple):
    """A way to lay a hybrid model's tokens out, and why it is the best one."""

    name: Name
    reason: str


@lru_cache(maxsize=64)
def promising_hybrid(work: HybridWork, machine: Machine, world_size: int) -> HybridChoice:
    """Choose as search_hybrid does, in little time: of plans of attention those of `promising`.

    The choice depends on the arguments alone.
    """
    num_tokens = work.attention.num_tokens
    attention = {
        name: (
            promising(
                replace(work.attention, layout=make(num_tokens, world_size)), machine, world_size
            ).seconds,
            0,
        )
        for name, make in _MAKE.items()
    }
    priced = _priced(work, machine, world_size, attention, counts_bytes=False)
    parts: dict[Name, HybridSeconds] = {name: seconds for name, (seconds, _) in priced.items()}
    return HybridChoice(min(parts, key=lambda name: sum(parts[name])), _reason(parts))


Cost = tuple[float, int]
"""Seconds of both passes, and bytes of the rank that sends most."""


def _priced(
    work: HybridWork,
    machine: Machine,
    world_size: int,
    attention: Mapping[str, Cost],
    *,
    counts_bytes: bool,
) -> dict[Name, tuple[HybridSeconds, tuple[int, int, int, int, int]]]:
    """Return seconds and bytes of each choice of layouts, by the name of the choice.

    Args:
        attention: cost of one layer of attention, by the kind of its layout.
        counts_bytes: False: do not count bytes; they are 0.
    """
    padded = pad_to_equal_shards(replace(work.attention, layout="zigzag"), world_size)
    shares, item_bytes = 2 * world_size, ITEM_BYTES(padded.dtype)
    share_rows = -(-padded.num_tokens // shares)

    def cost(moves: Sequence[RowMoves], row_bytes: int) -> Cost:
        """Return seconds and bytes of some row moves, forward and backward."""
        passes = (simulate_moves(moves, row_bytes, machine, backward=x) for x in (False, True))
        seconds = sum(timeline.seconds for timeline in passes)
        if not counts_bytes:
            return seconds, 0
        by_rank = [move.volume(row_bytes) for move in moves]
        return seconds, max(sum(f[r] + b[r] for f, b in by_rank) for r in range(world_size))

    def scans(kind: str) -> Cost:
        """The cost of all layers' scans; messages are those of pieces, whatever their length."""
        rounds = scan_moves(_MAKE[kind](shares, world_size), (0, shares))
        sizes = Counter(state.scan_bytes for state in work.states if state.num_heads)
        return _summed([(cost(rounds, size), count) for size, count in sizes.items()])

    def halos(kind: str) -> Cost:
        """The cost of all layers' halos, on pieces no longer than the rows that travel."""
        sizes = Counter(
            (state.conv_width - 1, state.conv_channels)
            for state in work.states
            if state.conv_channels and state.conv_width > 1
        )
        costs = list[tuple[Cost, int]]()
        for (rows, channels), count in sizes.items():
            num_tokens = shares * min(share_rows, rows)
            layout = _MAKE[kind](num_tokens, world_size)
            moves = halo_moves(layout, rows, 0, (0, num_tokens))
            costs.append((cost([moves], channels * item_bytes), count))
        return _summed(costs)

    def relayout() -> Cost:
        """The cost of a relayout around one layer; one row stands for all of a share."""
        layouts = CHOICES["relayout"].make(shares, world_size)
        there, back = (share_rows * row_bytes for row_bytes in work.relayout_bytes)
        moves = relayout_moves(*layouts), relayout_moves(*reversed(layouts))
        costs = cost(moves[:1], there), cost(moves[1:], back)
        return costs[0][0] + costs[1][0], costs[0][1] + costs[1][1]

    local = sum(
        products * state.flop * share_rows * 2 / speed.speed(CHUNK, CHUNK)
        for state in work.states
        for products, speed in (
            (1, machine.kernel(padded.dtype, False)),
            (2, machine.kernel(padded.dtype, True)),
        )
    )

    def indexed(kind: str) -> Cost:
        """The cost of all layers whose indexer chooses keys."""
        shape = padded.num_tokens, world_size, padded.dtype, machine
        costs = [
            (indexed_cost(layer, _MAKE[kind], *shape), count)
            for layer, count in Counter(work.indexed).items()
        ]
        return _summed(costs)

    layers = {kind: (scans(kind), halos(kind), indexed(kind)) for kind in _MAKE}
    moved, num_layers = relayout(), work.num_attention_layers
    priced: dict[Name, tuple[HybridSeconds, tuple[int, int, int, int, int]]] = {}
    for name, layouts in CHOICES.items():
        (scan, halo, chosen), plan = layers[layouts.tokens], attention[layouts.attention]
        move = moved if name == "relayout" else (0.0, 0)
        priced[name] = (
            HybridSeconds(
                num_layers * plan[0], scan[0], halo[0], num_layers * move[0], chosen[0], local
            ),
            (num_layers * plan[1], scan[1], halo[1], num_layers * move[1], chosen[1]),
        )
    return priced


def _summed(counts: Sequence[tuple[Cost, int]]) -> Cost:
    """The cost of layers, each kind as often as there are."""
    return sum(n * cost[0] for cost, n in counts), sum(n * cost[1] for cost, n in counts)


def _reason(parts: Mapping[Name, HybridSeconds]) -> str:
    best, *others = sorted(parts, key=lambda name: sum(parts[name]))
    of_best = ", ".join(
        f"{name} {seconds * 1e3:.4g}" for name, seconds in parts[best]._asdict().items() if seconds
    )
    of_others = "; ".join(f"{WORDS[name]}: {sum(parts[name]) * 1e3:.4g} ms" for name in others)
    total = sum(parts[best]) * 1e3
    return f"{WORDS[best].capitalize()}: {total:.4g} ms ({of_best}). {of_others}."
