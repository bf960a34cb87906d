"""The simulated tables of the pages, made anew by one command.

    python -m benchmarks.docs_tables                      # all of them: a quarter of an hour
    python -m benchmarks.docs_tables --only controls,model
    python -m benchmarks.docs_tables --check              # exit 1, and the pages that would change

A table stands between `<!-- table: NAME -->` and `<!-- end -->` on its page.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks import planner_choices
from benchmarks.study.__main__ import STUDIES
from tilewise.integrations.diffusers.models import MODELS
from tilewise.integrations.transformers import refusals
from tilewise_tools.naming import Parser, naming, new_file, run_script

ROOT = Path(__file__).parents[1]
Record = dict[str, Any]
Tables = dict[str, list[Record]]
"""The rows of a command's tables, by the table's name."""


def lines_of(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A table in Markdown."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (header, *rows)]
    return [lines[0], "|---" * len(header) + "|", *lines[1:]]


def grid(
    records: Iterable[Record],
    down: Callable[[Record], str],
    across: Callable[[Record], str],
    cell: Callable[[Record], str],
    corner: str = "",
) -> list[str]:
    """A table of one cell a record; a place without a record is empty."""
    cells: dict[str, dict[str, str]] = {}
    for record in records:
        cells.setdefault(down(record), {})[across(record)] = cell(record)
    columns = list(dict.fromkeys(name for row in cells.values() for name in row))
    rows = ([name, *(row.get(column, "") for column in columns)] for name, row in cells.items())
    return lines_of([corner, *columns], rows)


def _controls(tables: Tables) -> list[str]:
    def across(row: Record) -> str:
        return f"{row['machine'].split(', ')[1].removeprefix('nodes of ')}, {row['tokens']}"

    def cell(row: Record) -> str:
        fits = "" if row["fits"] == "yes" else ", too large"
        return f"{row['over ring']:.2f} ({row['of which bytes']:.2f}{fits})"

    return grid(tables["controls"], lambda row: row["method"], across, cell)


def _model(tables: Tables) -> list[str]:
    shown = {"attention2d", "attention2d_overlap", "mesh", "double_ring", "all_gather",
             "ulysses_ring", "ulysses_mesh"}  # fmt: skip
    rows = [
        row for row in tables["model"]
        if row["strategy"] in shown and row["tokens"] in (1 << 13, 1 << 17)
        and row["machine"] != "h100x8" and row["over ring"] is not None
    ]  # fmt: skip
    return grid(
        rows,
        lambda row: f"{row['machine']}, {row['strategy']}",
        lambda row: f"{row['model']}: {row['tokens'] >> 10}K",
        lambda row: f"{row['over ring']:.1f}",
        "64 devices, step over ring's",
    )


def _stress(tables: Tables) -> list[str]:
    disturbances = "a slow rank", "jitter", "short messages"
    header = ["32 devices, 256K tokens, causal", "over ring"]
    header += [name for x in disturbances for name in (x, "over ring")]
    rows = [
        [row["strategy"], *(f"{row[name]:.2f}" for name in
         ("over ring", *(y for x in disturbances for y in (x, f"over ring, {x}"))))]
        for row in tables["stress"] if row["over ring"] is not None
    ]  # fmt: skip
    return lines_of(header, rows)


def _stress_claims(tables: Tables) -> list[str]:
    def cell(row: Record) -> str:
        small = f"{row['of which topology']:.1f}; {row['of which bytes']:.2f}"
        return f"{row['found']:.1f} ({small})"

    return grid(
        tables["assumptions"],
        lambda row: row["assumption"],
        lambda row: row["claim"],
        cell,
        "ours (a double ring; of which bytes)",
    )


def _schedules(tables: Tables) -> list[str]:
    names = {"greedy": "greedy", "paper": "the paper's rule", "eager": "eager",
             "kv_first": "KV first", "gather": "gather"}  # fmt: skip
    rows: list[list[str]] = []
    for tokens in sorted({row["tokens"] for row in tables["schedules"]}):
        mine = [row for row in tables["schedules"] if row["tokens"] == tokens]
        pace = [row["kernels over messages"] for row in mine]
        length = f"{tokens >> 20}M" if tokens >> 20 else f"{tokens >> 10}K"
        cells = [length, f"{min(pace):.2f} to {max(pace):.2f}"]
        for name in names:
            over = [100 * (row[name] / row["optimum"] - 1) for row in mine]
            low = f"{min(over):.1f}".replace("0.0", "0")
            cells.append(f"{low} to {max(over):.1f} %")
        rows.append(cells)
    return lines_of(["tokens", "kernels over messages", *names.values()], rows)


def _choices(tables: Tables) -> list[str]:
    header = ["machine", "ranks", "heads", "mask", "ms", "search, s", "choice"]
    rows: list[list[object]] = []
    for row in tables["choices"]:
        mask = f"{row['mask']}, {row['layout']}" if row["layout"] else row["mask"]
        names = dict.fromkeys((row["plan"], row["backward_plan"]))
        rows.append([row["machine"], row["ranks"], row["heads"], mask,
                     f"{1e3 * row['seconds']:.4g}", f"{row['search_seconds']:.1f}",
                     " / ".join(names)])  # fmt: skip
    return lines_of(header, rows)


def _video(tables: Tables) -> list[str]:
    def cell(row: Record) -> str:
        times = f"{1e3 * row['forward']:.3g} / {1e3 * row['both']:.3g}"
        return f"{times} ({row['over ring']:.2f})"

    degrees = {("wan", 8): 4, ("wan", 72): 8, ("flux", 8): 4, ("flux", 72): 24}
    rows = [
        row | {"name": row["strategy"].replace(f"ulysses({degree}) x", "ulysses x")}
        for row in tables["video"]
        for degree in [degrees[row["shape"], row["devices"]]]
        if not row["strategy"].startswith("ulysses(")
        or row["strategy"].startswith(f"ulysses({degree}) x")
    ]
    return grid(
        rows,
        lambda row: row["name"],
        lambda row: f"{row['shape']}, {row['devices']}",
        lambda row: (
            f"{1e3 * row['forward']:.3g} / {1e3 * row['both']:.3g} ({row['over ring']:.2f})"
        ),
        "forward / both passes, ms (over ring)",
    )


def _wan(tables: Tables) -> list[str]:
    header = ["GPUs", "split", "published, s", "simulated, s", "published over simulated",
              "published efficiency", "simulated"]  # fmt: skip
    rows = [
        [row["GPUs"], row["split"], f"{row['published']:.2f}", f"{row['simulated']:.1f}",
         f"{row['published over simulated']:.2f}", f"{row['efficiency, published']:.0f} %",
         f"{row['efficiency, simulated']:.0f} %"]
        for row in tables["published"]
    ]  # fmt: skip
    return lines_of(header, rows)


def _behind(tables: Tables) -> list[str]:
    return grid(
        tables["behind"],
        lambda row: f"{row['GPUs']} GPUs, {row['split']}, published {row['published']:.2f}",
        lambda row: row["links"],
        lambda row: f"{row['ring over attention2d']:.2f} ({row['ring over mesh']:.2f})",
        "ring over attention2d (over mesh)",
    )


def _published(tables: Tables) -> list[str]:
    def cell(row: Record) -> str:
        return f"{row['published']:.0f} / {row['simulated']:.0f} ({row['off']:+.0f} %)"

    return grid(
        tables["published_methods"],
        lambda row: f"{row['mask'].replace('_', ' ')}, {row['GPUs']}, {row['pass']}",
        lambda row: row["method"],
        cell,
        "TFLOP/s a GPU: published / simulated",
    )


def _orders(tables: Tables) -> list[str]:
    return grid(
        tables["published_orders"],
        lambda row: f"{row['mask'].replace('_', ' ')}, {row['pass']}",
        lambda row: f"{row['GPUs']} GPUs",
        lambda row: f"{row['in order']} of {row['pairs']}",
        "pairs in the published order",
    )


def _kernels(tables: Tables) -> list[str]:
    rows = [
        [f"{row['mask'].replace('_', ' ')}, {row['pass']}", f"{row['published']:.0f} "
         f"({row['fastest']})", f"{row['FA2']:.0f}", f"{row['priced']:.0f}", f"{row['off']:+.0f} %"]
        for row in tables["published_kernels"]
    ]  # fmt: skip
    return lines_of(["TFLOP/s of one H100", "fastest", "FA2", "priced", "off the fastest"], rows)


def _measured(tables: Tables) -> list[str]:
    header = ["hosts, NIC, pass", "plan", "times faster than a ring", "ring waits", "waits less",
              "bytes less"]  # fmt: skip
    rows: list[list[str]] = []
    for row in tables["measured"]:
        size = row["a host"]
        hosts = f"{row['ranks'] // size}" + f" of {size} ranks" * (size > 1)
        scatter = f"{row['lowest']:.2f} to {row['highest']:.2f}"
        shares = (f"{row[name]:.1f} %" for name in ("ring waits", "waits less", "bytes less"))
        about = f"{hosts}, {row['Mbit/s a host']:.0f} Mbit/s, {row['pass']}"
        rows.append([about, f"`{row['plan']}`", f"{row['over ring']:.2f} ({scatter})", *shares])
    return lines_of(header, rows)


def _percent(value: float, unit: str) -> str:
    return f"{value:.1f} %" if unit == "%" else f"{value:.2f}"


def _claims(tables: Tables) -> list[str]:
    header = ["claim", "on", "paper", "ours", "off by", "of which topology", "of which bytes",
              "our best"]  # fmt: skip
    rows = []
    for claim in (row for row in tables["papers"] if row["kind"] == "claim"):
        unit, by_bytes = claim["unit"], claim["by_bytes"]
        if unit == "%" and claim["claimed"] is None:  # no paper says so
            continue
        rows.append([
            f"{claim['paper'].partition(':')[0]}: {claim['what']}", claim["where"],
            "wins" if claim["claimed"] is None else _percent(claim["claimed"], unit),
            _percent(claim["found"], unit), claim["off"], _percent(claim["topology"], unit),
            f"{by_bytes:+.1f} points" if unit == "%" else f"{by_bytes:.2f}",
            _percent(claim["best"], unit),
        ])  # fmt: skip
    return lines_of(header, rows)


def _rows_of(tables: Tables, paper: str) -> Iterator[Record]:
    for row in tables["papers"]:
        if row["kind"] == "row" and row["paper"] == paper:
            yield row


def _by_length(tables: Tables, paper: str, header: Sequence[str]) -> list[str]:
    """A paper's rows by length, in the columns that the header names from its third on."""
    rows: list[list[str]] = []
    last = ""
    for row in _rows_of(tables, paper):
        figures = [f"{row['figures'][name]:.1f}" for name in header[2:]]
        rows.append(["" if row["machine"] == last else row["machine"], row["plan"], *figures])
        last = row["machine"]
    return lines_of(header, rows)


def _times(tables: Tables) -> list[str]:
    header = ["times faster than a ring of 256", "", "256K", "512K", "1M", "2M", "mean"]
    return _by_length(tables, "Mesh-Attention: time", header)


def _grids(tables: Tables) -> list[str]:
    header = ["times faster than a ring of 64", "", "4K", "16K", "64K", "256K"]
    return _by_length(tables, "ATTENTION2D", header)


def _scaling(tables: Tables) -> list[str]:
    ranks = "8", "16", "32", "64", "96"
    by_plan: dict[str, dict[str, dict[str, float]]] = {}
    for row in _rows_of(tables, "LongCA-bench"):
        plan, _, which = row["plan"].rpartition(", causal ")
        if which in ("forward", "backward"):
            by_plan.setdefault(plan, {})[which] = row["figures"]
    rows = [
        [plan, *(f"{one['forward'][n]:.0f} / {one['backward'][n]:.0f}" if n in one["forward"]
         else "" for n in ranks)]
        for plan, one in by_plan.items()
    ]  # fmt: skip
    return lines_of(["TFLOP/s of one device, causal, forward / backward", *ranks], rows)


def _diffusers(tables: Tables) -> list[str]:
    header = ["model", "plan", "attention that stays diffusers'", "whole on every rank", "refused"]
    return lines_of(header, [list(row.values()) for row in tables["diffusers"]])


def _diffusers_rows() -> Iterator[Record]:
    for name, one in MODELS.items():
        layers = [layer for layer, attends in one.layers.items() if attends is None]
        refused = [f"`{setting}={value!r}`" for setting, value, _ in one.refused]
        yield {
            "model": f"`{name}`",
            "plan": "of diffusers" if one.cuts is None else "of tilewise",
            "layers": ", ".join(f"`{layer}`" for layer in layers),
            "whole": ", ".join(f"`{module}`" for module in one.whole_outputs),
            "refused": ", ".join(refused),
        }


def _refusals(tables: Tables) -> list[str]:
    header = ["of", "message", "what to do", ""]
    return lines_of(header, [list(row.values()) for row in tables["refusals"]])


def _refusals_rows() -> Iterator[Record]:
    tables = {
        "Trainers": (*refusals.TRAINERS, *refusals.LIGER),
        "parallelism": (*refusals.SIZES, *refusals.LAUNCHERS, *refusals.LOADERS),
        "models": refusals.MODELS,
        "adapters": refusals.ADAPTERS,
    }
    for of, rows in tables.items():
        for one in rows:
            message = re.sub(r"\{.*?\}", "...", one.message)
            later = "not now" if one.later else ""
            yield {"of": of, "message": message, "instead": one.instead, "later": later}


class DocsTable(NamedTuple):
    """A table of a page.

    Attributes:
        study: that has its rows; or "papers", which is benchmarks/papers.py; or "choices", the file
            that benchmarks/planner_choices.py --write has written; or "code", a table of the code.
    """

    page: str
    study: str
    lines: Callable[[Tables], list[str]]


TABLES = MappingProxyType(
    {
        "controls": DocsTable("studies.md", "controls", _controls),
        "schedules": DocsTable("studies.md", "schedules", _schedules),
        "model": DocsTable("studies.md", "model", _model),
        "choices": DocsTable("planner.md", "choices", _choices),
        "stress": DocsTable("studies.md", "stress", _stress),
        "stress_claims": DocsTable("studies.md", "stress", _stress_claims),
        "video": DocsTable("studies.md", "video", _video),
        "wan": DocsTable("studies.md", "video", _wan),
        "behind": DocsTable("studies.md", "video", _behind),
        "published": DocsTable("simulator.md", "published", _published),
        "published_orders": DocsTable("simulator.md", "published", _orders),
        "published_kernels": DocsTable("simulator.md", "published", _kernels),
        "measured": DocsTable("papers.md", "measured", _measured),
        "claims": DocsTable("papers.md", "papers", _claims),
        "times": DocsTable("papers.md", "papers", _times),
        "grids": DocsTable("papers.md", "papers", _grids),
        "scaling": DocsTable("papers.md", "papers", _scaling),
        "diffusers": DocsTable("integrations/diffusers.md", "code", _diffusers),
        "refusals": DocsTable("integrations/trainers.md", "code", _refusals),
    }
)


def rows_of(studies: Sequence[str]) -> Tables:
    """The rows of some studies, and of the papers' command if it is among them."""
    found: Tables = {}
    if "papers" in studies:
        found["papers"] = _run(["benchmarks/papers.py", "--json"])
    if "code" in studies:
        found |= {"diffusers": [*_diffusers_rows()], "refusals": [*_refusals_rows()]}
    if "choices" in studies:
        choices = planner_choices.read(planner_choices.STORED)
        found["choices"] = [case._asdict() | made._asdict() for case, made in choices.items()]
    named = [name for name in studies if name in STUDIES]
    if named:
        tables = _run(["-m", "benchmarks.study", *named, "--json"])["studies"]
        found |= {table["name"]: table["rows"] for table in tables}
    return found


def _run(arguments: list[str]) -> Any:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def replaced(page: str, name: str, lines: Sequence[str]) -> str:
    """A page's text with other lines between a table's marks."""
    begin, end = f"<!-- table: {name} -->\n", "<!-- end -->"
    before, found, rest = page.partition(begin)
    if not found:
        raise ValueError(f"the page has no line {begin.strip()!r}")
    return before + begin + "\n" + "\n".join(lines) + "\n\n" + end + rest.partition(end)[2]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default=",".join(TABLES), help=f"some of {', '.join(TABLES)}")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if a page is old"
    )
    parser.add_argument("--rows", type=Path, help="a file of rows that --keep wrote")
    parser.add_argument("--keep", type=new_file, help="write the rows here too")
    options = parser.parse_args(arguments)
    names = options.only.split(",")
    if unknown := [name for name in names if name not in TABLES]:
        parser.error(f"--only {unknown[0]!r} is not known; take some of {', '.join(TABLES)}")
    if options.rows:
        with naming("--rows"):
            rows = json.loads(options.rows.read_text())
    else:
        rows = rows_of(list(dict.fromkeys(TABLES[name].study for name in names)))
    if options.keep:
        options.keep.write_text(json.dumps(rows))
    old: list[str] = []
    for name in names:
        path = ROOT / "docs" / TABLES[name].page
        page = path.read_text()
        new = replaced(page, name, TABLES[name].lines(rows))
        if new != page:
            old.append(f"{TABLES[name].page}: {name}")
            if not options.check:
                path.write_text(new)
    print("\n".join(old) or "all tables are those of the commands")
    sys.exit(1 if old and options.check else 0)


if __name__ == "__main__":
    run_script(main)
