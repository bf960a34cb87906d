"""Eight bits a number: e4m3 with a power of two per block of rows and head."""

from dataclasses import dataclass

from tilewise.arguments import check_fields, checks_arguments, whole_number


@dataclass(frozen=True)
class Float8:
    """Numbers travel as e4m3 (1 sign, 4 exponent and 3 mantissa bits) times a power of two.

    A number x of a block whose largest is a arrives as x' with |x - x'| <= max(|x| / 16, a / 2^17),
    twice that with stochastic rounding, whose mean is x. Every row carries its block's power of
    two, a byte a head, so that rows can be cut out and passed on as they are.

    Given alone it is that of q, k, v and dout, in both passes.

    Args:
        block: rows of a shard that share a power of two, head by head.
        stochastic: a number is rounded up with the probability of its place between the two
            nearest; numbers of a counter decide, so that equal calls give equal bits.
        seed: of stochastic rounding, the same on every rank; pass another at every layer and step.
    Raises:
        ValueError: if block is below 1, or seed negative or above 2^63 - 1.
    """

    block: int = 128
    stochastic: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", whole_number("block", self.block))
        object.__setattr__(self, "seed", whole_number("seed", self.seed, 0, (1 << 63) - 1))
        check_fields(self)

    @checks_arguments
    def row_bytes(self, width: int, dtype: str) -> int:
        """Return the bytes of one row of one head: a byte a number, and the power of two."""
        return width + 1
