"""Every provider on one rank: dense and masks, 8K to 128K tokens, MHA and GQA, both passes.

Providers run through the executor, as attention runs them; beside them torch's own attention,
called directly, where it knows the mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise as tw
from benchmarks.gpu_parts.session import Row, Session, normal
from tilewise.kernels.providers import PROVIDERS, kernel_named
from tilewise.problem import Call, make_problem
from tilewise.transport import LocalTransport
from tilewise.two_passes import backward_pass, forward_pass

DIRECT = {"torch flash": SDPBackend.FLASH_ATTENTION, "torch cudnn": SDPBackend.CUDNN_ATTENTION}
# First what most is asked of: if time runs out, the rest is missing.
CASES = (
    ("causal", 65536, (32, 32)),
    ("causal_document", 65536, (32, 32)),
    ("sliding_window_causal", 65536, (32, 32)),
    ("full", 16384, (32, 32)),
    ("causal", 8192, (32, 32)),
    ("causal", 131072, (32, 32)),
    ("causal", 65536, (64, 8)),
    ("causal_document", 65536, (64, 8)),
    ("sliding_window_causal", 131072, (64, 8)),
    ("causal_document", 131072, (32, 32)),
    ("causal_document", 8192, (32, 32)),
    ("sliding_window_causal", 8192, (32, 32)),
    ("full", 65536, (64, 8)),
    ("full", 131072, (32, 32)),
    ("share_question", 32768, (32, 32)),
    ("global_sliding_window", 32768, (32, 32)),
)


def run(session: Session) -> None:
    cases = [(m, 256, (4, 2)) for m in ("causal", "causal_document")] if session.tiny else [*CASES]
    for name, num_tokens, heads in cases:
        mask = mask_named(name, num_tokens)
        for contender in contenders(session, name):
            case = {
                "contender": contender,
                "mask": name,
                "num_tokens": num_tokens,
                "heads": f"{heads[0]}:{heads[1]}",
                "head_dim": 128,
            }
            body = partial(figures, session, contender, mask, num_tokens, heads)
            session.measure("kernels", case, body)


def mask_named(name: str, num_tokens: int) -> tw.Mask:
    """Documents are of uneven lengths, 13 of them; windows a sixteenth of the sequence."""
    edges = [round(num_tokens * (i / 13) ** 1.5) for i in range(14)]
    match name:
        case "full":
            return tw.Full()
        case "causal":
            return tw.Causal()
        case "causal_document":
            return tw.masks.causal_document(edges)
        case "share_question":
            return tw.masks.share_question(edges)
        case "sliding_window_causal":
            return tw.masks.sliding_window_causal(num_tokens, num_tokens // 16)
    return tw.masks.global_sliding_window(num_tokens, num_tokens // 16)


def contenders(session: Session, mask: str) -> Iterator[str]:
    """By name: all that run here; the reference and others quadratic in memory stay out."""
    for name in PROVIDERS:
        kernel = kernel_named(name)
        able = kernel.supports(session.device.type, torch.bfloat16, 128, backward=False) is None
        if able and name not in ("reference", "efficient"):
            yield name
    if mask in ("full", "causal") and session.device.type == "cuda":
        yield from DIRECT


def figures(
    session: Session, contender: str, mask: tw.Mask, num_tokens: int, heads: tuple[int, int]
) -> Row:
    """Seconds and TFLOP/s of both passes, and their peak memory, inputs included."""
    torch.manual_seed(0)
    q, dout = normal(session, 2, num_tokens, heads[0], 128)
    k, v = normal(session, 2, num_tokens, heads[1], 128)
    make = direct if contender in DIRECT else provided
    forward, backward = make(contender, mask, (q, k, v, dout))
    flops = 4 * mask.area((0, num_tokens), (0, num_tokens)) * heads[0] * 128
    row: Row = {}
    for name, run, work in (("forward", forward, flops), ("backward", backward, 2.5 * flops)):
        if run is None:
            row[f"{name}_missing"] = "this provider has no such pass"
            continue
        seconds = session.seconds(run)
        row[f"{name}_ms"] = round(seconds * 1e3, 4)
        row[f"{name}_tflops"] = round(work / seconds / 1e12, 2)
        row[f"{name}_peak_bytes"] = session.peak_bytes(run)
    return row


Run = Callable[[], object]


def provided(name: str, mask: tw.Mask, tensors: tuple[Tensor, ...]) -> tuple[Run, Run | None]:
    """Both passes of a world of one rank."""
    q, k, v, dout = tensors
    transport, kernel = LocalTransport(), kernel_named(name)
    call = Call(tw.ring(1), tw.contiguous(len(q), 1), mask)
    problem = make_problem(q, k, v, call, 0, 1)._replace(kernel=kernel)
    forward = partial(forward_pass, problem, transport, q, k, v, keep=True)
    if kernel.supports(q.device.type, q.dtype, q.shape[-1], backward=True) is not None:
        return forward, None
    out, lse, kept = forward()
    saved = q, k, v, out, lse
    return forward, partial(backward_pass, problem, transport, saved, kept, (dout, None))


def direct(name: str, mask: tw.Mask, tensors: tuple[Tensor, ...]) -> tuple[Run, Run]:
    q, k, v = (x.transpose(0, 1)[None].requires_grad_() for x in tensors[:3])
    dout = tensors[3].transpose(0, 1)[None]

    def forward() -> Tensor:
        with sdpa_kernel(DIRECT[name]):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=isinstance(mask, tw.Causal), enable_gqa=q.shape[1] != k.shape[1]
            )

    out = forward()

    def backward() -> object:
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    return forward, backward


def summary(rows: list[Row]) -> list[str]:
    """A line per case: the providers' TFLOP/s, forward / backward."""
    lines: dict[tuple, list[str]] = {}
    for row in rows:
        if row.get("part") != "kernels" or "contender" not in row:
            continue
        key = row["mask"], row["num_tokens"], row["heads"]
        speeds = (row.get(f"{name}_tflops", math.nan) for name in ("forward", "backward"))
        text = "-" if "forward_tflops" not in row else "/".join(f"{x:.0f}" for x in speeds)
        lines.setdefault(key, []).append(f"{row['contender']} {text}")
    return [f"  {m} {n} {h}: " + ", ".join(found) for (m, n, h), found in lines.items()]
