"""A mask by what a user writes: a pattern, drawn; an expression; a function of a module."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from tilewise import masks
from tilewise.arguments import of_kind, require_range
from tilewise.expressions import read_mask
from tilewise.masks import lengths
from tilewise.masks.base import Mask
from tilewise.masks.patterns import BLOCK, BLOCK_NAMES, OF_DOCUMENTS, block_edges, top_blocks
from tilewise_tools.outside import called, is_outside, load, require_no_file

DENSITY = 0.2  # of the block-sparse patterns, one of those that the benchmark draws
CAP = 4  # the longest document is this part of the sequence
CORPUS = "prolong512k"
MOST_BLOCKS = 8  # of a document of LongCA-bench's block_causal_document
WINDOWED = "sliding_window", "sliding_window_causal", "global_sliding_window"
FIXED = "full", "causal", "sliding_window", "sliding_window_causal"  # the same with every seed
DRAWN = tuple(name for name in masks.ALL_NAMES if name not in FIXED)


class Axes(NamedTuple):
    """Parameters that patterns are drawn with; None: as the benchmark's paper has it."""

    block: int | None = None  # tokens; the paper draws 64 or 128, and 1024 of causal blocks
    density: float | None = None  # share of the key blocks that a query block sees; 0.2
    window: int | None = None  # tokens to each side; 1024
    cap: int | None = None  # tokens of the longest document; a quarter of the sequence
    corpus: str | None = None  # of `lengths.corpora()`, or the path of a CSV; prolong512k
    mix: float | None = None  # share of the tokens in long documents; 0
    block_mean: int | None = None  # tokens of a variable block, on average; 576
    draw: str | None = None  # "longca": as the benchmark's own sampler draws documents

    def check(self) -> None:
        """Refuse values out of range, naming the axis; a corpus is read."""
        for name, lowest, highest in (
            *(("block", 1, None), ("window", 0, None), ("cap", 1, None)),
            *(("block_mean", 1, None), ("mix", 0, 1)),
        ):
            if (value := getattr(self, name)) is not None:
                require_range(name, value, lowest, highest)
        if self.density is not None and not 0 < self.density <= 1:
            raise ValueError(f"density ({self.density}) must be above 0 and at most 1")
        if self.corpus is not None:
            lengths.histogram(self.corpus)
        of_kind("draw", self.draw, lengths.Draw | None)

    def of(self, text: str) -> Axes:
        """Return the axes that a mask depends on; all others are None, so that they make no further
        cases.
        """
        words = set(re.findall(r"\w+", text))
        return self._replace(**{axis: None for axis in HAVE if not words & set(HAVE[axis])})


USUAL = Axes()
HAVE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "block": ("block_sparse_uniform", "block_causal_document"),
        "density": BLOCK_NAMES,
        "window": WINDOWED,
        "cap": OF_DOCUMENTS,
        "corpus": OF_DOCUMENTS,
        "mix": OF_DOCUMENTS,
        "block_mean": ("block_sparse_variable",),
        "draw": OF_DOCUMENTS,
    }
)
"""The patterns that each axis is of."""


def drawn(name: str, num_tokens: int, seed: int, axes: Axes = USUAL) -> Mask:
    """One of the named patterns: documents of a corpus, capped at a quarter; blocks at 0.2."""
    cu = documents_of(name, num_tokens, seed, axes) if name in OF_DOCUMENTS else None
    density = axes.density or DENSITY
    if axes.window is not None and name in WINDOWED:
        return getattr(masks, name)(num_tokens, axes.window)
    if axes.block and name == "block_causal_document":
        return masks.block_causal_document(cu, axes.block)
    if axes.block and name == "block_sparse_uniform":
        count = -(-num_tokens // axes.block)
        table = top_blocks((count, count), None, density, np.random.default_rng(seed))
        return masks.block_sparse(table, axes.block)
    if axes.block_mean and name == "block_sparse_variable":
        rng = np.random.default_rng(seed)
        q_edges, k_edges = (block_edges(num_tokens, rng, axes.block_mean) for _ in range(2))
        table = top_blocks((len(q_edges) - 1, len(k_edges) - 1), None, density, rng)
        return masks.block_sparse_variable(table, q_edges, k_edges)
    return masks.random(name, num_tokens, seed=seed, cu_seqlens=cu, density=density)


def documents_of(name: str, num_tokens: int, seed: int, axes: Axes) -> tuple[int, ...]:
    """Boundaries of a pattern's documents.

    As draw "longca" draws them they are of the benchmark's corpus for the length, not capped, and
    have 1 to 8 whole blocks in block_causal_document, whatever the corpus.
    """
    longca, mix = axes.draw == "longca", axes.mix or 0.0
    if longca and name == "block_causal_document":
        block = axes.block or BLOCK
        rng = np.random.default_rng(seed)
        sizes = rng.integers(1, MOST_BLOCKS, -(-num_tokens // block), endpoint=True)
        ends = np.cumsum(block * sizes)
        return (0, *ends[ends < num_tokens].tolist(), num_tokens)
    if longca:
        corpus = axes.corpus or lengths.corpus_for(num_tokens)
        how = {"cap": axes.cap, "draw": "longca"}
        return lengths.sample(corpus, num_tokens, seed=seed, mix=mix, **how)
    cap = axes.cap or max(1, num_tokens // CAP)
    return lengths.sample(axes.corpus or CORPUS, num_tokens, seed=seed, cap=cap, mix=mix)


def mask_of(text: str, num_tokens: int, seed: int = 0, axes: Axes = USUAL) -> Mask:
    """The mask of a pattern's name, of an expression of names and masks, or of "FILE.py:name":
    a function of num_tokens, or a mask.

    Raises:
        ValueError: in one line, saying what can be written.
    """
    if is_outside(text):
        loaded = load(text)
        mask = called(text, loaded, num_tokens) if callable(loaded) else loaded
        if not isinstance(mask, Mask):
            raise ValueError(
                f"mask {text} is of type {type(mask).__name__}; give a mask such as tw.Causal(), "
                "or a function of num_tokens that returns one"
            )
    else:
        require_no_file(text, "a mask, or a function of num_tokens")
        mask = read_mask(text, also=_patterns(num_tokens, seed, axes))
    try:
        mask.check_tokens(num_tokens)
    except ValueError as error:
        raise ValueError(f"mask {text!r}: {error}") from None
    return mask


def _patterns(num_tokens: int, seed: int, axes: Axes) -> Mapping[str, Callable[[], Mask]]:
    return {name: partial(drawn, name, num_tokens, seed, axes) for name in masks.ALL_NAMES}
