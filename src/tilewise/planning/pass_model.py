"""One pass of a workload on a machine: the facts that bounds and trials of plans need."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from tilewise.compiler.pruning import all_alike
from tilewise.compiler.resolved import ResolvedPass
from tilewise.layouts.cells import Cell, cells
from tilewise.layouts.layout import Layout, contiguous, zigzag
from tilewise.masks.base import Causal, Full
from tilewise.plan.payload import Payload
from tilewise.plan.row_ranges import count
from tilewise.simulation.machine import KernelSpeed, Machine
from tilewise.simulation.network import blocks
from tilewise.strategies.ring import ring
from tilewise.workload import LAYOUTS, Workload

Pair = tuple[int, int]
"""A query shard and a KV shard."""

Reach = Mapping[Pair, Pair]
"""For each pair of shards with an allowed pair: its rows of queries and of keys that attend."""

EXACT_TRIAL_RANKS = 16
"""Up to this many ranks, a trial simulates every rank."""


@dataclass(frozen=True)
class PassModel:
    """A pass to plan for.

    Args:
        work: its layout is a Layout, its save is "replay" or "gathered".
    """

    work: Workload
    machine: Machine
    world_size: int
    backward: bool

    @cached_property
    def layout(self) -> Layout:
        return self.work.layout_for(self.world_size).owned

    @cached_property
    def alike(self) -> bool | None:
        """The result of pruning.all_alike for plans that are not made for a mask: None, False or
        True.
        """
        return all_alike(ring(self.world_size), self.work.mask, (self.layout, self.layout))

    @cached_property
    def sampled(self) -> bool:
        """True if a trial simulates a sample of the ranks, because all would take seconds.

        If ranks compute alike, the sample is one rank of each class, and under a causal mask all
        are taken to send as much as the rank that sends most. That is too far off where some nodes
        are not full, so such ranks are not sampled. If the mask leaves ranks different work, the
        sample is one rank of each team (teams.py).
        """
        if self.alike is None:
            return self.world_size > EXACT_TRIAL_RANKS
        whole = all(self.world_size % block == 0 for block in blocks(self.machine, self.world_size))
        return whole and self.world_size > EXACT_TRIAL_RANKS

    @property
    def least_share(self) -> float:
        """The least share of a whole shard that travels: half under a causal mask on zigzag."""
        return 0.5 if self.alike and not self.sampled else 1.0

    @cached_property
    def flop(self) -> float:
        """FLOPs of all ranks together."""
        tokens = (0, self.work.num_tokens)
        return float(self.payload(1).flop) * int(self.work.mask.area(tokens, tokens))

    @cached_property
    def kernel(self) -> KernelSpeed:
        return self.machine.kernel(self.work.dtype, self.backward, self.work.head_dim)

    def payload(self, degree: int) -> Payload:
        """The payload of one head group where heads are split by a degree."""
        payload = self.work.call_shape(self.world_size).payload(degree)
        saved = self.backward and self.work.save == "gathered"
        return payload._replace(backward=self.backward, saved=saved)

    def team_layout(self, degree: int) -> Layout:
        """The layout of teams under a split by heads: the rows of the ranks of a team, joined."""
        if degree not in self._team_layouts:
            tokens, num_teams = self.work.num_tokens, self.world_size // degree
            if self.alike is None:
                runs = self.layout.runs
                teams = (runs[i : i + degree] for i in range(0, self.world_size, degree))
                layout = Layout(tokens, map(chain.from_iterable, teams), self.layout.name)
            else:
                layout = (zigzag if self.alike else contiguous)(tokens, num_teams)
            self._team_layouts[degree] = layout
        return self._team_layouts[degree]

    @cached_property
    def _team_layouts(self) -> dict[int, Layout]:
        return {}

    def cells(self, degree: int, resolved: ResolvedPass) -> tuple[Mapping[Pair, Cell], Reach]:
        """Return the non-empty cells of an inner plan's shards, and how many rows each of them
        reaches.

        They are kept by degree, unless the plan cuts its shards.

        Args:
            degree: by which heads are split.
            resolved: the inner plan on the layout of teams.
        """
        cells_and_reach = self._cells.get(degree)
        if cells_and_reach is None or resolved.plan.cuts is not None:
            table = cells(resolved.mask, *resolved.layouts)
            sizes = [layout.sizes for layout in resolved.layouts]
            reach = {
                (q, kv): (count(cell.q_rows, sizes[0][q]), count(cell.k_rows, sizes[1][kv]))
                for (q, kv), cell in table.items()
            }
            cells_and_reach = table, reach
            if resolved.plan.cuts is None:
                self._cells[degree] = cells_and_reach
        return cells_and_reach

    @cached_property
    def _cells(self) -> dict[int, tuple[Mapping[Pair, Cell], Reach]]:
        return {}

    def best_speed(self, queries: float, keys: float) -> float:
        """The highest FLOP per second of a kernel of at most these numbers of rows."""
        speed = self._best_speeds.get((queries, keys))
        if speed is None:
            kernel = self.kernel
            # All heads at once fill a device as much as a call of this pass can.
            most = queries * (self.work.num_heads / kernel.heads if kernel.heads else 1)
            speed = self._best_speeds[queries, keys] = max(
                kernel.speed(q, k)
                for q in (*(x for x in kernel.queries if x < most), most)
                for k in (*(x for x in kernel.keys if x < keys), keys)
            )
        return speed

    @cached_property
    def _best_speeds(self) -> dict[tuple[float, float], float]:
        return {}


def pad_to_equal_shards(work: Workload, world_size: int) -> Workload:
    """Return the workload with its number of tokens raised to a multiple of twice the ranks.

    Ranks with equal shards are simulated once for all, and a few tokens more change no choice. The
    workload is returned as it is where that makes ranks no more alike: for masks neither full nor
    causal, and for layouts that are not made by name.
    """
    layout = work.layout_for(world_size)
    tokens = -(-work.num_tokens // (2 * world_size)) * 2 * world_size
    make_layout = dict(LAYOUTS).get(layout.name)
    if tokens == work.num_tokens or make_layout is None or not isinstance(work.mask, Full | Causal):
        return work
    if layout != make_layout(work.num_tokens, world_size):
        return work
    padded_layout = make_layout(tokens, world_size)
    if all_alike(ring(world_size), work.mask, (padded_layout, padded_layout)) is None:
        return work
    return replace(work, num_tokens=tokens, layout=padded_layout)
