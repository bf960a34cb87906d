"""TransformerEngine's own cases of context parallelism, through our class of its signature, on CPU.

    git clone https://github.com/NVIDIA/TransformerEngine
    python -m benchmarks.slots.transformer_engine TransformerEngine

The cases are those that TE's `tests/pytorch/attention/test_attention_with_cp.py` submits to GPUs:
its functions are called with every combination of its parameters, its rules decide what is left
out, on a described device with all backends. Each runs here on 2 ranks (4 for a2a+p2p) in this
process, with its heads, masks, windows and bias, of smaller widths and fewer tokens, in fp64: out,
largest scores and every gradient against dense attention. Cases of fp8 count as refused.
"""

from __future__ import annotations

import copy
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tilewise as tw
from benchmarks.slots import stand_ins
from tilewise.integrations.transformer_engine import DotProductAttention
from tilewise_tools.naming import Parser, run_script

TOKENS, WIDTH, WINDOW = 32, 32, 64
"""Tokens of a sequence, by how much widths are divided, and windows (with a rest of 1 at least)."""
BOUND = 1e-11
WHOLE = tw.transport.transport_for(None)


class Case(NamedTuple):
    """What TE submits for one combination, without the number format.

    Attributes:
        config: TE's ModelConfig.
    """

    name: str
    config: Any
    kernel: str
    qkv_format: str
    comm: str
    padded: bool

    @property
    def ranks(self) -> int:
        return 4 if self.comm == "a2a+p2p" else 2


def submitted(clone: Path, capability: tuple[int, int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The cases that TE's file submits: a label, and what it says to its workers."""
    os.environ["NVTE_TEST_ESSENTIAL"] = "0"
    _stand_in_for_te(capability)
    folder = clone / "tests" / "pytorch" / "attention"
    sys.path[:0] = [str(folder), str(folder.parent)]
    _stand_in_for_utils(folder.parent / "utils.py")
    import test_attention_with_cp as theirs  # pyright: ignore[reportMissingImports]

    found: list[dict[str, Any]] = []
    theirs._submit = lambda pool, **given: found.append(given)
    for function in (theirs.test_cp_with_flash_attention, theirs.test_cp_with_fused_attention):
        marks = [mark for mark in function.pytestmark if mark.name == "parametrize"]
        names = [mark.args[0] for mark in marks]
        configs = vars(theirs)["model_configs_flash_attn"]
        if "fused" in function.__name__:
            configs = vars(theirs)["model_configs_fused_attn"]
        for values in itertools.product(*(mark.args[1] for mark in marks)):
            given = dict(zip(names, values, strict=True))
            try:
                function(cp_pool=lambda n: n, **given)
            except pytest.skip.Exception:
                continue
            yield str(given), {**found.pop(), "config": configs[given["model"]]}


def _stand_in_for_te(capability: tuple[int, int]) -> None:
    class Flags:
        v2_plus = v3_is_installed = True

    recipe: dict[str, Any] = dict.fromkeys(
        ("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling"), lambda **_: None
    )

    class Format:
        E4M3 = None

    stand_ins.module("transformer_engine")
    stand_ins.module(
        "transformer_engine.pytorch",
        get_device_compute_capability=lambda: capability,
        get_cudnn_version=lambda: (9, 25, 0),
    )
    stand_ins.module("transformer_engine.common")
    stand_ins.module("transformer_engine.common.recipe", Format=Format, **recipe)
    for name in ("attention", "attention.dot_product_attention"):
        stand_ins.module(f"transformer_engine.pytorch.{name}")
    stand_ins.module(
        "transformer_engine.pytorch.attention.dot_product_attention.utils",
        FlashAttentionUtils=Flags,
    )


def _stand_in_for_utils(path: Path) -> None:
    """TE's ModelConfig, from its source: the rest of the file needs TE itself."""
    source = path.read_text()
    start = source.index("class ModelConfig")
    values: dict[str, Any] = {"Tuple": tuple, "check_set_window_size": _window}
    exec(source[start : source.index("@contextmanager", start)], values)
    stand_ins.module(
        "utils",
        ModelConfig=values["ModelConfig"],
        get_available_attention_backends=lambda *_, **__: ((True, True, True), None, [None]),
    )


def _window(mask_type: str, window: tuple[int, int]) -> tuple[int, int]:
    """TE's reading of window_size: nothing after a causal query."""
    return (window[0], 0) if "causal" in mask_type else window


class Small(NamedTuple):
    """A case's sizes here."""

    batch: int
    heads: int
    kv_heads: int
    width: int
    v_width: int
    window: tuple[int, int]


def small(config: Any) -> Small:
    left, right = (x if x <= 0 else max(x // WINDOW, 1) for x in config.window_size)
    sizes = config.batch_size, config.num_heads, config.num_gqa_groups
    widths = config.head_dim_qk // WIDTH, config.head_dim_v // WIDTH
    return Small(*sizes, *widths, (left, right))


def run(case: Case) -> float:
    """The largest difference from dense attention."""
    size, packed = small(case.config), case.qkv_format == "thd"
    make = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make, dtype=torch.float64)

    batch = 1 if packed else size.batch
    total = TOKENS * size.batch if packed else TOKENS
    lengths, places = documents(case.ranks, padded=case.padded)
    q = drawn(batch, total, size.heads, size.width)
    k = drawn(batch, total, size.kv_heads, size.width)
    v = drawn(batch, total, size.kv_heads, size.v_width)
    dout, bias = drawn(batch, total, size.heads, size.v_width), bias_of(case, drawn, size)
    offset = drawn(size.heads) if case.config.softmax_type == "learnable" else None
    causal = "causal" in case.config.attn_mask_type
    seen = allowed(total, causal, size.window)
    if packed:
        row = torch.full((total,), -1)
        for number, (length, place) in enumerate(zip(lengths, places, strict=False)):
            row[place : place + length] = number
        seen = seen & (row[:, None] == row) & (row >= 0)
    leaves = [x.requires_grad_() for x in (q, k, v, bias, offset) if x is not None]
    sink = torch.zeros(size.heads) if case.config.softmax_type == "off-by-one" else offset
    wanted, largest = dense(q, k, v, seen, bias, sink)
    learns = [x for x in leaves if case.config.bias_shape != "111s" or x is not bias]
    grads = torch.autograd.grad((wanted * dout).sum(), learns)
    layout = tw.zigzag_documents(places, case.ranks) if packed else tw.zigzag(total, case.ranks)

    def on_rank(rank: int, group: Any) -> tuple[Tensor, ...]:
        attend = DotProductAttention(
            size.heads,
            (size.width, size.v_width),
            num_gqa_groups=size.kv_heads,
            qkv_format=case.qkv_format,
            attn_mask_type=("padding_causal" if causal else "padding")
            if packed
            else case.config.attn_mask_type,
            window_size=case.config.window_size
            if size.window == case.config.window_size
            else size.window,
            softmax_type=case.config.softmax_type,
            return_max_logit=case.config.return_max_logit,
            cp_group=WHOLE,
        ).double()
        attend._set_group(group, case.comm, 2 if case.comm == "a2a+p2p" else None)
        mine = [in_format(layout.shard(x.detach(), rank, 1), case.qkv_format) for x in (q, k, v)]
        mine = [x.clone().requires_grad_() for x in mine]
        own_bias = None
        if bias is not None:
            own_bias = bias.detach().clone()
            own_bias = layout.shard(own_bias, rank, 2) if own_bias.shape[2] > 1 else own_bias
            own_bias.requires_grad_(case.config.bias_shape != "111s")
        if offset is not None:
            attend.softmax_offset = torch.nn.Parameter(offset.detach().clone())
        edges = [0, *itertools.accumulate(lengths)]
        told: dict[str, Any] = {"core_attention_bias_type": case.config.attn_bias_type}
        told |= {"core_attention_bias": own_bias}
        if packed:
            of_tokens, of_places = torch.tensor(edges), torch.tensor(places)
            told |= {"cu_seqlens_q": of_tokens, "cu_seqlens_kv": of_tokens}
            told |= {"cu_seqlens_q_padded": of_places, "cu_seqlens_kv_padded": of_places}
        out = attend(*mine, **told)
        out, logits = out if isinstance(out, tuple) else (out, largest)
        given = in_format(layout.shard(dout, rank, 1), case.qkv_format)
        out.backward(given.flatten(-2))
        found = [from_format(x.grad, case.qkv_format) for x in mine if x.grad is not None]
        own = from_format(out.detach().unflatten(-1, (size.heads, size.v_width)), case.qkv_format)
        more = [
            x.grad
            for x in (own_bias, attend.softmax_offset if offset is not None else None)
            if x is not None and x.grad is not None
        ]
        return own, logits, *found, *more

    results = tw.loopback(case.ranks, on_rank)
    for result in results:  # fp32, as TransformerEngine's
        torch.testing.assert_close(result[1].double(), largest, rtol=1e-6, atol=1e-6)
    own, _, dq, dk, dv, *more = zip(*results, strict=True)
    pairs = [
        (layout.unshard(x, dim=1), y)
        for x, y in zip((own, dq, dk, dv), (wanted, *grads[:3]), strict=True)
    ]
    names = grads[3:]
    for rows, grad in zip(more, names, strict=True):
        whole = (
            torch.stack(rows).sum(0) if rows[0].shape == grad.shape else layout.unshard(rows, dim=2)
        )
        pairs.append((whole, grad))
    return max(float((x - y).detach().abs().max()) for x, y in pairs)


def documents(ranks: int, *, padded: bool) -> tuple[list[int], list[int]]:
    """Tokens of two packed documents, and where they start and end in the sequence."""
    room = [TOKENS - 2 * ranks, TOKENS + 2 * ranks]
    return [x - 3 * padded for x in room], [0, *itertools.accumulate(room)]


def bias_of(case: Case, drawn: Callable[..., Tensor], size: Small) -> Tensor | None:
    if case.config.attn_bias_type == "no_bias":
        return None
    numbers = {"1": 1, "b": size.batch, "h": size.heads, "s": TOKENS}
    return drawn(*(numbers[letter] for letter in case.config.bias_shape))


def allowed(total: int, causal: bool, window: tuple[int, int]) -> Tensor:
    at = torch.arange(total)
    behind = at[:, None] - at
    seen = behind >= 0 if causal else torch.ones_like(behind, dtype=torch.bool)
    left, right = window
    if left >= 0:
        seen = seen & (behind <= left)
    return seen & (-behind <= right) if right >= 0 and not causal and left >= 0 else seen


def dense(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, bias: Tensor | None, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out [batch, tokens, heads, width] and the largest score of each head."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = scores if bias is None else scores + bias
    scores = scores.masked_fill(~seen, -torch.inf)
    largest = scores.detach().amax((0, 2, 3))
    extra = [] if sink is None else [sink[:, None, None].expand(*scores.shape[:-1], 1)]
    weights = torch.cat([scores, *extra], -1)
    hidden = (weights == -torch.inf).all(-1, keepdim=True)
    weights = weights.masked_fill(hidden, 0.0).softmax(-1).masked_fill(hidden, 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights[..., : k.shape[1]], v), largest


def in_format(x: Tensor, kind: str) -> Tensor:
    return x[0] if kind == "thd" else x.transpose(0, 1) if kind == "sbhd" else x


def from_format(x: Tensor, kind: str) -> Tensor:
    return x[None] if kind == "thd" else x.transpose(0, 1) if kind == "sbhd" else x


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("clone", type=Path)
    parser.add_argument("--capability", type=int, nargs=2, default=(10, 0))
    options = parser.parse_args()
    counts, known, wrong = Counter[str](), dict[str, str](), 0
    for label, given in submitted(options.clone.resolve(), tuple(options.capability)):
        kernel, config = given["kernel_backend"], copy.deepcopy(given["config"])
        kind = "bias" if config.attn_bias_type != "no_bias" else "plain"
        if given["dtype"] == "fp8":
            counts["fp8: refused"] += 1
            continue
        padded = bool(given.get("fa_pad_between_seqs", kernel == "FusedAttention"))
        what = (given["model"], kernel, given["qkv_format"], given["cp_comm_type"], padded)
        case = Case(label, config, kernel, *what[2:])
        key = str(what)
        if key not in known:
            try:
                distance = run(case)
                known[key] = "passed" if distance <= BOUND else f"differs by {distance:.3g}"
            except Exception as error:  # the report names it
                known[key] = f"{type(error).__name__}: {error}"
            if known[key] != "passed":
                print(key, known[key], flush=True)
        counts[f"{kind}: {'passed' if known[key] == 'passed' else 'FAILED'}"] += 1
        wrong += known[key] != "passed"
    print(f"{sum(counts.values())} cases that TransformerEngine submits:", dict(counts))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    run_script(main)
