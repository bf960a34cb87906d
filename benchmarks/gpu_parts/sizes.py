"""What is measured on a GPU, and the same in small for a CPU, where only the code is tried out.

Lists begin with what targets are about: where time runs out, their ends are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import tilewise as tw

Heads = tuple[int, int]
Makers = Mapping[str, Callable[[], tw.Plan]]


class Sizes(NamedTuple):
    """All lists of one run.

    Attributes:
        head_dim: of all.
        pairs: numbers of query and KV heads that are compiled ahead.
        checked: tokens and numbers of heads that correctness is checked with.
        executor: mask and numbers of heads; of `world`.
        world: ranks, q_tile and tokens of the executor's mesh.
        dense, masked: mask, tokens, numbers of heads; of dense also what else is measured in turns.
        graphs: ranks, q_tile and tokens per rank.
        scaled: tokens and numbers of heads that ever more ranks share.
    """

    head_dim: int
    pairs: tuple[Heads, ...]
    checked: tuple[int, tuple[Heads, ...]]
    executor: tuple[tuple[str, Heads], ...]
    world: tuple[int, int, int]
    dense: tuple[tuple[str, int, Heads, tuple[str, ...]], ...]
    masked: tuple[tuple[str, int, Heads], ...]
    graphs: tuple[tuple[int, int, int], ...]
    scaled: tuple[int, Heads]


MHA, GQA = (32, 32), (64, 8)
K = 1024
BESIDE = "kernel", "direct", "direct_packed"  # see kernels.py
FULL = Sizes(
    head_dim=128,
    pairs=(MHA, GQA),
    # the same heads in all parts: Triton compiles anew for other kinds of numbers
    checked=(1000, (MHA, GQA)),
    executor=(("causal", MHA), ("full", MHA), ("causal", GQA), ("full", GQA)),
    world=(256, 16, 1 << 20),
    dense=(
        ("causal", 64 * K, MHA, BESIDE),
        ("causal", 16 * K, MHA, BESIDE),
        ("full", 16 * K, MHA, BESIDE[:2]),
        ("causal", 64 * K, GQA, BESIDE[1:2]),
        ("causal", 8 * K, MHA, BESIDE[1:2]),
        ("causal", 128 * K, MHA, ()),
        ("full", 64 * K, MHA, ()),
        ("causal", 8 * K, GQA, BESIDE[1:2]),
        ("full", 8 * K, MHA, ()),
        ("causal", 32 * K, MHA, ()),
        ("full", 32 * K, GQA, ()),
        ("full", 128 * K, MHA, ()),
        ("causal", 128 * K, GQA, ()),
    ),
    masked=(
        ("causal_document", 64 * K, MHA),
        ("sliding_window_causal", 64 * K, MHA),
        ("causal_document of pile", 64 * K, MHA),
        ("causal_document", 64 * K, GQA),
        ("sliding_window_causal", 64 * K, GQA),
        ("causal_document", 8 * K, MHA),
        ("sliding_window_causal", 8 * K, MHA),
        ("causal_document", 128 * K, MHA),
        ("sliding_window_causal", 128 * K, MHA),
        ("share_question", 32 * K, MHA),
        ("global_sliding_window", 32 * K, MHA),
    ),
    graphs=((256, 16, 64), (64, 8, 512), (64, 8, 4096)),
    scaled=(32 * K, (16, 16)),
)
SMALL = (4, 2)
TINY = Sizes(
    head_dim=16,
    pairs=(SMALL,),
    checked=(40, ((4, 4), (4, 2))),
    executor=(("causal", SMALL), ("full", SMALL)),
    world=(16, 4, 16 * 24),
    dense=(("causal", 128, SMALL, BESIDE), ("full", 128, SMALL, ())),
    masked=(("causal_document", 128, SMALL), ("sliding_window_causal", 128, SMALL)),
    graphs=((16, 4, 16),),
    scaled=(64, SMALL),
)

CHECKED_PLANS: Makers = MappingProxyType(
    {
        "ring": lambda: tw.ring(4),
        "ring of q": lambda: tw.ring(4, moves="q"),
        "all_gather": lambda: tw.all_gather(4),
        "double_ring": lambda: tw.double_ring(2, 2),
        "balanced_ring": lambda: tw.balanced_ring(4),
        "attention2d": lambda: tw.attention2d(2, 2),
        "mesh": lambda: tw.mesh(8, q_tile=4),
        "ulysses of mesh": lambda: tw.ulysses(2, inner=tw.mesh(4, q_tile=2)),
    }
)
SCALED_PLANS: Makers = MappingProxyType(
    {
        "ring 1": lambda: tw.ring(1),
        "ring 2": lambda: tw.ring(2),
        "ring 4": lambda: tw.ring(4),
        "ring 8": lambda: tw.ring(8),
        "mesh 8": lambda: tw.mesh(8, q_tile=4),
        "ulysses 8": lambda: tw.ulysses(8),
        "double_ring 2 x 4": lambda: tw.double_ring(2, 4),
    }
)
CHECKED_MASKS = ("full", "causal", "window", "causal_document")


def plans(num_kv_heads: int) -> list[tw.Plan]:
    """A plan of every strategy that so many KV heads allow."""
    made = (make() for make in CHECKED_PLANS.values())
    return [plan for plan in made if num_kv_heads % plan.num_head_groups == 0]


def mask_named(name: str, num_tokens: int) -> tw.masks.Mask:
    """Documents are as long as in a corpus, prolong64k's."""
    kind, _, corpus = name.partition(" of ")
    match kind:
        case "full":
            return tw.Full()
        case "causal":
            return tw.Causal()
        case "window":
            return tw.Causal() & tw.Window(window_of(num_tokens), 0)
        case "sliding_window_causal":
            return tw.masks.sliding_window_causal(num_tokens, window_of(num_tokens))
        case "global_sliding_window":
            return tw.masks.global_sliding_window(num_tokens, window_of(num_tokens))
        case "share_question":
            return tw.masks.share_question(documents(num_tokens))
    assert kind == "causal_document", kind
    return tw.masks.causal_document(documents(num_tokens, corpus or "prolong64k"))


def window_of(num_tokens: int) -> int:
    """The mask benchmark's 1024; less of few tokens."""
    return min(tw.masks.WINDOW, num_tokens // 7)


def documents(num_tokens: int, corpus: str = "prolong64k") -> tuple[int, ...]:
    """cu_seqlens; of few tokens three documents, which a corpus would hardly give."""
    if num_tokens < 4 * K:
        return 0, num_tokens // 3, num_tokens // 2, num_tokens
    return tw.lengths.sample(corpus, num_tokens, seed=0)


def area(name: str, num_tokens: int) -> int:
    """Allowed pairs of a query and a key."""
    return mask_named(name, num_tokens).area((0, num_tokens), (0, num_tokens))
