"""Checks of a cache's calls: sizes, tensors, tokens that fit; each error names its fix.

They are a file of their own because a cache only calls them, under the agreement between ranks.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.arguments import brief, require_dense, require_type, whole_number
from tilewise.decoding.chunk import Chunk
from tilewise.execution.validation import check_mask_heads
from tilewise.masks.base import Mask, as_ints
from tilewise.plan.ir import Plan
from tilewise.workload import MOST_NUMBERS

Lengths = tuple[int, ...]


@dataclass(frozen=True)
class CacheShape:
    """Sizes that a cache was made for.

    Attributes:
        rank, world_size: this rank among all.
    """

    num_tokens: int  # of each sequence at most
    batch: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    rank: int
    world_size: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.num_tokens, self.batch, self.num_kv_heads, self.head_dim

    def check_sizes(self) -> None:
        names = "num_tokens", "batch", "num_kv_heads", "head_dim", "v_head_dim"
        for name, size in zip(names, (*self.sizes, self.v_head_dim), strict=True):
            whole_number(name, size)
        require_type(torch.dtype, "dtype", self.dtype, "torch.bfloat16")
        num_numbers = math.prod((*self.sizes[:3], self.head_dim + self.v_head_dim))
        if num_numbers > MOST_NUMBERS:
            raise ValueError(
                f"num_tokens ({self.num_tokens}) x batch ({self.batch}) x num_kv_heads "
                f"({self.num_kv_heads}) x head_dim ({self.head_dim} and {self.v_head_dim}) is more "
                f"than any memory holds, {MOST_NUMBERS}"
            )

    def one_each(self, name: str, given: Any) -> Lengths:
        """A number for each sequence."""
        numbers = as_ints(given, name)
        if len(numbers) != self.batch or min(numbers) < 0:
            raise ValueError(
                f"{name} {brief(numbers)} must be one number, 0 or more, for each of the "
                f"{self.batch} sequences of the cache"
            )
        return numbers

    def counts(self, given: Any, num_tokens: int) -> Lengths:
        """Return how many of the tokens that a call has belong to each sequence."""
        counts = self.one_each("counts", given)
        if max(counts) > num_tokens:
            raise ValueError(
                f"counts {brief(counts)} reach past the {num_tokens} tokens that were passed; "
                "pad q, k and v to the longest"
            )
        return counts

    def chunk(self, lengths: Lengths, counts: Any) -> Chunk:
        """The next counts[b] tokens of sequences of these lengths."""
        chunk = Chunk(lengths, self.one_each("counts", counts), self.world_size)
        for b, (start, end) in enumerate(zip(lengths, chunk.ends, strict=True)):
            if end > self.num_tokens:
                raise ValueError(
                    f"sequence {b} has {start} tokens and gets {end - start} more, {end} in all, "
                    f"but the cache holds {self.num_tokens} of each; make it with "
                    f"num_tokens={end} or more, or truncate the sequence"
                )
        return chunk

    def latest(self, lengths: Lengths, counts: Lengths) -> Chunk:
        """The last counts[b] tokens of sequences of these lengths."""
        for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            if count > length:
                raise ValueError(
                    f"q has {count} tokens of sequence {b}, but {length} are cached; append their "
                    "keys and values first, or use decode"
                )
        starts = tuple(a - b for a, b in zip(lengths, counts, strict=True))
        return Chunk(starts, counts, self.world_size)

    def kept(self, lengths: Lengths, given: Any) -> Lengths:
        """Lengths that sequences are to be cut to."""
        kept = self.one_each("lengths", given)
        for b, (old, new) in enumerate(zip(lengths, kept, strict=True)):
            if new > old:
                raise ValueError(
                    f"sequence {b} has {old} tokens, fewer than {new}; pass at most {old}"
                )
        return kept

    def check_mask(self, mask: Mask) -> None:
        require_type(Mask, "mask", mask).check_tokens(self.num_tokens)
        check_mask_heads(mask, self.num_kv_heads)

    def check_tokens(
        self, name: str, x: Tensor, heads: int | None = None, width: int | None = None
    ) -> int:
        """The number of tokens of [batch, tokens, heads, width]; heads None: any."""
        require_type(Tensor, name, x, "[batch, tokens, heads, head_dim]")
        require_dense(name, x)
        width = width or self.head_dim
        heads = x.shape[2] if heads is None and x.ndim == 4 else heads
        tokens = x.shape[1] if x.ndim == 4 else 0
        if x.shape != (self.batch, tokens, heads, width) or not tokens:
            wanted = f"{self.batch}, tokens, {heads or 'heads'}, {width}"
            raise ValueError(
                f"{name} is {tuple(x.shape)}, but the cache takes [{wanted}], at least one token; "
                "pass such a tensor, or make the cache for this one"
            )
        self._check_kind(name, x)
        return tokens

    def check_prefill(
        self, lengths: Lengths, chunk: Chunk, tensors: tuple[Tensor, ...], plan: Plan
    ) -> None:
        """Check what attention cannot know of a chunk's rows."""
        require_type(Chunk, "chunk", chunk, "cache.chunk([512])")
        require_type(Plan, "plan", plan)
        for name, x in zip("qkv", tensors, strict=True):
            require_type(Tensor, name, x, "this rank's rows, [rows, heads, head_dim]")
            require_dense(name, x)
        if (chunk.starts, chunk.world_size) != (lengths, self.world_size):
            raise ValueError(
                f"the chunk begins at {chunk.starts} for {chunk.world_size} ranks, but the cache "
                f"has {lengths} tokens on {self.world_size}; make it by the cache's chunk()"
            )
        if not sum(self.chunk(lengths, chunk.counts).counts):
            raise ValueError(f"the chunk has 0 tokens of {self.batch} sequences; leave it out")
        if plan.replicated_queries:
            raise ValueError(
                f"{plan.name} has its queries on every rank, but prefill shards them; pass another "
                "plan, such as tw.ring, or use decode"
            )
        num_rows = chunk.layout.size(self.rank)
        for name, x in zip("qkv", tensors, strict=True):
            heads = x.shape[1] if name == "q" and x.ndim == 3 else self.num_kv_heads
            width = self.v_head_dim if name == "v" else self.head_dim
            if x.shape != (num_rows, heads, width):
                raise ValueError(
                    f"{name} is {tuple(x.shape)}, but rank {self.rank}'s rows of the chunk are "
                    f"[{num_rows}, {heads}, {width}]; pass chunk.layout.shard(x, rank)"
                )
            self._check_kind(name, x)

    def _check_kind(self, name: str, x: Tensor) -> None:
        if x.dtype != self.dtype:
            raise ValueError(f"{name} is {x.dtype}, but the cache {self.dtype}; make them equal")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires a gradient, which a cache does not have; call it under "
                "torch.no_grad(), or train with tw.attention"
            )
