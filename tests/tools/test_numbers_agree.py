"""Card, table, bar and --json of a report say the same number, to the last digit that is shown."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.report_pages import many_rows, write_rows
from typer.testing import CliRunner
from verification.zoo import Settings, made, share

import tilewise as tw
from tilewise.planning.candidate import load_candidate
from tilewise_tools.cli import app
from tilewise_tools.cli.output import as_bytes
from tilewise_tools.cli.parity import _page as parity_page
from tilewise_tools.explain.explanation import PARTS, explain
from tilewise_tools.explain.page import page_of as explained_page
from tilewise_tools.explain.rows import read_run
from tilewise_tools.report.bench_report import page_of as bench_page
from tilewise_tools.report.bench_report import read_rows
from tilewise_tools.report.page import Figure, Page, TextTable
from tilewise_tools.report.plan_charts import BUSY
from tilewise_tools.report.plan_report import page_of, subject_of
from tilewise_tools.report.studies import Studies
from tilewise_tools.report.words import quantity, short

MASKS = {
    "causal": tw.Causal(),
    "documents": tw.masks.causal_document([0, 3, 40, 128]),
}


def figure(page: Page, name: str) -> Figure:
    (found,) = (x for section in page.sections for x in section.figures if x.name == name)
    return found


def column(table: TextTable | None, name: str) -> list[str]:
    assert table is not None
    place = table.header.index(name)
    return [row[place] for row in table.rows]


def bars(drawn: Figure) -> dict[str, list[float]]:
    """Values of each kind of bar, in the order of the names."""
    lying = drawn.drawing.data[0].get("orientation") == "h"
    return {
        bar["name"]: list(bar["x" if lying else "y"])
        for bar in drawn.drawing.data
        if bar["type"] == "bar"
    }


def facts(page: Page) -> dict[str, str]:
    return {fact.name: fact.value for fact in page.facts}


def ran(*words: object) -> Any:
    ended = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert ended.exit_code in (0, 1), ended.stderr
    return json.loads(ended.stdout)


@pytest.fixture(scope="module", params=MASKS)
def planned(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Page]:
    work = tw.Workload(128, 8, 2, 64, mask=MASKS[request.param])  # few sizes are simulated
    machine = tw.Machine.preset("h100x8-1nic")
    path = tmp_path_factory.mktemp(request.param) / "plan.json"
    path.write_text(tw.search(work, machine, world_size=8)[0].to_json())
    return path, page_of(subject_of(load_candidate(path)))


def test_a_plans_page_says_what_its_charts_table_and_simulate_say(
    planned: tuple[Path, Page],
):
    path, page = planned
    times, sent = figure(page, "seconds"), figure(page, "bytes")
    said, card = ran("simulate", path), facts(page)
    waiting, rest = bars(times)["waiting"], bars(times)[BUSY]
    place = column(times.rows, "strategy").index("this plan")
    assert card["Time per layer"] == quantity(said["seconds"], "s")
    assert card["Waiting"] == quantity(said["exposed_seconds"], "s")
    assert card["Sent by a rank"] == quantity(said["sent_bytes"], "B")
    assert card["Peak memory"] == quantity(said["peak_bytes"], "B")
    assert card["Time per layer"] == column(times.rows, "both passes")[place]
    assert card["Waiting"] == column(times.rows, "waiting")[place]
    for i, (whole, wait) in enumerate(
        zip(column(times.rows, "both passes"), column(times.rows, "waiting"), strict=True)
    ):
        assert whole == quantity(waiting[i] + rest[i], "s") and wait == quantity(waiting[i], "s")
    place = column(sent.rows, "strategy").index("this plan")
    links = {name: values[place] for name, values in bars(sent).items() if name}
    assert card["Sent by a rank"] == quantity(sum(links.values()), "B")
    for name, value in links.items():
        assert column(sent.rows, name)[place] == quantity(value, "B")


def test_a_plan_has_one_time_in_charts_table_and_head(planned: tuple[Path, Page]):
    path, page = planned
    rows = [row for row in load_candidate(path).rows if row.plan == row.backward_plan]
    ranked = {
        short(row.plan): (quantity(row.seconds, "s"), quantity(row.exposed_seconds, "s"))
        for row in rows
    }
    columns = (column(figure(page, "seconds").rows, x) for x in ("plan", "both passes", "waiting"))
    charted = {plan: figures for plan, *figures in zip(*columns, strict=True)}
    both = ranked.keys() & charted.keys()
    assert {"ring(8)"} < both
    assert {plan: list(ranked[plan]) for plan in both} == {plan: charted[plan] for plan in both}
    assert f"a ring takes {ranked['ring(8)'][0]}" in {fact.note for fact in page.facts}


def test_a_strategy_of_which_the_search_simulated_a_sample_has_that_time_on_the_page(
    monkeypatch: pytest.MonkeyPatch,
):
    simulated: list[str] = []

    def counted(plan: tw.Plan, *words: Any, **options: Any) -> tw.Simulation:
        simulated.append(plan.name)
        return tw.simulate(plan, *words, **options)

    monkeypatch.setattr("tilewise_tools.report.studies.simulate", counted)
    work, machine = tw.Workload(1 << 18, 8, 8, 64, mask=tw.Causal()), tw.Machine.preset("h100x8")
    best = tw.search(work, machine, world_size=32)[0]
    rows = {row.plan: row for row in best.rows if row.plan == row.backward_plan}
    studies = Studies(best.own_work, machine, world_size=32, rows=rows)
    entry = studies.best("ring", 32)
    assert entry is not None
    row, simulation = rows[entry.plan.name], entry.simulation
    assert row.sampled and simulated == [entry.plan.name]  # once
    assert simulation.seconds == pytest.approx(row.seconds, rel=1e-9)
    assert tw.simulate(entry.plan, simulation.work, machine).seconds != simulation.seconds


def test_the_first_line_of_a_plans_table_is_its_card(planned: tuple[Path, Page]):
    _, page = planned
    (table,) = (section.table for section in page.sections if section.name == "why")
    card = facts(page)
    for fact, name in (
        ("Time per layer", "both passes"),
        ("Waiting", "waiting"),
        ("Sent by a rank", "sent by a rank"),
        ("Peak memory", "peak memory"),
    ):
        assert card[fact] == column(table, name)[0]


def test_a_benchmarks_page_says_what_its_rows_say(tmp_path: Path):
    rows = [
        row | {"exposed_seconds": row["median_seconds"] * 0.3, "peak_bytes": 1000 * i + 77}
        for i, row in enumerate(many_rows())
        if row["outcome"] == "ok"
    ]
    page = bench_page(read_rows([write_rows(tmp_path / "rows.jsonl", rows)]))
    assert facts(page)["Measured"] == f"{len(rows):,}"
    waits, memory = figure(page, "waiting-strategies"), figure(page, "memory")
    by_name = bars(waits)
    for i, (whole, wait) in enumerate(
        zip(
            column(waits.rows, "median seconds"),
            column(waits.rows, "exposed seconds"),
            strict=True,
        )
    ):
        assert wait == quantity(by_name["waiting"][i], "s")
        assert whole == quantity(by_name["waiting"][i] + by_name["computing"][i], "s")
    drawn = {name: quantity(values[0], "B") for name, values in bars(memory).items() if name}
    names = column(memory.rows, "contender")
    assert drawn == dict(zip(names, column(memory.rows, "peak bytes"), strict=True))


@pytest.mark.parametrize("layout", ["balanced", "tiled"])
def test_a_masks_title_says_what_its_json_says(layout: str):
    words = ("mask", "causal_document", "--num-tokens", "4K", "--layout", layout)
    shown, said = CliRunner().invoke(app, words).stdout.splitlines(), ran(*words)
    assert f"imbalance {said['imbalance']:.2f}" in shown[2]
    assert f"area {100 * said['area'] / said['num_tokens'] ** 2:.3g} % of all pairs" in shown[2]
    mean, busiest, ring = (as_bytes(said[f"{x}_bytes"]) for x in ("mean", "busiest", "ring"))
    assert shown[3] == f"{said['plan']} sends {mean} a rank, busiest {busiest}, a ring {ring}"


def test_the_page_of_a_run_says_what_its_lines_and_json_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tilewise_tools.explain.advice.SEARCHED", 0)

    def train(rank: int, group: Any) -> None:
        cp = tw.ContextParallel(group, num_tokens=256, strategy=tw.ring(2))
        q, k, v = (torch.randn(cp.layout.size(rank), 4, 16, requires_grad=True) for _ in range(3))
        with tw.record(cp, 1, tmp_path) as recorder:
            for _ in range(3):
                recorder.step()
                cp.attention(q, k, v).sum().backward()

    tw.loopback(2, train)
    explanation = explain(read_run([tmp_path]))
    page, said = explained_page(explanation), explanation.as_json()
    assert facts(page)["step"] == quantity(said["seconds"], "s")
    drawn = figure(page, "parts")
    ticks = drawn.drawing.layout["yaxis"]["ticktext"]
    assert len(ticks) > 2 and all(re.fullmatch(r"[\d.]+ [nµm]?s", tick) for tick in ticks)
    for part, name in PARTS.items():
        share = f"{100 * explanation.parts[part] / explanation.seconds:.0f} %"
        assert facts(page)[name] == share
        assert said["parts"][part] == pytest.approx(explanation.parts[part])
        assert column(drawn.rows, name) == [quantity(x, "s") for x in bars(drawn)[name]]
        mean = sum(bars(drawn)[name]) / len(bars(drawn)[name])
        assert quantity(mean, "s") == quantity(explanation.parts[part], "s")


def test_what_fits_is_the_same_in_text_and_json(tmp_path: Path):
    pytest.importorskip("transformers")
    config = {
        **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64},
        **{"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8},
        **{"num_key_value_heads": 4, "vocab_size": 100},
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    words = ("fits", "--model", str(path), "--num-tokens", "4K", "--strategy", "ring(1)")
    shown, said = CliRunner().invoke(app, words).stdout, ran(*words)
    peak, memory = as_bytes(said["peak_bytes"]), as_bytes(said["memory_bytes"])
    assert shown.startswith(f"4,096 tokens (cp 1, dp 1): fits, {peak} of {memory} a device")
    for part in said["parts"]:
        (line,) = (one for one in shown.splitlines() if one.strip().startswith(f"{part['name']} "))
        assert as_bytes(part["num_bytes"]) in line
    assert said["peak_bytes"] == sum(part["num_bytes"] for part in said["parts"])


def test_a_parity_page_says_what_its_json_says():
    model, inputs = made(Settings(window=5))
    split: Any = partial(share, fault="window_ignored")
    report = tw.parity(model, inputs, split, world_size=2, backend="loopback")
    page, said = parity_page("mine.py:split", 2, report), report.to_json()
    card = facts(page)
    assert (card["equal"], said["equal"]) == ("no", False)
    assert card["first layer"] == said["layer"] and card["cause"] == said["cause"]
    assert card["compared"] == str(said["compared"])
    (table,) = (section.table for section in page.sections if section.name == "deviations")
    errors = [f"{one['error']:.3g}" for one in said["deviations"]]
    assert errors and column(table, "times rounding") == errors


def test_the_page_of_a_model_that_is_the_same_has_no_empty_tables():
    report = tw.parity(*made(Settings()), share, world_size=2, backend="loopback")
    page = parity_page("mine.py:split", 2, report)
    assert facts(page)["equal"] == "yes" and page.sections == ()
