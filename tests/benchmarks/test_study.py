"""The papers' studies: what their tables say follows from plans, formulas and each other."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from support.docs_tables import numbers_after, shows, table_of
from typer.testing import CliRunner

import tilewise as tw
from benchmarks.study import contexts, parts, simulated, stress, where
from benchmarks.study.__main__ import STUDIES, app
from benchmarks.study.against import METHODS, every_method
from benchmarks.study.controls import controls
from benchmarks.study.memory import formula, memory, planned
from benchmarks.study.parts import Journal, journal
from benchmarks.study.table import StudyTable, bar_chart
from benchmarks.study.video import video
from tilewise.simulation.machine import KernelSpeed
from tilewise_tools.report.drawing import Drawing

MACHINE = tw.Machine.preset("h100x8")
WORK = tw.Workload(1 << 14, 16, 16, 64)


def records(table: StudyTable) -> list[dict[str, Any]]:
    return table.as_json()["rows"]


def study(*words: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*map(str, words)])
    return done.exit_code, done.output


def test_scaling_shares_the_tokens_or_adds_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(simulated, "SIZES", (8, 16))
    strong, weak = simulated.scaling(WORK, MACHINE)
    assert {row["tokens"] for row in records(strong)} == {1 << 14}
    assert {row["tokens"] // row["devices"] for row in records(weak)} == {(1 << 14) // 128}
    for row in (*records(strong), *records(weak)):
        plan = tw.mesh(row["devices"])
        if row["strategy"] == "mesh":
            here = replace(WORK, num_tokens=row["tokens"])
            sent = tw.volume(plan, here)
            assert row["sent"] == max(sent.forward) + max(sent.backward)
        assert (row["time"] is None) == row["plan"].startswith("none: ")
        if row["time"] is not None:
            assert 0 <= row["waiting"] <= row["time"] and row["memory"] > 0
    by_size = {n: [row for row in records(strong) if row["devices"] == n] for n in (8, 16)}
    assert all([row["strategy"] for row in rows] == [*METHODS] for rows in by_size.values())
    found = {row["strategy"]: row for row in by_size[16]}
    ring, double, mesh = (found[name]["time"] for name in ("ring", "double_ring", "mesh"))
    gathered = found["all_gather"]["time"]
    assert found["mesh"]["over ring"] == ring / mesh
    assert found["mesh"]["of which topology"] == ring / double
    assert found["mesh"]["of which bytes"] == min(ring, double, gathered) / mesh
    figure, _, bars = strong.section().figures
    assert [line["name"] for line in bars.drawing.data[:2]] == ["computing", "waiting"]
    assert [line["x"] for line in figure.drawing.data if line["name"] == "ring"] == [[8, 16]]


def test_a_method_without_a_plan_has_a_row_that_says_why():
    work = tw.Workload(1 << 14, 8, 8, 64)
    every = every_method(64, work, 8)
    assert [*every] == [*METHODS]
    assert every["ulysses"] == "none: 8:8 heads on 64 devices"
    assert every_method(8, work, 8)["double_ring"] == "none: 8 devices in nodes of 8"
    assert "a product of two left over" in str(every_method(16, work, 8)["ulysses_double_ring"])


def test_tile_shapes_have_the_bytes_of_the_formula():
    (table,) = simulated.tiles(WORK, MACHINE, n=16)
    shard = (1 << 10) * 16 * (64 * 2)
    lse = (1 << 10) * 16 * 4
    *tiles, double, gathered = records(table)
    for row in (double, gathered):
        assert row["forward"] == tiles[0]["forward"] and row["backward"] == tiles[0]["backward"]
    for a, row in zip((1, 2, 4, 8, 16), tiles, strict=True):
        x, y = a - 1, 16 // a - 1
        assert row["tile"] == f"{a} x {16 // a}"
        assert row["forward"] == x * (2 * shard + lse) + y * 2 * shard
        assert row["backward"] == x * (3 * shard + 2 * lse) + y * 4 * shard


def test_no_schedule_beats_the_optimum(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(simulated, "TILE_SHAPES", ((2, 2), (3, 3)))
    (table,) = simulated.schedules(WORK, MACHINE, n=16)
    assert len(records(table)) == 8
    for row in records(table):
        orders = [row[name] for name in simulated.ORDERS]
        assert row["proven"] == "yes" and row["optimum"] <= min(orders) * (1 + 1e-9)
        assert row["gather"] == max(orders)
        assert row["greedy over optimum"] == row["greedy"] / row["optimum"] <= 1.1


def test_a_ring_loses_most_where_the_mask_leaves_it_uneven(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(simulated, "MASKED_SIZES", (4,))
    flat = tuple(
        KernelSpeed("bfloat16", backward, (1.0,), (1.0,), ((1e14,),)) for backward in (False, True)
    )  # pairs that are computed alone tell, and no copies, launches or shapes of calls
    kernels = replace(MACHINE, pack_bandwidth=None, launch_seconds=0.0, kernels=flat)
    (table,) = simulated.masks(replace(WORK, num_tokens=1 << 17), kernels)
    rows = [row for row in records(table) if row["strategy"] in ("ring", "needed")]
    kept = {(row["mask"], row["layout"]): row["kept of full"] for row in rows}
    uneven = {(row["mask"], row["layout"]): row["imbalance"] for row in rows}
    assert uneven["causal_document", "zigzag_documents"] < 1.01
    assert {row["strategy"] for row in records(table)} == {"ring", "all_gather", "needed"}
    assert kept["full", "zigzag"] == pytest.approx(100) and uneven["causal", "zigzag"] < 1.01
    assert kept["causal", "contiguous"] < kept["causal", "zigzag"] < 100
    assert kept["causal_document", "zigzag"] < kept["causal_document", "level"]
    assert uneven["causal_document", "level"] < uneven["causal_document", "zigzag"]


def test_a_models_step_is_its_attention_and_its_linear_layers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(simulated, "MODEL_TOKENS", (1 << 13,))
    (table,) = simulated.model(WORK, MACHINE, n=16)
    assert {row["model"] for row in records(table)} == {"760M", "2.7B", "13B"}
    for row in records(table):
        if row["plan"].startswith("none: "):
            assert row["strategy"] in ("ulysses", "ulysses_double_ring") and row["step"] is None
            continue
        assert row["step"] == row["attention"] + row["linear layers"]
        assert row["strategy"] != "ring" or row["over ring"] == 1
    one = next(iter(records(table)))
    alone = tw.simulate(
        tw.ring(16),
        tw.Workload(1 << 13, 16, 16, 96, mask=tw.Causal()),
        simulated.clusters(64)[0],
        exact=False,
    )
    assert one["attention"] == 24 * alone.seconds


@pytest.mark.parametrize("plan, name", [
    (tw.all_gather(16), "all_gather"), (tw.attention2d(4, 4), "attention2d"),
    (tw.attention2d(4, 4, overlap=True), "attention2d_overlap"),
])  # fmt: skip
def test_the_formula_of_memory_is_what_the_planner_counts(plan: tw.Plan, name: str):
    found = planned(WORK, plan)
    for backward in (False, True):
        assert found[backward] == pytest.approx(formula(WORK, plan, name, backward), rel=0.02)


@pytest.mark.parametrize("plan, name", [
    (tw.ring(16), "ring"), (tw.mesh(16, 4), "mesh"), (tw.double_ring(4, 4), "double_ring"),
    (tw.ulysses(4, tw.ring(4)), "ulysses_ring"),
])  # fmt: skip
def test_no_method_takes_less_than_what_it_must_hold(plan: tw.Plan, name: str):
    for backward, found in enumerate(planned(WORK, plan)):
        assert found > 0.98 * formula(WORK, plan, name, bool(backward))


@pytest.mark.slow
def test_measured_memory_is_near_what_is_planned():
    table, measured = memory(replace(WORK, num_heads=32, num_kv_heads=32), MACHINE, n=8)
    assert {row["mask"] for row in records(table)} == {"full", "causal"}
    ratios = {x["strategy"]: x["measured over planned"] for x in records(measured)}
    assert [*ratios] == [*METHODS] and ratios.pop("ulysses_double_ring") is None
    assert all(1.1 < ratio < 1.9 for ratio in ratios.values())


USUAL = tw.Workload(1 << 20, 32, 32, 128, layout="zigzag")
"""What the studies are of unless told otherwise, and docs/studies.md shows."""


@pytest.mark.slow
def test_the_page_shows_the_schedules_that_the_command_finds():
    (table,) = simulated.schedules(USUAL, MACHINE)
    for tokens, row in zip(
        (1 << 17, 1 << 20), table_of("studies.md", "KV first").rows, strict=True
    ):
        mine = [found for found in records(table) if found["tokens"] == tokens]
        pace = [found["kernels over messages"] for found in mine]
        assert shows(row[1], min(pace), max(pace))
        for name, cell in zip(
            ("greedy", "paper", "eager", "kv_first", "gather"), row[2:], strict=True
        ):
            over = [100 * (found[name] / found["optimum"] - 1) for found in mine]
            assert shows(cell, min(over), max(over)), (name, min(over), max(over))
    assert [x["proven"] for x in records(table)].count("no") == 3


@pytest.mark.slow
def test_the_page_shows_what_a_ring_keeps_under_masks():
    (table,) = simulated.masks(USUAL, MACHINE)
    found = {
        (row["mask"], row["layout"], row["strategy"], row["devices"]): row["kept of full"]
        for row in records(table)
    }
    masks = {
        "causal": "causal",
        "causal documents": "causal_document",
        "documents": "full_document",
    }
    header, rows = table_of("studies.md", "| 2 | 4 | 8 | 16 | 32 |")
    for name, *cells in rows:
        mask, *who = name.split(", ")
        layout = "level" if "level" in name else who[-1]
        strategy = who[0].strip("`") if len(who) > 1 else "ring"
        for cell, n in zip(cells, header[1:], strict=True):
            key = masks[mask], layout, strategy, int(n)
            assert shows(cell, found[key]) if key in found else not cell, (name, n)


@pytest.mark.slow
def test_the_page_says_what_a_ring_keeps_with_the_benchmarks_heads(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(simulated, "MASKED_SIZES", (8, 16))
    kept = {}
    for seed in range(5):
        (table,) = simulated.masks(replace(USUAL, num_heads=64, num_kv_heads=8), MACHINE, seed=seed)
        for row in records(table):
            if row["strategy"] == "ring":
                at = row["mask"], row["layout"], row["devices"]
                kept.setdefault(at, []).append(row["kept of full"])
    full, causal = ("full_document", "causal_document")
    cut = {(mask, n): kept[mask, "zigzag_documents", n] for mask in (full, causal) for n in (8, 16)}
    first = [round(cut[at][0]) for at in ((full, 8), (full, 16), (causal, 8), (causal, 16))]
    said = numbers_after("studies.md", "on its layout a ring keeps")
    left = [round(kept[full, "zigzag", n][0]) for n in (8, 16)]
    assert said[:6] == [first[0], 8, first[1], 16, *first[2:]] and said[6:8] == left
    spread = [f(cut[full, n]) for n in (8, 16) for f in (min, max)]
    assert numbers_after("studies.md", "of `--seed 0` to `4`") == [round(x) for x in spread]


def test_tables_go_to_a_file_and_to_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(simulated, "TILE_SHAPES", ((2, 2),))
    path, page = tmp_path / "studies.json", tmp_path / "studies.html"
    words = "--num-tokens", "64K", "--json"
    done = CliRunner().invoke(app, ["schedules", *words, "-o", str(path), "--page", str(page)])
    assert done.exit_code == 0 and json.loads(done.stdout) == json.loads(path.read_text())
    assert "4/4" in done.stderr
    (table,) = json.loads(done.stdout)["studies"]
    html = page.read_text()
    assert table["title"] in html and "greedy over optimum" in html


@pytest.mark.parametrize(
    "words, said",
    [
        (["speed"], "study 'speed' is not known; take some of controls, scaling, memory"),
        (["tiles", "--mask", "window(3, 0)"], "must be full or causal"),
        (["tiles", "--heads", "3:2"], "num_kv_heads"),
        (["tiles", "--machine", "abacus"], "neither a preset nor a file"),
        (["contexts", "--heads", "6:6"], "--heads (6) must be a multiple of 8"),
        (["contexts", "--num-tokens", "100"], "must be at least 192"),
        (["tiles", "--rows", "x.jsonl"], "--rows (x.jsonl) is of contexts or where; add it"),
        (["tiles", "--png", "x.png"], "is of contexts or where"),
        (["where", "contexts", "--rows", "x"], "--rows (x) is for one of contexts and where"),
        (["contexts", "--draw", "theirs"], "--draw ('theirs') must be 'tilewise' or 'longca'"),
        (["contexts", "--method", "ulyses"], "--method (ulyses) must be one of ulysses, ring"),
        (["tiles", "--draws", "3"], "--draws (3) is of contexts; add it"),
        (["tiles", "--devices", "16"], "--devices (16) is of model; add it"),
        (["tiles", "--seed", "1"], "--seed (1) is of masks; add it"),
        (["model", "--devices", "12"], "must be a multiple of the devices of a node of h100x8 (8)"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str):
    code, output = study(*words)
    assert code == 2 and said in output and output.count("\n") == 1


def test_a_double_ring_gains_what_a_mesh_does_where_every_device_has_a_nic():
    (table,) = controls(replace(WORK, num_heads=32, num_kv_heads=32), MACHINE, n=64)
    found = {(row["machine"].split(", ")[1], row["tokens"], row["method"]): row
             for row in records(table)}  # fmt: skip
    many = found["nodes of 8 with 8 NICs", "256K", "mesh 8 x 8"]
    alone = found["nodes of 1 with a NIC", "256K", "mesh 8 x 8"]
    assert many["of which topology"] > 2 and many["of which bytes"] < 1.3
    assert alone["of which topology"] < 1.1 and alone["of which bytes"] > 2
    assert {f"USP, {d} x {64 // d}" for d in (2, 4, 8, 16, 32)} < {method for *_, method in found}
    for (machine, tokens, method), row in found.items():
        if method == "double ring":
            assert row["over ring"] == row["of which topology"]
        if method.endswith("held"):
            whole = found[machine, tokens, method.removesuffix(", held")]
            assert row["memory"] < whole["memory"] and row["plan"] != whole["plan"]
        if method == "all-gather, staged" and "nodes of 8" in machine:
            assert row["time"] < found[machine, tokens, "all-gather"]["time"]
        assert row["fits"] == ("yes" if row["memory"] <= MACHINE.memory_bytes else "no")


def small_contexts(path: Path, draws: int = 2) -> list[StudyTable]:
    work = tw.Workload(contexts.DEVICES[-1] * 512, 64, 8, 64)
    return list(contexts.contexts(work, MACHINE, draws=draws, path=path))


def test_contexts_has_every_method_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(contexts, "DEVICES", (8, 16))
    monkeypatch.setattr(contexts, "MASKS", ("causal", "causal_document"))
    path = tmp_path / "rows.jsonl"
    causal, documents = small_contexts(path, draws=1)
    lines = path.read_text().splitlines()
    assert {row["method"] for row in records(documents)} == set(contexts.METHODS.values())
    assert {row["draws"] for row in records(documents)} == {1}
    assert len(documents.section().figures) == 3
    path.write_text("\n".join(lines[:-3]) + '\n{"mask": "cut')
    _, documents = small_contexts(path)
    assert {row["draws"] for row in records(documents)} == {2}
    for row in (*records(causal), *records(documents)):
        assert row["forward least"] <= row["forward 0.2"] <= row["forward"] <= row["forward most"]
    kept = path.read_text()
    small_contexts(path)
    assert path.read_text() == kept


def test_the_page_shows_the_rows_of_contexts():
    rows = contexts.read_rows(contexts.ROWS)
    header, lines = table_of("studies.md", "| mask, method |")
    names = {shown: name for name, shown in contexts.METHODS.items()}
    for name, *cells in lines:
        mask, method = name.split(", ", 1)
        for cell, n in zip(cells, header[1:], strict=True):
            at = mask.replace(" ", "_"), names[method], int(n)
            mine = [x for x in rows if (x["mask"], x["method"], x["devices"]) == at and x["plan"]]
            mine = [x for x in mine if "sampler" not in x]
            if not mine:
                assert not cell, (name, n)
                continue
            forward, backward = ([x[f"{y}_tflops"] for x in mine] for y in ("forward", "backward"))
            spread = (min(forward), max(forward)) if "document" in mask else ()
            assert shows(cell, median(forward), median(backward), *spread), (name, n)


def test_the_map_keeps_its_rows_and_says_what_is_gained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, few in {
        "MASKS": ("causal", "causal_document"),
        "HEADS": ((8, 8),),
        "LEFT_HEADS": ((5, 5),),
        "TOKENS": {"causal": (1 << 9,), "causal_document": (1 << 9,)},
        "DEVICES": {"causal": 16, "causal_document": 8},
        "LINKS": {"causal": (25,), "causal_document": (25,)},
    }.items():
        monkeypatch.setattr(where, name, few)
    path = tmp_path / "rows.jsonl"
    (table,) = where.where(WORK, MACHINE, path=path)
    assert len(table.rows) == 5 and len(table.figures) == 3
    (left,) = (row for row in records(table) if row["heads"] == "5:5")
    assert left["best"] == "mesh" and left["gain"] > 1.3
    for row in records(table):
        assert row["gain"] >= 1 and row["best of the known"] in where.KNOWN
        assert (row["best"] == "nothing gained") == (row["gain"] <= where.EQUAL)
    kept = path.read_text()
    (again,) = where.where(WORK, MACHINE, path=path)
    assert again.rows == table.rows and path.read_text() == kept


def test_the_page_counts_what_the_map_gains():
    names = "mask", "heads", "node", "gbit", "tokens", "best", "plan", "time", "known", "gain"
    lines = contexts.read_rows(where.ROWS)
    rows = [dict(zip((*names, "ring"), row, strict=True)) for x in lines for row in x["rows"]]
    rows = [row | {"gained": row["gain"] > where.EQUAL} for row in rows]

    def of(mask: str, heads: str, **only: int) -> list[dict[str, Any]]:
        wanted = {"mask": mask, "heads": heads, **only}
        return [row for row in rows if wanted.items() <= row.items()]

    few, many = of("causal", "64:8"), of("causal", "32:32")
    assert not any(row["gained"] for row in few)
    said = numbers_after("choosing.md", "**Often nothing is gained.** Under a causal mask with")
    near = [row for row in few if row["ring"] <= 1.09]
    assert said == [64, 8, len(few), 5, len(near), 9]
    (cell,) = of("causal", "64:8", node=8, gbit=400, tokens=8192)
    words = "with 400 Gbit/s each and 512K tokens, where a ring takes"
    assert numbers_after("choosing.md", words) == [round(cell["ring"], 2)]
    gained = [100 * (row["gain"] - 1) for row in many if row["gained"]]
    said = numbers_after("choosing.md", "A mesh inside it gains")
    assert said[:4] == [round(min(gained)), round(max(gained)), len(gained), len(many)]
    assert {row["best"] for row in many if row["gained"]} == {"ulysses x mesh"}
    five, eight = of("causal", "5:5"), of("causal", "8:1")
    gained = [row["gain"] for row in five if row["gained"]]
    said = numbers_after("choosing.md", "which no degree divides, a mesh is")
    assert said[:4] == [round(min(gained), 1), round(max(gained), 1), len(gained), len(five)]
    assert {row["best"] for row in five if row["gained"]} == {"mesh"}
    gained = [row["gain"] for row in eight if row["gained"]]
    said = numbers_after("choosing.md", "alone or inside Ulysses, is")
    assert said[:3] == [round(min(gained), 1), round(max(gained), 1), len(gained)]
    alone = of("causal_document", "64:8", node=1)
    gained = [row["gain"] for row in alone if row["gained"]]
    said = numbers_after("choosing.md", "on nodes of one device `needed` is")
    assert said[:4] == [round(min(gained), 1), round(max(gained), 1), len(gained), len(alone)]
    others = [row["known"] for row in alone if not row["gained"]]
    assert numbers_after("choosing.md", "In the other") == [len(others)]
    assert {*others} == {"all-gather"}
    inside, split = of("causal_document", "64:8", node=8), of("causal_document", "32:32")
    assert {row["plan"] for row in split if row["gained"]} == {"tiled"}
    counts = [x for rows in (inside, split) for x in (sum(x["gained"] for x in rows), len(rows))]
    assert numbers_after("choosing.md", "On nodes of") == [8, *counts[:2], 32, 32, *counts[2:]]


def test_the_pages_show_the_rows_of_the_lab():
    rows = contexts.read_rows(contexts.ROWS.parent / "network_hybrids.jsonl")
    found = {(row["contender"], row["pass"]): row for row in rows}
    assert {row["is_exact"] for row in rows} == {True}
    for name, *cells in table_of("results.md", "| contender | forward, ms |").rows:
        for number, which in enumerate(("forward", "both")):
            row, ring = found[name.strip("`"), which], found["ring", which]
            taken, waited, over = cells[3 * number : 3 * number + 3]
            assert shows(taken, 1e3 * row["median_seconds"])
            assert shows(waited, 1e3 * row["exposed_seconds"])
            ratios = (ring[x] / row[x] for x in ("median_seconds", "bytes_max_rank"))
            assert shows(over, *ratios), (name, which)


def test_disturbed_methods_take_longer_and_a_ring_hides_a_slow_rank(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(stress, "DEVICES", 16)
    monkeypatch.setattr(stress, "TOKENS", 1 << 15)
    monkeypatch.setattr(stress, "CLAIMS", (("ring waits", 91.5, 16, 1 << 15),))
    table, claims = stress.stress(WORK, MACHINE, n=16)
    for row in records(table):
        if row["plan"].startswith("none: "):
            assert row["time"] is None
            continue
        assert min(row[name] for name in ("a slow rank", "jitter", "short messages")) >= 1
        assert row["strategy"] != "ring" or row["over ring, jitter"] == 1
    found = {row["assumption"]: row["found"] for row in records(claims)}
    assert found["links at a tenth"] > found["links at half speed"] > found["as described"]


def test_a_study_that_was_stopped_goes_on(tmp_path: Path):
    made: list[str] = []

    def part(name: str, fails: bool = False):
        def make() -> list[tuple[str, float]]:
            if fails:
                raise KeyboardInterrupt
            made.append(name)
            return [(name, 1 / 3)]

        return make

    path = tmp_path / "rows.jsonl"
    names = "first", "second", "third"
    with pytest.raises(KeyboardInterrupt):
        Journal(path).rows_of("study", {x: part(x, fails=x == "second") for x in names})
    path.write_text(path.read_text() + '{"study": "cut')
    rows = Journal(path).rows_of("study", {x: part(x) for x in names})
    assert made == ["first", "second", "third"]
    assert rows == [(name, 1 / 3) for name in names]
    assert Journal(path).rows_of("another", {"first": part("again")}) == [("again", 1 / 3)]


def test_a_finished_study_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parts, "gettempdir", lambda: str(tmp_path))
    with pytest.raises(KeyboardInterrupt), journal(WORK, MACHINE) as kept:
        kept.rows_of("study", {"one": lambda: [("row", 1)]})
        raise KeyboardInterrupt
    (left,) = tmp_path.iterdir()
    with journal(WORK, MACHINE) as kept:
        assert kept.path == left and kept.done == {("study", "one"): [("row", 1)]}
    with journal(WORK, "another machine") as kept:
        assert not kept.done
    assert not list(tmp_path.iterdir())


def test_the_benchmarks_own_draws_have_rows_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(contexts, "DEVICES", (8,))
    work = tw.Workload(8 * 512, 64, 8, 64)
    path = tmp_path / "rows.jsonl"
    chosen = {"draws": 1, "methods": ("usp", "ring"), "path": path}
    theirs = list(contexts.contexts(work, MACHINE, sampler="longca", **chosen))
    assert [table.name for table in theirs] == [
        "contexts-full_document",
        "contexts-causal_document",
    ]
    assert [row["method"] for row in records(theirs[0])] == ["ring P2P", "USP, 8 x n/8"]
    list(contexts.contexts(work, MACHINE, **chosen))
    rows = contexts.read_rows(path)
    assert [row.get("sampler") for row in rows].count("longca") == 4
    assert {row["corpus"] for row in rows if row.get("sampler")} == {"pile"}


def test_contexts_says_beforehand_how_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    work = tw.Workload(1 << 10, 64, 8, 64)
    tasks = [contexts.Task("causal_document", 96, draw, "tilewise", tuple(contexts.METHODS), 8192,
                           work, MACHINE) for draw in range(10)]  # fmt: skip
    monkeypatch.setattr(contexts, "ProcessPoolExecutor", None)
    with pytest.raises(TypeError):
        list(contexts._run(tasks, {}, tmp_path / "rows.jsonl"))
    said = capsys.readouterr().err
    assert f"about {contexts.minutes_of(tasks):.0f} minutes of two cores" in said
    assert "90 rows are not in" in said and "Fewer --draws or some --method take less" in said


def test_every_study_has_a_chart(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(simulated, "TILE_SHAPES", ((2, 2),))
    monkeypatch.setattr(simulated, "MASKED_SIZES", (4,))
    monkeypatch.setattr(simulated, "MODEL_TOKENS", (1 << 13,))
    small: dict[str, dict[str, Any]] = {
        "controls": {"n": 16},
        "tiles": {"n": 16},
        "schedules": {"n": 16},
        "model": {"n": 16},
    }
    for name in ("controls", "tiles", "schedules", "masks", "model"):
        for table in STUDIES[name](
            replace(WORK, num_tokens=1 << 15), MACHINE, **small.get(name, {})
        ):
            figures = table.section().figures
            assert figures and all(figure.drawing.data for figure in figures), table.name


def test_bars_of_a_study_have_the_unit_of_what_they_show():
    parts = {"computing": {"ring": 2e-3, "mesh": 1e-3}, "waiting": {"ring": 1e-3, "mesh": 0.0}}
    drawn = bar_chart("time", "Time", "s", parts).drawing
    assert isinstance(drawn, Drawing)
    assert drawn.layout["xaxis"]["ticktext"][1:] == ["1 ms", "2 ms", "3 ms"]
    assert [bar.get("name") for bar in drawn.data][:2] == ["computing", "waiting"]


def speeds_of(method: str, devices: int, sampler: str | None = None) -> list[int]:
    """Forward TFLOP/s of the committed draws under causal documents, ascending."""
    at = ("causal_document", devices, method, sampler)
    names = "mask", "devices", "method", "sampler"
    rows = contexts.read_rows(contexts.ROWS)
    mine = [row["forward_tflops"] for row in rows if tuple(map(row.get, names)) == at]
    return [round(x) for x in sorted(mine)]


def test_the_page_says_what_draws_and_samplers_change():
    most = [x for method in ("ring", "all_gather", "usp") for x in speeds_of(method, 32)[::4]]
    assert numbers_after("studies.md", "five draws have a ring at") == most
    found = {}
    for method in ("ring", "usp", "double_ring"):
        for sampler in ("longca", None):
            speeds = speeds_of(method, 32, sampler)
            assert len(speeds) == (3 if sampler else 5)
            found[method, sampler] = [speeds[0], speeds[-1]]
    ring, usp, double = ([*found[x, "longca"], *found[x, None]] for x in
                         ("ring", "usp", "double_ring"))  # fmt: skip
    assert numbers_after("studies.md", "three such draws have a ring at") == ring
    assert numbers_after("studies.md", "USP has there") == [*usp, *double]


def test_committed_rows_of_contexts_are_what_the_command_makes():
    work = tw.Workload(96 * 8192, 64, 8, 128, layout="zigzag")
    known = {contexts._key(row): row for row in contexts.read_rows(contexts.ROWS)}
    cases = (("causal", "tilewise"), ("causal_document", "tilewise"), ("full_document", "longca"))
    for mask, sampler in cases:
        task = contexts.Task(mask, 8, 0, sampler, ("ring", "usp"), 8192, work, MACHINE)
        for row in contexts.rows_of(task):
            assert row == pytest.approx(known[contexts._key(row)], abs=2e-4)  # rounded shares


@pytest.mark.slow
def test_committed_rows_of_the_map_are_what_the_command_makes():
    known = {json.dumps(x["case"]): x["rows"] for x in contexts.read_rows(where.ROWS)}
    for at in (("causal", (64, 8), 8, 8192), ("causal_document", (64, 8), 1, 1024)):
        task = where.Task(*at, USUAL, MACHINE)
        assert json.loads(json.dumps(where.rows_of(task))) == known[json.dumps(task.key)]


@pytest.mark.slow
def test_the_page_says_what_a_slow_rank_and_jitter_make_of_the_claims():
    work = replace(USUAL, mask=tw.Causal())
    waits, grid = stress.CLAIMS[1:]

    def claimed(claim: tuple[str, float, int, int], name: str) -> tuple[Any, ...]:
        return next(stress._claimed(work, MACHINE, claim, name))[3:]

    waited, times = (round(claimed(claim, "jitter")[0], 1) for claim in (waits, grid))
    said = numbers_after("studies.md", "with jitter a ring of")
    assert said == [waits[2], waited, 2, times]  # the 2 of ATTENTION2D
    both = [round(x, 1) for x in claimed(waits, stress.SLOW)[:2]]
    assert numbers_after("studies.md", "With a slow rank a ring waits") == both


@pytest.mark.slow
def test_videos_come_in_the_order_that_was_measured():
    _, published, _ = video(USUAL, MACHINE)
    times = [row["simulated"] for row in records(published)]
    assert times == sorted(times, reverse=True)
    shares = [row["efficiency, simulated"] for row in records(published)]
    assert all(b < a + 0.1 for a, b in pairwise(shares))
