"""Planning a model whose layers are not all attention: which tokens a rank holds, layer by layer.

    work = HybridWork.of_config(config, num_tokens=1 << 18)
    best = search_hybrid(work, tw.Machine.preset("h100x8"), world_size=32)[0]
    print(best.reason)

A layer with a state passes it on from piece to piece; attention wants equal work under a causal
mask. So the whole model runs on contiguous tokens, or on zigzag ones, of which a rank has two
pieces; or attention alone runs on zigzag tokens, and each of its layers moves rows there and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from tilewise.arguments import (
    ITEM_BYTES,
    MOST_RANKS,
    DtypeName,
    checks_arguments,
    dtype_name,
    whole_number,
)
from tilewise.layouts.layout import Layout, contiguous, zigzag
from tilewise.masks.base import Causal
from tilewise.planning.candidate import Candidate
from tilewise.planning.model_attention import HEAD_FIELDS, heads_of
from tilewise.planning.pass_model import pad_to_equal_shards
from tilewise.planning.search import search
from tilewise.simulation.machine import Machine
from tilewise.simulation.row_moves import simulate_moves
from tilewise.tokens.moves import halo_moves, relayout_moves, scan_moves
from tilewise.workload import Workload

CHUNK = 64  # tokens that a scan's kernel takes at once
ATTENTION = ("full_attention", "attention", "sliding_attention")


@dataclass(frozen=True)
class StateLayer:
    """A layer that carries a state [num_heads, key_dim, value_dim] along the sequence.

    Args:
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
        for name in ("num_heads", "key_dim", "value_dim", "conv_width"):
            whole_number(name, getattr(self, name))
        whole_number("conv_channels", self.conv_channels, 0)
        if self.decay not in ("number", "row", "matrix"):
            raise ValueError(f"decay ({self.decay!r}) must be 'number', 'row' or 'matrix'")

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

    Args:
        attention: of one layer of attention; its layout does not count.
        num_attention_layers, num_state_layers: of each kind.
        state: of one layer with a state.
        hidden_size: numbers of a token between layers, which travel where a layer's rows move.
    """

    attention: Workload
    num_attention_layers: int
    state: StateLayer
    num_state_layers: int
    hidden_size: int

    def __post_init__(self) -> None:
        for name in ("num_attention_layers", "num_state_layers"):
            whole_number(name, getattr(self, name), 0)
        whole_number("hidden_size", self.hidden_size)

    @staticmethod
    def of_config(config: Any, num_tokens: int, dtype: DtypeName = "bfloat16") -> HybridWork:
        """The step of a configuration of transformers, of one sequence without documents.

        Args:
            config: of gated delta rules (Qwen3-Next, Qwen3.5, OLMo hybrid) or of Mamba2 (Bamba,
                Granite hybrid, ...), with layer_types.
        Raises:
            ValueError: for a configuration of other layers; it names what is missing.
        """

        def value(name: str) -> Any:
            return getattr(config, name, None)

        kinds = value("layer_types") or value("layers_block_type")
        if not kinds:
            raise ValueError(
                f"{type(config).__name__} has neither layer_types nor layers_block_type, the kind "
                "of each layer"
            )
        if value("linear_num_value_heads"):
            heads, key = config.linear_num_value_heads, config.linear_key_head_dim
            channels = 2 * config.linear_num_key_heads * key + heads * config.linear_value_head_dim
            state = StateLayer(
                heads,
                key,
                config.linear_value_head_dim,
                "matrix",
                channels,
                config.linear_conv_kernel_dim,
            )
        elif value("mamba_n_heads"):
            heads, key = config.mamba_n_heads, config.mamba_d_state
            channels = heads * config.mamba_d_head + 2 * config.mamba_n_groups * key
            width = config.mamba_d_conv
            state = StateLayer(heads, key, config.mamba_d_head, "number", channels, width)
        else:
            raise ValueError(
                f"{type(config).__name__} has neither linear_num_value_heads (gated delta rules) "
                "nor mamba_n_heads (Mamba2); give a StateLayer of its layers"
            )
        heads = heads_of({name: value(name) for name in HEAD_FIELDS})
        sizes = heads.num_heads, heads.num_kv_heads, heads.head_dim
        attention = Workload(
            num_tokens, *sizes, dtype_name(dtype), mask=Causal(), v_head_dim=heads.v_head_dim
        )
        num_attention = sum(kind in ATTENTION for kind in kinds)
        return HybridWork(
            attention, num_attention, state, len(kinds) - num_attention, config.hidden_size
        )


class HybridSeconds(NamedTuple):
    """Simulated seconds of a step, both passes, of all layers.

    Attributes:
        attention: of its plan.
        scan, halo: of what states and convolutions send.
        relayout: of rows that move around layers of attention.
        local: of the scans' own kernels, as tiles of CHUNK queries and keys: an assumption that is
            the same for every choice.
    """

    attention: float
    scan: float
    halo: float
    relayout: float
    local: float


@dataclass(frozen=True)
class HybridCandidate:
    """A way to lay a hybrid model's tokens out, and what a step takes.

    Attributes:
        name: "contiguous" or "zigzag": the whole model; "relayout": contiguous tokens, and zigzag
            ones within layers of attention.
        layout: of the model's tokens; attention.layout is that of layers of attention.
        attention: the plan of these.
        parts: seconds by what takes them.
        sent_bytes: of the rank that sends most, by the same parts but the last.
        reason: why the best one is, beside the others.
    """

    name: Literal["contiguous", "zigzag", "relayout"]
    layout: Layout
    attention: Candidate
    parts: HybridSeconds
    sent_bytes: tuple[int, int, int, int]
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
    the row moves that the verbs make; states pass every border, as in one document. Nothing
    overlaps between layers; projections and other layers take the same time on each layout, and are
    left out.

    Raises:
        ValueError: as tw.search.
    """
    whole_number("world_size", world_size, most=MOST_RANKS)
    padded = pad_to_equal_shards(replace(work.attention, layout="zigzag"), world_size)
    num_tokens, state = padded.num_tokens, work.state
    layouts = {"contiguous": contiguous, "zigzag": zigzag}
    plans = {
        name: search(
            replace(padded, layout=make(num_tokens, world_size)),
            machine,
            world_size=world_size,
            memory_bytes=memory_bytes,
        )[0]
        for name, make in layouts.items()
    }

    def both(moves: Sequence[Any], row_bytes: int) -> tuple[float, int]:
        """Seconds of both passes, and bytes of the rank that sends most."""
        passes = (simulate_moves(moves, row_bytes, machine, backward=x) for x in (False, True))
        by_rank = [move.volume(row_bytes) for move in moves]
        sent_by_rank = [sum(f[r] + b[r] for f, b in by_rank) for r in range(world_size)]
        return sum(timeline.seconds for timeline in passes), max(sent_by_rank)

    def of_layout(name: str) -> tuple[tuple[float, int], tuple[float, int]]:
        """A scan and a halo."""
        layout, whole = layouts[name](num_tokens, world_size), (0, num_tokens)
        halo = 0.0, 0
        if state.conv_channels and state.conv_width > 1:
            row_bytes = state.conv_channels * ITEM_BYTES(padded.dtype)
            halo = both([halo_moves(layout, state.conv_width - 1, 0, whole)], row_bytes)
        return both(scan_moves(layout, whole), state.scan_bytes), halo

    shares = 2 * world_size  # of equal rows: one row stands for all of a share
    to_zigzag = relayout_moves(contiguous(shares, world_size), zigzag(shares, world_size))
    to_contiguous = relayout_moves(zigzag(shares, world_size), contiguous(shares, world_size))
    share_bytes = -(-num_tokens // shares) * work.hidden_size * ITEM_BYTES(padded.dtype)
    relayout = both([to_zigzag, to_contiguous], share_bytes)
    local = sum(
        products * state.flop * -(-num_tokens // world_size) / speed.speed(CHUNK, CHUNK)
        for products, speed in (
            (1, machine.kernel(padded.dtype, False)),
            (2, machine.kernel(padded.dtype, True)),
        )
    )
    candidates: list[HybridCandidate] = []
    choices: tuple[tuple[Any, str, str], ...] = (
        ("contiguous", "contiguous", "contiguous"),
        ("zigzag", "zigzag", "zigzag"),
        ("relayout", "contiguous", "zigzag"),
    )
    for name, tokens, attention_tokens in choices:
        scan, halo = of_layout(tokens)
        layer_relayout = relayout if name == "relayout" else (0.0, 0)
        counts = work.num_attention_layers, work.num_state_layers
        plan = plans[attention_tokens]
        num_attention, num_state = counts
        parts = HybridSeconds(
            num_attention * plan.seconds,
            num_state * scan[0],
            num_state * halo[0],
            num_attention * layer_relayout[0],
            num_state * local,
        )
        sent_bytes = (
            num_attention * plan.sent_bytes,
            num_state * scan[1],
            num_state * halo[1],
            num_attention * layer_relayout[1],
        )
        layout = layouts[tokens](num_tokens, world_size)
        candidates.append(HybridCandidate(name, layout, plan, parts, sent_bytes))
    candidates.sort(key=lambda candidate: candidate.seconds)
    return [replace(candidate, reason=_reason(candidates)) for candidate in candidates]


WORDS = MappingProxyType(
    {
        "contiguous": "contiguous tokens for the whole model",
        "zigzag": "zigzag tokens for the whole model",
        "relayout": "contiguous tokens, and a relayout to zigzag ones around each "
        "layer of attention",
    }
)


def _reason(candidates: Sequence[HybridCandidate]) -> str:
    best, *other_candidates = candidates
    parts = ", ".join(
        f"{name} {seconds * 1e3:.4g}" for name, seconds in best.parts._asdict().items() if seconds
    )
    other_times = "; ".join(
        f"{WORDS[candidate.name]}: {candidate.seconds * 1e3:.4g} ms"
        for candidate in other_candidates
    )
    return f"{WORDS[best.name].capitalize()}: {best.seconds * 1e3:.4g} ms ({parts}). {other_times}."
