"""Every rank's operations with prices, for the event loop; messages become flows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


class Model(NamedTuple):
    """A rank whose operations another rank's are priced by, and how that one names ranks."""

    rank: int
    relabelled: Callable[[int], int] = int


def price_programs(
    models: Mapping[int, Model],
    draft_of: Callable[[int], Draft],
    prices: PassPrices,
    network: Network,
    call_seconds: float,
) -> tuple[tuple[PricedProgram, ...], tuple[Flow, ...]]:
    """Price the operations of some ranks, and collect their messages.

    Args:
        models: of every rank that is simulated.
        draft_of: the operations of a rank.
        call_seconds: a rank's own work before its first operation.
    """
    writer = _Writer(prices, network)
    priced: dict[int, list[_Operation]] = {}
    unresolved: list[tuple[int, list[Unresolved]]] = []
    for rank, (model, relabelled) in models.items():
        if model not in priced:
            priced[model] = writer.priced(draft_of(model))
        unresolved.append((rank, writer.operations(rank, priced[model], relabelled)))
    programs = tuple(
        PricedProgram(rank, network.compute(rank), call_seconds, tuple(writer.resolved(operations)))
        for rank, operations in unresolved
    )
    return programs, tuple(writer.flows)


class _Sent(NamedTuple):
    """A message: all items of one side and role that one launch sends to one peer."""

    peer: int
    part: tuple[Side, Role]
    num_bytes: int
    num_items: int
    item: Item
    step: int


class _Operation(NamedTuple):
    """An operation as its model has it.

    Attributes:
        sent: messages that it starts.
        arriving: numbers of the receives that it posts, with each message; None: it is empty.
        arrivals: numbers of the receives that it waits for.
    """

    operation: RankOperation
    sent: tuple[_Sent, ...] = ()
    arriving: tuple[tuple[int, Message | None], ...] = ()
    arrivals: tuple[int, ...] = ()


Awaited = tuple[MessageKey | None, ...]
"""The messages that an operation waits for; None: one that is empty."""

Unresolved = tuple[RankOperation, Awaited, tuple[MessageKey, ...]]
"""An operation, the messages that it waits for, and those that it posts receives of."""


class _Writer:
    """Writes the priced operations of ranks, and the flows of all of them."""

    def __init__(self, prices: PassPrices, network: Network):
        self._prices, self._network = prices, network
        self.flows: list[Flow] = []
        self._flow_by_key: dict[MessageKey, int] = {}

    def priced(self, draft: Draft) -> list[_Operation]:
        """The operations of a draft with their prices."""
        found: list[_Operation] = []
        num_bytes = draft.num_bytes
        for op in draft.ops:
            kernel, memory, posting, traffic = self._prices.price(op, draft)
            kind, lane = type(op).__name__, "copy"
            if isinstance(op, Wait):
                lane = "wait"
            elif isinstance(op, Attend | Expand | Pull):
                lane = "compute"
            own = memory + posting
            named = op.label, lane, kind, traffic
            operation = RankOperation(kernel, own, (), (), (), *named)
            if isinstance(op, Post):
                rooms = zip(op.arrivals, op.recvs, op.arriving, strict=True)
                arriving = ((n, x if num_bytes(room) else None) for n, x, room in rooms)
                found.append(_Operation(operation, _sent(op, num_bytes), tuple(arriving)))
            elif isinstance(op, Wait):
                found.append(_Operation(operation, (), (), op.arrivals))
            else:
                found.append(_Operation(operation))
        return found

    def operations(
        self, rank: int, priced: Sequence[_Operation], relabelled: Callable[[int], int]
    ) -> list[Unresolved]:
        """The operations of a rank; what they wait for may be sent by a rank that comes later."""
        found: list[Unresolved] = []
        last_flows: dict[int, int] = {}  # the last flow to each peer
        keys: dict[int, MessageKey | None] = {}
        for operation, sent, arriving, arrivals in priced:
            posted: dict[MessageKey, None] = {}
            for number, message in arriving:
                key = message and self._received(rank, message, relabelled)
                keys[number] = key
                if key is not None:
                    posted[key] = None
            if sent:
                first = len(self.flows)
                self._send(rank, sent, relabelled, last_flows)
                operation = operation._replace(leaving=tuple(range(first, len(self.flows))))
            found.append((operation, tuple(map(keys.__getitem__, arrivals)), tuple(posted)))
        return found

    def resolved(self, operations: Iterable[Unresolved]) -> Iterator[RankOperation]:
        """Yield operations with the numbers of the flows that they wait for; all ranks' are known
        by then.
        """
        flow_of = self._flow_by_key
        for operation, awaited, posted in operations:
            if awaited:
                flows = (ARRIVED if key is None else flow_of.get(key, LOST) for key in awaited)
                operation = operation._replace(awaited=tuple(flows))
            elif posted:
                flows = (flow_of[key] for key in posted if key in flow_of)
                operation = operation._replace(posted=tuple(flows))
            yield operation

    def _received(
        self, rank: int, message: Message, relabelled: Callable[[int], int]
    ) -> MessageKey:
        assert isinstance(message.item, Item)
        return self._key(message.step, relabelled(message.peer), rank, message.item[:2])

    def _key(self, step: int, src: int, dst: int, part: tuple[Side, Role]) -> MessageKey:
        symmetry = self._network.symmetry
        if symmetry.shifts:
            src, dst = symmetry.representative(src), relative(dst, src, symmetry.shifts)
        return step, src, dst, *part

    def _send(
        self,
        rank: int,
        sent: Sequence[_Sent],
        relabelled: Callable[[int], int],
        last_flows: dict[int, int],
    ) -> None:
        """Append a rank's flows. Equal messages by one route after the same flow are one flow."""
        network, first_flow = self._network, len(self.flows)
        groups: dict[tuple[int, int, int], list[tuple[int, _Sent]]] = {}
        flow_by_group: dict[tuple[int, int, int], int] = {}
        for message in sent:
            peer = relabelled(message.peer)
            group = network.message(rank, peer), message.num_bytes, last_flows.get(peer, LOST)
            groups.setdefault(group, []).append((peer, message))
            flow = flow_by_group.setdefault(group, first_flow + len(flow_by_group))
            last_flows[peer] = flow
            self._flow_by_key[self._key(message.step, rank, peer, message.part)] = flow
        for (route, size, previous), messages in groups.items():
            peer, one = messages[0]
            num_items = sum(message.num_items for _, message in messages)
            link = network.link(rank, peer)
            seconds = size / network.bandwidth(link) + self._prices.machine.carry_seconds
            item = one.item._replace(shard=relabelled(one.item.shard))
            name = f"{item} to {peer}" + f" and {num_items - 1} more" * (num_items > 1)
            latency, count = network.latency(link), len(messages)
            self.flows.append(
                Flow(rank, route, link, seconds, size, count, latency, previous, name)
            )


def _sent(post: Post[View], num_bytes: Callable[[View], int]) -> tuple[_Sent, ...]:
    """The messages of a launch, in the order of their first items; none that are empty."""
    found: dict[tuple[int, tuple[Side, Role]], _Sent] = {}
    for message, view in zip(post.sends, post.leaving, strict=True):
        item = message.item
        assert isinstance(item, Item)
        key, size = (message.peer, item[:2]), num_bytes(view)
        before = found.get(key)
        if before is None:
            found[key] = _Sent(*key, size, 1, item, message.step)
        else:
            total, items = before.num_bytes + size, before.num_items + 1
            found[key] = before._replace(num_bytes=total, num_items=items)
    return tuple(message for message in found.values() if message.num_bytes)
