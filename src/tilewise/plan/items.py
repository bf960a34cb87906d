"""What travels between ranks: one role of one shard of one side, in hops."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

Rows = tuple[tuple[int, int], ...]
"""Half-open ranges of local rows of a shard, ascending and disjoint."""


class Side(IntEnum):
    """Which side of the query x key table an item belongs to."""

    Q = 0
    KV = 1

    __hash__ = int.__hash__  # items are dictionary keys everywhere: Enum's own hash is slow


class Role(IntEnum):
    """What a travelling value is, and so what its arrival means.

    OPERAND is copied. PARTIAL moves, and is merged into what the receiver has of it. RESULT is a
    finished partial that its home copies to the other holders of a replicated shard.
    """

    OPERAND = 0
    PARTIAL = 1
    RESULT = 2

    __hash__ = int.__hash__


class Item(NamedTuple):
    """What can travel: one role of one shard of one side, for one head group."""

    side: Side
    role: Role
    shard: int
    heads: int = 0

    def __str__(self) -> str:
        stem = {Role.OPERAND: "", Role.PARTIAL: "*", Role.RESULT: "!"}[self.role]
        group = f"/{self.heads}" if self.heads else ""
        return f"{self.side.name.lower()}{self.shard}{group}{stem}"


class Transfer(NamedTuple):
    """One hop of an item between two ranks; rows None means the whole shard."""

    item: Item
    src: int
    dst: int
    rows: Rows | None = None


def transfer_order(transfer: Transfer) -> tuple:
    """The canonical order of a step's transfers, in which both ends of a pair post them."""
    return transfer.item, transfer.src, transfer.dst, transfer.rows or ()
