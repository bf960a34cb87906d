"""Settings of other libraries that come nearest to a candidate, and their times beside it.

Megatron-LM has rings ("p2p"), "all_gather", Ulysses ("a2a") and Ulysses around a ring ("a2a+p2p",
the ranks of a head group being neighbours); torchtitan has torch's ring and all-gather. They are
simulated as the plans of ours that move the same, in both passes and with the same kernels: what
the libraries' own code costs besides is not known.
Source: Megatron-LM's and torchtitan's command-line options.
"""

from collections.abc import Iterator
from typing import NamedTuple

from tilewise.masks.base import Causal, Full
from tilewise.plan.ir import Plan
from tilewise.planning.candidate import Candidate
from tilewise.simulation.simulator import simulate
from tilewise.simulation.tracks import EXACT_RANKS
from tilewise.strategies.all_gather import all_gather
from tilewise.strategies.catalog import degrees
from tilewise.strategies.ring import ring
from tilewise.strategies.ulysses import ulysses


class Setting(NamedTuple):
    """A library's options, and the plan that they stand for.

    Attributes:
        seconds: of both passes.
        sampled: whether ranks that send less than others were taken to send as much.
    """

    library: str
    options: str
    plan: str
    save: str
    seconds: float
    sampled: bool


def nearest_settings(candidate: Candidate) -> tuple[Setting, ...]:
    """Return the fastest setting of each library; none for masks neither full nor causal."""
    work = candidate.work
    if candidate.world_size == 1 or not isinstance(work.mask, Full | Causal):
        return ()
    sampled = candidate.world_size > EXACT_RANKS
    exact = False if sampled else None
    best: dict[str, Setting] = {}
    seconds_of: dict[str, float] = {}  # by a plan's name: libraries have some in common
    for library, options, plan in _settings(candidate):
        name, save = plan.name, work.save or plan.default_save
        own = (candidate.plan.name, candidate.backward_plan.name, candidate.save)
        chosen = own == (name, name, save)
        if name not in seconds_of:
            seconds_of[name] = (
                candidate.seconds
                if chosen
                else simulate(plan, work, candidate.machine, exact=exact).seconds
            )
        is_sampled = sampled and isinstance(work.mask, Causal) and not chosen
        setting = Setting(library, options, name, save, seconds_of[name], is_sampled)
        best[library] = min(best.get(library, setting), setting, key=lambda each: each.seconds)
    return tuple(best.values())


def _settings(candidate: Candidate) -> Iterator[tuple[str, str, Plan]]:
    n, work = candidate.world_size, candidate.work
    megatron = f"--context-parallel-size {n} --cp-comm-type "
    yield "Megatron-LM", f"{megatron}p2p", ring(n)
    yield "Megatron-LM", f"{megatron}all_gather", all_gather(n)
    for degree in degrees(n, work.num_heads, work.num_kv_heads):
        if degree > 1 and work.num_kv_heads % degree == 0:
            sizes = f"a2a+p2p --hierarchical-context-parallel-sizes {degree} {n // degree}"
            plan = ulysses(degree, inner=ring(n // degree))
            yield "Megatron-LM", megatron + ("a2a" if degree == n else sizes), plan
    titan = (
        f"--parallelism.context_parallel_degree {n} --parallelism.context_parallel_rotate_method "
    )
    yield "torchtitan", f"{titan}alltoall", ring(n)
    yield "torchtitan", f"{titan}allgather", all_gather(n)
