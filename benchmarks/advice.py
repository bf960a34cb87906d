"""The advisor's lines for nine cases, and its ranking beside three public measurements.

    python -m benchmarks.advice           # the tables of docs/advisor.md
    python -m benchmarks.advice --public  # the second alone, in a second

The cases are three models on a cluster each, for three libraries. The models' files hold what
their config.json says of attention. Public measurements are of whole steps, ours of attention
alone: only orders are compared.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import tilewise as tw
from tilewise.planning.advisor import LIBRARIES, Advice, advise
from tilewise.planning.model_attention import read_model
from tilewise.simulation.machine import Link
from tilewise_tools.naming import Parser, run_script

MODELS = Path(__file__).parent / "cases" / "models"


class Cluster(NamedTuple):
    """A model, the tokens of its sequence, and nodes of a machine."""

    model: str
    num_tokens: int
    machine: str
    nodes: int


CLUSTERS = (
    Cluster("llama-3.1-8b", 1 << 17, "h100x8", 1),
    Cluster("mistral-7b-v0.1", 1 << 16, "a100x8", 4),
    Cluster("qwen2.5-7b", 1 << 18, "h100x8", 16),
)


def advice_of(library: str, case: Cluster) -> Advice:
    machine = tw.Machine.preset(case.machine)
    model = read_model(MODELS / f"{case.model}.json")
    return advise(library, model, case.num_tokens, machine, case.nodes * machine.node_size)


def line(case: Cluster, advice: Advice) -> str:
    """The row of one case."""
    setting = advice.setting
    assert setting is not None
    where = f"{case.nodes} x {case.machine}"
    what = f"{case.model}, {case.num_tokens >> 10}K"
    refused = "; ".join(text.rpartition(" (")[0] for text in advice.refused) or "none"
    times = setting.seconds / advice.best.seconds
    return (
        f"| {advice.library.partition(',')[0]} | {what} | {where} | {setting.scheme} | "
        f"`{setting.options}` | {setting.seconds * 1e3:.4g} | {advice.best.seconds * 1e3:.4g} | "
        f"{times:.2f} | {refused} |"
    )


HEADER = (
    "| library | model, tokens | cluster | setting | to paste | ms | best plan, ms | times | "
    "refused |\n|---|---|---|---|---|---|---|---|---|"
)


def lines() -> Iterator[str]:
    yield HEADER
    for case in CLUSTERS:
        for library in LIBRARIES:
            yield line(case, advice_of(library, case))


PASSES = 3.0
"""Passes over fp32 numbers by which a preset prices adding to a partial: two reads, one write."""


class Way(NamedTuple):
    """A way to split a workload.

    Attributes:
        took: what was measured; the less, the better.
        passes: over fp32 numbers that the library's own merging takes, by its code.
    """

    name: str
    plan: tw.Plan
    layout: str
    took: float
    passes: float = PASSES


class Measured(NamedTuple):
    """A public measurement of several ways to split one workload.

    Attributes:
        forward: whether only the forward pass was run.
    """

    source: str
    what: str
    machine: tw.Machine
    work: tw.Workload
    forward: bool
    unit: str
    ways: tuple[Way, ...]

    def machine_of(self, way: Way) -> tw.Machine:
        """The machine on which a result is added to a partial at once, as device "cpu" says, and
        that takes as long as in the library's own code.
        """
        bandwidth = self.machine.merge_bandwidth
        assert bandwidth, f"{self.machine.name} has no memory_bandwidth"
        merging = bandwidth * PASSES / way.passes
        return replace(self.machine, merge_bandwidth=merging, device="cpu")


def _prime_rl(n: int, ulysses: float, ring: float) -> Measured:
    """GLM-4.5-Air. Their ring gathers keys and values of contiguous shards (ring-flash-attn)."""
    return Measured(
        "[prime-rl #2418](https://github.com/PrimeIntellect-ai/prime-rl/pull/2418)",
        f"GLM-4.5-Air, 64K, {n} H200",
        tw.Machine.preset("h200x8"),
        tw.Workload(1 << 16, 96, 8, 128, mask=tw.Causal()),
        False,
        "step beside cp 1",
        (
            Way("Ulysses", tw.ulysses(n), "zigzag", ulysses),
            Way("ring", tw.all_gather(n), "contiguous", ring),
        ),
    )


def _tensorrt_llm(degree: int, rows: int, cols: int, slower: float) -> Measured:
    """Wan 2.2 A14B, half of the devices of a rack for each stream of its guidance.

    Its ring merges in torch: the block's out (bf16) is taken from out (fp32), multiplied, and taken
    from out, three kernels that read and write 30 bytes a number. Its Attention2D makes what it
    receives (bf16) fp32, and one kernel reads that: 10 bytes a number.
    """
    n, unit = degree * rows * cols, "denoising loop"
    square = tw.ulysses(degree, inner=tw.attention2d(rows, cols))
    ring = tw.ulysses(degree, inner=tw.ring(rows * cols))
    return Measured(
        "[TensorRT-LLM #13821](https://github.com/NVIDIA/TensorRT-LLM/pull/13821), its blog 25",
        f"Wan 2.2 A14B, 72K, {2 * n} GB200",
        tw.Machine.preset("nvl72"),
        tw.Workload(72 << 10, 40, 40, 128, layout="contiguous"),
        True,
        unit,
        (
            Way(f"Ulysses {degree} x Attention2D", square, "contiguous", 1.0, 10 / 4),
            Way(f"Ulysses {degree} x ring", ring, "contiguous", slower, 30 / 4),
        ),
    )


def _vllm_omni() -> Measured:
    """BAGEL on four A800: A100 whose NVLink carries 200 GB/s one way."""
    a800 = replace(
        tw.Machine.preset("a100x8"), node_size=4, nics=4, inside=Link(200e9, 4e-6), name="a800x4"
    )
    ways = (
        ("all-gather", tw.all_gather(4), 169.57),
        ("Ulysses", tw.ulysses(4), 207.29),
        ("Ulysses 2 x ring", tw.ulysses(2, inner=tw.ring(2)), 231.69),
        ("ring", tw.ring(4), 244.77),
    )
    return Measured(
        "[vllm-omni #5092](https://github.com/vllm-project/vllm-omni/issues/5092), "
        "[#5520](https://github.com/vllm-project/vllm-omni/pull/5520)",
        "BAGEL, 4K, 4 A800",
        a800,
        tw.Workload(4096, 32, 4, 128, layout="contiguous"),
        True,
        "ms a step",
        tuple(Way(name, plan, "contiguous", took) for name, plan, took in ways),
    )


def public() -> tuple[Measured, ...]:
    """Three threads: 2 + 3 + 1 rankings, with what each published."""
    return (
        _prime_rl(2, 84 / 77, 84 / 60),
        _prime_rl(4, 84 / 85, 84 / 57),
        _tensorrt_llm(8, 2, 1, 1.03),
        _tensorrt_llm(8, 2, 2, 1.13),
        _tensorrt_llm(4, 3, 3, 1.83),
        _vllm_omni(),
    )


class Ranking(NamedTuple):
    """Ways of a measurement, the fastest measured first, with what ours says of them."""

    measured: Measured
    rows: tuple[tuple[str, float, float], ...]

    @property
    def pairs(self) -> tuple[int, int]:
        """Pairs that both order alike, and all pairs."""
        both = [(a[2] <= b[2]) for a, b in combinations(self.rows, 2)]
        return sum(both), len(both)


def ranking(measured: Measured) -> Ranking:
    rows: list[tuple[str, float, float]] = []
    for way in measured.ways:
        work = replace(measured.work, layout=way.layout)
        found = tw.simulate(way.plan, work, measured.machine_of(way), prune=False)
        seconds = found.forward_seconds if measured.forward else found.seconds
        rows.append((way.name, way.took, seconds))
    return Ranking(measured, tuple(sorted(rows, key=lambda row: row[1])))


def public_lines() -> Iterator[str]:
    yield "| thread | case | measured | simulated attention | pairs in the same order |"
    yield "|---|---|---|---|---|"
    for found in map(ranking, public()):
        m, (alike, pairs) = found.measured, found.pairs
        unit = m.unit
        measured = ", ".join(f"{name} {took:.4g}" for name, took, _ in found.rows)
        simulated = ", ".join(f"{name} {s * 1e3:.4g} ms" for name, _, s in found.rows)
        yield f"| {m.source} | {m.what} | {unit}: {measured} | {simulated} | {alike} of {pairs} |"


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--public", action="store_true", help="no cases, public rankings alone")
    if not parser.parse_args().public:
        print("\n".join(lines()), end="\n\n")
    print("\n".join(public_lines()))


if __name__ == "__main__":
    run_script(main)
