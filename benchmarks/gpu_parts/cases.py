"""The list of cases, most valuable first, with what each is expected to take on an H200."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, product

from benchmarks.gpu_parts.case import Case, Row
from benchmarks.gpu_parts.sizes import (
    CHECKED_MASKS,
    CHECKED_PLANS,
    FULL,
    SCALED_PLANS,
    TINY,
    Heads,
    Sizes,
    area,
    plans,
)

PARTS = ("correctness", "executor", "kernels", "graphs", "scaling")
FLEX = "torch flex"  # flex_attention called directly, with a mask function as its users write one
OTHER = "triton_deterministic"  # the same forward; its backward is timed at a few sizes
# providers, where none can be asked
EXPECTED = ("cuda", "triton", OTHER, "cudnn", "efficient", "flex")
UNTIMED = ("reference", "efficient", "flashinfer")  # quadratic in memory, slow, or forward alone
DIRECT = ("cuda", "cudnn")  # providers whose library torch's own attention can be told to call
# what comes before other parts; of the rest the quickest comes first
FIRST_RANKS, FIRST_SIZES = 3, 4
FORWARD_FLOPS, BACKWARD_FLOPS = 4e14, 2.8e14  # a second; for estimates alone
START = 4.0  # seconds, of CUDA in a new process and a first call; imports have passed before


def before(able: Sequence[str], tiny: bool) -> list[Case]:
    """What is not timed, so that lanes may run side by side: compiling ahead, and correctness."""
    sizes = TINY if tiny else FULL
    return [*_ahead(able, sizes), *_alone(able, sizes), *_checked(able, sizes)]


def timed(able: Sequence[str], tiny: bool) -> list[Case]:
    """What one process at a time measures."""
    sizes = TINY if tiny else FULL
    names = [n for n in able if n not in (*UNTIMED, OTHER) and (n == "cpu") == tiny]
    executor = [list(_executor(names, sizes, *row)) for row in sizes.executor]
    dense = [list(_dense(names, sizes, *row)) for row in sizes.dense]
    masked = [list(_masked(names, sizes, *row)) for row in sizes.masked]
    flex = list(_flex(able, sizes))
    rest = [*dense[FIRST_SIZES:], *masked[FIRST_SIZES:], *executor[FIRST_RANKS:], flex[2:]]
    rest.sort(key=lambda group: sum(case.seconds for case in group))
    return [
        *dense[0],  # which kernel is fast decides what is worth asking next
        *chain(*executor[:FIRST_RANKS], *dense[1:FIRST_SIZES], *masked[:FIRST_SIZES]),
        *_deterministic(able, sizes),
        *flex[:2],
        *_graphs(names, sizes),
        *_scaling(sizes),
        *chain(*rest),
    ]


def _ahead(able: Sequence[str], sizes: Sizes) -> Iterator[Case]:
    """Variants of compiled kernels, each in a process of its own: caches on disk are filled."""
    names = [n for n in able if n in ("triton", OTHER, "cpu")]
    for name, heads in product(names, sizes.pairs):
        passes = ("backward",) if name == OTHER else ("forward", "backward")
        for which, into in product(passes, (False,) if name == OTHER else (False, True)):
            given = {"which": which, "into": into, "heads": _text(heads)}
            options = {"kernel": name, **given, "head_dim": sizes.head_dim}
            yield Case("ahead", options, 25.0, f"ahead {name} {which} {into} {heads}")
    if "flex" in able:
        (first, second), shape = sizes.masked[:2], {"head_dim": sizes.head_dim}
        for contender, (mask, tokens, heads) in (("flex", first), (FLEX, first), (FLEX, second)):
            options = {**_kernel(contender, mask, tokens, heads), **shape}
            yield Case("ahead flex", options, 60.0, f"ahead {contender} {mask}")


def _alone(able: Sequence[str], sizes: Sizes) -> Iterator[Case]:
    """Every provider without a plan. A case of flex compiles anew, so it has fewer."""
    tokens, pairs = sizes.checked
    for name, heads, mask in product(able, pairs, CHECKED_MASKS):
        if name == "flex" and (heads != pairs[-1] or mask not in ("causal", "causal_document")):
            continue
        given = {"kernel": name, "mask": mask, "heads": _text(heads), "num_tokens": tokens}
        seconds = 40.0 if name == "flex" else 2.0
        options = {"plan": "none", **given, "head_dim": sizes.head_dim, "graph": False}
        yield Case("correctness", options, seconds, f"alone {name}")


def _checked(able: Sequence[str], sizes: Sizes) -> Iterator[Case]:
    """Every strategy with the default kernel and with our own, as a graph and not."""
    tokens, pairs = sizes.checked
    names = [n for n in able if n in ("cuda", "triton", "cpu")]
    for heads, mask, kernel in product(pairs, CHECKED_MASKS, names):
        allowed = {plan.name for plan in plans(heads[1])}
        for plan, graph in product(CHECKED_PLANS, (False, True)):
            if CHECKED_PLANS[plan]().name not in allowed:
                continue
            given = {"kernel": kernel, "mask": mask, "heads": _text(heads), "num_tokens": tokens}
            options = {"plan": plan, **given, "head_dim": sizes.head_dim, "graph": graph}
            yield Case("correctness", options, 1.2, f"checked {mask} {heads}")


def _executor(names: Sequence[str], sizes: Sizes, mask: str, heads: Heads) -> Iterator[Case]:
    world, q_tile, tokens = sizes.world
    for name in names:
        if name == "flex":
            continue
        given = {"mask": mask, "heads": _text(heads), "world_size": world, "q_tile": q_tile}
        options = {"kernel": name, **given, "num_tokens": tokens, "head_dim": sizes.head_dim}
        seconds = 4 + _seconds(area(mask, tokens) // world, heads, 3)
        yield Case("executor", options, seconds, "executor")


def _dense(
    names: Sequence[str], sizes: Sizes, mask: str, tokens: int, heads: Heads, beside: Sequence[str]
) -> Iterator[Case]:
    for name in names:
        if name == "flex":
            continue
        others = [x for x in beside if x == "kernel" or name in DIRECT]
        given = _kernel(name, mask, tokens, heads)
        options = {**given, "head_dim": sizes.head_dim, "beside": others}
        seconds = 1 + _seconds(area(mask, tokens), heads, 1 + len(others))
        yield Case("kernels", options, seconds, "dense")


def _masked(
    names: Sequence[str], sizes: Sizes, mask: str, tokens: int, heads: Heads
) -> Iterator[Case]:
    for name in names:
        if name in ("flex", "cudnn"):
            continue
        given = _kernel(name, mask, tokens, heads)
        options = {**given, "head_dim": sizes.head_dim, "beside": []}
        # small calls take longer than their area
        yield Case("kernels", options, 1.5 + 2 * _seconds(area(mask, tokens), heads, 1), "masks")


def _deterministic(able: Sequence[str], sizes: Sizes) -> Iterator[Case]:
    names = [n for n in able if n == OTHER]
    yield from _dense(names, sizes, *sizes.dense[1][:3], ())
    yield from _masked(names, sizes, *sizes.masked[0])


def _flex(able: Sequence[str], sizes: Sizes) -> Iterator[Case]:
    """First flex_attention called directly. Each compiles, so each has a process of its own; what
    was compiled ahead is found on disk."""
    if "flex" not in able:
        return
    first, second = sizes.masked[:2]
    for name, row in ((FLEX, first), (FLEX, second), ("flex", first)):
        given = _kernel(name, *row)
        options = {**given, "head_dim": sizes.head_dim, "beside": []}
        yield Case("kernels", options, 20.0, f"{name} {row[0]}")


def _graphs(names: Sequence[str], sizes: Sizes) -> Iterator[Case]:
    for (world, q_tile, rows), name in product(sizes.graphs, names):
        if name not in ("cuda", "triton", "cpu"):
            continue
        shape = {"world_size": world, "q_tile": q_tile, "num_tokens": world * rows}
        given = {"mask": "causal", "heads": _text(sizes.pairs[0]), "head_dim": sizes.head_dim}
        yield Case("graphs", {"kernel": name, **given, **shape}, 4.0, "graphs")


def _scaling(sizes: Sizes) -> Iterator[Case]:
    tokens, heads = sizes.scaled
    for name, make in SCALED_PLANS.items():
        ranks = make().world_size
        if sizes is TINY and (ranks > 2 or heads[1] % make().num_head_groups):
            continue
        for graph in (False, True):
            if graph and name not in ("ring 1", "ring 8", "mesh 8"):
                continue
            given = {"heads": _text(heads), "num_tokens": tokens, "head_dim": sizes.head_dim}
            options = {"plan": name, "ranks": ranks, "graph": graph, **given}
            yield Case("scaling", options, 2.0, "scaling")


def _kernel(contender: str, mask: str, num_tokens: int, heads: Heads) -> Row:
    return {"contender": contender, "mask": mask, "num_tokens": num_tokens, "heads": _text(heads)}


def _text(heads: Heads) -> str:
    return f"{heads[0]}:{heads[1]}"


def _seconds(pairs: int, heads: Heads, variants: int) -> float:
    """Of both passes of so many variants: two warm-ups each, then rounds as session.py does."""
    flops = 4 * 128 * heads[0] * pairs
    both = flops / FORWARD_FLOPS + 2.5 * flops / BACKWARD_FLOPS
    return variants * max(0.9, 5.5 * both)


def lanes_at_once(cores: int | None) -> int:
    """How many lanes run side by side before anything is timed."""
    return max(2, min(15, (cores or 1) - 1))
