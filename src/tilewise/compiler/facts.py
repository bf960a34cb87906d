"""The facts that the compiler's passes read: a resolved call, a rank, its transport and kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tilewise.compiler.draft import Draft
from tilewise.compiler.head_exchange import HeadExchange, as_one_shard, head_exchange
from tilewise.compiler.lowering import Part, lower, read_together
from tilewise.compiler.program import LAUNCHES_IN_FLIGHT, Launch, Program
from tilewise.compiler.resolved import ResolvedPass
from tilewise.layouts.layout import Layout
from tilewise.plan.ir import Item, Plan, Role, Rows, Side
from tilewise.plan.payload import Field, HeadGroups, Payload, RowFormat, accumulator
from tilewise.tiles.call_rows import LIBRARY_STYLE, CallStyle, TileCalls

SMALL_BYTES = 2**20
"""Up to here a message costs more than a copy of it; beyond, copies are avoided."""

MOST_AHEAD = 8
"""Launches by which receives of small shards are posted before their sends."""


class CodeTraits(NamedTuple):
    """Facts of the transport and of the kernel that a code depends on, beside the call.

    Attributes:
        receives_ahead, node_size, sends_in_flight: as of transport.protocol.Transport.
        takes_teams: whether the transport takes exchanges of whole teams.
        cut: how the kernel wants tiles cut.
        waiting_results: of one row, results of kernel calls that may wait where the kernel put them
            before they are combined; 0: each is added to its partial at once.
    """

    receives_ahead: int = 0
    node_size: int | None = None
    takes_teams: bool = False
    sends_in_flight: int | None = LAUNCHES_IN_FLIGHT
    cut: CallStyle = LIBRARY_STYLE
    waiting_results: int = 0

    def of_plan(self, plan: Plan) -> CodeTraits:
        """These facts for a plan, which may let fewer results wait than the device does."""
        most = self.waiting_results
        own = most if plan.waiting_results is None else plan.waiting_results
        return self._replace(waiting_results=min(most, own))


DEFAULT_TRAITS = CodeTraits()
"""Of a transport that posts a launch as one batch, as NCCL's and loopback's do."""

WAITING_RESULTS = 4
"""Results of a row that wait on a GPU: of more, fewer bytes would move, and more memory be held."""


def kernel_traits(device: str, cut: CallStyle) -> tuple[CallStyle, int]:
    """The last of CodeTraits for a kernel on a device: how tiles are cut, and what may wait.

    Results wait on a GPU, whose time is short for memory. Those of kernels of whole tiles do not:
    they are added to partials. A kernel of lists does that itself, and what arrives waits. On a CPU
    additions are cheap, and what waits would leave its cache.
    """
    if device != "cuda":
        return cut._replace(lists=False), 0
    return cut, 0 if cut.whole_tile and not cut.lists else WAITING_RESULTS


def device_traits(device: str, cut: CallStyle = LIBRARY_STYLE) -> CodeTraits:
    """The traits of loopback, and of NCCL on one node, with a kernel on a device."""
    cut, waiting = kernel_traits(device, cut)
    return DEFAULT_TRAITS._replace(cut=cut, waiting_results=waiting)


class CallTraits(NamedTuple):
    """Facts of a call that a code depends on, beside its resolved passes.

    Attributes:
        batch: sequences that lie side by side in every row.
        prune: whether what the mask makes needless is left out.
        keep: a forward pass keeps what it receives for backward, where the call saves that.
        places: kernels are told where their rows lie in the sequence (dropout, bias).
        asks: tiles are computed by whoever runs the code (decoding).
    """

    batch: int = 1
    prune: bool = True
    keep: bool = False
    places: bool = False
    asks: bool = False


@dataclass(frozen=True)
class Facts:
    """One rank's pass of a call, before it is compiled.

    Args:
        forward: the draft of the forward pass, where backward finds what that kept.
    """

    resolved: ResolvedPass
    rank: int
    call: CallTraits
    traits: CodeTraits
    forward: Draft | None = None

    @cached_property
    def plan(self) -> Plan:
        return self.resolved.pruned if self.call.prune else self.resolved.plan

    @cached_property
    def payload(self) -> Payload:
        return self.resolved.payload

    @cached_property
    def latent(self) -> bool:
        """True if latents travel in place of keys and values."""
        return self.payload.wires.latent is not None

    @property
    def keeps(self) -> bool:
        """True if what this forward pass receives is kept for backward."""
        return self.call.keep and not self.payload.backward

    def combines(self, draft: Draft) -> bool:
        """Return whether results of kernels wait and are summed by a Combine, not merged one by
        one.

        Results do not wait where heads are exchanged by one buffer: the kernel writes into the
        message. Those of a kernel that could take calls of lists wait only beside such calls.
        """
        if self.traits.cut.lists:
            return self.lists(draft.by_head)
        return self.traits.waiting_results > 0 and not draft.by_head

    def lists(self, by_head: bool) -> bool:
        """Return whether kernel calls are of lists: they read rows where they lie, and add their
        results there.
        """
        apart = by_head or self.latent or self.payload.whole_rows
        return self.traits.cut.lists and not apart

    @property
    def kernel_places(self) -> bool:
        """True if kernels get the positions of their rows in the sequence (dropout, bias)."""
        return self.call.places or self.payload.whole_rows

    @property
    def needs_places(self) -> bool:
        """True if kernels, or what makes keys of latents, get the positions of their rows."""
        return self.kernel_places or self.latent

    @cached_property
    def groups(self) -> HeadGroups:
        """Heads of the call's tensors, cut into groups.

        A latent is not cut: each group has all of it.
        """
        groups = self.resolved.groups
        return groups._replace(num_kv_heads=1) if self.latent else groups

    @cached_property
    def formats(self) -> dict[Part, RowFormat]:
        """The format of a row as it travels, by side and role."""
        payload = self.payload
        return {(side, role): payload.row_format(side, role) for side in Side for role in Role}

    @cached_property
    def longest_bytes(self) -> dict[Part, int]:
        """Bytes of one item of each part for the longest shard. Every rank computes the same."""
        return {
            part: self.call.batch
            * max(self.resolved.layouts[part[0]].sizes, default=0)
            * row.num_bytes
            for part, row in self.formats.items()
        }

    @cached_property
    def program(self) -> Program:
        traits, largest = self.traits, max(self.longest_bytes.values())
        ahead, exchanges = traits.receives_ahead, ()
        if traits.takes_teams and largest <= SMALL_BYTES:
            exchanges = self.plan.traits.exchanges
        if ahead:  # more of small ones: posted while all is quiet, they meet nobody's sends
            ahead = max(ahead, min(MOST_AHEAD, SMALL_BYTES // max(1, largest)))
        return lower(
            self.plan,
            self.rank,
            node_size=traits.node_size,
            ahead=ahead,
            carries=frozenset(part for part, row in self.formats.items() if row.fields),
            exchanges=exchanges,
        )

    @cached_property
    def launches(self) -> tuple[Launch, ...]:
        return tuple(x for x in self.program.instructions if isinstance(x, Launch))

    @cached_property
    def arenas(self) -> tuple[tuple[Item, ...], ...]:
        """Groups of operands that lie side by side in one buffer.

        These are the program's arenas whose rows can be used where they lie, in this pass and in
        the forward pass that kept them.
        """
        forward = self.payload._replace(backward=False, saved=False)
        usable = {
            side
            for side in Side
            if self.formats[side, Role.OPERAND].in_place
            and not (self.payload.saved and not forward.row_format(side, Role.OPERAND).in_place)
        }
        lists = self.lists(by_head=False)
        arenas = read_together(self.plan, self.rank) if lists else self.program.arenas
        return tuple(arena for arena in arenas if arena[0].side in usable)

    @cached_property
    def by_head(self) -> dict[Role, HeadExchange]:
        """The exchange of heads by one buffer each way, by role; empty if teams send items."""
        launches, exchanges = self.launches, self.plan.traits.exchanges
        teams = bool(launches) and all(launch.team is not None for launch in launches)
        if not teams or not all(x.by_head for x in exchanges) or not self.call.batch or self.latent:
            return {}
        found: dict[Role, HeadExchange] = {}
        for launch in launches:
            role = (launch.sends or launch.recvs)[0].item.role
            whole = self.head_exchange(role, self.payload)
            if whole is None:
                return {}
            found[role] = whole
        return found

    def head_exchange(self, role: Role, payload: Payload) -> HeadExchange | None:
        """The exchange of a role's items between all ranks by one buffer, if it can be had."""
        layouts, groups = self.resolved.layouts, self.resolved.groups
        return head_exchange(role, payload, layouts, groups, self.rank, self.call.batch)

    @cached_property
    def whole_layouts(self) -> tuple[Layout, Layout]:
        """The layouts of both sides as tiles read them where heads were exchanged: one shard."""
        q, kv = self.resolved.layouts
        return as_one_shard(q), as_one_shard(kv)

    def table(self, by_head: bool) -> TileCalls:
        """Return the table that cuts tiles into kernel calls.

        Args:
            by_head: whether heads were exchanged, so that a tile reads one shard of all rows.
        """
        layouts = self.whole_layouts if by_head else self.resolved.layouts
        cut = CallStyle(whole_rows=True) if self.payload.whole_rows else self.traits.cut
        cut = cut._replace(lists=self.lists(by_head))
        return TileCalls(layouts, self.resolved.mask, self.resolved.groups, cut)

    @cached_property
    def held(self) -> tuple[tuple[tuple[int, tuple[int, int]], ...], ...]:
        """The shards that this rank holds, by side, each with its (start, stop) among the rank's
        rows.
        """
        plan = self.plan
        return tuple(
            tuple(
                (shard, plan.cuts[shard] if plan.cuts else (0, layout.sizes[shard]))
                for shard, ranks in enumerate(plan.owners[side])
                if self.rank in ranks
            )
            for side, layout in zip(Side, self.resolved.layouts, strict=True)
        )

    def num_own_rows(self, side: Side) -> int:
        return sum(stop - start for _, (start, stop) in self.held[side])

    def num_rows(self, item: Item) -> int:
        """Rows of an item's shard."""
        return self.resolved.layouts[item.side].sizes[item.shard]

    @cached_property
    def accumulator(self) -> str:
        return accumulator(self.payload.dtype)

    def result_fields(self, side: Side) -> tuple[Field, ...]:
        """The fields of a side's partials in memory: accumulated, not as they travel."""
        return tuple(
            Field(name, width, self.accumulator) for name, width in self.payload.results(side)
        )

    def own_fields(self, side: Side) -> tuple[Field, ...]:
        """The call's tensors of a side as they are given, and delta, which the pass makes."""
        payload = self.payload
        fields = [Field(name, width, payload.dtype) for name, width in payload.inputs(side)]
        if payload.backward and side is Side.Q:
            fields.append(Field("dout", payload.v_head_dim, payload.dtype))
            fields += [Field("lse", 1, self.accumulator), Field("delta", 1, self.accumulator)]
        return tuple(fields)

    def own_heads(self, side: Side) -> int:
        return self.groups.num_heads if side is Side.Q else self.groups.num_kv_heads


def received_rows(facts: Facts) -> dict[Item, Rows | None]:
    """Return the rows of each operand that is received; None: all."""
    return {
        transfer.item: transfer.rows
        for launch in facts.launches
        for transfer in launch.recvs
        if transfer.item.role is Role.OPERAND
    }


def shares_message(num_bytes: Sequence[int]) -> bool:
    """Return whether tensors of these sizes, from one rank to another in one launch, share a
    message.

    Both ends decide it from the same numbers.
    """
    return len(num_bytes) > 1 and sum(num_bytes) <= SMALL_BYTES
