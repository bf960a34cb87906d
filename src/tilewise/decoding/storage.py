"""A rank's cached keys and values in memory: where its rows lie, nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.decoding.chunk import Chunk, num_held


class Storage:
    """Rows of k and v, [2, batch, rows, num_kv_heads, head_dim], taken once.

    Row i of a sequence is its token rank + i world_size.

    Args:
        sizes: num_tokens of a sequence on all ranks together, batch, num_kv_heads, head_dim.
    """

    def __init__(self, sizes: tuple[int, int, int, int], rank: int, world_size: int, **tensor: Any):
        num_tokens, batch, *heads = sizes
        self.rank, self.world_size = rank, world_size
        self.tensor = torch.empty(2, batch, self._held(num_tokens), *heads, **tensor)

    @property
    def rows_first(self) -> tuple[Tensor, Tensor]:
        """k and v as kernels take them: [rows, batch, num_kv_heads, head_dim]."""
        k, v = self.tensor.transpose(1, 2)
        return k, v

    def write(self, chunk: Chunk, k: Tensor, v: Tensor) -> None:
        """Keep this rank's tokens of a chunk that is whole on every rank: [batch, tokens, ...]."""
        for b, (start, stop) in enumerate(zip(chunk.starts, chunk.ends, strict=True)):
            rows = slice(self._held(start), self._held(stop))
            if rows.start < rows.stop:
                skipped = self.rank + rows.start * self.world_size - start
                theirs = slice(skipped, stop - start, self.world_size)
                self.tensor[0, b, rows] = k[b, theirs]
                self.tensor[1, b, rows] = v[b, theirs]

    def write_rows(self, chunk: Chunk, k: Tensor, v: Tensor) -> None:
        """Keep rows of a chunk that are this rank's already, one sequence after the other."""
        offset = 0
        for b, (start, stop) in enumerate(zip(chunk.starts, chunk.ends, strict=True)):
            rows = slice(self._held(start), self._held(stop))
            theirs = slice(offset, offset + rows.stop - rows.start)
            self.tensor[0, b, rows] = k[theirs]
            self.tensor[1, b, rows] = v[theirs]
            offset = theirs.stop

    def packed(self, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """k and v of sequences of these lengths, one after the other: [rows, ...].

        A view of one sequence, a copy of several.
        """
        parts = [self.tensor[:, b, : self._held(length)] for b, length in enumerate(lengths)]
        k, v = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return k, v

    def _held(self, length: int) -> int:
        return num_held(length, self.rank, self.world_size)
