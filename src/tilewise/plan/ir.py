"""A plan: which rank computes which tiles of the query x key table, and what travels when.

Two sides (Q, KV) and two roles (operand, partial) name all that can travel. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from hashlib import blake2b
from itertools import chain, zip_longest
from typing import Any, ClassVar, NamedTuple, TypedDict, Unpack

from tilewise.arguments import MOST_RANKS, Save, listed, of_kind, require_type, shown, whole_number
from tilewise.opaque import OpaqueValue
from tilewise.plan.grid import marked_grid
from tilewise.plan.kept import kept_with_plan
from tilewise.plan.shifts import Shift, Symmetry

Rows = tuple[tuple[int, int], ...]
"""Half-open ranges of local rows of a shard, ascending and disjoint."""


class Side(IntEnum):
    """Side of the query x key table that an item belongs to."""

    Q = 0
    KV = 1

    __hash__ = int.__hash__  # items are dictionary keys everywhere: Enum's own hash is slow


class Role(IntEnum):
    """Role of a travelling value, which says what its arrival means.

    OPERAND is copied. PARTIAL moves, and is merged into what the receiver has of it. RESULT is a
    finished partial that its home copies to the other holders of a replicated shard.
    """

    OPERAND = 0
    PARTIAL = 1
    RESULT = 2

    __hash__ = int.__hash__


class Item(NamedTuple):
    """One thing that can travel: one role of one shard of one side, for one head group."""

    side: Side
    role: Role
    shard: int
    heads: int = 0

    def __str__(self) -> str:
        mark = ("", "*", "!")[self.role]
        group = f"/{self.heads}" if self.heads else ""
        return f"{self.side.name.lower()}{self.shard}{group}{mark}"


class Transfer(NamedTuple):
    """One transfer of an item between two ranks; rows None means the whole shard."""

    item: Item
    src: int
    dst: int
    rows: Rows | None = None

    def __str__(self) -> str:
        """Return the text of the grid that `show` draws, in the cell of src: "kv0*[0:5,8:9]>1"."""
        return f"{self.item}{rows_label(self.rows)}>{self.dst}"

    def arrival(self) -> str:
        """Text of the transfer as its destination sees it: "kv0*[0:5,8:9]<0"."""
        return f"{self.item}{rows_label(self.rows)}<{self.src}"


def rows_label(rows: Rows | None) -> str:
    """Rows of an item as its label names them: "[0:5,8:9]", nothing where they are all."""
    return "" if rows is None else f"[{','.join(f'{start}:{stop}' for start, stop in rows)}]"


def transfer_order(transfer: Transfer) -> tuple[Item, int, int, Rows]:
    """The canonical order of a step's transfers, in which both ends of a pair post them."""
    return transfer.item, transfer.src, transfer.dst, transfer.rows or ()


class Tile(NamedTuple):
    """One attention call: every q shard against every kv shard, for one head group."""

    q: tuple[int, ...]
    kv: tuple[int, ...]
    heads: int = 0

    def __str__(self) -> str:
        """Return the text of the grid that `show` draws: "q0,1xkv2/1"."""
        q, kv = (",".join(map(str, shards)) for shards in (self.q, self.kv))
        return f"q{q}xkv{kv}" + (f"/{self.heads}" if self.heads else "")


class Step(NamedTuple):
    """Work of all ranks at once: tiles[rank], and the transfers under way meanwhile.

    Transfers read values as they stood when the step began; arrivals count from the next step.
    """

    tiles: tuple[tuple[Tile, ...], ...]
    transfers: tuple[Transfer, ...]

    def cells(self) -> list[str]:
        """The step's row of the grid, a cell per rank: its tiles, and what it sends."""
        words = [[str(tile) for tile in tiles] for tiles in self.tiles]
        for transfer in self.transfers:
            if 0 <= transfer.src < len(words):
                words[transfer.src].append(str(transfer))
        return [" ".join(rank_words) or "." for rank_words in words]


class RankStep(NamedTuple):
    """One rank's share of a step."""

    tiles: tuple[Tile, ...] = ()
    sends: tuple[Transfer, ...] = ()
    recvs: tuple[Transfer, ...] = ()


Owners = tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]
"""Per side, per shard: the ranks that hold it from the start; the first is its home."""


class PlanError(ValueError):
    """A plan that does not compute attention, and where: step, rank, item (None if unknown)."""

    def __init__(
        self,
        message: str,
        step: int | None = None,
        rank: int | None = None,
        item: Item | None = None,
    ):
        super().__init__(message)
        self.step, self.rank, self.item = step, rank, item

    def in_grid(self, name: str, steps: Sequence[Step], world_size: int) -> PlanError:
        """This error with the plan's name, above its grid with the cell marked."""
        where = marked_grid(steps, world_size, self.step, self.rank)
        return PlanError(f"{name}: {self}\n{where}", self.step, self.rank, self.item)


def own_shards(world_size: int) -> Owners:
    """Shard s of both sides is held by rank s alone."""
    n = whole_number("world_size", world_size, most=MOST_RANKS)
    side = tuple((rank,) for rank in range(n))
    return side, side


MHA = 2.0  # kv_bytes of as many KV heads as query heads


class HeadTuning(NamedTuple):
    """The way in which a plan that was made before heads were known is made anew for them.

    Attributes:
        make: (*known, num_heads, num_kv_heads) -> Plan, a module's function, so that it can be
            pickled. Owners and cuts of the shards may differ from the plan's at hand.
        known: what it was made of beside heads: values.
        kv_bytes: what that was made for: bytes of a KV shard per byte of a query shard.
    """

    make: Callable[..., Plan]
    known: tuple[Any, ...]
    kv_bytes: float

    def plan(self, num_heads: int, num_kv_heads: int) -> Plan:
        """The plan for these heads."""
        return self.make(*self.known, num_heads, num_kv_heads)


class BackwardOrder(NamedTuple):
    """The way to make a plan anew in the order that suits the backward pass, where other tensors
    travel than in forward.

    Attributes:
        make: (*known) -> Plan, a module's function, so that it can be pickled. It moves and
            computes what the plan at hand does, in another order.
        known: what it is made of: values.
    """

    make: Callable[..., Plan]
    known: tuple[Any, ...]


class WholeRows(NamedTuple):
    """The way to make a plan anew in which one tile of a rank has all that its rows meet.

    Attributes:
        make: (*known, side) -> Plan, a module's function, so that it can be pickled. Rows of side
            are each computed by one rank, which gathers the rows of the other side.
        known: what the plan was made of: values.
    """

    make: Callable[..., Plan]
    known: tuple[Any, ...]

    def plan(self, side: Side) -> Plan:
        """The plan that computes whole rows of a side."""
        return self.make(*self.known, side)


class TeamExchange(NamedTuple):
    """A step in which the ranks of every team exchange with each other, and with nobody else.

    All ranks know of it, also those that a mask leaves nothing to send, so that a transport may
    take its messages as one collective of the team.

    Attributes:
        step: of every rank; negative: from the end.
        size: neighbouring ranks that make a team.
        parts: the sides and roles that travel.
        by_head: between every two of all ranks a whole item of each part travels, of one head group
            a rank.
    """

    step: int
    size: int
    parts: tuple[tuple[Side, Role], ...]
    by_head: bool = False


class Traits(NamedTuple):
    """Facts that the author of a plan knows of it beside its steps.

    Not part of its value: == ignores them, text and JSON leave them out, and a plan with other
    steps has none.

    Attributes:
        shifts: digits of ranks, and of their shards with them, that may be shifted without
            changing the plan; ranks that they map to each other are simulated once. Rank r must
            own shard r.
        head_split: the degree and the inner plan that a split by heads was made of; for those
            who compose plans.
        made_for: the mask and the layout that a mask-aware plan covers, and no other.
        tuning: how to make such a plan anew for heads; None: it is for any, or for its own.
        backward_order: how to make the plan that backward runs; None: this one.
        whole_rows: how to make the plan anew so that it merges no results; None: it merges some.
        proven: tests prove what the strategy makes; any other plan is checked before it first runs.
        exchanges: steps that are exchanges of whole teams; a pruned plan keeps them.
    """

    shifts: tuple[Shift, ...] = ()
    head_split: tuple[int, Plan] | None = None
    made_for: tuple[Hashable, Hashable] | None = None
    tuning: HeadTuning | None = None
    backward_order: BackwardOrder | None = None
    whole_rows: WholeRows | None = None
    proven: bool = False
    exchanges: tuple[TeamExchange, ...] = ()


NO_TRAITS = Traits()


Script = Callable[[int], tuple[RankStep, ...]]
"""A pure function rank -> that rank's steps."""


class PlanArguments(TypedDict, total=False):
    """The arguments of `Plan`, for `Plan.changed`."""

    name: str
    world_size: int
    num_head_groups: int
    owners: Owners | None
    steps: Iterable[Step] | None
    script: Script | None
    cuts: Rows | None
    default_save: str
    replicated_queries: bool
    waiting_results: int | None
    traits: Traits


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Plan(OpaqueValue):
    """A frozen, hashable value; equality and hash ignore the name.

    Args:
        name: as in "mesh(16, q_tile=4, schedule='greedy')".
        world_size: number of ranks.
        num_head_groups: query and KV heads are cut into this many equal groups.
        owners: per side and shard the ranks that hold it, the first being its home; None: rank s
            holds shard s of both sides.
        steps: the steps of all ranks; or
        script: a pure function rank -> that rank's steps, as a RankBuilder writes them, from which
            all steps are built only when somebody asks for them (check, show, ==, hash, JSON).
        cuts: None if shard s is all of its home's rows; else per shard the half-open range of its
            home's local rows that it is (mask-aware plans cut finer than one shard a rank).
        default_save: what backward does by default: "replay" the operands' transfers, or keep
            those "gathered" in forward where that takes no extra memory.
        replicated_queries: all queries are one shard that every rank holds (decoding).
        waiting_results: results of kernel calls for one row that may wait in memory until they are
            combined; 0: each is added at once; None, or more than the device lets wait: as many as
            that does (docs/gpu.md). It is of this plan, not of plans that are composed of it.
        traits: what its author knows of it beside its steps.

    Attributes:
        check: (mask: Mask | None = None, layout: Layout | None = None) -> None. Raises a PlanError
            unless the plan computes exact attention and its gradients.
        check_canonical: (work: Workload, backward_plan: Plan | None = None) -> None. Raises a
            ValueError if bits of a result depend on how the workload is split.
        pruned: (mask: Mask, layout: Layout) -> Plan, without what the mask makes needless.
        program: (rank: int) -> Program, what one rank does; the others' parts are not built.
        code: (work: Workload, rank: int, backward: bool = False) -> Code, the operations that a
            rank runs.
        to_json: () -> str, one JSON object.
        from_json: (text: str) -> Plan, the plan that to_json wrote; a static method. str(plan) is a
            grid, which `parse` reads.

    These methods are set by `tilewise.plan_methods`, above this module, which does not know what a
    plan is compiled to.
    """

    check: ClassVar[Callable[..., None]]
    check_canonical: ClassVar[Callable[..., None]]
    pruned: ClassVar[Callable[..., Plan]]
    program: ClassVar[Callable[..., Any]]
    code: ClassVar[Callable[..., Any]]
    to_json: ClassVar[Callable[..., str]]
    from_json: ClassVar[Callable[[str], Plan]]

    name: str
    world_size: int
    num_head_groups: int
    owners: Owners
    cuts: Rows | None
    default_save: str
    replicated_queries: bool
    waiting_results: int | None
    traits: Traits
    _given_steps: tuple[Step, ...] | None
    _script: Script | None

    def __init__(  # noqa: PLR0913 - a constructor
        self,
        name: str,
        world_size: int,
        num_head_groups: int = 1,
        owners: Owners | None = None,
        steps: Iterable[Step] | None = None,
        *,
        script: Script | None = None,
        cuts: Rows | None = None,
        default_save: str = "replay",
        replicated_queries: bool = False,
        waiting_results: int | None = None,
        traits: Traits = NO_TRAITS,
    ):
        world_size = whole_number("world_size", world_size, most=MOST_RANKS)
        num_head_groups = whole_number("num_head_groups", num_head_groups, most=MOST_RANKS)
        of_kind("default_save", default_save, Save)
        if (steps is None) == (script is None):
            raise ValueError("a plan takes either steps or script, and not both")
        require_type(str, "name", name, "'ring(4)'")
        for argument, value in (("owners", owners), ("cuts", cuts)):
            if value is not None:
                require_type(tuple, argument, value, "those of tw.ring(4)")
        require_type(Traits, "traits", traits, "tw.plan.ir.NO_TRAITS")
        require_type(bool, "replicated_queries", replicated_queries, "True")
        if waiting_results is not None:
            waiting_results = whole_number("waiting_results", waiting_results, 0)
        steps = None if steps is None else listed("steps", steps, "Step")
        for step in steps or ():
            require_type(Step, "step", step, "Step(tiles, transfers)")
        if traits.shifts and (cuts is not None or owners != own_shards(world_size)):
            raise ValueError("shifts need a plan without cuts in which rank r owns shard r")
        vars(self).update(  # the fields are frozen
            name=name,
            world_size=world_size,
            num_head_groups=num_head_groups,
            owners=own_shards(world_size) if owners is None else owners,
            cuts=cuts,
            default_save=default_save,
            replicated_queries=replicated_queries,
            waiting_results=waiting_results,
            traits=traits,
            _given_steps=None if steps is None else tuple(_in_order(step) for step in steps),
            _script=script,
        )

    @property
    def fingerprint(self) -> str:
        """A short text, equal for equal plans of one origin; it builds no strategy's steps."""
        if not (self.scripted and self.traits.proven):
            return self._digested_name()
        most = self.waiting_results
        return self.name if most is None else f"{self.name}, waiting results: {most}"

    @kept_with_plan(keep=1)
    def _digested_name(self) -> str:
        return f"{self.name} {blake2b(repr(self._key()).encode(), digest_size=8).hexdigest()}"

    def num_shards(self, side: Side) -> int:
        try:
            return len(self.owners[side])
        except (IndexError, TypeError):
            raise ValueError(f"side ({shown(side)}) must be Side.Q or Side.KV") from None

    def home(self, side: Side, shard: int) -> int:
        try:
            return self.owners[side][shard][0]
        except (IndexError, TypeError):
            most = self.num_shards(side) - 1
            raise ValueError(f"shard ({shown(shard)}) must be in 0..{most}") from None

    @property
    def scripted(self) -> bool:
        """True if the plan is written per rank, so that one rank's steps need not build all."""
        return self._script is not None

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps of all ranks.

        Raises:
            PlanError: if one end of a transfer does not know of it.
        """
        return self._joined_steps() if self._given_steps is None else self._given_steps

    @kept_with_plan(keep=1)
    def _joined_steps(self) -> tuple[Step, ...]:
        steps_by_rank = [self.rank_steps(rank) for rank in range(self.world_size)]
        steps = _join(steps_by_rank)
        try:
            _check_ends(steps_by_rank)
        except PlanError as error:
            raise error.in_grid(self.name, steps, self.world_size) from None
        return steps

    def rank_steps(self, rank: int) -> tuple[RankStep, ...]:
        """One rank's steps, without building the others' where a script allows."""
        whole_number("rank", rank, 0, self.world_size - 1)
        if self._script is None:
            return self._steps_by_rank()[rank]
        steps = self._script(rank)
        if type(steps) is not tuple:
            kind = type(steps).__name__
            fix = "its steps; return what RankBuilder.done() gives"
            raise ValueError(f"{self.name}: the script of rank {rank} returned {kind}, not {fix}")
        return steps

    @kept_with_plan(keep=1)
    def _steps_by_rank(self) -> list[tuple[RankStep, ...]]:
        return _split(self.steps, self.world_size)

    @property
    def made_for(self) -> tuple[Any, Any] | None:
        """The mask and the layout that a mask-aware plan covers, and no other."""
        return self.traits.made_for

    def tuned(self, num_heads: int, num_kv_heads: int) -> Plan:
        """The plan for these heads: itself, or made anew if it was made before they were known."""
        tuning = self.traits.tuning
        if tuning is None:
            return self
        whole_number("num_heads", num_heads)
        whole_number("num_kv_heads", num_kv_heads, most=num_heads)
        if tuning.kv_bytes == 2 * num_kv_heads / num_heads:
            return self._without_tuning()
        return self._tuned(num_heads, num_kv_heads)

    @kept_with_plan(keep=1)
    def _without_tuning(self) -> Plan:
        return self.changed(traits=self.traits._replace(tuning=None))

    @kept_with_plan()
    def _tuned(self, num_heads: int, num_kv_heads: int) -> Plan:
        assert self.traits.tuning is not None
        tuned = self.traits.tuning.plan(num_heads, num_kv_heads)
        return tuned.with_waiting_results(self.waiting_results)

    def in_backward(self) -> Plan:
        """The plan that backward runs: itself, or made anew in the order that suits that pass."""
        return self if self.traits.backward_order is None else self._in_backward()

    @kept_with_plan(keep=1)
    def _in_backward(self) -> Plan:
        order = self.traits.backward_order
        assert order is not None
        return order.make(*order.known).with_waiting_results(self.waiting_results)

    def replaced(self, name: str, steps: Iterable[Step]) -> Plan:
        """Return this plan with other steps; what its strategy declared of it (symmetry, ...) is
        dropped.
        """
        return self.changed(name=name, steps=steps, script=None, traits=NO_TRAITS)

    def changed(self, **fields: Unpack[PlanArguments]) -> Plan:
        """This plan with other values of some of its arguments; its steps are not built for it."""
        return Plan(**(self._arguments() | fields))

    def with_waiting_results(self, most: int | None) -> Plan:
        """This plan with at most so many waiting results: itself, if it has that number."""
        return self if most == self.waiting_results else self.changed(waiting_results=most)

    def _arguments(self) -> PlanArguments:
        return {
            "name": self.name,
            "world_size": self.world_size,
            "num_head_groups": self.num_head_groups,
            "owners": self.owners,
            "steps": self._given_steps,
            "script": self._script,
            "cuts": self.cuts,
            "default_save": self.default_save,
            "replicated_queries": self.replicated_queries,
            "waiting_results": self.waiting_results,
            "traits": self.traits,
        }

    def _key(self) -> tuple[Hashable, ...]:
        return (
            self.world_size,
            self.num_head_groups,
            self.owners,
            self.cuts,
            self.default_save,
            self.replicated_queries,
            self.waiting_results,
            self.steps,
        )

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Plan) and self._key() == other._key())

    @kept_with_plan(keep=1)
    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process gets the steps of all ranks in place of a script."""
        whole: PlanArguments = {"steps": self.steps, "script": None}
        return partial(Plan, **(self._arguments() | whole)), ()

    def __repr__(self) -> str:
        return f"Plan({self.name!r}, world_size={self.world_size})"


def _in_order(step: Step) -> Step:
    tiles = tuple(tuple(Tile(*tile) for tile in tiles) for tiles in step.tiles)
    return Step(tiles, tuple(sorted(step.transfers, key=transfer_order)))


def _join(parts: Sequence[tuple[RankStep, ...]]) -> tuple[Step, ...]:
    return tuple(
        _in_order(Step(tuple(share.tiles for share in row), tuple(chain(*(s.sends for s in row)))))
        for row in zip_longest(*parts, fillvalue=RankStep())
    )


def _check_ends(parts: Sequence[tuple[RankStep, ...]]) -> None:
    """Raise PlanError unless each transfer is written by its two ends, and by no other rank."""
    for number, row in enumerate(zip_longest(*parts, fillvalue=RankStep())):
        for rank, share in enumerate(row):
            for transfer in chain(share.sends, share.recvs):
                if (transfer.src if transfer in share.sends else transfer.dst) != rank:
                    message = (
                        f"step {number}: rank {rank} writes {transfer.item} from rank "
                        f"{transfer.src} to rank {transfer.dst}; each rank writes what it sends "
                        f"and receives, as RankBuilder({rank}) does"
                    )
                    raise PlanError(message, number, rank, transfer.item)
        sent = {transfer for share in row for transfer in share.sends}
        received = {transfer for share in row for transfer in share.recvs}
        if sent != received:
            ranks = range(len(parts))
            transfer = min(
                sent ^ received,
                key=lambda transfer: (
                    transfer.src in ranks and transfer.dst in ranks,
                    transfer_order(transfer),
                ),
            )
            raise _one_sided(transfer, transfer in sent, number, len(parts))


def _one_sided(transfer: Transfer, is_sent: bool, number: int, world_size: int) -> PlanError:
    rows = "" if transfer.rows is None else f", rows {transfer.rows},"
    known_rank, other_rank = (
        (transfer.src, transfer.dst) if is_sent else (transfer.dst, transfer.src)
    )
    known_verb, missing_verb = ("sends", "receive") if is_sent else ("receives", "send")
    if 0 <= other_rank < world_size:
        reason = f"rank {known_rank} {known_verb} it, rank {other_rank} does not {missing_verb} it"
    else:
        reason = f"rank {known_rank} {known_verb} it, and there are {world_size} ranks"
        other_rank = known_rank
    ends = f"from rank {transfer.src} to rank {transfer.dst} is known to one end only"
    return PlanError(
        f"step {number}: {transfer.item}{rows} {ends}: {reason}", number, other_rank, transfer.item
    )


def _split(steps: tuple[Step, ...], world_size: int) -> list[tuple[RankStep, ...]]:
    parts: list[list[RankStep]] = [[] for _ in range(world_size)]
    for step in steps:
        sends: list[list[Transfer]] = [[] for _ in range(world_size)]
        recvs: list[list[Transfer]] = [[] for _ in range(world_size)]
        for transfer in step.transfers:
            sends[transfer.src].append(transfer)
            recvs[transfer.dst].append(transfer)
        for rank, part in enumerate(parts):
            part.append(RankStep(step.tiles[rank], tuple(sends[rank]), tuple(recvs[rank])))
    return [tuple(part) for part in parts]


MAX_CLASSES = 128
"""With more classes ranks are taken as unlike."""


def find_symmetry(plan: Plan, blocks: tuple[int, ...] = ()) -> Symmetry:
    """Return the symmetry that a plan declares; without one, every rank is a class of its own.

    Args:
        blocks: sizes of groups of neighbouring ranks that must be mapped to one another (nodes,
            those who share a NIC, racks).
    """
    n = plan.world_size
    block_sizes = [block for block in blocks if block < n]
    shifts = tuple(part for shift in plan.traits.shifts for part in shift.cut(block_sizes))
    machine_shifts = tuple(power for shift in shifts for power in shift.respecting(block_sizes))
    symmetry = Symmetry(n, shifts, machine_shifts)
    return symmetry if symmetry.num_classes <= min(n // 2, MAX_CLASSES) else Symmetry(n)
