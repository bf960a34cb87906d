"""Every rank's operations with prices, for the event loop; messages become flows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from tilewise.compiler.draft import Draft, View
from tilewise.compiler.ops import Attend, Expand, Message, Post, Pull, Wait
from tilewise.plan.ir import Item, Role, Side
from tilewise.plan.shifts import relative
from tilewise.simulation.engine import ARRIVED, LOST, Flow, PricedProgram, RankOperation
from tilewise.simulation.network import Network
from tilewise.simulation.prices import PassPrices

MessageKey = tuple[int, int, int, Side, Role]
"""Key of a message: (step, the rank that stands for its sender, receiver relative to that, side,
role)."""


def price_programs(
    ranks: Iterable[int],
    draft_of: Callable[[int], Draft],
    prices: PassPrices,
    network: Network,
    call_seconds: float,
) -> tuple[tuple[PricedProgram, ...], tuple[Flow, ...]]:
    """Price the operations of some ranks, and collect their messages.

    Args:
        ranks: that are simulated: one of each class of alike ranks.
        draft_of: the operations of a rank.
        call_seconds: a rank's own work before its first operation.
    """
    writer = _Writer(prices, network)
    unresolved = [(rank, writer.operations(rank, draft_of(rank))) for rank in ranks]
    programs = tuple(
        PricedProgram(
            rank, network.compute(rank), call_seconds, tuple(writer.resolved(operations))
        )
        for rank, operations in unresolved
    )
    return programs, tuple(writer.flows)


class _Operation(NamedTuple):
    """An operation of a rank, and the messages that it waits for."""

    operation: RankOperation
    awaited: tuple[MessageKey | None, ...]


class _Sent(NamedTuple):
    """What one launch sends to one peer, of one side and role: it travels as one message."""

    peer: int
    part: tuple[Side, Role]
    num_bytes: int
    num_items: int
    first: Item


class _Writer:
    """Writes the priced operations of ranks, and the flows of all of them."""

    def __init__(self, prices: PassPrices, network: Network):
        self._prices, self._network = prices, network
        self.flows: list[Flow] = []
        self._flow_by_key: dict[MessageKey, int] = {}

    def operations(self, rank: int, draft: Draft) -> list[_Operation]:
        """The operations of a rank; what they wait for may be sent by a rank that comes later."""
        found: list[_Operation] = []
        last_flows: dict[int, int] = {}  # the last flow to each peer
        keys: dict[int, MessageKey | None] = {}
        for op in draft.ops:
            kernel, memory, posting, traffic = self._prices.price(op, draft)
            leaving: tuple[int, ...] = ()
            awaited: tuple[MessageKey | None, ...] = ()
            lane = "memory"
            if isinstance(op, Post):
                lane = "wait"
                first = len(self.flows)
                self._send(rank, self._sent(op, draft), op, last_flows)
                leaving = tuple(range(first, len(self.flows)))
                for number, message, room in zip(op.arrivals, op.recvs, op.arriving, strict=True):
                    keys[number] = self._key_of(rank, message, draft.num_bytes(room))
            elif isinstance(op, Wait):
                lane = "wait"
                awaited = tuple(keys[number] for number in op.arrivals)
            elif isinstance(op, Attend | Expand | Pull):
                lane = "compute"
            kind = type(op).__name__
            operation = RankOperation(
                kernel, memory + posting, leaving, (), op.label, lane, kind, traffic
            )
            found.append(_Operation(operation, awaited))
        return found

    def resolved(self, operations: Iterable[_Operation]) -> Iterable[RankOperation]:
        """Operations with the flows that they wait for, once those of all ranks are known."""
        for operation, awaited in operations:
            if awaited:
                flows = (
                    ARRIVED if key is None else self._flow_by_key.get(key, LOST) for key in awaited
                )
                operation = operation._replace(awaited=tuple(flows))
            yield operation

    def _key_of(self, rank: int, message: Message, num_bytes: int) -> MessageKey | None:
        """The key of a message that a rank receives; None if it is empty."""
        assert isinstance(message.item, Item)
        if not num_bytes:
            return None
        return self._key(message.step, message.peer, rank, message.item[:2])

    def _key(self, step: int, src: int, dst: int, part: tuple[Side, Role]) -> MessageKey:
        symmetry = self._network.symmetry
        if symmetry.shifts:
            src, dst = symmetry.representative(src), relative(dst, src, symmetry.shifts)
        return step, src, dst, *part

    def _sent(self, post: Post[View], draft: Draft) -> list[_Sent]:
        """The messages of a launch, in the order of their first items."""
        found: dict[tuple[int, tuple[Side, Role]], _Sent] = {}
        for message, view in zip(post.sends, post.leaving, strict=True):
            item = message.item
            assert isinstance(item, Item)
            key, num_bytes = (message.peer, item[:2]), draft.num_bytes(view)
            before = found.get(key)
            if before is None:
                found[key] = _Sent(*key, num_bytes, 1, item)
            else:
                total, items = before.num_bytes + num_bytes, before.num_items + 1
                found[key] = before._replace(num_bytes=total, num_items=items)
        return [message for message in found.values() if message.num_bytes]

    def _send(
        self, rank: int, sent: list[_Sent], post: Post[View], last_flows: dict[int, int]
    ) -> None:
        """Append a rank's flows. Equal messages by one route after the same flow are one flow."""
        network, first_flow = self._network, len(self.flows)
        groups: dict[tuple[int, int, int], list[_Sent]] = {}
        flow_by_group: dict[tuple[int, int, int], int] = {}
        for message in sent:
            peer = message.peer
            group = network.message(rank, peer), message.num_bytes, last_flows.get(peer, LOST)
            groups.setdefault(group, []).append(message)
            flow = flow_by_group.setdefault(group, first_flow + len(flow_by_group))
            last_flows[peer] = flow
            step = post.sends[0].step
            self._flow_by_key[self._key(step, rank, peer, message.part)] = flow
        for (route, size, previous), messages in groups.items():
            one, num_items = messages[0], sum(message.num_items for message in messages)
            link = network.link(rank, one.peer)
            seconds = size / network.bandwidth(link) + self._prices.machine.carry_seconds
            name = f"{one.first} to {one.peer}" + f" and {num_items - 1} more" * (num_items > 1)
            latency, count = network.latency(link), len(messages)
            self.flows.append(
                Flow(rank, route, link, seconds, size, count, latency, previous, name)
            )
