"""Prices: the seconds that each operation of a pass takes on a machine.

What is priced is the list of operations that runs. A kernel call takes its launch and its FLOP; an
operation on memory the bytes that it reads and writes over the memory's bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from tilewise.compiler.draft import Draft, DraftOp, View
from tilewise.compiler.ops import (
    Attend,
    Combine,
    ComputeDelta,
    Decode,
    Encode,
    Expand,
    Merge,
    Post,
    Pull,
    Wait,
)
from tilewise.compiler.resolved import ResolvedPass
from tilewise.compiler.traffic import traffic_bytes
from tilewise.plan.ir import Side
from tilewise.simulation.machine import KernelSpeed, Machine
from tilewise.tiles.calls import Kind

PASSES_OF_ENCODING = 8
"""Number of times that encoding, or decoding, passes over the memory of its operand."""


class OpPrice(NamedTuple):
    """The price of one operation.

    Attributes:
        kernel: seconds of kernels.
        memory: seconds of copies, fills, merges and encodings.
        posting: seconds of a rank's own work for its messages.
        traffic_bytes: bytes that it reads and writes in memory, see compiler.traffic.
    """

    kernel: float = 0.0
    memory: float = 0.0
    posting: float = 0.0
    traffic_bytes: int = 0


_FREE = OpPrice()


def copy_seconds(machine: Machine, traffic: float) -> float:
    """Seconds of copies that read and write so many bytes: each number is read and written."""
    return traffic / (2 * machine.pack_bandwidth) if machine.pack_bandwidth else 0.0


def merge_seconds(machine: Machine, traffic: float) -> float:
    """Seconds of merges of so many bytes: of each number two are read and one is written."""
    return traffic / (3 * machine.merge_bandwidth) if machine.merge_bandwidth else 0.0


@dataclass(frozen=True)
class PassPrices:
    """Prices of the operations of one pass on a machine."""

    resolved: ResolvedPass
    machine: Machine
    _known: dict[tuple[float, float, int], float] = field(default_factory=dict, repr=False)

    @cached_property
    def kernel(self) -> KernelSpeed:
        payload = self.resolved.payload
        return self.machine.kernel(payload.dtype, payload.backward, payload.head_dim)

    def kernel_seconds(self, queries: float, area: float, num_heads: int | None = None) -> float:
        """Seconds of a kernel call with these numbers of queries and allowed pairs.

        Args:
            num_heads: of the call; None: those of a head group.
        """
        payload = self.resolved.payload
        heads = payload.heads(Side.Q) if num_heads is None else num_heads
        key = queries, area, heads
        seconds = self._known.get(key)
        if seconds is None:
            flop = payload.flop * area * heads / payload.num_heads
            launch = self.machine.launch_seconds + self.kernel.launch_seconds
            seconds = launch + flop / self.kernel.speed(queries, area / queries, heads)
            self._known[key] = seconds
        return seconds

    def price(self, op: DraftOp, draft: Draft) -> OpPrice:
        """The price of an operation of a draft.

        A rank's own time around a pass is the machine's call_seconds: see Machine.
        """
        num_bytes = draft.num_bytes
        match op:
            case Wait():
                return _FREE
            case Attend():
                return self._attend(op, draft)
            case Post():
                messages = len(op.sends) + len(op.recvs)
                return OpPrice(posting=self.machine.message_seconds * messages)
            case Expand():
                return OpPrice(self._latent_seconds(draft.num_rows(op.latents), 1))
            case Pull():
                return OpPrice(self._latent_seconds(draft.num_rows(op.dlatents), 2))
            case ComputeDelta():
                views = op.out, op.dout, op.product, op.product, op.delta
                return OpPrice(memory=copy_seconds(self.machine, sum(map(num_bytes, views))))
        traffic = traffic_bytes(op, num_bytes)  # pyright: ignore
        match op:
            case Merge() | Combine():
                seconds = self.machine.merge_seconds + merge_seconds(self.machine, traffic)
            case Encode(_, view) | Decode(_, _, view):
                seconds = copy_seconds(self.machine, 2 * PASSES_OF_ENCODING * num_bytes(view))
            case _:
                seconds = copy_seconds(self.machine, traffic)
        return OpPrice(0.0, seconds, 0.0, traffic)

    def _attend(self, op: Attend[View], draft: Draft) -> OpPrice:
        """A kernel call; and what it adds in place, or converts to the dtype of partials."""
        call = op.call
        area = call.area * self._allowed_share
        area += 0 if call.kind is Kind.FULL else int(self.kernel.edge_keys * call.num_q)
        heads = draft.num_heads(op.operands[0])
        kernel = self.kernel_seconds(call.num_q, area, heads) if area else 0.0
        traffic = traffic_bytes(op, draft.num_bytes)
        moved = traffic - sum(op.made_bytes)
        memory = len(op.added) * self.machine.merge_seconds + merge_seconds(self.machine, moved)
        return OpPrice(kernel, memory, 0.0, traffic)

    @cached_property
    def _allowed_share(self) -> float:
        """Share of a call's pairs that are computed. A call of whole rows skips blocks that the
        mask hides, and is taken to have as many of them as the whole table.
        """
        if not self.resolved.payload.whole_rows:
            return 1.0
        q, k = (layout.num_tokens for layout in self.resolved.layouts)
        return int(self.resolved.mask.area((0, q), (0, k))) / max(q * k, 1)

    def _latent_seconds(self, rows: int, products: int) -> float:
        """Seconds of making keys and values of latents, or their gradients of theirs."""
        latent = self.resolved.payload.wires.latent
        assert latent is not None
        return products * rows * latent.flop / self.kernel.speed(rows, rows)
