"""Exchanges of whole teams as collectives: one buffer each way in place of a message a peer.

Where all ranks trade heads for rows (Ulysses), a field is written and read by one strided copy for
all peers, and what arrives lies as tiles read it: as one shard of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.compiler.code import Home
from tilewise.compiler.draft import (
    AttendTile,
    Draft,
    DraftOp,
    HeadBuffer,
    Held,
    Kept,
    RowBuffer,
    View,
    blank_value,
    narrow_fields,
)
from tilewise.compiler.facts import Facts
from tilewise.compiler.ops import (
    ComputeDelta,
    Copy,
    Fill,
    Post,
    SumHeads,
    Table,
    TeamExchange,
    Wait,
)
from tilewise.compiler.program import Await, Compute, Launch, Team, compute_label, wait_label
from tilewise.plan.builder import partial
from tilewise.plan.ir import Role, Side, Tile


def exchanges(draft: Draft, facts: Facts) -> None:
    """Let launches of teams exchange one buffer each way."""
    teams = {
        launch.handle: launch
        for launch in facts.program.instructions
        if isinstance(launch, Launch) and launch.team is not None
    }
    if not teams:
        return
    if facts.by_head:
        _Heads(draft, facts).rewrite()
        return
    taken_in: dict[int, list[tuple[View, View]]] = {}
    old, draft.ops = draft.ops, []
    for op in old:
        if isinstance(op, Post) and op.handle in teams:
            taken_in[op.handle] = _post_in_turn(draft, facts, op, teams[op.handle])
            continue
        draft.ops.append(op)
        if isinstance(op, Wait):
            for place, room in taken_in.pop(op.handle, ()):
                draft.ops.append(Copy(f"unpack {op.label.removeprefix('wait ')}", place, room))


def _post_in_turn(
    draft: Draft, facts: Facts, post: Post[View], launch: Launch
) -> list[tuple[View, View]]:
    """Post one buffer each way, with the bytes for and from each rank of the team in turn.

    Returns:
        The place of each message in the buffer that arrives, and where it is to lie.
    """
    team = launch.team
    assert team is not None
    to, of = [x.peer for x in post.sends], [x.peer for x in post.recvs]
    leaving, parts = _in_turn(draft, "leaving", to, post.leaving)
    arriving, places = _in_turn(draft, "arriving", of, post.arriving)
    for source, target in parts:
        draft.ops.append(Copy(f"pack {post.label.removeprefix('launch ')}", source, target))
    sizes = _by_rank(draft, to, post.leaving, team), _by_rank(draft, of, post.arriving, team)
    most = sum(facts.longest_bytes[part] for part in team.parts)
    named = launch.recvs or launch.sends
    label = f"step {launch.step}, {named[0].item}" if named else "an exchange of a team"
    exchange = TeamExchange(sizes, team, most, label)
    whole = post._replace(
        leaving=(leaving,), arriving=(arriving,), sends=(), recvs=(), team=exchange, lane=0
    )
    draft.ops.append(whole)
    return [(place, room) for room, place in places]


def _in_turn(
    draft: Draft, name: str, peers: Sequence[int], views: Sequence[View]
) -> tuple[View, list[tuple[View, View]]]:
    """A buffer for messages in order of their peers, and the place of each in it."""
    total = sum(map(draft.num_bytes, views))
    whole = draft.new(RowBuffer(name, total, (), 1, Home.WORKSPACE, total))
    places: list[tuple[View, View]] = []
    offset = 0
    for _, view in sorted(zip(peers, views, strict=True), key=lambda pair: pair[0]):
        buffer = draft.buffers[view.buffer]
        place = buffer._replace(
            name=name, num_rows=draft.num_rows(view), within=(whole.buffer, offset), item=None
        )
        places.append((view, draft.new(place)))
        offset += draft.num_bytes(view)
    return whole, places


def _by_rank(
    draft: Draft, peers: Sequence[int], views: Sequence[View], team: Team
) -> tuple[int, ...]:
    sizes = dict.fromkeys(team.ranks, 0)
    for peer, view in zip(peers, views, strict=True):
        sizes[peer] += draft.num_bytes(view)
    return tuple(sizes.values())


class _Heads:
    """A pass whose two launches trade all heads for all rows."""

    def __init__(self, draft: Draft, facts: Facts):
        self._draft, self._facts = draft, facts
        self._own: dict[Side, View] = {}
        self._operands: dict[Side, tuple[View, ...]] = {Side.Q: (), Side.KV: ()}
        self._partials: dict[Side, View] = {}
        self._arrived: set[int] = set()
        self._buffers: dict[Role, dict[Side, View]] = {}

    def rewrite(self) -> None:
        """Replace all operations of the draft; only those that compute delta stay."""
        draft, facts = self._draft, self._facts
        draft.by_head = True
        old, kept = draft.ops, list[DraftOp]()
        kept += (op for op in old if isinstance(op, ComputeDelta))
        draft.ops = kept
        for op in old:
            if isinstance(op, Copy) and draft.buffers[op.source.buffer].home is Home.GIVEN:
                item = draft.buffers[op.target.buffer].item
                assert item is not None
                self._own[item.side] = View(op.source.buffer)
        if facts.forward is not None:
            self._find_saved(facts.forward)
        launches: dict[int, Launch] = {}
        for instruction in facts.program.instructions:
            match instruction:
                case Launch():
                    launches[instruction.handle] = instruction
                    self._launch(instruction)
                case Compute(tile):
                    self._compute(tile)
                case Await(handle, arrivals):
                    self._wait(launches[handle], arrivals)
        for side in Side:
            if facts.payload.results(side):
                self._collect(side)

    def _buffer(
        self, name: str, role: Role, sent: bool, home: Home = Home.WORKSPACE
    ) -> tuple[View, dict[Side, View]]:
        """Make the buffer of bytes for one direction of an exchange.

        Returns:
            the whole buffer; and for each side a view of its fields in it.
        """
        exchange, facts = self._facts.by_head[role], self._facts
        size = sum(exchange.sizes[0 if sent else 1])
        whole = self._draft.new(RowBuffer(name, size, (), 1, home, size))
        return whole, self._fields(whole, role, facts, whole=sent == (role is Role.PARTIAL))

    def _fields(self, inside: View, role: Role, facts: Facts, *, whole: bool) -> dict[Side, View]:
        payload = facts.payload
        if self._draft.buffers[inside.buffer].home is Home.SAVED:
            payload = payload._replace(backward=False, saved=False)
        exchange = facts.head_exchange(role, payload)
        assert exchange is not None
        found: dict[Side, View] = {}
        for side in Side:
            fields = payload.fields(side, role)
            if fields:
                rows = facts.whole_layouts[side].sizes[0] if whole else facts.num_own_rows(side)
                heads = payload.heads(side) * (1 if whole else facts.plan.world_size)
                form = HeadBuffer(exchange, side, whole)
                buffer = RowBuffer(
                    f"heads of {side.name.lower()}", rows, fields, heads, Home.WORKSPACE, form
                )
                found[side] = self._draft.new(buffer._replace(within=(inside.buffer, 0)))
        return found

    def _find_saved(self, forward: Draft) -> None:
        (kept,) = forward.kept
        size = forward.buffers[kept.buffer].num_rows
        saved = self._draft.new(RowBuffer("kept0", size, (), 1, Home.SAVED, size))
        for side, view in self._fields(saved, Role.OPERAND, self._facts, whole=True).items():
            self._operands[side] = (view,)

    def _launch(self, launch: Launch) -> None:
        draft, facts = self._draft, self._facts
        assert launch.team is not None
        role = (launch.sends or launch.recvs)[0].item.role
        exchange, first = facts.by_head[role], role is Role.OPERAND
        leaving, places = self._buffer("heads to send", role, sent=True)
        names = " ".join(x.name for side in places for x in facts.payload.fields(side, role))
        for side, place in places.items():
            fields = tuple(x.name for x in facts.payload.fields(side, role))
            source = self._own[side]._replace(fields=fields) if first else self._made(side)
            shared = exchange.shared[side] if first else None
            heads = None if shared is None else Table.of(shared)
            draft.ops.append(Copy(f"pack heads of {names}", source, place, heads=heads))
        home = Home.KEPT if first and facts.keeps else Home.WORKSPACE
        arriving, self._buffers[role] = self._buffer("arriving heads", role, sent=False, home=home)
        if home is Home.KEPT:
            items = tuple((one.item, 0, ((0, facts.num_rows(one.item)),)) for one in launch.recvs)
            draft.kept.append(Kept(arriving.buffer, items))
        most = sum(facts.longest_bytes[part] for part in launch.team.parts)
        label = f"step {launch.step}, {(launch.recvs or launch.sends)[0].item}"
        sizes = tuple(exchange.sizes[0]), tuple(exchange.sizes[1])
        numbers = tuple(self._number(launch, index) for index in range(len(launch.recvs)))
        team = TeamExchange(sizes, launch.team, most, label)
        draft.ops.append(
            Post(str(launch), launch.handle, 0, (leaving,), (arriving,), (), (), numbers, (), team)
        )

    def _number(self, launch: Launch, index: int) -> int:
        """The number of an arrival: the second exchange's follow the first one's."""
        before = [
            x
            for x in self._facts.program.instructions
            if isinstance(x, Launch) and x.handle < launch.handle
        ]
        return sum(len(x.recvs) for x in before) + index

    def _wait(self, launch: Launch, indices: tuple[int, ...]) -> None:
        transfers = [launch.recvs[index] for index in indices]
        role, numbers = transfers[0].item.role, [self._number(launch, index) for index in indices]
        views = self._buffers[role]
        arriving = {self._draft.buffers[view.buffer].within for view in views.values()}
        ((buffer, _),) = [x for x in arriving if x is not None]
        wait = Wait(wait_label(transfers), launch.handle, tuple(numbers), (View(buffer),))
        self._draft.ops.append(wait)
        if role is Role.OPERAND and launch.handle not in self._arrived:
            self._arrived.add(launch.handle)
            for side, view in views.items():
                self._operands[side] = (*self._operands[side], view)

    def _made(self, side: Side) -> View:
        """The partial of all rows, blank if it is new."""
        draft, facts = self._draft, self._facts
        if side not in self._partials:
            fields, heads = facts.result_fields(side), facts.payload.heads(side)
            item = partial(side, 0, facts.rank)
            rows = facts.whole_layouts[side].sizes[0]
            made = draft.apart(str(item), rows, fields, heads, item=item)
            self._partials[side] = made
            values = tuple(blank_value(x.name) for x in fields)
            draft.ops.append(Fill(f"fill {item}", made, values))
        return self._partials[side]

    def _compute(self, tile: Tile) -> None:
        sides = [side for side in Side if self._facts.payload.results(side)]
        partials = [(self._made(side),) if side in sides else () for side in Side]
        rows = [((0, self._facts.whole_layouts[side].sizes[0]),) for side in Side]
        held = [(Held(rows[side], self._operands[side]),) for side in Side]
        whole = Tile((0,), (0,), tile.heads)
        both = (held[0], held[1]), (partials[0], partials[1])
        self._draft.ops.append(AttendTile(compute_label(tile), whole, *both))

    def _collect(self, side: Side) -> None:
        """Read what all ranks computed of this rank's rows."""
        draft, facts = self._draft, self._facts
        fields = narrow_fields(facts.result_fields(side), facts.payload.dtype)
        rows, heads = facts.num_own_rows(side), facts.own_heads(side)
        results = draft.apart("results", rows, fields, heads, Home.GIVEN)
        label = f"collect {' '.join(x.name for x in fields)}"
        source = self._buffers[Role.PARTIAL][side]
        if facts.by_head[Role.PARTIAL].shared[side] is None:
            draft.ops.append(Copy(label, source, results))
        else:  # ranks of one KV head, whose gradients sum
            draft.ops.append(SumHeads(label, source, results))
