"""What a run consists of: presets, case files, filters, keys."""

from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bench_contenders import Bad

import tilewise as tw
from tilewise import masks
from tilewise.expressions import STRATEGIES as WRITABLE
from tilewise.expressions import read_plan
from tilewise.kernels.registry import PROVIDERS
from tilewise.strategies.catalog import degrees, divisors
from tilewise_tools.bench import environment
from tilewise_tools.bench.case import KINDS, BenchCase, LabNetwork, Timing, key_of
from tilewise_tools.bench.grid import entered, preset, read_cases
from tilewise_tools.bench.our_kernels import DENSE
from tilewise_tools.bench.our_strategies import STRATEGIES, Strategy
from tilewise_tools.doctor import examine
from tilewise_tools.mask_report.named import Axes

ROOT = Path(__file__).resolve().parents[2]
CASE = BenchCase("strategies", "causal", 64, world_size=2, network=LabNetwork("loopback", 1, 2))


@pytest.mark.parametrize("kind", ["kernels", "strategies"])
def test_quick_has_all_masks_and_everybody(kind: str):
    plan = entered(preset(kind, "quick"))
    assert {case.mask for case, _ in plan} == set(masks.NAMES)
    everybody = {*PROVIDERS, *DENSE} if kind == "kernels" else set(STRATEGIES)
    assert all({one.name for one in contenders} == everybody for _, contenders in plan)


def test_every_kernel_and_strategy_of_the_library_takes_part():
    assert {found.name for found in examine() if found.part == "kernel"} == set(PROVIDERS)
    assert set(WRITABLE) | {"needed", "tiled"} <= set(STRATEGIES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["quick", "standard"])
def test_presets_can_be_read_and_entered(kind: str, name: str):
    assert entered(preset(kind, name))


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "cases").glob("*.toml")), ids=str)
def test_case_files_can_be_read_and_entered(path: Path):
    kind = path.stem.partition("_")[0]
    assert entered(read_cases(path, kind))


@pytest.mark.parametrize("kind", ["kernels", "strategies"])
def test_sources_that_are_only_on_the_path_have_no_version(kind: str, monkeypatch):
    def missing(name: str) -> str:
        raise environment.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(environment.metadata, "version", missing)
    contenders = {one for _, several in entered(preset(kind, "quick")) for one in several}
    ours = [one for one in contenders if one.library == "tilewise"]
    assert ours and {one.version for one in ours} == {"not installed"}


def test_a_filter_takes_the_place_of_a_list():
    run = preset("strategies", "quick")
    (case,) = [case for case, *_ in run.narrowed({"mask": ["causal"], "num_tokens": [100]}).cases()]
    assert (case.mask, case.num_tokens, case.world_size) == ("causal", 100, 4)
    two = run.narrowed({"mask": ["causal"], "world_size": [2, 3], "tokens_per_rank": [8]})
    assert {(c.world_size, c.num_tokens) for c, *_ in two.cases()} == {(2, 16), (3, 24)}


def test_axes_make_cases_of_the_masks_that_have_them():
    run = preset("kernels", "quick").narrowed(
        {
            "mask": ["causal", "block_sparse_uniform", "sliding_window & causal_document"],
            **{"block": [8, 16], "density": [0.2, 0.5], "window": [3], "cap": [9, 20]},
        }
    )
    cases = [case for case, *_ in run.cases()]
    by_mask = {mask: [c.axes for c in cases if c.mask == mask] for mask in {c.mask for c in cases}}
    assert by_mask["causal"] == [Axes()]
    assert set(by_mask["block_sparse_uniform"]) == {
        Axes(block=block, density=density) for block in (8, 16) for density in (0.2, 0.5)
    }
    assert set(by_mask["sliding_window & causal_document"]) == {
        Axes(window=3, cap=cap) for cap in (9, 20)
    }


def test_documents_are_drawn_as_longca_draws_them():
    num_tokens = 1 << 16
    shares = []
    for seed in range(20):
        case = BenchCase(
            "kernels", "block_causal_document", num_tokens, seed=seed, axes=Axes(draw="longca")
        )
        shares.append(case.make_mask().area((0, num_tokens), (0, num_tokens)) / num_tokens**2)
    assert np.mean(shares) == pytest.approx(0.051, abs=0.002)
    case = BenchCase("kernels", "full_document", num_tokens, seed=3, axes=Axes(draw="longca"))
    wanted = tw.lengths.sample("prolong64k", num_tokens, seed=case.seed, draw="longca")
    assert case.make_mask() == tw.Document(wanted)
    mixed = replace(case, axes=Axes(draw="longca", mix=0.6)).make_mask()
    assert mixed == tw.Document(
        tw.lengths.sample("prolong64k", num_tokens, seed=case.seed, draw="longca", mix=0.6)
    )


def test_variable_blocks_have_the_mean_that_is_asked_for():
    for mean in (36, 576):
        axes = Axes(block_mean=mean, density=0.1)
        mask = BenchCase("kernels", "block_sparse_variable", 1 << 12, axes=axes).make_mask()
        dense = mask.dense(range(1 << 12), range(1 << 12))
        edges = np.flatnonzero((dense[1:] != dense[:-1]).any(1))
        assert len(edges) == pytest.approx((1 << 12) / mean, rel=0.4)
        assert np.diff(edges).min() >= mean * 128 // 576


def test_axes_that_nobody_sets_leave_the_keys_of_older_rows():
    who, versions = {"name": "ring"}, {"torch": "2"}
    keys = {
        key_of(replace(CASE, axes=axes), Timing(), who, versions)
        for axes in (Axes(), Axes(mix=0.6), Axes(draw="longca"))
    }
    assert len(keys) == 3
    assert key_of(CASE, Timing(), who, versions) == "7cacc7d8f6f50563"


@pytest.mark.parametrize("density", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("block", [8, 16])
def test_a_block_mask_has_its_block_and_density(block: int, density: float):
    axes = Axes(block=block, density=density)
    case = BenchCase("kernels", "block_sparse_uniform", 160, axes=axes)
    dense = case.make_mask().dense(range(160), range(160)).reshape(160 // block, block, -1, block)
    blocks = dense.any((1, 3))
    assert (dense.all((1, 3)) == blocks).all()
    assert set(blocks.sum(1)) == {int(density * 160 / block)}
    assert case.make_mask() == case.make_mask()


def test_windows_caps_and_corpora_are_drawn_as_said(tmp_path: Path):
    path = tmp_path / "c.csv"
    path.write_text("name,length\na,5\nb,11\n")
    made = BenchCase("kernels", "full_document", 64, axes=Axes(corpus=str(path))).make_mask()
    assert isinstance(made, tw.Document)
    lengths = [b - a for a, b in pairwise(made.cu_seqlens)]
    assert set(lengths[:-1]) == {5, 11}
    capped = BenchCase("kernels", "full_document", 64, axes=Axes(corpus=str(path), cap=7))
    made = capped.make_mask()
    assert isinstance(made, tw.Document)
    assert max(b - a for a, b in pairwise(made.cu_seqlens)) == 7
    for name in ("sliding_window", "sliding_window_causal", "global_sliding_window"):
        mask = BenchCase("kernels", name, 64, axes=Axes(window=4)).make_mask()
        assert mask == getattr(tw.masks, name)(64, 4)
    axes = Axes(block=8, cap=16, corpus=str(path))
    mask = BenchCase("kernels", "block_causal_document", 64, axes=axes).make_mask()
    first = mask.dense([0], range(64)).sum()
    assert first in (5, 8)  # a document of 5 tokens, or a block of 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: columns are none; there must be a column length"),
        ("size\n3\n", "line 1: columns are size; there must be a column length"),
        ("length\n", "line 2: there is no length"),
        ("length\n3\nlong\n", r"line 3: length \('long'\) must be a whole number"),
        ("length\n0\n", r"line 2: length \('0'\) must be"),
        ("first_length,last_length,num_documents\n9,3,1\n", r"line 2: first_length .9. is above"),
    ],
)
def test_a_corpus_with_mistakes_names_the_line(tmp_path: Path, text: str, message: str):
    path = tmp_path / "c.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        tw.lengths.sample(str(path), 64, seed=0)
    with pytest.raises(ValueError, match="cannot be read"):
        tw.lengths.histogram(str(tmp_path / "none.csv"))


def test_network_cases_count_their_ranks():
    run = preset("network", "quick").narrowed({"hosts": [3], "ranks_per_host": [2], "mbit": [7]})
    case, *_ = next(run.cases())
    assert (case.world_size, case.network) == (6, LabNetwork("lab", 3, 2, 7.0))


CHANGES: dict[str, Any] = {
    **{"kind": "kernels", "mask": "full", "num_tokens": 65, "num_heads": 16, "num_kv_heads": 4},
    **{"head_dim": 32, "dtype": "bfloat16", "which": "forward", "world_size": 4},
    **{"layout": "zigzag", "seed": 1, "device": "cuda", "network": LabNetwork("lab", 2, 1, 50.0)},
    "axes": Axes(block=8),
}


def test_a_key_depends_on_everything_that_defines_a_row():
    assert set(CHANGES) == {field.name for field in fields(BenchCase)}
    who, versions = {"name": "ring", "version": "1"}, {"torch": "2"}
    plain = CASE, Timing(), who, versions
    others = [
        *((replace(CASE, **{name: value}), *plain[1:]) for name, value in CHANGES.items()),
        (CASE, Timing(repeats=6), who, versions),
        (CASE, Timing(), {**who, "version": "2"}, versions),
        (CASE, Timing(), who, {"torch": "3"}),
    ]
    keys = {key_of(*one) for one in (plain, *others)}
    assert len(keys) == len(others) + 1
    assert key_of(*plain) == key_of(replace(CASE), Timing(), dict(who), dict(versions))


GOOD = 'kind = "kernels"\n[[grid]]\nnum_tokens = [64]\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind = ", "is no TOML"),
        ('kind = "strategies"\n[[grid]]\n', "this command wants 'kernels'"),
        ('kind = "kernels"\n', r"at least one \[\[grid\]\]"),
        ("grids = 1\n" + GOOD, "'grids' is not known; take one of kind, timing, grid"),
        (GOOD + "masks = ['causal']\n", "'masks' is not known; take one of mask, contender"),
        (GOOD + "heads = [8]\n", r"heads \(\[8\]\) must be a list of str"),
        (GOOD + "head_dim = []\n", "head_dim .* must be a list of int"),
        (GOOD + "heads = ['8:']\n", "query:KV heads"),
        (GOOD + "heads = ['8:3']\n", r"num_heads \(8\) must be a multiple of num_kv_heads \(3\)"),
        (GOOD + "mask = ['round']\n", "mask 'round' is not known; take one of full, causal"),
        (GOOD + "pass = ['twice']\n", "pass 'twice' is not known; take one of forward, backward"),
        (GOOD + "dtype = ['int8']\n", "dtype"),
        (GOOD + "layout = ['odd']\n", "layout 'odd' is not known; take one of own"),
        (GOOD + "hosts = [2]\n", "hosts: not of kernels"),
        (GOOD + "density = [1.5]\n", r"cases.toml, line 4: density \(1.5\) must be above 0"),
        (GOOD + "\nblock = [0]\n", r"cases.toml, line 5: block \(0\) must be at least 1"),
        (GOOD + "window = ['8']\n", r"cases.toml, line 4, grid: window .* must be a list of int"),
        (GOOD + "sparsity = [1]\n", "line 4, grid: 'sparsity' is not known; take one of mask"),
        (GOOD + "corpus = ['web']\n", "line 4: corpus 'web' is not known; take one of .*csv"),
        (
            GOOD + "mask = ['causal']\nblock = [8]\n",
            "line 5: block is of block_sparse_uniform, .* mask .causal. names none of them",
        ),
        (GOOD + "mask = ['causal & windows(1, 0)']\n", "line 4: mask 'windows' is not known"),
        (GOOD + "mask = ['document([0, 9])']\n", "line 4: .*9.*64"),
        (GOOD + "kernel = ['fast']\n", "line 4: kernel 'fast' is not known"),
        (GOOD + "heads = ['8:3']\n", "line 4: num_heads"),
        (GOOD + "contender = ['fast']\n", "kernel 'fast' is not known; take one of cpu, cuda"),
        ('kind = "kernels"\n[[grid]]\nhead_dim = [64]\n', "needs num_tokens or tokens_per_rank"),
        (GOOD + "[timing]\nrepeats = 0\n", r"repeats \(0\) must be at least 1"),
        (GOOD + "[timing]\nrounds = 1\n", "'rounds' is not known; take one of repeats, warmups"),
    ],
)
def test_case_files_with_mistakes_are_refused(tmp_path: Path, text: str, message: str):
    path = tmp_path / "cases.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        entered(read_cases(path, "kernels"))


def test_others_take_part_beside_those_named_or_alone_where_they_are_named():
    run, others = preset("strategies", "quick"), (Bad("a"), Bad("b"))
    for named, wanted in (
        (["ring"], ["ring", "a", "b"]),
        (["ring", "b"], ["ring", "b"]),
        ([], [*STRATEGIES, "a", "b"]),
    ):
        _, contenders = entered(run.narrowed({"contender": named}), others)[0]
        assert [one.name for one in contenders] == wanted


def test_unknown_strategies_are_refused_with_those_known():
    run = preset("strategies", "quick")
    with pytest.raises(ValueError, match=r"strategy 'rings' is not known; take one of ring, "):
        entered(run.narrowed({"contender": ["rings"]}))
    with pytest.raises(ValueError, match="take one of ring, all_gather"):
        entered(run.narrowed({"contender": ["rings(4)"]}))


def sent(name: str, case: BenchCase) -> int:
    """By the rank that sends most in what the case runs."""
    plan, layout, _ = Strategy(name).planned(case)
    work = tw.Workload(
        case.num_tokens, *case.heads, dtype=case.dtype, mask=case.make_mask(), layout=layout
    )
    passes = tw.volume(plan, work)._asdict()
    wanted = passes if case.which == "both" else [case.which]
    return max(map(sum, zip(*(passes[which] for which in wanted), strict=True)))


def on(n: int, node: int = 0, **changed: Any) -> BenchCase:
    """The case on n ranks of one machine, or of nodes."""
    network = LabNetwork("loopback", 1, n) if not node else LabNetwork("lab", n // node, node, 50.0)
    return replace(CASE, num_tokens=16 * n, world_size=n, network=network, **changed)


@pytest.mark.parametrize("mask, n, heads, which", [
    ("full", 16, (16, 2), "both"), ("full", 12, (8, 8), "forward"), ("full", 8, (6, 6), "backward"),
    ("causal_document", 8, (6, 2), "both"), ("causal_document", 8, (8, 8), "forward"),
])  # fmt: skip
def test_the_mesh_contenders_never_send_more_than_the_best_of_their_tiles(
    mask: str, n: int, heads: tuple[int, int], which: str
):
    case = on(n, mask=mask, which=which, num_heads=heads[0], num_kv_heads=heads[1])
    meshes = [f"mesh({n}, q_tile={a})" for a in divisors(n)]
    assert sent("mesh", case) == min(sent(mesh, case) for mesh in meshes)
    left = {d: n // d for d in degrees(n, *heads) if 1 < d <= n // 2}
    degree, inner = max((d, m) for d, m in left.items() if len(divisors(m)) > 2)
    hybrids = [f"ulysses({degree}, inner=mesh({inner}, q_tile={a}))" for a in divisors(inner)[1:-1]]
    assert sent("ulysses_mesh", case) == min(sent(hybrid, case) for hybrid in hybrids)


@pytest.mark.parametrize("name, n, node, plan", [
    ("ulysses_ring", 8, 0, "ulysses(4, inner=ring(2))"),
    ("ulysses_ring", 16, 0, "ulysses(8, inner=ring(2))"),
    ("ulysses_ring", 64, 8, "ulysses(8, inner=ring(8))"),
    ("ulysses_ring", 8, 1, "ulysses(4, inner=ring(2))"),
    ("ulysses_double_ring", 8, 0, "ulysses(2, inner=double_ring(2, 2))"),
    ("ulysses_double_ring", 16, 4, "ulysses(4, inner=double_ring(2, 2))"),
    ("ulysses_double_ring", 64, 8, "ulysses(8, inner=double_ring(2, 4))"),
    ("ulysses_mesh", 8, 0, "ulysses(2, inner=mesh(4, q_tile=2))"),
    ("ulysses_mesh", 16, 4, "ulysses(4, inner=mesh(4, q_tile=2))"),
    ("ulysses_mesh", 64, 8, "ulysses(8, inner=mesh(8, q_tile=4))"),
    ("hierarchical", 8, 0, "hierarchical(mesh(4, q_tile=2), ring(2))"),
    ("hierarchical", 16, 4, "hierarchical(mesh(4, q_tile=2), ring(4))"),
    ("hierarchical", 64, 8, "hierarchical(mesh(8, q_tile=2), ring(8))"),
])  # fmt: skip
def test_named_hybrids_are_the_papers_plans(name: str, n: int, node: int, plan: str):
    found = Strategy(name).planned(on(n, node)).plan
    assert found == read_plan(plan, n)


def test_hybrids_take_the_degree_that_is_asked_for():
    found = Strategy("ulysses_ring", ulysses_degree=2)
    assert found.name == "ulysses_ring, degree 2"
    assert found.planned(on(8)).plan == tw.ulysses(2, tw.ring(4))
    reason = Strategy("ulysses_mesh", ulysses_degree=4).supports(on(8))
    assert reason and "ulysses_degree (4) must be above 1, divide the ranks (8)" in reason
    assert "2 would do" in reason
    reason = Strategy("ulysses_mesh").supports(on(4))
    assert reason and "degree above 1 that divides the ranks (4) with a product of two" in reason


def test_a_degree_is_of_the_hybrids_alone():
    run = preset("strategies", "quick").narrowed({"mask": ["full"], "ulysses_degree": [2, 4]})
    ((_, contenders),) = entered(run.narrowed({"contender": ["ring", "ulysses_ring"]}))
    assert [x.name for x in contenders] == [
        "ring",
        "ulysses_ring, degree 2",
        "ulysses_ring, degree 4",
    ]
    with pytest.raises(ValueError, match=r"strategy \(ring\) names none of them"):
        entered(run.narrowed({"contender": ["ring"]}))
    with pytest.raises(ValueError, match=r"ulysses_degree \(1\)"):
        entered(run.narrowed({"ulysses_degree": [1]}))
