"""One pass of a workload on a machine, seen by those who weigh plans for it."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tilewise.compiler.pruning import all_alike
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Causal, Full
from tilewise.plan.ir import Item, Plan, Role, Side
from tilewise.plan.payload import Payload, head_groups
from tilewise.planning.options import Option
from tilewise.simulation.machine import KernelSpeed, Machine
from tilewise.simulation.network import BETWEEN, INSIDE, blocks
from tilewise.simulation.prices import PassCosts
from tilewise.simulation.tracks import EXACT_RANKS
from tilewise.strategies.ring import ring
from tilewise.workload import LAYOUTS, Workload

EXACT_UNLIKE_RANKS = 16
"""The same under masks for which ranks differ."""


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
        return self.work.layout_for(self.world_size)

    @cached_property
    def alike(self) -> bool | None:
        """As shards.all_alike, for plans that are made for no mask."""
        return all_alike(ring(self.world_size), self.work.mask, (self.layout, self.layout))

    @property
    def rough(self) -> bool:
        """Whether trials are first simulated roughly: exactly that takes seconds.

        Of causal ranks, which compute alike, all are taken to send equally much; where nodes are
        not all full, that is too far off to choose by. Of other masks see teams.py.
        """
        if self.alike is None:
            return self.world_size > EXACT_UNLIKE_RANKS
        whole = all(self.world_size % block == 0 for block in blocks(self.machine, self.world_size))
        return self.alike and whole and self.world_size > EXACT_RANKS

    def share(self, option: Option) -> float:
        """The least share of a shard's bytes that is left after pruning, of any that is read.

        Under a causal mask on zigzag shards that is half; the simulator prunes unless it finds
        ranks that are alike on the machine too.
        """
        exact = self.world_size <= EXACT_RANKS
        return 0.5 if self.alike and (exact or not self._symmetric(option)) else 1.0

    def _symmetric(self, option: Option) -> bool:
        """Whether groups of ranks that are alike and those who share NICs or nodes nest."""
        groups = [option.degree * place for place in option.shape.places]
        shared = [b for b in blocks(self.machine, self.world_size) if b < self.world_size]
        return bool(groups) and all(
            self.world_size % block == 0 and (block % group == 0 or group % block == 0)
            for group in (option.degree, *groups)
            for block in shared
        )

    @cached_property
    def flop(self) -> float:
        """Of all ranks together."""
        tokens = (0, self.work.num_tokens)
        return float(self.payload(1).flop) * int(self.work.mask.area(tokens, tokens))

    @cached_property
    def kernel(self) -> KernelSpeed:
        return self.machine.kernel(self.work.dtype, self.backward, self.work.head_dim)

    def payload(self, degree: int) -> Payload:
        """What travels where heads are split by a degree."""
        payload = self.work.call_shape(self.world_size).payload(degree)
        saved = self.backward and self.work.save == "gathered"
        return payload._replace(backward=self.backward, saved=saved)

    def shard_bytes(self, degree: int, kept: bool = False) -> dict[Side, int]:
        """The operand and the partial of a whole shard, for one head group, by side.

        Args:
            kept: counts operands that forward kept, too.
        """
        payload, rows = self.payload(degree), max(self.layout.sizes)
        payload = payload._replace(saved=payload.saved and not kept)
        return {
            side: rows * sum(payload.row_bytes(Item(side, role, 0)) for role in list(Role)[:2])
            for side in Side
        }

    def of_heads(self, degree: int, **changes: Any) -> Workload:
        """The workload of one head group, with other values of some of its fields."""
        work = self.work
        num_heads, num_kv_heads = head_groups(work.num_heads, work.num_kv_heads, degree).size
        return replace(work, num_heads=num_heads, num_kv_heads=num_kv_heads, **changes)

    def costs(self, plan: Plan) -> PassCosts:
        """Prices of whole shards: for plans and masks whose cells are alike."""
        resolved = self.work.resolve(plan)[self.backward]
        return PassCosts(resolved, self.machine, None, bool(self.alike))

    def bandwidths(self) -> dict[str, float]:
        """Bytes per second of one message by its link, if it has that to itself."""
        return {INSIDE: self.machine.inside.bandwidth, BETWEEN: self.machine.nic_bandwidth}

    def best_speed(self, queries: float, keys: float) -> float:
        """The highest FLOP per second of a kernel of at most so many rows."""
        known = self._best_speeds.get((queries, keys))
        if known is None:
            kernel = self.kernel
            known = self._best_speeds[queries, keys] = max(
                kernel.speed(q, k)
                for q in (*(x for x in kernel.queries if x < queries), queries)
                for k in (*(x for x in kernel.keys if x < keys), keys)
            )
        return known

    @cached_property
    def _best_speeds(self) -> dict[tuple[float, float], float]:
        return {}


def pad_to_equal_shards(work: Workload, world_size: int) -> Workload:
    """The workload with the next multiple of twice the ranks as its number of tokens.

    Ranks whose shards are equal are simulated once for all; a token more or less changes no choice.
    As it is if that makes ranks no more alike: for other masks than full and causal ones, and for
    layouts that are made otherwise.
    """
    layout = work.layout_for(world_size)
    tokens = -(-work.num_tokens // (2 * world_size)) * 2 * world_size
    named = dict(LAYOUTS).get(layout.name)
    if tokens == work.num_tokens or named is None or not isinstance(work.mask, Full | Causal):
        return work
    if layout != named(work.num_tokens, world_size):
        return work
    even = named(tokens, world_size)
    if all_alike(ring(world_size), work.mask, (even, even)) is None:
        return work
    return replace(work, num_tokens=tokens, layout=even)
