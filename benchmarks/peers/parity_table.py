"""What tw.parity finds in public libraries, on CPU: the table of docs/parity.md.

    python -m benchmarks.peers.parity_table [--library NAME] [--output rows.json]

One layer of attention between projections is run whole, and split over 4 local processes by each
library; outputs and gradients are compared. Kernels of flash_attn are computed by our CPU kernel
(flash_attn_shim.py), so what deviates is the library's own doing.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import tilewise as tw
from benchmarks.peers import contenders
from benchmarks.peers.more import LucidRing, Ringmaster
from tilewise_tools.bench.case import BenchCase, LabNetwork
from tilewise_tools.naming import Parser, new_file, run_script

RANKS, NUM_TOKENS, HEADS, KV_HEADS, DIM = 4, 128, 4, 2, 16
MASKS = {
    "causal": tw.Causal(),
    "full": tw.Full(),
    "sliding_window_causal": tw.Causal() & tw.Window(23, 0),
    "causal_document": tw.Causal() & tw.Document([0, 50, NUM_TOKENS]),
}
DTYPES = "float32", "bfloat16"


class ShortCase(BenchCase):
    """A case of few tokens, with a window and documents that are short as well."""

    def make_mask(self) -> tw.masks.Mask:
        return MASKS[self.mask]


class Layer(nn.Module):
    """Projections around attention, and a loss of random weights a row."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(HEADS * DIM, HEADS * DIM)
        self.k, self.v = (nn.Linear(HEADS * DIM, KV_HEADS * DIM) for _ in range(2))
        self.out = nn.Linear(HEADS * DIM, HEADS * DIM)
        self.attend: Any = None

    def forward(self, x: Tensor, weights: Tensor, allowed: Tensor | None = None) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, DIM)) for f in (self.q, self.k, self.v))
        if self.attend is None:
            heads_first = (t.transpose(0, 1) for t in (q, k, v))
            attention = nn.functional.scaled_dot_product_attention
            out = attention(*heads_first, attn_mask=allowed, enable_gqa=True).transpose(0, 1)
        else:
            out = self.attend(q, k, v)
        return (self.out(out.flatten(-2)) * weights).sum()


def split(peer: Any, case: BenchCase, model: Layer, inputs: Any, rank: int, group: Any) -> Any:
    """One rank's share through a library."""
    prepared = peer.prepare(case, rank, group)
    model.attend = prepared.attend
    own = (prepared.layout.shard(inputs[name], rank) for name in ("x", "weights"))
    return model(*own), prepared.layout.positions(rank)


def case_of(mask: str, dtype: str) -> ShortCase:
    sizes = {"num_tokens": NUM_TOKENS, "num_heads": HEADS, "num_kv_heads": KV_HEADS}
    network = LabNetwork("loopback", 1, RANKS)
    fields = {"head_dim": DIM, "world_size": RANKS, "dtype": dtype, "network": network}
    return ShortCase("strategies", mask, **sizes, **fields)


def row(peer: Any, mask: str, dtype: str) -> dict[str, str]:
    """A library under a mask: right, refused, or what is wrong."""
    case = case_of(mask, dtype)
    found = {"library": peer.name, "version": peer.version, "mask": mask, "dtype": dtype}
    refused = peer.supports(case)
    if refused:
        return found | {"verdict": "cannot", "evidence": refused}
    torch.manual_seed(0)
    model = Layer().to(getattr(torch, dtype))
    at = torch.arange(NUM_TOKENS)
    inputs = {
        name: torch.randn(NUM_TOKENS, HEADS * DIM, dtype=getattr(torch, dtype))
        for name in ("x", "weights")
    }
    inputs["allowed"] = torch.as_tensor(case.make_mask().dense(at, at))
    report = tw.parity(model, inputs, partial(split, peer, case), world_size=RANKS, timeout=120)
    if report.equal:
        return found | {"verdict": "right", "evidence": ""}
    verdict = "refused" if report.failures else str(report.cause)
    return found | {"verdict": verdict, "evidence": report.findings[0].text}


def main() -> None:
    options = Parser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--library", default="", help="only those with this in their name")
    options.add_argument("--output", type=new_file, help="write the rows as JSON to this file")
    given = options.parse_args()
    rings = Ringmaster(), Ringmaster("alltoall"), LucidRing()
    peers = [*(p for p in contenders() if p.name != rings[0].name), *rings]
    peers = [p for p in peers if given.library in p.name]
    if not peers:
        options.error(f"--library {given.library!r} is in no name")
    rows = []
    for peer in peers:
        for mask in MASKS:
            for dtype in DTYPES:
                rows.append(row(peer, mask, dtype))
                print("|", " | ".join(rows[-1].values()), "|", flush=True)
    if given.output is not None:
        given.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    run_script(main)
