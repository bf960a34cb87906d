"""What a new mask costs a rank: its host time from a new document mask to the last kernel call.

Both passes of one rank are checked and bound, but not run: what is left is the host's work before
the first kernel call, as on a GPU. The first call of a mask plans, prunes, generates code and binds
it, the second finds all that kept with the plan; shown is the difference, in seconds of processor
time, the median over masks. `needed` and `tiled` are given
their plan. `prepared` is what a worker process made of `needed`'s plan (BatchStep.prepare), of
which unpickling counts as part of the first call.

    python benchmarks/first_use.py [--ranks 8,64,256] [--masks 3] [--json]
"""

from __future__ import annotations

import json
import pickle
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import tilewise as tw
from tilewise.compiler.program import LAUNCHES_IN_FLIGHT
from tilewise.compiler.resolved import ResolvedPass
from tilewise.execution.call import Call
from tilewise.execution.forward_backward import bound_code
from tilewise.execution.prepare import prepare
from tilewise.execution.resolve import resolve_once
from tilewise_tools.naming import Parser, run_script, some_of, whole_number, whole_numbers

TOKENS_PER_RANK = 8192
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


class Nowhere:
    """What a code depends on of a transport, as loopback and NCCL have it."""

    receives_ahead, sends_in_flight, node_size = 0, LAUNCHES_IN_FLIGHT, None

    def __init__(self, rank: int):
        self.rank = rank


def document_mask(world_size: int, seed: int) -> tw.masks.Mask:
    num_tokens = world_size * TOKENS_PER_RANK
    return tw.Causal() & tw.Document(tw.lengths.sample("prolong64k", num_tokens, seed=seed))


def on_mesh(mask: tw.masks.Mask, num_tokens: int, n: int) -> tuple[tw.Plan, tw.Layout]:
    return tw.mesh(n, q_tile=max(d for d in range(1, 9) if n % d == 0 and d * d <= n)), tw.zigzag(
        num_tokens, n
    )


def on_needed(mask: tw.masks.Mask, num_tokens: int, n: int) -> tuple[tw.Plan, tw.Layout]:
    layout = tw.balanced(mask, num_tokens, n)
    return tw.needed(mask, layout), layout


def on_tiled(mask: tw.masks.Mask, num_tokens: int, n: int) -> tuple[tw.Plan, tw.Layout]:
    layout = tw.tiled_layout(mask, num_tokens, n)
    return tw.tiled(mask, layout), layout


STRATEGIES: dict[str, Callable[[tw.masks.Mask, int, int], tuple[tw.Plan, tw.Layout]]] = {
    "mesh": on_mesh,
    "needed": on_needed,
    "tiled": on_tiled,
    "prepared": on_needed,
}


def first_use(strategy: str, world_size: int, seed: int) -> tuple[float, float]:
    """Seconds of the first call of a mask, and of the second, both passes.

    A plan for any mask has served another mask before, as in training.
    """
    num_tokens, rank = world_size * TOKENS_PER_RANK, world_size // 2
    mask, before = document_mask(world_size, seed), document_mask(world_size, seed + 1000)
    plan, layout = STRATEGIES[strategy](mask, num_tokens, world_size)
    if plan.made_for is None:
        run(plan, before, layout, rank)
    mask = document_mask(world_size, seed)  # equal, with nothing derived from it
    if strategy == "prepared":
        return first_use_prepared(pickle.dumps(prepare(passes(plan, mask, layout), rank)))
    first, second = (run(plan, mask, layout, rank) for _ in range(2))
    return first, second


def first_use_prepared(sent: bytes) -> tuple[float, float]:
    """The same of a value that a worker process sends."""
    begin = time.process_time()
    plan = pickle.loads(sent)
    unpickling = time.process_time() - begin
    first, second = (run(plan, *plan.made_for, plan.rank) for _ in range(2))
    return unpickling + first, second


def passes(
    plan: tw.Plan, mask: tw.masks.Mask, layout: tw.Layout
) -> tuple[ResolvedPass, ResolvedPass]:
    work = tw.Workload(
        num_tokens=layout.num_tokens,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        mask=mask,
        layout=layout,
    )
    return work.resolve(plan)


def run(plan: tw.Plan, mask: tw.masks.Mask, layout: tw.Layout, rank: int) -> float:
    """Seconds of all that both passes of a call need before they run."""
    rows = layout.size(rank)
    q = torch.empty(rows, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    k = v = torch.empty(rows, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    begin = time.process_time()
    call = Call(plan=plan, layout=layout, mask=mask, needs_grad=True)
    problem = resolve_once(q, k, v, call, rank, plan.world_size)
    transport: Any = Nowhere(rank)
    for backward in (False, True):
        keep = problem.gathered and not backward
        bound_code(problem, transport, q[:, None], backward=backward, keep=keep)
    return time.process_time() - begin


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--ranks", type=whole_numbers, default="8,64,256")
    parser.add_argument(
        "--masks", type=whole_number, default=3, help="of which the median is taken"
    )
    parser.add_argument("--strategies", type=some_of(STRATEGIES), default=",".join(STRATEGIES))
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    first_use("mesh", 8, 0)  # imports, and what torch makes once
    rows = []
    for n in asked.ranks:
        for strategy in asked.strategies:
            runs = [first_use(strategy, n, seed) for seed in range(asked.masks)]
            extra = statistics.median(first - second for first, second in runs)
            rows.append(
                {
                    "ranks": n,
                    "strategy": strategy,
                    "first_use_seconds": extra,
                    "second_call_seconds": statistics.median(second for _, second in runs),
                }
            )
            if not asked.json:
                print(
                    f"{n:4} ranks  {strategy:6}  first use {extra:.3f} s, "
                    f"second call {rows[-1]['second_call_seconds']:.3f} s",
                    flush=True,
                )
    if asked.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    run_script(main)
