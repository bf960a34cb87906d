"""Rows to a page: every target with what was measured, then the figures behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from benchmarks.gpu_parts.case import Row
from benchmarks.gpu_parts.cases import FLEX

PASSES = ("forward", "backward")
BY_TESTS = (
    "not measured here but by tests: Triton kernels in the interpreter (test_triton_slices.py), no "
    "allocation (test_buffers.py), no waiting of the host (test_streams.py)"
)


class Item(NamedTuple):
    """One figure that a target is about, and whether it is met."""

    text: str
    met: bool


class Target(NamedTuple):
    """What is wanted, and all that was measured of it: nothing, if there are no items."""

    wanted: str
    items: list[Item]

    def __str__(self) -> str:
        verdict = "met" if all(i.met for i in self.items) else "NOT MET"
        lines = [f"target: {self.wanted}: {verdict if self.items else 'not measured'}"]
        lines += [f"  measured: {i.text}: {'met' if i.met else 'NOT MET'}" for i in self.items]
        return "\n".join(lines)


def summary(rows: list[Row]) -> list[str]:
    lines = [*map(str, targets(rows)), BY_TESTS]
    for title, make in SECTIONS.items():
        found = list(make(rows))
        lines += [title, *found] if found else []
    lines += [f"failed: {_name(r)}: {r['error']}" for r in rows if "error" in r]
    skipped = sum("skipped" in r for r in rows)
    return [*lines, f"{skipped} cases skipped for time"] if skipped else lines


def targets(rows: list[Row]) -> list[Target]:
    masks = "causal_document", "sliding_window_causal"
    return [
        _conformance(rows),
        _executor(rows),
        _memory(rows),
        _direct(rows),
        _against(rows, FLEX, 2.0, masks),
        _against(rows, "cuda", 0.9, ("causal", "full")),
        _against(rows, "cuda", 1.0, masks),
        _doctor(rows),
    ]


def _conformance(rows: list[Row]) -> Target:
    checks = [r for r in rows if r["part"] == "correctness"]
    wrong = [_name(r) for r in checks if r.get("right") is False]
    right, missing = (
        sum(r.get("right") is True for r in checks),
        sum("right" not in r for r in checks),
    )
    text = f"{right} of {len(checks)} right, {len(wrong)} wrong, {missing} not done"
    items = [Item(text, right == len(checks)), *(Item(name, False) for name in wrong)]
    return Target("conformance green", items if checks else [])


def _executor(rows: list[Row]) -> Target:
    """The fastest rank against the fastest single call, whichever kernels they take."""
    items = []
    for (mask, heads), found in _grouped(rows, "executor", "backward_share").items():
        for x in PASSES:
            rank = min(found, key=lambda r: r[f"{x}_ms"])
            one = min(found, key=lambda r: r[f"{x}_one_call_ms"])
            share = one[f"{x}_one_call_ms"] / rank[f"{x}_ms"]
            if rank is one:  # in turns, so that clocks are the same
                share = rank[f"{x}_share"]
            text = f"{mask} {heads} {x} {share:.3f}, {rank['kernel']} against {one['kernel']}"
            text += "" if rank is one else f" (against itself {rank[f'{x}_share']:.3f})"
            items.append(Item(text, share >= 0.95))
    return Target("a rank's mesh tile at >= 95 % of one call of the best kernel", items)


def _memory(rows: list[Row]) -> Target:
    items = []
    for row in (r for r in rows if r["part"] == "executor" and r.get("backward_peak_bytes")):
        found = [row[f"{x}_peak_bytes"] / row[f"{x}_planned_bytes"] for x in PASSES]
        text = f"{row['kernel']} {row['mask']} {row['heads']} {found[0]:.3f}, {found[1]:.3f}"
        items.append(Item(text, all(abs(x - 1) <= 0.05 for x in found)))
    return Target("peak memory of both passes within 5 % of the planner's figure", items)


def _direct(rows: list[Row]) -> Target:
    """The fastest provider against its own library in turns, else against the fastest library."""
    items = []
    for key, found in _grouped(rows, "kernels", "backward_tflops").items():
        for x in PASSES if key[0] == "causal" else ():
            best = max(found, key=lambda r: r[f"{x}_tflops"])
            direct = max((r.get(f"{x}_direct_tflops", 0.0) for r in found), default=0.0)
            if not direct:
                continue
            share = best.get(f"{x}_share", best[f"{x}_tflops"] / direct)
            text = f"{_text(key)} {x} {share:.3f}: {best['contender']} {best[f'{x}_tflops']:.0f}"
            text += f" TFLOP/s, the fastest library called directly {direct:.0f}"
            if f"{x}_kernel_share" in best:
                text += f" (without the executor {best[f'{x}_kernel_share']:.3f})"
            items.append(Item(text, share >= 0.97))
    return Target("dense causal of the best provider within 3 % of calling it directly", items)


def _against(rows: list[Row], theirs: str, factor: float, masks: tuple[str, ...]) -> Target:
    """The slice kernel's speed in units of another's."""
    items = []
    for key, group in _grouped(rows, "kernels", "backward_tflops").items():
        others = [r for r in group if r["contender"] == theirs]
        for ours in (r for r in group if r["contender"] == "triton"):
            for other in others if key[0] in masks else ():
                ratios = [other[f"{x}_ms"] / ours[f"{x}_ms"] for x in PASSES]
                text = f"{_text(key)} {ours['contender']} {ratios[0]:.2f}x, {ratios[1]:.2f}x"
                items.append(Item(text, min(ratios) >= factor))
    what = {FLEX: "flex", "cuda": "flash attention 2"}[theirs]
    wanted = f"slice kernel >= {factor:g}x {what} on {' and '.join(masks)}, forward and backward"
    return Target(wanted, items)


def _doctor(rows: list[Row]) -> Target:
    found = next((r["doctor"] for r in rows if "doctor" in r), {})
    items = [Item(f"{name}: {detail}", bool(detail)) for name, detail in found.items()]
    return Target("doctor states what each provider can do here, or why it is out", items)


def _executor_table(rows: list[Row]) -> Iterator[str]:
    for r in (r for r in rows if r["part"] == "executor" and "forward_share" in r):
        speeds = ", ".join(
            f"{x} {r[f'{x}_tflops']:.0f} of {r[f'{x}_one_call_tflops']:.0f} TFLOP/s, host "
            f"{r[f'{x}_host_ms']:.0f} of {r[f'{x}_ms']:.0f} ms, "
            f"allocations {r.get(f'{x}_allocations', '-')}"
            for x in PASSES
        )
        yield f"  {r['kernel']} {r['mask']} {r['heads']}: {speeds}"


def _kernel_table(rows: list[Row]) -> Iterator[str]:
    """A line per case: the contenders' TFLOP/s, forward/backward."""
    for key, found in _grouped(rows, "kernels", "backward_tflops").items():
        texts = []
        for r in found:
            texts.append(f"{r['contender']} {r['forward_tflops']:.0f}/{r['backward_tflops']:.0f}")
            if "forward_direct_tflops" in r:
                direct = "/".join(f"{r[f'{x}_direct_tflops']:.0f}" for x in PASSES)
                texts[-1] += f" (direct {direct})"
        yield f"  {_text(key)}: {', '.join(texts)}"


def _graph_table(rows: list[Row]) -> Iterator[str]:
    for r in (r for r in rows if r["part"] == "graphs" and "forward_gain" in r):
        gains = ", ".join(
            f"{x} {r[f'{x}_eager_ms']:.2f} to {r[f'{x}_graph_ms']:.2f} ms, {r[f'{x}_gain']:.2f}x"
            for x in PASSES
        )
        yield f"  {r['kernel']} {r['num_tokens']} tokens on {r['world_size']}: {gains}"


def _scaling_table(rows: list[Row]) -> Iterator[str]:
    for r in (r for r in rows if r["part"] == "scaling" and "both_passes_ms" in r):
        graph = " as a graph" if r["graph"] else ""
        yield f"  {r['plan']}{graph}: {r['both_passes_ms']:.2f}"


SECTIONS: Mapping[str, Callable[[list[Row]], Iterable[str]]] = MappingProxyType(
    {
        "executor, one rank of its one call": _executor_table,
        "kernels, TFLOP/s forward/backward": _kernel_table,
        "graphs, one rank's program": _graph_table,
        "loopback, ms of both passes": _scaling_table,
    }
)


def _grouped(rows: list[Row], part: str, needs: str) -> dict[tuple, list[Row]]:
    """Rows of a part that have a figure, by case."""
    keys = {"executor": ("mask", "heads"), "kernels": ("mask", "num_tokens", "heads")}[part]
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        if row["part"] == part and needs in row:
            found.setdefault(tuple(row[k] for k in keys), []).append(row)
    return found


def _text(key: tuple) -> str:
    return " ".join(map(str, key))


def _name(row: Row) -> str:
    names = ("part", "kernel", "contender", "plan", "mask", "num_tokens", "heads", "graph")
    return " ".join(str(row[x]) for x in names if x in row)
