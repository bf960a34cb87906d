"""Layers that carry a state, split: beside their own kernel, a gather of all rows, and ringmaster.

    python -m benchmarks.hybrid_layers               # 2 processes: seconds, and bytes kept
    sudo python -m benchmarks.hybrid_layers --lab    # 8 hosts at 50 Mbit/s: seconds, and bytes sent
    python -m benchmarks.hybrid_layers --show        # the committed rows

The gated delta rule and Mamba2's scan of transformers' torch code, forward and backward, without
projections. "local" is the kernel on a rank's own rows from an empty state: its numbers are wrong,
its time is that of one pass. ringmaster's gated delta rule is its torch fallback, exact on 2 ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterable
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import tilewise as tw
from tilewise.integrations.transformers import state_rules
from tilewise.transport.processes import gather_yields
from tilewise_tools.bench.environment import environment, installed
from tilewise_tools.lab import Lab
from tilewise_tools.naming import Parser, naming, new_file, run_script

ROWS = Path(__file__).parent / "results" / "hybrid_layers.jsonl"
HEADS, DIM, CHUNK = 4, 32, 64  # widths of keys, values and states
KINDS = ("gated delta rule", "mamba2")
WAYS = ("local", "tilewise", "tilewise zigzag", "gather", "ringmaster")
WORLD_SIZE, TOKENS_PER_RANK, REPEATS = 2, 2048, 7
HOSTS, MBIT, LAB_TOKENS, LAB_REPEATS = 8, 50.0, (64, 256, 1024), 3
Operands = dict[str, Tensor]


class Measured(NamedTuple):
    """One repeat of a rank: seconds of both passes, bytes kept for backward, error of the result,
    as a share of the largest.
    """

    seconds: float
    kept_bytes: int
    error: float


def operands(num_tokens: int) -> Operands:
    """The whole sequence, [1, num_tokens, ...], the same on every rank."""
    make = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(1, num_tokens, *shape, generator=make)

    x = {name: draw(HEADS, DIM) for name in "qkv"}
    return x | {"gate": -0.05 * draw(HEADS).abs(), "rate": draw(HEADS).sigmoid()}


def kernel(kind: str) -> Callable[..., tuple[Tensor, Any]]:
    """The function that a layer of transformers calls."""
    if kind == KINDS[0]:
        from transformers.models.qwen3_next import modeling_qwen3_next

        return modeling_qwen3_next.torch_chunk_gated_delta_rule
    from transformers.models.bamba import modeling_bamba

    return modeling_bamba.mamba2_chunk_scan


def computed(kind: str, run: Callable[..., Any], x: Operands) -> Tensor:
    """The result of a kernel, or of what a library put in its place."""
    if kind == KINDS[0]:
        given = {"g": x["gate"], "beta": x["rate"], "chunk_size": CHUNK}
        out, _ = run(x["q"], x["k"], x["v"], **given, use_qk_l2norm_in_kernel=True)
        return out
    a = -torch.ones(HEADS)  # one group of keys and queries for all heads, as in Bamba
    out = run(x["v"], -x["gate"], a, x["k"][:, :, :1], x["q"][:, :, :1], CHUNK)
    return out[0] if isinstance(out, tuple) else out


def tilewise_way(kind: str, cp: tw.ContextParallel) -> Callable[..., Any]:
    whole, rule = (0, cp.layout.num_tokens), kernel(kind)
    if kind == KINDS[0]:
        return partial(state_rules.delta_rule, cp, whole, rule)
    return partial(state_rules.state_space, cp, whole, rule)


def ringmaster_way(kind: str, group: Any) -> Callable[..., Any] | None:
    """What it puts in the kernel's place; None where it has nothing for a CPU and so many ranks."""
    from ringmaster import config, runtime

    world_size = dist.get_world_size(group)
    made = config.RingmasterConfig(size=world_size)
    runtime.set_runtime(runtime.CPRuntime(made, cp_group=group))
    if kind == KINDS[1]:
        from ringmaster import mamba

        found = {"mamba2_chunk_scan": kernel(kind), "causal_conv1d_fn": None}
        return mamba._bindings(SimpleNamespace(__globals__=found), group)["mamba2_chunk_scan"]
    from ringmaster.strategies import linear_attn

    if world_size > 2:
        return None
    module = kernel(kind).__module__  # where it looks for the kernel
    mixer_class = type("Mixer", (SimpleNamespace,), {"__module__": module})
    mixer = mixer_class(chunk_gated_delta_rule=kernel(kind), causal_conv1d_fn=None)
    linear_attn._torch_fallback_cp(mixer, 4)
    return mixer.chunk_gated_delta_rule


def serve(rank: int, kind: str, num_tokens: int) -> Generator[Any, str, None]:
    """A rank: for each way that it is sent, one repeat; None if the way does not run."""
    torch.set_num_threads(1)
    group: Any = dist.group.WORLD
    n, whole = dist.get_world_size(), operands(num_tokens)
    with torch.no_grad():
        want = computed(kind, kernel(kind), whole)
    layouts = {"tilewise zigzag": tw.zigzag(num_tokens, n)}
    ways: dict[str, tuple[Callable[[Operands], Tensor], tw.ContextParallel] | None] = {}
    answer: Any = None
    while True:
        way = yield answer
        if way not in ways:
            layout = layouts.get(way, tw.contiguous(num_tokens, n))
            cp = tw.ContextParallel(group, num_tokens=num_tokens, layout=layout)
            ways[way] = _way(way, kind, cp)
        prepared = ways[way]
        answer = None if prepared is None else _repeat(*prepared, whole, want)


def _way(
    way: str, kind: str, cp: tw.ContextParallel
) -> tuple[Callable[[Operands], Tensor], tw.ContextParallel] | None:
    """A function of a rank's rows."""
    if way == "local":
        return lambda x: computed(kind, kernel(kind), x), cp
    if way == "gather":

        def gathered(x: Operands) -> Tensor:
            names = list(x)
            widths = [x[name].flatten(2).shape[2] for name in names]
            rows = cp.gather(torch.cat([x[name].flatten(2) for name in names], 2), dim=1)
            parts = zip(names, rows.split(widths, 2), strict=True)
            every = {name: part.unflatten(2, x[name].shape[2:]) for name, part in parts}
            return computed(kind, kernel(kind), every)[:, cp.position_ids]

        return gathered, cp
    run = ringmaster_way(kind, cp.group) if way == "ringmaster" else tilewise_way(kind, cp)
    return None if run is None else ((lambda x: computed(kind, run, x)), cp)


def _repeat(
    run: Callable[[Operands], Tensor], cp: tw.ContextParallel, whole: Operands, want: Tensor
) -> Measured:
    mine = {name: cp.shard(x, 1).contiguous().requires_grad_() for name, x in whole.items()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage
        return x

    dist.barrier()
    start = time.perf_counter()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = run(mine)
    out.square().sum().backward()
    seconds = time.perf_counter() - start
    dist.barrier()
    error = (out.detach() - cp.shard(want, 1)).abs().max() / want.abs().max()
    return Measured(seconds, sum(x.nbytes() for x in kept.values()), float(error))


def measured(
    world: Any, ways: Iterable[str], repeats: int, lab: Lab | None
) -> dict[str, dict[str, Any]]:
    """Of each way the seconds of its slowest rank, in turn, after one repeat that is not timed."""
    next(world)
    found: dict[str, dict[str, Any]] = {}
    for repeat in range(repeats + 1):
        for way in ways:
            if way in found and found[way]["outcome"] != "ok":
                continue
            before = lab.counters() if lab else ()
            answers = world.send(way)
            after = lab.counters() if lab else ()
            if any(answer is None for answer in answers):
                found[way] = {"outcome": "does not run"}
                continue
            row = found.setdefault(way, {"outcome": "ok", "seconds": []})
            if repeat:
                row["seconds"].append(max(answer.seconds for answer in answers))
            row["kept_bytes"] = max(answer.kept_bytes for answer in answers)
            row["error"] = max(answer.error for answer in answers)
            if lab:
                moved = [b.since(a).sent_payload for a, b in zip(before, after, strict=True)]
                row["sent_bytes"] = max(moved)
    world.close()
    return found


def rows_of(
    found: dict[str, dict[str, Any]], kind: str, world_size: int, num_tokens: int, network: str
) -> list[dict[str, Any]]:
    about = {
        "network": network,
        "layer": kind,
        "world_size": world_size,
        "tokens_per_rank": num_tokens // world_size,
        "heads": HEADS,
        "dim": DIM,
        "dtype": "float32",
        "pass": "both",
    }
    versions = {
        f"{name.replace('axolotl-', '')}_version": installed(name)
        for name in ("transformers", "axolotl-ringmaster")
    }
    made = []
    for way, figures in found.items():
        row = {**about, "way": way, **figures}
        if figures["outcome"] == "ok":
            row["median_seconds"] = median(figures["seconds"])
            times = zip(figures["seconds"], found["local"]["seconds"], strict=True)
            row["passes"] = median(a / b for a, b in times)
        made.append(row | environment("cpu") | versions)
    return made


def processes(kind: str) -> list[dict[str, Any]]:
    num_tokens = WORLD_SIZE * TOKENS_PER_RANK
    world = gather_yields(WORLD_SIZE, serve, (kind, num_tokens), timeout_seconds=600)
    found = measured(world, WAYS, REPEATS, None)
    return rows_of(found, kind, WORLD_SIZE, num_tokens, "loopback")


def in_lab(kind: str) -> list[dict[str, Any]]:
    rows = []
    for tokens in LAB_TOKENS:
        with Lab(hosts=HOSTS, mbit=MBIT) as lab:
            world = lab.gather_yields(serve, kind, HOSTS * tokens, timeout_seconds=600)
            found = measured(world, WAYS, LAB_REPEATS, lab)
        rows += rows_of(found, kind, HOSTS, HOSTS * tokens, f"lab, {MBIT:g} Mbit/s")
    return rows


def show(rows: Iterable[dict[str, Any]]) -> None:
    header = ("network", "layer", "ranks", "tokens", "way", "ms", "passes", "kept MB", "sent kB")
    print("| " + " | ".join((*header, "error")) + " |")
    print("|" + "---|" * (len(header) + 1))
    for row in rows:
        cells = [row["network"], row["layer"], row["world_size"], row["tokens_per_rank"]]
        cells.append(row["way"])
        if row["outcome"] == "ok":
            cells += [f"{row['median_seconds'] * 1e3:.0f}", f"{row['passes']:.2f}"]
            cells.append(f"{row['kept_bytes'] / 1e6:.1f}")
            cells.append(f"{row['sent_bytes'] / 1e3:.0f}" if "sent_bytes" in row else "")
            cells.append("wrong" if row["way"] == "local" else f"{row['error']:.0e}")
        else:
            cells += [row["outcome"], "", "", "", ""]
        print("| " + " | ".join(map(str, cells)) + " |")


def main() -> None:
    parser = Parser(description=__doc__)
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--lab", action="store_true", help="8 hosts; needs Linux, root, ip and tc")
    either.add_argument("--show", action="store_true", help="only show the rows that are there")
    parser.add_argument("--rows", type=new_file, default=ROWS)
    options = parser.parse_args()
    with naming("--rows"):
        is_read = options.show or options.rows.exists()
        lines = options.rows.read_text().splitlines() if is_read else []
        old = [json.loads(line) for line in lines]
    if options.show:
        show(old)
        return
    new = [row for kind in KINDS for row in (in_lab if options.lab else processes)(kind)]
    kept = [row for row in old if row["network"].startswith("lab") != options.lab]
    options.rows.write_text("".join(json.dumps(row) + "\n" for row in (*kept, *new)))
    show(new)


if __name__ == "__main__":
    run_script(main)
