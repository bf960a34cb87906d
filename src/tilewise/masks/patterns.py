"""The mask patterns of the Long-Context Attention Benchmark, and of models, as functions."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tilewise.arguments import (
    brief,
    checks_arguments,
    listed,
    require_known,
    require_range,
    whole_number,
)
from tilewise.masks import lengths
from tilewise.masks.base import Causal, Document, Full, Mask, Window, as_ints
from tilewise.masks.strips import LIMIT
from tilewise.masks.tables import MOST_CELLS, Blocks, PerHead, Slices, bool_table

BLOCK_MEAN = 576
"""Tokens of a variable block, of the benchmark's 128 to 1024."""


def top_blocks(
    shape: tuple[int, int], num_kv_heads: int | None, share: float, rng: np.random.Generator
) -> np.ndarray:
    """The highest of random scores: the same number of key blocks for every query block."""
    table_shape = shape if num_kv_heads is None else (num_kv_heads, *shape)
    num_cells = math.prod(table_shape)
    if num_cells > MOST_CELLS:
        heads = "" if num_kv_heads is None else f"num_kv_heads ({num_kv_heads}) x "
        raise ValueError(
            f"{heads}{shape[0]} x {shape[1]} blocks of num_tokens are {num_cells} cells of a "
            f"table; take fewer tokens or heads, {MOST_CELLS} cells at most"
        )
    count = max(1, int(share * shape[1]))
    table = np.zeros(table_shape, bool)
    rows = table.reshape(-1, shape[1])
    for some in np.array_split(rows, 1 + num_cells // CELLS_AT_ONCE):
        scores = rng.random(some.shape)
        best = np.argpartition(scores, shape[1] - count, axis=-1)[:, shape[1] - count :]
        np.put_along_axis(some, best, True, axis=-1)
    return table


def block_edges(num_tokens: int, rng: np.random.Generator, mean: int = BLOCK_MEAN) -> list[int]:
    """Blocks of 128 to 1024 tokens, or as many times more or less as the mean is; the last cut."""
    smallest = max(1, mean * 128 // BLOCK_MEAN)
    sizes = rng.integers(smallest, 2 * mean - smallest + 1, -(-num_tokens // smallest))
    ends = np.cumsum(sizes)
    return [0, *ends[ends < num_tokens].tolist(), num_tokens]


def prefixes_for(cu: Sequence[int], rng: np.random.Generator) -> list[int]:
    """Draw a prefix length of at most the first document, and cut it to the length of each
    document.
    """
    first = cu[1] if len(cu) > 1 else 0
    prefix = int(rng.integers(min(1, first), first + 1))
    return [min(prefix, stop - start) for start, stop in pairwise(cu)]


NAMES = (
    "full",
    "causal",
    "full_document",
    "causal_document",
    "sliding_window",
    "sliding_window_causal",
    "share_question",
    "causal_blockwise",
    "global_sliding_window",
    "prefix_lm_causal",
    "prefix_lm_document",
    "block_causal_document",
    "block_sparse_uniform",
    "block_sparse_variable",
)  # the benchmark's table
BLOCK_NAMES = NAMES[-2:]
ALL_NAMES = (*NAMES, "chunked_causal", "causal_with_blocks")  # and of models
OF_DOCUMENTS = tuple(
    name
    for name in ALL_NAMES
    if "document" in name or name in ("share_question", "causal_blockwise", *ALL_NAMES[-2:])
)
WINDOW = BLOCK = 1024  # tokens, the benchmark's sizes
CHUNK, IMAGE = 8192, 256  # tokens of a chunk of Llama 4, of an image of Gemma 3
DENSITIES = (0.1, 0.2, 0.5, 0.8, 1.0)  # shares of key blocks that the benchmark keeps


MOST_HEADS = 1 << 12  # of which each has a table of its own
MOST_PIECES = 1 << 20  # chunks or blocks of a sequence, each an entry of the mask
CELLS_AT_ONCE = 1 << 20  # of a drawn table


@checks_arguments
def full(num_tokens: int) -> Mask:
    """Every query sees every key."""
    whole_number("num_tokens", num_tokens)
    return Full()


@checks_arguments
def causal(num_tokens: int) -> Mask:
    """A query sees the keys up to its own."""
    whole_number("num_tokens", num_tokens)
    return Causal()


@checks_arguments
def full_document(cu_seqlens: Any) -> Mask:
    """Each document sees all of itself."""
    return Document(cu_seqlens)


@checks_arguments
def causal_document(cu_seqlens: Any) -> Mask:
    """Each document sees itself causally."""
    return Document(cu_seqlens) & Causal()


@checks_arguments
def sliding_window(num_tokens: int, window: int) -> Mask:
    """|q - k| <= window."""
    whole_number("num_tokens", num_tokens)
    return Window(window, window)


@checks_arguments
def sliding_window_causal(num_tokens: int, window: int) -> Mask:
    """0 <= q - k <= window."""
    whole_number("num_tokens", num_tokens)
    return Window(window, 0)


@checks_arguments
def share_question(cu_seqlens: Any) -> Mask:
    """Each document is causal on itself; all later ones see the whole first one, too."""
    documents = Document(cu_seqlens)
    question, end = documents.cu_seqlens[:2][-1], documents.cu_seqlens[-1]
    return (documents & Causal()) | Slices([((question, end), (0, question), "full")])


@checks_arguments
def causal_blockwise(cu_seqlens: Any) -> Mask:
    """Each document is causal on itself; the last one sees everything before it, too."""
    documents = Document(cu_seqlens)
    start, end = documents.cu_seqlens[-2:][0], documents.cu_seqlens[-1]
    return (documents & Causal()) | Slices([((start, end), (0, start), "full")])


@checks_arguments
def global_sliding_window(num_tokens: int, window: int) -> Mask:
    """|q - k| <= window; the first `window` queries see all keys, and all queries see the first
    `window` keys."""
    whole_number("window", window, 0)
    first = min(window, whole_number("num_tokens", num_tokens, most=LIMIT))
    everywhere = [
        ((0, first), (0, num_tokens), "full"),
        ((first, num_tokens), (0, first), "full"),
    ]
    return Window(window, window) | Slices(everywhere)


@checks_arguments
def prefix_lm_causal(num_tokens: int, prefix: int) -> Mask:
    """The first `prefix` keys are visible to all queries, the rest causally."""
    whole_number("num_tokens", num_tokens, most=LIMIT)
    require_range("prefix", prefix, 0, num_tokens)
    return Causal() | Slices([((0, num_tokens), (0, prefix), "full")])


@checks_arguments
def prefix_lm_document(cu_seqlens: Any, prefixes: Any) -> Mask:
    """Within each document, its first prefixes[i] keys are visible to all, the rest causally."""
    documents = Document(cu_seqlens)
    spans, prefixes = list(pairwise(documents.cu_seqlens)), as_ints(prefixes, "prefixes")
    if len(prefixes) != len(spans):
        raise ValueError(
            f"{len(prefixes)} prefixes for {len(spans)} documents; give one for each (0: causal)"
        )
    for i, ((start, stop), prefix) in enumerate(zip(spans, prefixes, strict=True)):
        require_range(f"prefix {i}", prefix, 0, stop - start)
    shared = [
        ((start, stop), (start, start + prefix), "full")
        for (start, stop), prefix in zip(spans, prefixes, strict=True)
    ]
    return (documents & Causal()) | Slices(shared)


@checks_arguments
def block_causal_document(cu_seqlens: Any, block: int) -> Mask:
    """Blocks count from each document's start; a query sees its document up to its block's end."""
    whole_number("block", block)
    documents = Document(cu_seqlens)
    _check_pieces("block", block, documents)
    shared = [
        ((at, min(at + block, stop)), (start, min(at + block, stop)), "full")
        for start, stop in pairwise(documents.cu_seqlens)
        for at in range(start, stop, block)
    ]
    return documents & Slices(shared)


@checks_arguments
def chunked_causal(num_tokens: int, chunk: int, cu_seqlens: Any = None) -> Mask:
    """Causal within chunks of `chunk` tokens, as in Llama 4.

    Args:
        chunk: tokens in a chunk; the last one may be cut.
        cu_seqlens: chunks count from each document's start; None: from token 0.
    Raises:
        ValueError: if chunk or num_tokens is under 1, or the documents do not end at num_tokens.
    """
    whole_number("num_tokens", num_tokens)
    whole_number("chunk", chunk)
    documents = Document([0, num_tokens] if cu_seqlens is None else cu_seqlens)
    documents.check_tokens(num_tokens)
    _check_pieces("chunk", chunk, documents)
    starts = [at for span in pairwise(documents.cu_seqlens) for at in range(*span, chunk)]
    return Document([*starts, num_tokens]) & Causal()


@checks_arguments
def causal_with_blocks(num_tokens: int, blocks: Any, window: int | None = None) -> Mask:
    """Causal, but the tokens of a block (an image's) see each other, as in Gemma 3.

    Args:
        blocks: [(start, end), ...], half-open ranges of tokens that do not overlap.
        window: tokens; outside its block a query sees keys with 0 <= q - k <= window.
            None: all before it.
    Raises:
        ValueError: if blocks overlap or end past num_tokens, or window is below 0.
    """
    whole_number("num_tokens", num_tokens)
    ranges = [as_ints(block, "blocks") for block in listed("blocks", blocks, "(start, end)")]
    for block in ranges:
        if len(block) != 2 or not 0 <= block[0] <= block[1] <= num_tokens:
            raise ValueError(
                f"block {brief(block)} must be (start, end), 0 <= start <= end <= num_tokens "
                f"({num_tokens})"
            )
    text = Causal() if window is None else Window(window, 0)
    return text | Slices([(block, block, "full") for block in ranges]) if ranges else text


@checks_arguments
def block_sparse(block_mask: Any, block: int) -> Mask:
    """A bool table over blocks of `block` queries x `block` keys.

    Args:
        block_mask: bool [q_blocks, k_blocks], or [num_kv_heads, q_blocks, k_blocks].
        block: tokens in a block; the last one may reach past the sequence by less than one block.
    """
    whole_number("block", block, most=LIMIT)
    table = _table(block_mask)
    num_q_blocks, num_k_blocks = map(int, table.shape[-2:])
    q_edges, k_edges = np.arange(num_q_blocks + 1) * block, np.arange(num_k_blocks + 1) * block
    return _by_head(table, lambda part: Blocks(part, q_edges, k_edges, overhang=block - 1))


@checks_arguments
def block_sparse_variable(block_mask: Any, q_edges: Any, k_edges: Any) -> Mask:
    """A bool table over blocks of any sizes.

    Args:
        block_mask: bool [q_blocks, k_blocks], or [num_kv_heads, q_blocks, k_blocks].
        q_edges, k_edges: from 0 to the end of the sequence.
    """
    return _by_head(_table(block_mask), lambda part: Blocks(part, q_edges, k_edges))


@checks_arguments
def random(
    name: str,
    num_tokens: int,
    *,
    seed: int,
    cu_seqlens: Any = None,
    num_kv_heads: int | None = None,
    density: float | None = None,
) -> Mask:
    """A pattern by name, its parameters drawn: windows, prefixes and blocks as the benchmark does.

    Args:
        name: one of `ALL_NAMES`.
        num_tokens: length of the sequence.
        seed: the same seed gives the same mask.
        cu_seqlens: documents; None: drawn from the pile, by its published histogram.
        num_kv_heads: block-sparse patterns differ by so many heads; None: one table for all.
        density: share of the key blocks that each query block sees; None: drawn.
    """
    require_known("mask", name, ALL_NAMES)
    whole_number("num_tokens", num_tokens)
    if num_kv_heads is not None:
        whole_number("num_kv_heads", num_kv_heads, most=MOST_HEADS)
    if density is not None and not 0 < density <= 1:
        raise ValueError(f"density ({density}) must be above 0 and at most 1")
    if cu_seqlens is not None:
        Document(cu_seqlens).check_tokens(num_tokens)
    rng = np.random.default_rng(whole_number("seed", seed, 0))
    if name in BLOCK_NAMES:
        share = float(rng.choice(DENSITIES)) if density is None else density
        return _draw_blocks(name, num_tokens, num_kv_heads, share, rng)
    if cu_seqlens is None:
        drawn = name in OF_DOCUMENTS
        cu_seqlens = lengths.sample("pile", num_tokens, seed=seed) if drawn else (0, num_tokens)
    mask = _draw(name, num_tokens, as_ints(cu_seqlens, "cu_seqlens"), rng)
    mask.check_tokens(num_tokens)
    return mask


def _draw(name: str, num_tokens: int, cu: tuple[int, ...], rng: np.random.Generator) -> Mask:
    draws: dict[str, Callable[[], Mask]] = {
        "full": lambda: full(num_tokens),
        "causal": lambda: causal(num_tokens),
        "full_document": lambda: full_document(cu),
        "causal_document": lambda: causal_document(cu),
        "sliding_window": lambda: sliding_window(num_tokens, WINDOW),
        "sliding_window_causal": lambda: sliding_window_causal(num_tokens, WINDOW),
        "share_question": lambda: share_question(cu),
        "causal_blockwise": lambda: causal_blockwise(cu),
        "global_sliding_window": lambda: global_sliding_window(
            num_tokens, int(rng.integers(1, max(2, -(-num_tokens // 3))))
        ),
        "prefix_lm_causal": lambda: prefix_lm_causal(
            num_tokens, int(rng.integers(1, num_tokens + 1))
        ),
        "prefix_lm_document": lambda: prefix_lm_document(cu, prefixes_for(cu, rng)),
        "block_causal_document": lambda: block_causal_document(cu, BLOCK),
        "chunked_causal": lambda: chunked_causal(num_tokens, CHUNK, cu),
        "causal_with_blocks": lambda: _draw_images(num_tokens, rng) & Document(cu),
    }
    return draws[name]()


def _draw_images(num_tokens: int, rng: np.random.Generator) -> Mask:
    starts = np.flatnonzero(rng.random(num_tokens // (2 * IMAGE)) < 0.5) * 2 * IMAGE
    blocks = [(at, at + IMAGE) for at in starts.tolist()]
    return causal_with_blocks(num_tokens, blocks, WINDOW)


def _draw_blocks(
    name: str, num_tokens: int, num_kv_heads: int | None, share: float, rng: np.random.Generator
) -> Mask:
    if name == "block_sparse_uniform":
        block = int(rng.choice((64, 128)))
        count = -(-num_tokens // block)
        return block_sparse(top_blocks((count, count), num_kv_heads, share, rng), block)
    q_edges, k_edges = block_edges(num_tokens, rng), block_edges(num_tokens, rng)
    shape = len(q_edges) - 1, len(k_edges) - 1
    return block_sparse_variable(top_blocks(shape, num_kv_heads, share, rng), q_edges, k_edges)


def _by_head(table: np.ndarray, make: Callable[[np.ndarray], Mask]) -> Mask:
    return make(table) if table.ndim == 2 else PerHead(make(part) for part in table)


def _check_pieces(name: str, size: int, documents: Document) -> None:
    spans = pairwise(documents.cu_seqlens)
    count = sum(-(-(stop - start) // size) for start, stop in spans)
    if count > MOST_PIECES:
        raise ValueError(
            f"{name} ({size}) cuts {documents.cu_seqlens[-1]} tokens in {count} pieces, more than "
            f"{MOST_PIECES}; take a larger one"
        )


def _table(block_mask: Any) -> np.ndarray:
    table = bool_table(block_mask)
    if table.ndim not in (2, 3):
        raise ValueError(
            f"block_mask has {table.ndim} dimensions, but must be [q_blocks, k_blocks] "
            "or [num_kv_heads, q_blocks, k_blocks]"
        )
    return table
