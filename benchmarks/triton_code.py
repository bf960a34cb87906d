"""What the compiler makes of our Triton kernels, for a GPU that need not be here.

    python -m benchmarks.triton_code [--arch 90] [--head-dim 128] [--dtype bf16]
        [--lists | --whole-rows] [--json]

Per kernel: registers, bytes of stack (spills), shared memory, blocks that fit a multiprocessor;
then of its inner loop, without (full) and with a mask: instructions, matrix instructions, copies
that run ahead (cp.async), waits for matrix products, loads and stores of spilled registers. On
Hopper also cycles of the tensor cores and of issuing, per 64 x 64 cells: a kernel takes at least
the larger, and their sum where nothing overlaps. The tools come with triton.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tilewise.arguments import require_range
from tilewise.exact import triton_kernel as exact
from tilewise.exact.triton_kernel import WARPS, block_sizes
from tilewise.kernels.triton.kernel import Lists, ScoreRule
from tilewise.kernels.triton.tuning import (
    MOST_LIST_WIDTHS,
    LaunchBlocks,
    list_tuning_for,
    tuning_for,
)
from tilewise.kernels.triton.views import TensorView
from tilewise.kernels.triton.work_list import UNIT
from tilewise_tools.naming import Parser, run_script, whole_number

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ALIGNED = [["tt.divisibility", 16]]
KINDS = {float: "fp32", int: "i32"}
NUMBERS = ("lse", "dlse", "delta", "largest")  # tensors of a number a row and head
MATRIX = ("HGMMA", "HMMA", "UTCHMMA")
REGISTERS, THREADS = 65536, 2048  # of a multiprocessor
SHARED = {80: 164, 90: 228, 100: 228}  # KiB of a multiprocessor; a block takes 1 KiB more
ARCHITECTURES = (80, 86, 89, 90, 100, 120)  # compute capabilities
SCHEDULERS = 4  # each issues one instruction a cycle


class Job(NamedTuple):
    """A kernel as the provider launches it."""

    name: str
    kernel: Any
    blocks: LaunchBlocks
    options: dict[str, Any]


class Loop(NamedTuple):
    """An inner loop that multiplies matrices."""

    masked: bool
    instructions: int
    matrix: int
    copies: int
    waits: int
    spilled: int
    tensor_cycles: float | None
    issue_cycles: float


class Code(NamedTuple):
    """A kernel compiled.

    Attributes:
        narrow: loads and stores of 2 bytes.
    """

    kernel: str
    head_dim: int
    blocks: str
    registers: int
    stack: int
    shared: int
    fit: int
    narrow: int
    loops: tuple[Loop, ...]


def jobs(head_dim: int, dtype: torch.dtype, arch: int) -> list[Job]:
    from tilewise.kernels.triton.backward import keys_backward, rows_backward
    from tilewise.kernels.triton.forward import forward

    tuning = tuning_for(head_dim, dtype, arch // 10)
    made = [Job("forward", forward, tuning.forward, {}), Job("dq", rows_backward, tuning.dq, {})]
    names = ("dk, dv",) if len(tuning.keys) == 1 else ("dk", "dv")
    passes = [*zip(names, tuning.keys, strict=True), ("at once", tuning.at_once)]
    for name, blocks in passes:
        if blocks:
            parts = {"DQ": name == "at once", "DK": name != "dv", "DV": name != "dk"}
            made.append(Job(name, keys_backward, blocks, {"UNIT": UNIT, **parts}))
    return made


def list_jobs(head_dim: int, dtype: torch.dtype, arch: int) -> list[Job]:
    """Kernels of lists, for 64 query heads of a KV head."""
    from tilewise.kernels.triton import lists

    v_dim = min(head_dim, MOST_LIST_WIDTHS[dtype][1])
    kernels = lists.forward, lists.queries_backward, lists.lists_backward
    tuning = list_tuning_for(head_dim, dtype, arch // 10)
    return [
        Job(
            name,
            kernel,
            LaunchBlocks(*blocks),
            {**lists.widths_of(head_dim, v_dim), "HEADS": blocks.heads},
        )
        for name, kernel, blocks in zip(tuning._fields, kernels, tuning, strict=True)
    ]


def whole_rows_jobs(head_dim: int, dtype: torch.dtype, arch: int) -> list[Job]:
    """Kernels of reduction="canonical", of the same blocks on every GPU."""
    from tilewise.kernels.triton import whole_rows

    sizes = block_sizes(head_dim, dtype)
    kernels = whole_rows.attend, whole_rows.query_gradients, whole_rows.key_gradients
    blocks, options = LaunchBlocks(*sizes, WARPS), {"OWN": sizes.own, "WALKED": sizes.walked}
    names = "forward", "dq", "dk, dv"
    return [Job(x, kernel, blocks, options) for x, kernel in zip(names, kernels, strict=True)]


class Target(NamedTuple):
    """What a kernel is compiled for, as Triton specialises it.

    Attributes:
        group: query heads of a KV head; 1 is a constant to the compiler.
        into: whether results are added to what is there.
    """

    arch: int = 90
    head_dim: int = 128
    dtype: str = "bf16"
    group: int = 8
    into: bool = False


def compiled(job: Job, target: Target, *, stepped: bool = True) -> Any:
    """As for one dense sequence: [rows, heads, head_dim], lse [rows, heads].

    Args:
        stepped: strides of rows are in units of 16 bytes, as `in_steps` gives them, and nothing
            else is known of them; else of any numbers.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    rows, keys, warps, stages, registers = job.blocks
    head_dim = target.head_dim
    given: dict[Any, Any] = {"HEAD_DIM": head_dim, "ROWS": rows, "KEYS": keys, "ADD": target.into}
    width = max(16, 1 << (head_dim - 1).bit_length())
    given |= {"WIDTH": width, "V_DIM": head_dim, "V_WIDTH": width, **job.options}
    given = {name: x for name, x in given.items() if name in job.kernel.arg_names}
    given["STEP"] = 16 // DTYPES[target.dtype].itemsize if stepped else 1
    given |= dict.fromkeys({"CAPPED", "DROPS", "PEAKS"}.intersection(job.kernel.arg_names), False)
    types: dict[str, Any] = {}
    aligned: dict[tuple[int, ...], Any] = {}
    for i, name in enumerate(job.kernel.arg_names):
        types[name] = _type(name, target, of_lists="places" in job.kernel.arg_names)
        if name == "lists" and "OWN" in job.options:
            kinds: Any = ["*i32"] * len(exact.BlockLists._fields)
            types[name] = exact.BlockLists(*kinds)
        if name in ("statistics", "padded", "places", "bounds", "shares"):
            aligned[(i,)] = ALIGNED
        elif isinstance(types[name], TensorView) and name not in NUMBERS:
            aligned[(i, 0)] = ALIGNED
        elif isinstance(types[name], TensorView | Lists | exact.BlockLists):
            fields = enumerate(types[name])
            aligned |= {(i, j): ALIGNED for j, kind in fields if kind != "constexpr"}
        if name == "rule":
            given |= {(i, j): x for j, x in enumerate(ScoreRule()) if x is None}
        elif name in NUMBERS:
            given[(i, 3)] = 1
        elif name == "group" and target.group == 1:
            given[name] = 1
    source = ASTSource(job.kernel, types, given, aligned)
    fuses = "OWN" not in job.options
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": fuses}
    options |= {"maxnreg": registers} if registers else {}
    return triton.compile(source, target=GPUTarget("cuda", target.arch, 32), options=options)


def _type(name: str, target: Target, *, of_lists: bool) -> Any:
    match name:
        case _ if name.isupper():
            return "constexpr"
        case "places" | "bounds":
            return "*i32"
        case "out" | "dq" if of_lists:
            return _type("q", target, of_lists=True)
        case "lists":
            return Lists(*["*i32"] * 4)  # pyright: ignore[reportArgumentType]
        case "q" | "k" | "v" | "dout":
            return TensorView(f"*{target.dtype}", *["i32"] * 3)  # pyright: ignore[reportArgumentType]
        case "out" | "dq" | "dk" | "dv":
            return TensorView("*fp32", *["i32"] * 3)  # pyright: ignore[reportArgumentType]
        case "rule":
            kinds = ("constexpr" if x is None else KINDS[type(x)] for x in ScoreRule())
            return ScoreRule(*kinds)  # pyright: ignore[reportArgumentType]
        case _ if name in NUMBERS:
            return TensorView("*fp32", "i32", "i32", "constexpr")  # pyright: ignore[reportArgumentType]
        case "group" if target.group == 1:
            return "constexpr"
        case "statistics" | "shares":
            return "*fp32"
        case "scale" | "slope_scale":
            return "fp32"
        case _:
            return "i32"


def examined(job: Job, target: Target) -> Code:
    made = compiled(job, target)
    usage, text = _disassembled(made.asm["cubin"])
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    registers, stack, shared = int(found[1]), int(found[2]), int(made.metadata.shared)
    threads = 32 * job.blocks.warps
    most = SHARED.get(target.arch, 100) * 1024
    fit = min(REGISTERS // (registers * threads), THREADS // threads, most // (shared + 1024))
    loops = [loop for loop in (loop_of(x, job.blocks) for x in inner_loops(text)) if loop.matrix]
    return Code(
        job.name,
        target.head_dim,
        " ".join(str(x) for x in job.blocks if x),
        registers,
        stack,
        shared,
        fit,
        narrow_accesses(made.asm["ptx"]),
        tuple(loop._replace(masked=i > 0) for i, loop in enumerate(loops)),
    )


def narrow_accesses(ptx: str) -> int:
    return len(re.findall(r"\b(?:ld|st)\.global\S*\.[bu]16\b(?<!\.v\d\.b16)", ptx))


def inner_loops(text: str) -> list[list[str]]:
    """Instructions of each loop that holds no other, in order."""
    places: dict[str, int] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            places[label[1]] = len(lines)
        elif one := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
            lines.append(re.sub(r"^@!?U?P\w+\s+", "", one[1]))
    jumps = [(re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", x), i) for i, x in enumerate(lines)]
    back = [(places[m[1]], i) for m, i in jumps if m and places.get(m[1], i + 1) <= i]
    inner = [
        (a, b) for a, b in back if not any((c, d) != (a, b) and a <= c <= d <= b for c, d in back)
    ]
    return [lines[a : b + 1] for a, b in inner]


def loop_of(lines: list[str], blocks: LaunchBlocks) -> Loop:
    count = Counter(line.split()[0].split(".")[0] for line in lines)
    per_block = blocks.warps / (blocks.rows * blocks.keys / 4096)  # warps' worth, of 64 x 64 cells
    products = [line for line in lines if line.startswith("HGMMA")]
    cycles = sum(map(wgmma_cycles, products)) * per_block / 4 if products else None
    return Loop(
        False,
        len(lines),
        sum(count[name] for name in MATRIX),
        count["LDGSTS"],
        sum("WARPGROUP.DEPBAR" in line for line in lines),
        count["LDL"] + count["STL"],
        cycles,
        len(lines) * per_block / SCHEDULERS,
    )


def wgmma_cycles(line: str) -> float:
    """Of m64 nN k16 (k8 in tf32) in a warpgroup: 64 n multiplications, 128 bytes a cycle."""
    n = int(re.findall(r"64x(\d+)x\d+", line)[0])
    operands = [x.strip() for x in line.split(maxsplit=1)[1].split(",")]
    from_shared = 32 * n + (2048 if operands[1].startswith("gdesc") else 0)
    return max(64 * n * 16 / 2048, from_shared / 128)


def _disassembled(cubin: bytes) -> tuple[str, str]:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        commands = ([tools / "cuobjdump", "-res-usage"], [tools / "nvdisasm", "-c"])
        usage, text = (
            subprocess.run([*x, file.name], capture_output=True, text=True, check=True).stdout
            for x in commands
        )
    return usage, text


def table(codes: list[Code]) -> str:
    head = (
        "kernel    head  blocks             regs stack  KiB fit  loop    instr  mma copy wait spill"
    )
    lines = [f"{head}  tensor issue"]
    for code in codes:
        start = (
            f"{code.kernel:9} {code.head_dim:4}  {code.blocks:17} {code.registers:5} "
            f"{code.stack:5} {code.shared // 1024:4} {code.fit:3}"
        )
        if not code.loops:  # matrices are multiplied around another loop
            lines.append(start)
        for loop in code.loops:
            cycles = "     -" if loop.tensor_cycles is None else f"{loop.tensor_cycles:6.0f}"
            lines.append(
                f"{start}  {'masked' if loop.masked else 'full':6} {loop.instructions:6} "
                f"{loop.matrix:4} {loop.copies:4} {loop.waits:4} {loop.spilled:5}  "
                f"{cycles} {loop.issue_cycles:5.0f}"
            )
            start = " " * len(start)
    return "\n".join(lines)


def main() -> int:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--arch", type=int, default=90, choices=ARCHITECTURES, help="compute capability"
    )
    parser.add_argument(
        "--head-dim",
        type=whole_number,
        action="append",
        help="default: 64, 128, 256; of lists 128, 256, 576",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--group", type=whole_number, default=8, help="query heads of a KV head")
    parser.add_argument("--into", action="store_true", help="kernels that add to what is there")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--lists", action="store_true", help="the kernels of lists of keys")
    either.add_argument("--whole-rows", action="store_true", help="those of canonical calls")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    dtype, all_jobs = DTYPES[given.dtype], list_jobs if given.lists else jobs
    all_jobs = whole_rows_jobs if given.whole_rows else all_jobs
    widths = sorted({128, 256, MOST_LIST_WIDTHS[dtype][0]}) if given.lists else (64, 128, 256)
    most = MOST_LIST_WIDTHS[dtype][0] if given.lists else 256
    require_range("--head-dim", max(given.head_dim or widths), most=most)
    codes = [
        examined(job, Target(given.arch, head_dim, given.dtype, given.group, given.into))
        for head_dim in given.head_dim or widths
        for job in all_jobs(head_dim, dtype, given.arch)
    ]
    if given.json:
        rows = [{**c._asdict(), "loops": [x._asdict() for x in c.loops]} for c in codes]
        print(json.dumps(rows))
    else:
        print(table(codes))
    return 0


if __name__ == "__main__":
    run_script(main)
