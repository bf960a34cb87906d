"""Layouts of packed documents: each document split over all ranks."""

from itertools import pairwise
from typing import Any

from tilewise.arguments import MOST_RANKS, whole_number
from tilewise.layouts.layout import Layout, Run
from tilewise.masks.base import Document


def zigzag_documents(cu_seqlens: Any, world_size: int) -> Layout:
    """Cut each document in 2 world_size pieces, of which rank r owns the r-th from either end.

        tw.zigzag_documents([0, 8, 12], 2)      # rank 0: 0 1 6 7  8 11; rank 1: 2 3 4 5  9 10

    Under a causal mask of these documents every rank has the same work in each. Where 2 world_size
    divides a document this is TransformerEngine's order. Else its pieces differ by one token, the
    longer ones first, and none is padded. The longer pieces of the next such document begin at the
    next rank, so that rank 0 is not favoured.

    Args:
        cu_seqlens: boundaries of the documents, as Document takes them; the last one is the length
            of the sequence.
        world_size: number of ranks.
    Raises:
        ValueError: for boundaries that Document refuses, and world_size below 1.
    """
    boundaries = Document(cu_seqlens).cu_seqlens
    n = whole_number("world_size", world_size, most=MOST_RANKS)
    runs: list[list[Run]] = [[] for _ in range(n)]
    first_rank = 0
    for start, stop in pairwise(dict.fromkeys(boundaries)):
        size, num_longer = divmod(stop - start, 2 * n)
        num_pieces = 2 * n if size else num_longer  # that have tokens
        edges = [start + i * size + min(i, num_longer) for i in range(num_pieces + 1)]
        shift = first_rank if num_longer else 0
        for piece in range(num_pieces):
            rank = (min(piece, 2 * n - 1 - piece) + shift) % n
            runs[rank].append(Run(edges[piece], edges[piece + 1] - edges[piece]))
        first_rank = (first_rank + bool(num_longer)) % n
    return Layout(boundaries[-1], runs, "zigzag_documents")
