"""The cost of reduction="canonical" beside "fast": python -m benchmarks.canonical_cost

Ranks run one after the other in this process: seconds are processor time of all, without a network.
The control has the same matrix products and exponentials, of whole blocks and nothing else: a
kernel of this kind cannot take less.
"""

from __future__ import annotations

import time
from typing import Any

import torch

import tilewise as tw
from tilewise_tools.naming import Parser, run_script, whole_number

HEADS, HEAD_DIM = 8, 64
BLOCK = 1024  # rows and keys of a block of the control


def seconds(plan: tw.Plan, layout: tw.Layout, dtype: torch.dtype, reduction: str) -> float:
    """Seconds of a forward and a backward pass of all ranks."""
    make = torch.Generator().manual_seed(0)
    tensors = torch.randn(4, layout.num_tokens, HEADS, HEAD_DIM, generator=make).to(dtype)

    def main(rank: int, group: Any) -> None:
        *inputs, dout = (layout.shard(x, rank) for x in tensors)
        inputs = [x.requires_grad_() for x in inputs]
        given = {"plan": plan, "layout": layout, "group": group, "mask": tw.Causal()}
        out = tw.attention(*inputs, **given, wire_dtype="float32", reduction=reduction)
        torch.autograd.grad(out, inputs, dout)

    begin = time.process_time()
    tw.loopback(plan.world_size, main)
    return time.process_time() - begin


def control_seconds(tokens: int) -> float:
    """Seconds of the products and exponentials of a causal call: 2 and 1 of a block in forward; in
    backward 3 and 1 for dq, and 4 and 1 for dk and dv. Heads, widths and blocks are those of above.
    """
    q, k = torch.randn(2, HEADS, tokens, HEAD_DIM)
    table, out = torch.empty(BLOCK, BLOCK), torch.zeros(BLOCK, HEAD_DIM)
    blocks = range(0, tokens, BLOCK)
    pairs = [(i, j) for i in blocks for j in blocks if j <= i]
    begin = time.process_time()
    for head in range(HEADS):
        for i, j in pairs:
            rows, keys = q[head, i : i + BLOCK], k[head, j : j + BLOCK]
            for scores, weighted in ((1, 1), (2, 1), (2, 2)):
                for _ in range(scores):
                    torch.mm(rows, keys.T, out=table)
                table.sub_(table.amax(-1, keepdim=True)).exp_()
                for _ in range(weighted):
                    out.addmm_(table, keys)
    return time.process_time() - begin


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--tokens", type=whole_number, default=2048, help="of a rank")
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2, 4, 8), help="of 8 heads")
    parser.add_argument("--repeats", type=whole_number, default=5)
    arguments = parser.parse_args()
    n = arguments.ranks
    tokens = n * arguments.tokens
    if tokens % BLOCK:
        parser.error(
            f"--ranks ({n}) x --tokens ({arguments.tokens}) must be a multiple of {BLOCK}, the "
            "length of the control's blocks"
        )
    plans = {"all_gather": tw.all_gather(n), "ulysses": tw.ulysses(n)}
    layouts = {"zigzag": tw.zigzag(tokens, n), "striped": tw.striped(tokens, n)}
    print(f"{n} ranks of {arguments.tokens} tokens, 8 heads of 64, causal, both passes; least of")
    print(f"{arguments.repeats} runs, alternating")
    control = min(control_seconds(tokens) for _ in range(arguments.repeats))
    print(f"control, the products and exponentials alone: {control:.2f} s")
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
    run_script(main, world_size="--ranks", num_tokens="--tokens")
