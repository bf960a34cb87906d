"""Dropout's choice of pairs of queries and keys: a function of the pair, whoever computes it.

A generator with a state gives numbers by the order in which they are asked for, which differs with
the ranks. Philox gives them by a counter, here (key position, query position, query head, batch
row), all global, and a key, the seed: so the same pairs are dropped at every world size, in every
strategy, in backward and in recomputation.

Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3; Philox4x32 of 7 rounds, the
fewest that pass all of BigCrush.
"""

import torch
from torch import Tensor

from tilewise.kernels.protocol import Scores

ROUNDS = 7
_FACTORS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = (1 << 32) - 1


def philox(
    counter: tuple[Tensor | int, Tensor | int, Tensor | int, Tensor | int], seed: int
) -> Tensor:
    """Return the first of Philox's four words, in [0, 2^32), as int64; counters are broadcast."""
    return philox_words(counter, seed)[0]


def philox_words(
    counter: tuple[Tensor | int, Tensor | int, Tensor | int, Tensor | int], seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return Philox's four words, in [0, 2^32), as int64; counters are broadcast.

    Args:
        counter: four words below 2^32, int64 where they are tensors.
        seed: two words, below 2^64.
    """
    (a, b, c, d), key = counter, (seed & _LOW, seed >> 32 & _LOW)
    for _ in range(ROUNDS):
        # int64 wraps as uint64 does; what >> fills with signs is cut off
        left, right = a * _FACTORS[0], c * _FACTORS[1]
        a, c = (right >> 32) & _LOW ^ b ^ key[0], (left >> 32) & _LOW ^ d ^ key[1]
        b, d = right & _LOW, left & _LOW
        key = (key[0] + _WEYL[0]) & _LOW, (key[1] + _WEYL[1]) & _LOW
    one, two, three, four = (torch.as_tensor(word) for word in (a, b, c, d))
    return one, two, three, four


def threshold(dropout_p: float) -> int:
    """A pair is dropped whose word is below this."""
    return int(dropout_p * (1 << 32))


def kept(scores: Scores, batch: int, num_heads: int) -> Tensor:
    """bool [batch, num_heads, m, n]: which pairs of a call dropout keeps."""
    assert scores.places is not None
    q, k, first = scores.places
    heads = torch.arange(first, first + num_heads, device=q.device)[:, None, None]
    rows = torch.arange(batch, device=q.device)[:, None, None, None]
    word = philox((k[None, :], q[:, None], heads, rows), scores.dropout_seed)
    return word >= threshold(scores.dropout_p)
