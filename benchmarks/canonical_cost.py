"""The cost of reduction="canonical" beside "fast": python -m benchmarks.canonical_cost

Ranks run one after the other in this process: seconds are processor time of all, without a network.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

import tilewise as tw


def seconds(plan: tw.Plan, layout: tw.Layout, dtype: torch.dtype, reduction: str) -> float:
    """Seconds of a forward and a backward pass of all ranks."""
    make = torch.Generator().manual_seed(0)
    tensors = torch.randn(4, layout.num_tokens, 8, 64, generator=make).to(dtype)

    def main(rank: int, group: Any) -> None:
        *inputs, dout = (layout.shard(x, rank) for x in tensors)
        inputs = [x.requires_grad_() for x in inputs]
        given = {"plan": plan, "layout": layout, "group": group, "mask": tw.Causal()}
        out = tw.attention(*inputs, **given, wire_dtype="float32", reduction=reduction)
        torch.autograd.grad(out, inputs, dout)

    begin = time.process_time()
    tw.loopback(plan.world_size, main)
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="of a rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    n = arguments.ranks
    tokens = n * arguments.tokens
    plans = {"all_gather": tw.all_gather(n), "ulysses": tw.ulysses(n)}
    layouts = {"zigzag": tw.zigzag(tokens, n), "striped": tw.striped(tokens, n)}
    print(f"{n} ranks of {arguments.tokens} tokens, 8 heads of 64, causal, both passes; least of")
    print(f"{arguments.repeats} runs, alternating")
    print("| plan, layout, dtype | fast, s | canonical, s | ratio |")
    print("|---|---|---|---|")
    for plan_name, plan in plans.items():
        for layout_name, layout in layouts.items():
            for dtype in (torch.float32, torch.bfloat16):
                best = dict.fromkeys(("fast", "canonical"), float("inf"))
                for _ in range(arguments.repeats):
                    for reduction in best:
                        best[reduction] = min(
                            best[reduction], seconds(plan, layout, dtype, reduction)
                        )
                name = f"{plan_name}, {layout_name}, {str(dtype).removeprefix('torch.')}"
                ratio = best["canonical"] / best["fast"]
                print(f"| {name} | {best['fast']:.2f} | {best['canonical']:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
