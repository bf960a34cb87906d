"""The first ten minutes on a GPU: how fast memory work, short calls, tiles, ranks and sends are.

    python -m benchmarks.gpu_first [--after] [--out FILE]
    python -m benchmarks.gpu_first --dry-run        # the same code, tiny, on the CPU

Parts run one after another, each in a process of its own with a time limit; what fails or takes too
long has a row that says so, and the next part runs. Rows go to benchmarks/results/
gpu_first_<date>.jsonl as they come (of a dry run to a temporary folder), a page to .md beside them
after each part, and what processes print to .log. --after adds kernels for Hopper that this library
does not have. The exit code is 1 if a part failed, 2 without a GPU. It needs no network.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu import ANSWER, CORES, RESULTS, interrupt
from benchmarks.gpu_parts import cases
from benchmarks.gpu_parts.case import Case, Row
from benchmarks.gpu_parts.clocks import Clocks
from benchmarks.gpu_parts.first import SOURCES
from benchmarks.gpu_parts.runner import Runner
from benchmarks.gpu_parts.sizes import FULL, GQA, MHA, SMALL, TINY, K
from benchmarks.gpu_parts.summary import PASSES
from benchmarks.gpu_parts.variants import VARIANTS
from tilewise_tools.naming import Parser, new_file, run_script

SECONDS = 600.0  # in all
STAMP = ("torch_version", "triton_version", "device_name", "commit")  # in every row
KERNELS = ("cudnn", "triton")
TILES = ("causal_document", "sliding_window_causal")  # masks of more than one slice
BY_LISTS = "flash_attn_4_lists"  # skipped where its package is not installed
TILE_HEADS = (32, 16)  # as many query heads a KV head as its trial has, for which it is compiled
MEMORY = ("copy of keys", "copy of keys, 16 bytes a number", "merge", "add", "out_for_delta")
ROWS, KEYS = (2048, 4096, 8192, 16384), (2048, 8192, 32768)  # of short calls
FEW = (4, 4)  # heads of one head group

GREEDY = {"world_size": 256, "q_tile": 16, "num_tokens": 1 << 20}
RANKS: tuple[Row, ...] = (
    {"heads": MHA, **GREEDY},
    {"heads": MHA, **GREEDY, "schedule": "kv_first"},
    {"heads": MHA, **GREEDY, "schedule": "gather"},
    {"heads": MHA, **GREEDY, "q_tile": 4, "head_groups": 8},
    {"heads": GQA, **GREEDY},
    {"heads": GQA, "world_size": 8, "num_tokens": 128 * K},
    {"heads": GQA, "world_size": 8, "num_tokens": 128 * K, "q_tile": 2},
)
TINY_RANKS: tuple[Row, ...] = (
    {"heads": SMALL, "world_size": 16, "q_tile": 4, "num_tokens": 16 * 24, "schedule": "gather"},
    {"heads": SMALL, "world_size": 8, "q_tile": 2, "num_tokens": 8 * 24, "head_groups": 2},
    {"heads": SMALL, "world_size": 4, "num_tokens": 4 * 24},
)


class Part(NamedTuple):
    """Cases that get so many seconds together.

    Attributes:
        at_once: lanes side by side; of what is timed one.
    """

    title: str
    cases: list[Case]
    seconds: float
    at_once: int = 1


def parts(*, tiny: bool, after: bool) -> list[Part]:
    """All parts in their order; together they end within ten minutes."""
    names = ("cpu",) if tiny else KERNELS
    ahead = [c for c in cases.before(names, tiny) if c.part == "ahead"]
    found = [
        Part("compiling ahead", ahead, 70.0, cases.lanes_at_once(2 if tiny else CORES)),
        Part("bandwidth", list(_bandwidth()), 30.0),
        Part("short calls", list(_short_calls(names, tiny)), 65.0),
        Part("executor", list(_ranks(names, tiny)), 185.0),
        Part("whole tiles", list(_whole_tiles(names, tiny)), 75.0),
        Part("sends", list(_sends()), 30.0),
    ]
    return [*found, Part("variants", list(_variants(tiny)), 110.0)] if after else found


def _bandwidth() -> Iterator[Case]:
    for what in MEMORY:
        yield Case("bandwidth", {"what": what}, 1.0, "bandwidth")
    for sources in SOURCES:
        yield Case("bandwidth", {"what": "combine", "sources": sources}, 1.0, "bandwidth")


def _short_calls(names: Sequence[str], tiny: bool) -> Iterator[Case]:
    rows, keys = ((16, 32), (16,)) if tiny else (ROWS, KEYS)
    heads = (SMALL,) if tiny else (MHA, FEW)
    width = (TINY if tiny else FULL).head_dim
    for name, pair, n, m in product(names, heads, keys, rows):
        options = {"kernel": name, "heads": _text(pair), "rows": m, "keys": n, "head_dim": width}
        yield Case("short calls", options, 1.0, "short calls")


def _ranks(names: Sequence[str], tiny: bool) -> Iterator[Case]:
    width = (TINY if tiny else FULL).head_dim
    for name, rank in product(names, TINY_RANKS if tiny else RANKS):
        given = {**rank, "heads": _text(rank["heads"]), "head_dim": width, "beside": ["graph"]}
        yield Case("executor", {"kernel": name, "mask": "causal", **given}, 12.0, "executor")


def _whole_tiles(names: Sequence[str], tiny: bool) -> Iterator[Case]:
    options = {
        "heads": _text(SMALL if tiny else TILE_HEADS),
        "num_tokens": 128 if tiny else 16 * K,
        "head_dim": (TINY if tiny else FULL).head_dim,
    }
    for name, mask in product(names if tiny else (*names, BY_LISTS), TILES):
        seconds = 20.0 if name == BY_LISTS else 3.0  # it is compiled and tried first
        yield Case("whole tiles", {"kernel": name, "mask": mask, **options}, seconds, "whole tiles")


def _sends() -> Iterator[Case]:
    for options in ({"what": "combine", "sources": 4}, {"what": "merge"}):
        yield Case("sends", options, 4.0, "sends")


def _variants(tiny: bool) -> Iterator[Case]:
    for name in VARIANTS:
        yield Case(
            "variants", {"variant": name, "num_tokens": 128 if tiny else 16 * K}, 12.0, "variants"
        )


def _text(heads: tuple[int, int]) -> str:
    return f"{heads[0]}:{heads[1]}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--after", action="store_true", help="kernels for Hopper, too")
    parser.add_argument("--out", type=new_file, help="where the rows go")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, interrupt)  # so that processes end
    folder = Path(tempfile.mkdtemp()) if given.dry_run else RESULTS
    path = given.out or folder / f"gpu_first_{time.strftime('%Y%m%d_%H%M%S')}.jsonl"
    question = {"device": "cpu" if given.dry_run else "cuda", "tiny": given.dry_run}
    with closing(Runner(ANSWER, path, SECONDS, question)) as runner:
        where = runner.ask(Case("environment", {}, 30.0, "environment"))
        if "error" in where:
            path.unlink()
            print(f"{where['error']}; --dry-run tries the code", file=sys.stderr)
            return 2
        runner.stamp = {name: where[name] for name in STAMP}
        runner.clocks = Clocks(where["uuid"]) if "uuid" in where else None
        for part in parts(tiny=given.dry_run, after=given.after):
            try:
                runner.run(part.cases, part.at_once, seconds=part.seconds)
            except KeyboardInterrupt:
                print("interrupted: the rows are of a part", file=sys.stderr)
                return 1
            finally:
                page = "\n".join(
                    [f"# The first minutes on {where['device_name']}", *_page(runner.rows)]
                )
                path.with_suffix(".md").write_text(page + "\n")
    print(f"{page}\n\nrows in {path}")
    return 1 if any("error" in row for row in runner.rows) else 0


def _page(rows: Sequence[Row]) -> Iterator[str]:
    """The rows as tables in Markdown, and what failed or was skipped."""
    yield ", ".join(f"{name} {rows[0][name]}" for name in STAMP)
    done = [row for row in rows if "error" not in row and "skipped" not in row]
    for title, part, names, figures in TABLES:
        found = [row for row in done if row["part"] == part]
        if found:
            yield from (
                f"\n## {title}\n",
                _line(names + figures),
                _line(["---"] * len(names + figures)),
            )
            yield from (_line([row.get(x, "") for x in names + figures]) for row in found)
    missing = [row for row in rows if row not in done]
    if missing:
        yield "\n## Failed or skipped\n"
        yield from (f"- {_title(row)}: {row.get('error') or row['skipped']}" for row in missing)


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _title(row: Row) -> str:
    names = dict.fromkeys(name for _, _, names, _ in TABLES for name in names)
    return " ".join([row["part"], *(str(row[name]) for name in names if name in row)])


def _both(*figures: str) -> list[str]:
    return [f"{which}_{figure}" for which, figure in product(PASSES, figures)]


WAYS = ("user's group", "own lane", "copy")
TABLES: tuple[tuple[str, str, list[str], list[str]], ...] = (
    ("Memory work, TB/s", "bandwidth", ["what", "sources"], ["work_tbps", "copy_tbps"]),
    ("Short calls", "short calls", ["kernel", "heads", "rows", "keys"], _both("ms", "tflops")),
    (
        "Tiles of a mask",
        "whole tiles",
        ["kernel", "mask", "heads"],
        ["calls", *_both("ms", "tflops")],
    ),
    (
        "A rank beside one call",
        "executor",
        ["kernel", "heads", "world_size", "q_tile", "schedule", "head_groups", "num_tokens"],
        _both("ms", "one_call_ms", "share", "graph_ms", "host_ms", "traffic_bytes", "beside_tbps"),
    ),
    ("Sends beside memory work", "sends", ["what"], [f"{way}, hidden_share" for way in WAYS]),
    ("Kernels for Hopper", "variants", ["variant"], ["ms", "tflops", "ours_tflops", "difference"]),
)
"""Title, part, and names of options and of figures of each table."""


if __name__ == "__main__":
    run_script(main)
