"""Public functions with right arguments, of which one at a time is replaced by a wrong value.

A call is a function and its keyword arguments; `CALLS` makes them anew each time, as some keep what
they get. A wrong value may be right for some argument (0 tokens of lookahead, True for a switch):
then the call is taken, and nothing is said about it here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch

import tilewise as tw
from tilewise.compat import ring_flash_attn as rfa
from tilewise.compiler import droppable
from tilewise.compiler.lowering import lower
from tilewise.integrations import data, hf
from tilewise.integrations.transformer_engine import DotProductAttention
from tilewise.layouts import Run
from tilewise.layouts.balanced import default_layout
from tilewise.masks import lengths
from tilewise.plan import RankBuilder, Side, operand, parse
from tilewise.plan.text import show
from tilewise.planning import load_candidate
from tilewise.simulation.machine import KernelSpeed, Link
from tilewise.transport import transport_for
from tilewise.workload import plan_code
from tilewise_verify import error_bound

Arguments = dict[str, Any]


class _Nothing:
    def __repr__(self) -> str:
        return "_Nothing()"


def pool() -> dict[str, Any]:
    """The wrong values, by name."""
    return {
        "None": None,
        "text": "8",
        "empty text": "",
        "bytes": b"",
        "nan": float("nan"),
        "inf": float("inf"),
        "-inf": float("-inf"),
        "-1": -1,
        "0": 0,
        "10**6": 10**6,
        "10**18": 10**18,
        "10**400": 10**400,
        "2.5": 2.5,
        "complex": 1j,
        "True": True,
        "list": [],
        "list of a text": ["8"],
        "list of lists": [[1.5], None],
        "dict": {},
        "tuple": (1, 2, 3),
        "object": _Nothing(),
        "array": np.arange(3.0),
        "whole array": np.arange(8),
        "0-d array": np.array(2.5),
        "tensor": torch.arange(3.0),
        "whole tensor": torch.arange(8),
        "empty tensor": torch.zeros(0),
        "function": pool,
        "class": _Nothing,
        "type": int,
        "dtype": torch.float32,
        "generator": (x for x in "ab"),
        "False": False,
        "list of 0": [0],
        "range(10**9)": range(10**9),
        "range(10**30)": range(10**30),
        "without an end": count(),
        "list of ranges": [range(10**9), range(10**9)],
        "list of arrays": [np.arange(3), np.arange(3)],
        "list of 10**5": [0] * 10**5,
        "array of 10**9": np.broadcast_to(np.float64(1.5), 10**9),
        "switches of 10**9": np.broadcast_to(np.bool_(True), 10**9),
        "tensor of 10**9": torch.ones(1).expand(10**9),
        "rows of 10**9": torch.ones(1, 1, 1).expand(10**6, 125, 8),
        "tensor without numbers": torch.ones(16, 2, 8, device="meta"),
        "sparse tensor": torch.ones(16, 2).to_sparse(),
        "nested tensor": torch.nested.nested_tensor([torch.ones(16, 2)], layout=torch.jagged),
        "complex tensor": torch.ones(16, 2, 8, dtype=torch.complex64),
        "half tensor": torch.ones(16, 2, 8, dtype=torch.float16),
        "array of objects": np.array([None, "8"], dtype=object),
        "text of a plan": "ring(10**9)",
        "long text": "(" * 10**5,
        "mask": tw.Full(),
        "1e308": 1e308,
    }


@dataclass(frozen=True)
class Called:
    """A public function, and arguments that it takes."""

    name: str
    function: Callable[..., Any]
    arguments: Callable[[], Arguments]

    def run(self, replaced: Arguments) -> Any:
        return self.function(**(self.arguments() | replaced))


def attend(q: Any, k: Any, v: Any) -> Any:
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def model() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


MASK, LAYOUT, PLAN = tw.Causal(), tw.zigzag(16, 2), tw.ring(2)
WORK = {"num_tokens": 16, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "dtype": "float32",
        "wire_dtype": "float32", "mask": MASK, "layout": "zigzag", "save": "replay",
        "v_head_dim": 8, "max_logit": False, "wire": None, "reduction": "fast"}  # fmt: skip


def work(**changed: Any) -> tw.Workload:
    return tw.Workload(**(WORK | changed))


def machine() -> tw.Machine:
    return tw.Machine.preset("h100x8")


def cache(**changed: Any) -> Any:
    return tw.KVCache(**({"num_tokens": 8, "num_kv_heads": 2, "head_dim": 8} | changed))


def filled() -> Any:
    made = cache()
    made.append(rows(1, 4, 2, 8), rows(1, 4, 2, 8))
    return made


def rows(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def kernel_speed(**changed: Any) -> KernelSpeed:
    fields = {"dtype": "float32", "backward": False, "queries": (1.0,), "keys": (1.0,)}
    more = {"flops": ((1e12,),), "head_dim": 0, "launch_seconds": 0.0, "edge_keys": 0.0}
    return KernelSpeed(**(fields | more | changed))


def made_machine(**changed: Any) -> tw.Machine:
    fields = {"name": "m", "node_size": 2, "inside": Link(1e9), "between": Link(1e9)}
    more = {"kernels": (kernel_speed(),), "nics": 1, "pooled": False, "launch_seconds": 0.0}
    seconds = {"message_seconds": 0.0, "carry_seconds": 0.0, "call_seconds": (0.0, 0.0)}
    rest = {"agree_seconds": 0.0, "merge_seconds": 0.0, "merge_bandwidth": 1e9,
            "pack_bandwidth": 1e9, "memory_bytes": 1 << 30, "rack_nodes": 2, "across": Link(1e9),
            "cores": 2.0, "core_sharers": 2, "copy_cores": 0.0, "source": ""}  # fmt: skip
    return tw.Machine(**(fields | more | seconds | rest | changed))


def cp(**changed: Any) -> tw.ContextParallel:
    fields: Arguments = {"num_tokens": 16, "mask": tw.Causal(), "strategy": tw.ring(1)}
    return tw.ContextParallel(**(fields | changed))


def ids() -> torch.Tensor:
    return torch.arange(16)[None]


def of(make: Callable[[], Any], name: str) -> Callable[..., Any]:
    """A method of a fresh object."""

    def call(**arguments: Any) -> Any:
        return getattr(make(), name)(**arguments)

    return call


def qkv(**more: Any) -> Arguments:
    q, k, v = (torch.ones(16, 2, 8) for _ in range(3))
    return {"q": q, "k": k, "v": v} | more


def batched(**more: Any) -> Arguments:
    q, k, v = (torch.ones(1, 2, 2, 8) for _ in range(3))
    return {"q": q, "k": k, "v": v} | more


def tree() -> Any:
    return tw.Tree.from_sequences([[1, 2, 3], [1, 2, 4]])


def builder() -> RankBuilder:
    return RankBuilder(0)


def step_stream(**changed: Any) -> Any:
    fields = {"lengths": [8, 4, 3, 1], "world_size": 2, "tokens_per_rank": 4, "num_heads": 2,
              "num_kv_heads": 2, "head_dim": 8, "v_head_dim": 8, "machine": machine(),
              "lookahead": 2, "seed": 0}  # fmt: skip
    return next(iter(tw.schedule(**(fields | changed))))


def seen() -> Any:
    return _SEEN[0]


_SEEN = [tw.effective_mask(attend, num_tokens=4, num_heads=1, head_dim=8)]


CALL_OPTIONS: Arguments = {
    "layout": tw.contiguous(16, 1), "mask": MASK, "group": None, "softmax_scale": 0.5,
    "return_lse": False, "backward_plan": None, "kv_layout": None, "wire_dtype": None,
    "wire": None, "save": None, "prune": True, "q_positions": None, "validate": "first",
    "kernel": None, "sink": None, "bias": None, "softcap": None, "dropout_p": 0.0,
    "dropout_seed": 0, "return_max_logit": False, "reduction": "fast",
}  # fmt: skip
CP_OPTIONS = {k: v for k, v in CALL_OPTIONS.items() if k not in ("layout", "group")}
CACHE_OPTIONS: Arguments = {
    "num_tokens": 8, "num_kv_heads": 2, "head_dim": 8, "batch": 1, "dtype": torch.float32,
    "device": "cpu", "group": None, "softmax_scale": 0.5, "wire_dtype": None, "validate": "first",
    "kernel": None, "softcap": None, "v_head_dim": 8,
}  # fmt: skip
TOKENS: Arguments = {"num_tokens": 16}
CU: Arguments = {"cu_seqlens": [0, 8, 16]}
HEADS: Arguments = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 8}
PAIR: Arguments = {"q_range": (0, 4), "k_range": (0, 4)}
EDGES: Arguments = {"q_edges": [0, 4], "k_edges": [0, 4]}
POSITIONS: Arguments = {"q_positions": [0, 1], "k_positions": [0, 1]}


def _table() -> Iterator[tuple[str, Callable[..., Any], Arguments | Callable[[], Arguments]]]:
    masks, machines = tw.masks, {"machine": machine()}
    yield "alibi", tw.alibi, {"slopes": [0.5, 0.25]}
    yield "Causal", tw.Causal, {}
    yield "Full", tw.Full, {}
    yield "Window", tw.Window, {"left": 2, "right": 0}
    yield "Document", tw.Document, CU
    yield "Slices", tw.Slices, {"slices": [((0, 2), (0, 2), "full")]}
    yield "PerHead", tw.PerHead, {"heads": [tw.Causal(), tw.Full()]}
    for mask in (tw.Causal(), tw.PerHead([tw.Causal()]), tw.Document([0, 16]) & tw.Window(2, 2)):
        name = type(mask).__name__
        yield f"{name}.area", mask.area, PAIR
        yield f"{name}.areas", mask.areas, EDGES
        yield f"{name}.coverage", mask.coverage, EDGES
        yield f"{name}.dense", mask.dense, POSITIONS
        yield f"{name}.check_tokens", mask.check_tokens, {"num_tokens": 16, "num_keys": 16}
    yield "Layout", tw.Layout, {"num_tokens": 4, "runs": [[Run(0, 2)], [(2, 2)]], "name": "l"}
    for name in ("size", "rows", "ranges", "positions"):
        yield f"Layout.{name}", getattr(LAYOUT, name), {"shard": 0}
    yield "Layout.shard", LAYOUT.shard, {"x": torch.ones(16), "rank": 0, "dim": 0}
    yield "Layout.unshard", LAYOUT.unshard, {"shards": [torch.ones(8)] * 2, "dim": 0}
    yield "Layout.cut", LAYOUT.cut, {"homes": [0, 1], "cuts": [(0, 8), (0, 8)]}
    for name in ("contiguous", "zigzag", "striped"):
        yield name, getattr(tw, name), {"num_tokens": 16, "n": 2}
    yield "Layout.from_positions", tw.Layout.from_positions, {
        "positions_by_rank": [[0, 1], [2, 3]], "num_tokens": 4, "name": "x",
    }  # fmt: skip
    yield "zigzag_documents", tw.zigzag_documents, {"cu_seqlens": [0, 8, 16], "world_size": 2}
    yield "joint", tw.joint, {"layout": tw.contiguous(16, 2), "replicated": [0, 5]}
    yield "default_layout", default_layout, {"mask": MASK, "num_tokens": 16, "world_size": 2}
    yield (
        "balanced",
        tw.balanced,
        {"mask": MASK, "num_tokens": 64, "n": 2, "chunk": 4, "slack": 0.1},
    )
    options = {"kv_bytes": 2.0, "slack": 0.1, "linear": 0.0}
    yield "tiled", tw.tiled, {"mask": MASK, "layout": LAYOUT, **options}
    yield "tiled_layout", tw.tiled_layout, {"mask": MASK, "num_tokens": 16, "n": 2, **options}
    yield "needed", tw.needed, {
        "mask": MASK, "layout": LAYOUT, "node_size": 2, "moves": "kv",
    }  # fmt: skip
    yield "all_gather", tw.all_gather, {"world_size": 2, "moves": "kv"}
    for name in ("balanced_ring", "tree"):
        yield name, getattr(tw, name), {"world_size": 2}
    yield "ring", tw.ring, {"world_size": 2, "moves": "kv"}
    yield "attention2d", tw.attention2d, {"rows": 2, "columns": 2, "overlap": False}
    yield "double_ring", tw.double_ring, {"num_nodes": 2, "node_size": 2}
    yield "hierarchical", tw.hierarchical, {"outer": tw.ring(2), "inner": tw.ring(2)}
    mesh = {"world_size": 4, "q_tile": 2, "schedule": "greedy", "kv_bytes": 2.0}
    yield "mesh", tw.mesh, {**mesh, "backward": False, "held": 4}
    yield "ulysses", tw.ulysses, {"degree": 2, "inner": tw.ring(2)}
    yield "Plan", tw.Plan, {
        "name": "p", "world_size": 1, "num_head_groups": 1, "owners": None, "steps": [],
        "script": None, "cuts": None, "default_save": "replay", "replicated_queries": False,
        "waiting_results": None, "traits": tw.plan.ir.NO_TRAITS,
    }  # fmt: skip
    yield "Plan.check", PLAN.check, {"mask": MASK, "layout": LAYOUT}
    yield "Plan.pruned", PLAN.pruned, {"mask": MASK, "layout": LAYOUT}
    yield "Plan.program", PLAN.program, {"rank": 0}
    coded = {"work": work(), "rank": 0, "backward": False, "device": "cpu", "kernel": "cpu"}
    yield "Plan.code", PLAN.code, coded
    yield "Plan.from_json", tw.Plan.from_json, {"text": PLAN.to_json()}
    yield "Plan.rank_steps", PLAN.rank_steps, {"rank": 0}
    yield "Plan.num_shards", PLAN.num_shards, {"side": Side.Q}
    yield "Plan.home", PLAN.home, {"side": Side.Q, "shard": 0}
    yield "Plan.tuned", tw.mesh(4).tuned, {"num_heads": 2, "num_kv_heads": 2}
    yield "Plan.changed", PLAN.changed, {"name": "p", "steps": PLAN.steps, "script": None}
    yield "plan_code", plan_code, {"plan": PLAN, **coded}
    yield "droppable", droppable, {"plan": PLAN, "mask": MASK, "layout": LAYOUT}
    yield "lower", lower, {"plan": PLAN, "rank": 0}
    yield "parse", parse, {"text": str(PLAN)}
    yield "show", show, {"plan": PLAN}
    yield "operand", operand, {"side": Side.Q, "shard": 0, "heads": 0}
    yield "RankBuilder", RankBuilder, {"rank": 0}
    yield "RankBuilder.tile", of(builder, "tile"), {"q": [0], "kv": [0], "heads": 0}
    yield (
        "RankBuilder.send",
        of(builder, "send"),
        {"item": operand(Side.Q, 0), "dst": 1, "rows": None},
    )
    yield (
        "RankBuilder.recv",
        of(builder, "recv"),
        {"item": operand(Side.Q, 0), "src": 1, "rows": None},
    )
    yield "RankBuilder.at", of(builder, "at"), {"step": 1}
    yield "Workload", tw.Workload, WORK
    yield "Workload.kv_bytes", work().kv_bytes, {"degree": 2}
    yield "Workload.layout_for", work().layout_for, {"world_size": 2}
    yield "Workload.call_shape", work().call_shape, {"world_size": 2}
    yield "Workload.resolve", work().resolve, {"plan": PLAN, "backward_plan": None}
    yield "volume", tw.volume, {"plan": PLAN, "work": work(), "backward_plan": None}
    simulated = {"plan": PLAN, "work": work(dtype="bfloat16"), **machines, "backward_plan": None}
    yield "simulate", tw.simulate, {**simulated, "exact": None, "prune": True}
    yield "search", tw.search, {
        "work": work(dtype="bfloat16"), **machines, "world_size": 2, "memory_bytes": None,
        "wires": (), "progress": None,
    }  # fmt: skip
    yield "load_candidate", load_candidate, {"path": "/nothing.json"}
    yield "Machine", made_machine, lambda: {
        "name": "m", "node_size": 2, "inside": Link(1e9), "between": Link(1e9),
        "kernels": (kernel_speed(),), "nics": 1, "pooled": False, "launch_seconds": 0.0,
        "message_seconds": 0.0, "carry_seconds": 0.0, "call_seconds": (0.0, 0.0),
        "agree_seconds": 0.0, "merge_seconds": 0.0, "merge_bandwidth": 1e9,
        "pack_bandwidth": 1e9, "memory_bytes": 1 << 30, "rack_nodes": 2, "across": Link(1e9),
        "cores": 2.0, "core_sharers": 2, "copy_cores": 0.0, "source": "",
    }  # fmt: skip
    yield "Machine(inside=Link)", lambda **x: made_machine(inside=Link(**x)), {
        "bandwidth": 1e9, "latency": 0.0,
    }  # fmt: skip
    yield "Machine(kernels=)", lambda **x: made_machine(kernels=(kernel_speed(**x),)), {
        "dtype": "float32", "backward": False, "queries": (1.0,), "keys": (1.0,),
        "flops": ((1e12,),), "head_dim": 0, "launch_seconds": 0.0, "edge_keys": 0.0,
        "heads": 0,
    }  # fmt: skip
    yield "Machine.preset", tw.Machine.preset, {"name": "h100x8"}
    yield "Machine.load", tw.Machine.load, {"path": "/nothing.toml"}
    yield "Machine.scaled", machine().scaled, {"bandwidth": 2.0}
    yield "Machine.same_node", machine().same_node, {"rank": 0, "other": 1}
    yield (
        "Machine.kernel",
        machine().kernel,
        {"dtype": "bfloat16", "backward": False, "head_dim": 64},
    )
    linear = {"parameters": 1e6, "num_heads": 8, "head_dim": 64, "dtype": "bfloat16", "flops": 1e12}
    yield "Machine.linear_pairs", machine().linear_pairs, linear
    yield "Machine.write", lambda **x: made_machine(**x).to_toml(), {"name": "m", "source": ""}
    yield "wire.Plain", tw.wire.Plain, {"dtype": "float32"}
    yield "wire.Float8", tw.wire.Float8, {"block": 8, "stochastic": False, "seed": 0}
    plain = tw.wire.Plain()
    yield "wire.Wires", tw.wire.Wires, {
        "forward": plain, "backward": plain, "partials": plain, "latent": None,
    }  # fmt: skip
    latent = {"expand": attend, "params": (), "num_kv_heads": 2, "head_dim": 8, "v_head_dim": 8}
    yield "wire.Latent", tw.wire.Latent, {**latent, "width": 4, "name": "l", "keep": False}
    for made in (tw.wire.Plain(), tw.wire.Float8()):
        name = f"wire.{type(made).__name__}.row_bytes"
        yield name, made.row_bytes, {"width": 8, "dtype": "float32"}
    yield "loopback", tw.loopback, {"n": 2, "fn": lambda rank, group: rank}
    yield "transport_for", transport_for, {"group": None}
    yield "kernel", tw.kernels.kernel, {"name": "cpu"}
    yield "effective_mask", tw.effective_mask, {
        "attend": attend, "num_tokens": 4, **HEADS, "softmax_scale": 0.5, "softcap": 5.0,
        "sink": None,
    }  # fmt: skip
    for name in ("matches", "causes", "explain", "svg"):
        yield f"EffectiveMask.{name}", of(seen, name), {"mask": MASK}
    yield "parity", tw.parity, {
        "model": model(), "inputs": {"input": torch.ones(4, 2)}, "split": lambda *x: None,
        "world_size": 1, "timeout": 1.0, "backend": "loopback",
    }  # fmt: skip
    yield "record", tw.record, {"cp": cp, "every": 100, "folder": "run"}
    yield (
        "error_bound",
        error_bound,
        lambda: qkv(
            dout=torch.ones(16, 2, 8), plan=tw.ring(1), layout=tw.contiguous(16, 1), mask=MASK
        ),
    )
    yield "attention", tw.attention, lambda: qkv(plan=tw.ring(1), **CALL_OPTIONS)
    yield "ContextParallel", tw.ContextParallel, {
        "mesh_or_group": None, "num_tokens": 16, "mask": MASK, "strategy": tw.ring(1),
        "layout": tw.contiguous(16, 1), "attention_layout": tw.zigzag(16, 1), **machines,
        "kernel": "cpu", "reduction": "fast",
    }  # fmt: skip
    yield "cp.shard", of(cp, "shard"), {"x": torch.ones(16, 2), "dim": 0}
    yield "cp.unshard", of(cp, "unshard"), {"x": torch.ones(16, 2), "dim": 0}
    yield "cp.roll", of(cp, "roll"), {
        "x": torch.ones(1, 16), "shifts": -1, "dim": 1, "cu_seqlens": [0, 16],
        "fill": -100, "wrap": False,
    }  # fmt: skip
    yield "cp.gather", of(cp, "gather"), {"x": torch.ones(16, 2), "dim": 0, "mask": MASK}
    named = {"x": torch.ones(16, 2), "positions": torch.tensor([3, -1]), "dim": 0}
    yield "Chosen", tw.Chosen, {
        "positions": torch.zeros(16, 3).long(), "within": MASK, "window": 2,
    }  # fmt: skip
    yield "cp.gather_rows", of(cp, "gather_rows"), named
    indexer = {"q_index": torch.ones(16, 2, 4), "k_index": torch.ones(16, 4)}
    yield "cp.index", of(cp, "index"), {
        **indexer, "weights": torch.ones(16, 2), "k": 3, "mask": MASK, "cu_seqlens": [0, 16],
    }  # fmt: skip
    relayout = {"x": torch.ones(16, 2), "to": tw.contiguous(16, 1), "dim": 0}
    yield "cp.relayout", of(cp, "relayout"), relayout
    yield "cp.pieces", of(cp, "pieces"), {"cu_seqlens": [0, 16]}
    yield "cp.dropout", of(cp, "dropout"), {
        "x": torch.ones(16, 2), "p": 0.5, "seed": 1, "dim": 0, "training": True,
    }  # fmt: skip
    halo = {"x": torch.ones(16, 2), "left": 2, "right": 1, "dim": 0}
    yield "cp.halo", of(cp, "halo"), {**halo, "cu_seqlens": [0, 16], "fill": 0.0}
    conv1d = {"x": torch.ones(16, 2), "weight": torch.ones(2, 3), "bias": torch.ones(2)}
    yield "cp.conv1d", of(cp, "conv1d"), {**conv1d, "activation": None, "cu_seqlens": [0, 16]}
    scan = {"decay": torch.ones(1, 2), "update": torch.ones(1, 2), "matrix": False}
    yield "cp.scan", of(cp, "scan"), {**scan, "cu_seqlens": [0, 16], "dim": None}
    yield "cp.mean", of(cp, "mean"), {"losses": torch.ones(()), "count": 2}
    yield "cp.sum_gradients", of(cp, "sum_gradients"), {"module": torch.nn.Linear(2, 2)}
    yield "cp.attention", of(cp, "attention"), lambda: qkv(plan=tw.ring(1), **CP_OPTIONS)
    yield "cp.plan", of(cp, "plan"), lambda: qkv(wire=None)
    yield "KVCache", tw.KVCache, CACHE_OPTIONS
    yield "KVCache.chunk", of(cache, "chunk"), {"counts": [4]}
    yield "KVCache.append", of(cache, "append"), {
        "k": rows(1, 2, 2, 8), "v": rows(1, 2, 2, 8), "counts": [2],
    }  # fmt: skip
    yield "KVCache.attention", of(filled, "attention"), {
        "q": rows(1, 2, 2, 8), "mask": MASK, "counts": [2], "sink": None,
    }  # fmt: skip
    yield "KVCache.decode", of(filled, "decode"), lambda: batched(mask=MASK, counts=[2], sink=None)
    yield "KVCache.prefill", of(cache, "prefill"), lambda: {
        "q": rows(4, 2, 8), "k": rows(4, 2, 8), "v": rows(4, 2, 8), "chunk": cache().chunk([4]),
        "plan": tw.ring(1), "mask": MASK, "sink": None,
    }  # fmt: skip
    yield "KVCache.truncate", of(filled, "truncate"), {"lengths": [2]}
    yield "Tree.from_sequences", tw.Tree.from_sequences, {"token_lists": [[1, 2], [1, 3]]}
    yield "Tree.from_segments", tw.Tree.from_segments, {
        "cu_seqlens_q": [0, 2, 3], "cu_seqlens_k": [0, 2, 5], "kv_index": [0, 1, 0, 1, 2],
        "tokens": [1, 2, 3],
    }  # fmt: skip
    yield "Slices.windowed", tree().mask.windowed, {"left": 1}
    yield "Tree.rows", of(tree, "rows"), {"sequence": 0}
    yield "Tree.shard", of(tree, "shard"), lambda: {"cp": cp(num_tokens=4, mask=tree().mask)}
    yield "Tree.log_probs", of(tree, "log_probs"), lambda: {
        "logits": torch.ones(4, 8), "cp": cp(num_tokens=4, mask=tree().mask),
    }  # fmt: skip
    yield "schedule", step_stream, {
        "lengths": [8, 4, 3, 1], "world_size": 2, "tokens_per_rank": 4, **HEADS, "v_head_dim": 8,
        **machines, "lookahead": 2, "seed": 0,
    }  # fmt: skip
    yield "BatchStep.prepare", of(step_stream, "prepare"), {
        "rank": 0, "kernel": None, "dtype": "float32",
    }  # fmt: skip
    stream = tw.schedule([8], world_size=2, tokens_per_rank=4, **HEADS)
    state = stream.state_dict()
    yield "StepStream.load_state_dict", stream.load_state_dict, {"state": state}
    yield "StepStream.load_state_dict(steps)", lambda **x: stream.load_state_dict(x), state
    for name in ("full", "causal"):
        yield f"masks.{name}", getattr(masks, name), TOKENS
    for name in ("full_document", "causal_document", "share_question", "causal_blockwise"):
        yield f"masks.{name}", getattr(masks, name), CU
    for name in ("sliding_window", "sliding_window_causal", "global_sliding_window"):
        yield f"masks.{name}", getattr(masks, name), {**TOKENS, "window": 2}
    yield "masks.prefix_lm_causal", masks.prefix_lm_causal, {**TOKENS, "prefix": 2}
    yield "masks.prefix_lm_document", masks.prefix_lm_document, {**CU, "prefixes": [1, 2]}
    yield "masks.block_causal_document", masks.block_causal_document, {**CU, "block": 2}
    yield "masks.chunked_causal", masks.chunked_causal, {**TOKENS, "chunk": 2, **CU}
    yield "masks.chunked_causal(no cu)", masks.chunked_causal, {**TOKENS, "chunk": 2}
    blocks = {"blocks": [(0, 2)], "window": 4}
    yield "masks.causal_with_blocks", masks.causal_with_blocks, {**TOKENS, **blocks}
    table = {"block_mask": np.ones((2, 2), bool)}
    yield "masks.block_sparse", masks.block_sparse, {**table, "block": 8}
    edges = {"q_edges": [0, 8, 16], "k_edges": [0, 8, 16]}
    yield "masks.block_sparse_variable", masks.block_sparse_variable, {**table, **edges}
    for name in ("block_sparse_uniform", "causal_document", "prefix_lm_causal"):
        more = {"cu_seqlens": None, "num_kv_heads": 2, "density": 0.5}
        yield (
            f"masks.random({name})",
            masks.random,
            {"name": name, "num_tokens": 512, "seed": 0, **more},
        )
    yield "lengths.histogram", lengths.histogram, {"corpus": "pile"}
    drawn = {"corpus": "pile", "num_tokens": 100, "seed": 0, "cap": 50, "mix": 0.5}
    drawn["draw"] = "longca"
    yield "lengths.sample", lengths.sample, drawn
    yield "lengths.position_ids", lengths.position_ids, CU
    yield (
        "lengths.shift_labels",
        lengths.shift_labels,
        {"tokens": ids(), **CU, "ignore_index": -100},
    )
    columns = {"labels": ids(), "cu_seqlens": [0, 16], "token_type_ids": None}
    yield "data.shard_inputs", data.shard_inputs, {
        "layout": LAYOUT, "rank": 0, "input_ids": ids(), **columns, "attention_mask": None,
        "mm_token_type_ids": None, "shift_labels": True,
    }  # fmt: skip
    yield "data.shard_inputs(attention_mask)", data.shard_inputs, {
        "layout": LAYOUT, "rank": 0, "input_ids": ids(), "attention_mask": torch.ones(1, 16),
    }  # fmt: skip
    yield "data.pack", data.pack, {"document_lengths": [3, 4], "num_tokens": 8}
    collator = {"layout": LAYOUT, "rank": 0, "pad_token_id": 0, "shift_labels": True}
    yield "data.ShardingCollator", data.ShardingCollator, collator
    yield "data.ShardingCollator()", data.ShardingCollator(**collator), {
        "examples": [{"input_ids": [1, 2]}],
    }  # fmt: skip
    yield "data.ShardingCollator(example)", lambda **x: data.ShardingCollator(**collator)([x]), {
        "input_ids": [1, 2], "labels": [1, 2], "attention_mask": [1, 1], "token_type_ids": [0, 0],
    }  # fmt: skip
    dataset = {"tokens": np.arange(40), "layout": LAYOUT, "rank": 0, "cu_seqlens": [0, 40]}
    yield "data.TokenDataset", lambda **x: data.TokenDataset(**x)[0], dataset
    yield "data.TokenDataset[]", lambda index: data.TokenDataset(**dataset)[index], {"index": 0}
    yield "hf.register", hf.register, lambda: {"cp": cp(), "name": "mine"}
    yield "hf.parallelize", hf.parallelize, lambda: {"model": model(), "cp": cp(), "name": "mine"}
    yield "hf.check_model", hf.check_model, lambda: {
        "model": model(), "numerical": False, "loss": False,
    }  # fmt: skip
    yield "hf.trainer_args", hf.trainer_args, lambda: {
        "cp": cp(), "model": model(), "args": None, "train_dataset": [], "eval_dataset": [],
    }  # fmt: skip
    yield "hf.shard", hf.shard, lambda: {
        "cp": cp(), "input_ids": ids(), "indices": [torch.zeros(1, 16, 2, dtype=torch.int64)],
    }  # fmt: skip
    yield "hf.shard(columns)", lambda **x: hf.shard(cp(), ids(), **x), {
        "cu_seqlens": [0, 16], "labels": ids(), "attention_mask": None, "shift_labels": True,
    }  # fmt: skip
    entered: Callable[..., object] = lambda **x: hf.unsplit(**x).__enter__()  # noqa: E731
    yield "hf.unsplit", entered, lambda: {"model": model()}
    yield "hf.unshard", hf.unshard, lambda: {"cp": cp(), "x": ids(), "dim": 1}
    shared = {
        "dropout_p": 0.0, "softmax_scale": None, "causal": True, "window_size": (-1, -1),
        "alibi_slopes": None, "deterministic": False, "return_attn_probs": False, "group": None,
    }  # fmt: skip
    batch, packed = rows(1, 4, 2, 8), rows(4, 2, 8)
    edges = torch.tensor([0, 4])
    for kind in ("ring", "zigzag_ring", "stripe"):
        name = f"{kind}_flash_attn_func"
        yield name, getattr(rfa, name), {"q": batch, "k": batch, "v": batch, **shared}
    operands = {"q": packed, "k": packed, "v": packed}
    for kind in ("ring", "zigzag_ring"):
        name, more = f"{kind}_flash_attn_varlen_func", {"cu_seqlens": edges, "max_seqlen": 4}
        yield name, getattr(rfa, name), {**operands, **more, **shared}
    yield "llama3_flash_attn_varlen_func", rfa.llama3_flash_attn_varlen_func, {
        **operands, "cu_seqlens_q": edges, "cu_seqlens_k": edges, "max_seqlen_q": 4,
        "max_seqlen_k": 4, "heads_k_stride": 1, "local_k_slice": slice(0, 4), **shared,
    }  # fmt: skip
    yield "ring_flash_attn_kvpacked_func", rfa.ring_flash_attn_kvpacked_func, {
        "q": batch, "kv": rows(1, 4, 2, 2, 8), **shared,
    }  # fmt: skip
    yield "ring_flash_attn_qkvpacked_func", rfa.ring_flash_attn_qkvpacked_func, {
        "qkv": rows(1, 4, 3, 2, 8), **shared,
    }  # fmt: skip
    yield "llama3_flash_attn_prepare_cu_seqlens", rfa.llama3_flash_attn_prepare_cu_seqlens, {
        "cu_seqlens": edges, "causal": True, "rank": 0, "world_size": 1,
    }  # fmt: skip
    slot = {"num_attention_heads": 2, "kv_channels": 8, "qkv_format": "sbhd"}
    tensors = {f"{name}_layer": rows(4, 1, 2, 8) for name in ("query", "key", "value")}
    yield "DotProductAttention", lambda **x: DotProductAttention(**x)(**tensors), {
        **slot, "num_gqa_groups": 2, "attention_dropout": 0.0, "attn_mask_type": "causal",
        "window_size": None, "tp_size": 1, "tp_group": None, "cp_group": None,
        "cp_global_ranks": None, "cp_comm_type": "p2p", "softmax_scale": None,
        "softmax_type": "vanilla", "return_max_logit": False,
    }  # fmt: skip
    yield "DotProductAttention()", lambda **x: DotProductAttention(**slot)(**x), {
        **tensors, "attention_mask": None, "qkv_format": "sbhd", "cu_seqlens_q": None,
        "attn_mask_type": "causal", "window_size": None, "core_attention_bias_type": "no_bias",
        "core_attention_bias": None, "alibi_slopes": None, "inference_params": None,
        "fp8_output": False, "layout": None,
    }  # fmt: skip
    lengths_of = {f"cu_seqlens_{x}": edges for x in ("q", "kv", "q_padded", "kv_padded")}
    yield "DotProductAttention(thd)", lambda **x: DotProductAttention(**slot)(**x), {
        **{name: x[:, 0] for name, x in tensors.items()}, "qkv_format": "thd", **lengths_of,
        "attn_mask_type": "padding_causal",
    }  # fmt: skip


def _called(name: str, function: Callable[..., Any], arguments: Any) -> Called:
    return Called(name, function, arguments if callable(arguments) else partial(dict, arguments))


CALLS = tuple(_called(*entry) for entry in _table())
"""Every public function that takes an argument."""


def wrong_calls() -> Iterator[tuple[Called, str, str]]:
    """A call, the argument to replace, and the name of the value."""
    for called in CALLS:
        for argument in called.arguments():
            for value in pool():
                yield called, argument, value
