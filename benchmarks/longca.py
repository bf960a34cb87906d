"""CSV files of the Long-Context Attention Benchmark as rows of ours, which tilewise report reads.

    python -m benchmarks.longca output-8-causal.csv flops.csv -o published.jsonl
    tilewise report published.jsonl results.jsonl

Two kinds, as its code writes them. Its runs of distributed attention append to output/*.csv:

    baseline, masktype, world_size, wd, ulysses, ring, mean_tflops, mean_peak_mems

Its kernels' flops.csv has seqlen or sparsity_ratio first, then a column per kernel, then -min and
-max of each; mask and pass stand in the folder's name, as in "attn-fwd with full mask".
Source: arXiv 2510.17896, github NJUDeepEngine/LongCA-bench.
"""

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tilewise_tools.bench.results import FORMAT
from tilewise_tools.naming import Parser, new_file, run_script

Row = dict[str, Any]
DISTRIBUTED = frozenset({"baseline", "masktype", "world_size", "wd", "mean_tflops"})
SIZES = ("seqlen", "sparsity_ratio")
PASSES = MappingProxyType(
    {"fwd": "forward", "bwd": "backward", "fwd+bwd": "both", "fwd_bwd": "both"}
)
TOKENS_PER_RANK = 8192  # TOTAL_SEQLEN / WORLD_SIZE of its run_benchmark.py
HEADS = MappingProxyType(
    {"num_heads": 64, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "device": "cuda"}
)
UNSUPPORTED = -2  # out of memory is -1 or -1000
FOLDER = re.compile(r"attn-(fwd|bwd)\b(?:.* with (\w+) mask)?")


def read_csv(path: Path) -> tuple[list[Row], int]:
    """The rows of a file, and how many of its lines were not whole."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text: {error}") from None
    reader = csv.DictReader(io.StringIO(text))
    names = reader.fieldnames or []
    if set(names) >= DISTRIBUTED:
        read = _distributed
    elif names and names[0] in SIZES and len(names) > 1:
        read = _kernels
    else:
        raise ValueError(
            f"{path}: columns {', '.join(names[:8])[:99] or 'none'} are not those of LongCA-bench; "
            f"wanted {', '.join(sorted(DISTRIBUTED))}, or {' or '.join(SIZES)} and one per kernel"
        )
    rows: list[Row] = []
    num_lost = 0
    for line in reader:
        try:
            if None in line.values() or None in line:
                raise ValueError
            rows += read(line, path)
        except ValueError:
            num_lost += 1
    keyed = [
        {"format": FORMAT, "key": f"{path.parent.name}/{path.name} {i}", **row}
        for i, row in enumerate(rows)
    ]
    return keyed, num_lost


def _distributed(line: dict[str, str], path: Path) -> Iterator[Row]:
    world_size, speed = int(line["world_size"]), float(line["mean_tflops"])
    yield {
        "kind": "strategies",
        "contender": line["baseline"],
        "library": "LongCA-bench",
        "mask": line["masktype"],
        "pass": PASSES.get(line["wd"], line["wd"]),
        "world_size": world_size,
        "num_tokens": TOKENS_PER_RANK * world_size,
        "tokens_per_rank": TOKENS_PER_RANK,
        "plan": f"ulysses {line.get('ulysses', '')}, ring {line.get('ring', '')}",
        "peak_bytes": max(0.0, float(line.get("mean_peak_mems") or 0)) or None,
        **_speed(speed),
        **HEADS,
    }


def _kernels(line: dict[str, str], path: Path) -> Iterator[Row]:
    size = next(iter(line))
    found = FOLDER.search(path.parent.name)
    which, mask = found.groups() if found else (None, None)
    value = float(line[size])
    about: Row = {"num_tokens": int(value)} if size == "seqlen" else {size: value}
    kernels = [name for name in line if name != size and not name.endswith(("-min", "-max"))]
    for name in kernels:
        yield {
            "kind": "kernels",
            "contender": name,
            "library": "LongCA-bench",
            "mask": mask or path.parent.name or "unknown",
            "pass": PASSES.get(which or "", "unknown"),
            "world_size": 1,
            **about,
            **_speed(float(line[name])),
            **HEADS,
        }


def _speed(tflops: float) -> Row:
    """TFLOP/s of one device, or why there are none."""
    if tflops > 0:
        return {"outcome": "ok", "message": "", "tflops": tflops}
    if tflops == UNSUPPORTED:
        return {"outcome": "unsupported", "message": f"written as {tflops:g}"}
    said = f"written as {tflops:g}: out of memory, or in kernels' files an unsupported mask"
    return {"outcome": "out_of_memory", "message": said}


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="CSV files of LongCA-bench")
    parser.add_argument("-o", "--output", type=new_file, required=True, help="the rows, as .jsonl")
    options = parser.parse_args()
    rows: list[Row] = []
    for path in options.files:
        read, num_lost = read_csv(path)
        rows += read
        print(f"{path}: {len(read)} rows, {num_lost} lines were not whole")
    options.output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    run_script(main)
