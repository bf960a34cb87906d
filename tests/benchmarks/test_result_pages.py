"""Figures of README, docs/results.md and docs/papers.md are those of the rows and commands."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.docs_blocks import ROOT
from support.docs_tables import NUMBER, numbers_after, shows, table_of

import tilewise as tw

RESULTS = ROOT / "benchmarks" / "results"


def rows_of(name: str) -> list[dict]:
    lines = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def medians(name: str) -> dict[tuple[str, str], float]:
    """Seconds by mask and contender, of the rows that have them."""
    rows = rows_of(name)
    done = [row for row in rows if row["outcome"] == "ok"]
    return {(row["mask"], row["contender"]): row["median_seconds"] for row in done}


def rounded(*seconds: float) -> list[int]:
    return [round(1e3 * x) for x in seconds]


def test_the_rows_are_as_exact_as_the_page_says():
    rows = rows_of("strategies")
    ours, peers = ([r for r in rows if (r["library"] == "tilewise") is x] for x in (True, False))
    exact, masks, *_ = numbers_after("results.md", "**Errors.** All")
    done = [row for row in ours if row["outcome"] == "ok"]
    assert exact == len(done) and all(row["is_exact"] for row in done)
    assert masks == len({row["mask"] for row in ours})
    run, of = numbers_after("results.md", "Peers run")
    assert (run, of) == (sum(row["outcome"] == "ok" for row in peers), len(peers))


def test_the_kernels_milliseconds_are_those_of_the_rows():
    found = medians("kernels")
    cut = [m for m, who in found if who == "cpu" and ("document" in m or "block" in m)]
    cut.append("share_question")
    least, most, dense_least, dense_most = numbers_after(
        "results.md", "on full and wide masks, and"
    )
    ours, dense = (rounded(*(found[m, who] for m in cut)) for who in ("cpu", "sdpa"))
    assert (min(ours), max(ours), min(dense), max(dense)) == (least, most, dense_least, dense_most)
    (window,) = rounded(found["sliding_window_causal", "cpu"])
    (prefix,) = rounded(found["prefix_lm_causal", "cpu"])
    assert numbers_after("results.md", "A causal window gains less") == [window, prefix]


def test_the_labs_table_is_that_of_the_rows():
    found = medians("network")
    header, rows = table_of(
        "results.md", "| mask | ring | mesh | tiled | ulysses | planner's choice"
    )
    for name, *cells in rows:
        for cell, who in zip(cells, header[1:], strict=True):
            contender = {"planner's choice": "auto"}.get(who, who)
            seconds = found[name.replace(" documents", "_document"), contender]
            assert shows(cell, 1e3 * seconds), (name, who)


def test_all_passes_of_the_lab_are_those_of_the_rows():
    rows = [row for row in rows_of("network_passes") if row["mask"] == "causal"]
    found = {(r["contender"], r["num_kv_heads"], r["pass"]): r for r in rows}
    heads = ""
    for name, forward, backward, both, sent in table_of("results.md", "| sent, both |").rows:
        contender, _, said = name.partition(", ")
        heads = said or heads
        kv = int(heads.removesuffix(" heads").partition(":")[2])
        mine = [found[contender, kv, which] for which in ("forward", "backward", "both")]
        for cell, row in zip((forward, backward, both), mine, strict=True):
            assert shows(cell, 1e3 * row["median_seconds"]), (name, row["pass"])
        assert shows(sent, mine[2]["bytes_max_rank"] / 1e6), name


def test_the_labs_table_in_short_is_that_of_its_rows():
    rows = rows_of("network_measured")
    assert len(rows) == 19 and all(row["is_exact"] for row in rows)
    found = {(r["hosts"], r["mbit"], r["pass"], r["contender"]): r for r in rows}
    header, lines = table_of("results.md", "| network | ring | double_ring |")
    cases = (16, 50, "forward"), (16, 50, "both"), (4, 100, "both"), (64, 25, "forward")
    for (name, first, *cells), case in zip(lines, (*cases, (64, 5, "forward")), strict=True):
        ring = found[*case, "ring"]
        assert shows(first, ring["median_seconds"]), name
        for cell, who in zip(cells, header[2:], strict=True):
            row = found.get((*case, who))
            if row is None:
                assert not cell, (name, who)
                continue
            ratios = (max(x["nic_bytes_by_host"]) for x in (ring, row))
            faster = ring["median_seconds"] / row["median_seconds"]
            assert shows(cell, faster, next(ratios) / next(ratios)), (name, who)


def test_the_kernel_experiments_are_those_of_the_rows():
    rows = rows_of("kernels_papers")
    (number,) = numbers_after(
        "results.md", "`tilewise bench kernels --cases benchmarks/cases/kernels_papers.toml`; its"
    )
    assert number == len(rows) and all(row["is_exact"] for row in rows)
    usual = [
        r for r in rows if (r["num_kv_heads"], r["head_dim"], r["dtype"]) == (8, 64, "float32")
    ]
    found = {
        (r["num_tokens"], r["block"], r["density"], r["contender"], r["pass"]): r for r in usual
    }
    for name, *cells in table_of("results.md", "| 8:8 heads of 64, fp32 |").rows:
        sizes = [float(x.strip(",")) for x in NUMBER.findall(name)]
        tokens, block, density = sizes if len(sizes) > 1 else (*sizes, None, None)
        for number, who in enumerate(("cpu", "sdpa")):
            of = [found[1024 * tokens, block, density, who, x] for x in ("forward", "backward")]
            assert shows(cells[number], *(1e3 * row["tflops"] for row in of)), (name, who)
            assert shows(cells[2 + number], of[1]["peak_bytes"] / 1e6), (name, who)
    plugin = [r for r in rows if r["contender"].endswith("blocks_of_64")]
    cpu = [found[r["num_tokens"], r["block"], r["density"], "cpu", r["pass"]] for r in plugin]
    slower = [a["median_seconds"] / b["median_seconds"] for a, b in zip(plugin, cpu, strict=True)]
    held = [r["peak_bytes"] / 1e6 for r in plugin if r["pass"] == "backward"]
    said = numbers_after("results.md", "`examples/block_sparse_kernel.py`, plain torch, holds")
    assert said[:2] == [round(min(held)), round(max(held))]
    assert said[2:] == [round(min(slower), 1), round(max(slower), 1)]


def test_the_table_of_models_in_short_is_that_of_the_page_of_models():
    models = table_of("integrations/huggingface_models.md", "| model | layers |").rows
    ours, rule, ringmaster = ([row[i] for row in models] for i in (2, 3, 4))
    split = [x.startswith("exact") for x in ours]
    refused = [i for i, x in enumerate(rule) if x == "refuses"]
    short = {
        "split": (sum(split), rule.count("splits"), ringmaster.count("exact")),
        "refused": (
            sum(split[i] for i in refused),
            sum(ringmaster[i] == "exact" for i in refused),
        ),
    }
    for page, header in (
        (ROOT / "README.md", "| language models of"),
        ("integrations/huggingface_models.md", "| | tilewise | transformers' rule"),
    ):
        first, second, *_ = table_of(page, header).rows
        assert tuple(int(x) for x in first[1:]) == short["split"], page
        assert (int(second[1]), int(second[3])) == short["refused"], page
        assert int(second[0].split()[2]) == len(refused)


def test_the_papers_page_counts_the_bytes_that_volume_does():
    counts = (32, 64, 128, 256)
    words = "Which cases the mean is over is not known to us. By the same accounting"
    assert numbers_after("papers.md", words) == [*counts, *(round(theirs(n), 1) for n in counts)]
    u = 64 * 32 * 128 * 2  # a query shard
    work = tw.Workload(64 * 64, 32, 32, 128)
    volumes = [tw.volume(plan, work) for plan in (tw.ring(64), tw.attention2d(8, 8))]
    ring, grid = (max(x.forward) / u + max(x.backward) / u for x in volumes)
    said = [round(ring), round(grid), round(ring / grid, 1)]
    assert numbers_after("papers.md", "9.4 cannot come from bytes:") == said


def theirs(n: int) -> float:
    """Per cent that a mesh 8 x n/8 sends less than a ring, as the Mesh-Attention paper counts."""
    x, y = 7, n // 8 - 1
    return 100 * (1 - (2 * x + 2 * y + 5 * x + 6 * y) / (8 * (n - 1)))


@pytest.mark.slow
def test_the_documents_in_short_are_what_the_command_prints():
    command = [sys.executable, "benchmarks/documents.py", "--ranks", "64", "--json"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    rows = json.loads(found)
    for name, heads, *cells in table_of("results.md", "| documents | heads | tiled |").rows:
        kv = int(heads.partition(":")[2])
        mine = [row for row in rows if (row["documents"], row["kv_heads"]) == (name, kv)]
        for cell, who in zip(cells, ("tiled", "needed", "ring", "mesh"), strict=True):
            means = [row[who]["mean"] for row in mine]
            assert shows(cell.replace("-", " "), min(means), max(means)), (name, heads, who)


def test_the_trained_models_are_those_of_the_rows():
    text = (RESULTS / "train.json").read_text(encoding="utf-8")
    loopback, lab = (
        {row["strategy"]: row for row in table["rows"]} for table in json.loads(text)["studies"]
    )
    table = table_of("studies.md", "| strategy | loopback |")
    assert [row[0] for row in table.rows] == [*loopback] == [*lab]
    for name, *cells, held, off in table.rows:
        for cell, row in zip(cells, (loopback[name], lab[name]), strict=True):
            assert shows(cell, row["over ring"], row["waiting share"]), name
        assert shows(held.removesuffix(" MB"), loopback[name]["memory"] / 1e6), name
        assert float(off) == max(float(at[name]["loss, off"]) for at in (loopback, lab)), name


def test_the_methods_on_local_ranks_are_those_of_the_rows():
    rows = rows_of("strategies_methods")
    assert all(row["outcome"] == "ok" and row["is_exact"] for row in rows)
    named = {(r["contender"].split(":")[-1], r["world_size"]) for r in rows}
    found = {
        (r["contender"].split(":")[-1], r["world_size"], r["mask"]): r
        for r in rows
        if r["pass"] == "both"
    }
    header, lines = table_of("results.md", "| a ring's bytes over its own")
    shown = {(name.split(",")[0], int(name.split()[1])) for name, *_ in lines}
    assert shown == {at for at in named if at[0] != "ring"}
    for name, *cells in lines:
        who, n = name.split(",")[0], int(name.split()[1])
        for cell, mask in zip(cells, header[1:], strict=True):
            at = {"documents": "full_document"}.get(mask, mask.replace(" documents", "_document"))
            ring, row = (found[x, n, at]["bytes_max_rank"] for x in ("ring", who))
            assert shows(cell, ring / row), (name, mask)
