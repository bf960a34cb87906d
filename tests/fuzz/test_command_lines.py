"""Commands with any words end by SystemExit and say why in a line; none ends in a traceback."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzing import examples
from support.report_pages import many_rows, write_rows
from typer.testing import CliRunner

import tilewise as tw
from tilewise_tools.cli import app

NUMBERS = ("4", "2", "1", "3", "0", "-1", "1.5", "x", "", "1e3", "9" * 30, "٣", "nan", " 2")
TOKENS = ("64", "24", "1", "0", "-5", "K", "1K", "1e9", "64K64", "0x10", "inf", "9" * 25, "1.5M")
PLANS = (
    *(
        "ring(4)",
        "mesh(4, q_tile=2)",
        "ring",
        "mesh",
        "ulysses",
        "tree",
        "needed",
        "tiled",
        "ring(0)",
    ),
    *("ulysses(2, inner=ring(2))", "tree(3)", "mesh(4, q_tile=3)", "mesh(4, q_tile=2, schedule=1)"),
    *(
        "hierarchical(ring(2), ring(2))",
        "ring(4",
        "ring(4).steps",
        "ring(10**9)",
        "ring(2**70)",
        "",
    ),
    *(
        "attention2d(2, 2, overlap='x')",
        "__import__('os')",
        "ring(ring(2))",
        "{file}",
        "{torn}",
        "/",
    ),
    *("nobody.json", "tiled(causal)", "double_ring(2, 2)", "balanced_ring(-3)", "ring(None)", "é"),
)
MASKS = (
    *("causal", "full", "causal & window(7, 0)", "document([0, 9, 64])", "document([0, 9, 24])"),
    *("causal_document", "share_question", "window", "window(-1, 0)", "document([3])", "causal &"),
    *(
        "block_sparse",
        "~causal",
        "chunked_causal(64, 7)",
        "chunked_causal",
        "causal(3)",
        "{file}",
        "",
    ),
)
VALUES = {
    "--world-size": NUMBERS,
    "--num-tokens": TOKENS,
    "--heads": ("4:2", "8", "8:1", "4:3", "0", ":", "4:2:1", "x", "-4", "4:0", "9" * 30, "2:4"),
    "--head-dim": ("4", "16", "1", "0", "-1", "x", "1.5"),
    "--v-head-dim": ("4", "16", "1", "0", "x"),
    "--mask": MASKS,
    "--layout": ("zigzag", "contiguous", "striped", "balanced", "tiled", "spiral", "", "{file}"),
    "--dtype": ("bfloat16", "float32", "float64", "int8", "x", ""),
    "--wire-dtype": ("float32", "float16", "bfloat16", "int8", ""),
    "--wire": (
        "float8",
        "float8(3)",
        "none",
        "float8(0)",
        "plain('x')",
        "wires(forward=float8())",
        "none",
        "latent",
        "8(",
    ),
    "--save": ("replay", "gathered", "replay", "both", ""),
    "--machine": ("h100x8", "cpu-gloo", "a100x8", "{torn}", "{file}", "{folder}", "nowhere", ""),
    "--rank": NUMBERS,
    "--seed": NUMBERS,
    "--top": ("1", "3", "2", "0", "x"),
    "--memory": ("1GiB", "1KiB", "1MiB", "x", "-1GiB", "0", "nanGiB", "1e400GiB", "9" * 20),
    "--backward-plan": PLANS,
    "--corpus": ("pile", "{rows}", "{torn}", "nothing", ""),
    "--timeout": ("1", "0", "-1", "nan", "x", "inf"),
    "--backend": ("loopback", "gloo", "mpi"),
    "--output": ("{folder}/out", "{folder}", "/nowhere/x", "{folder}/no/such", ""),
    "--png": ("{folder}/x.png", "{folder}", "/nowhere/x.png"),
    "--csv": ("{folder}/x.csv", "{folder}", "/nowhere/x.csv"),
    "--trace": ("{folder}/trace.json", "{folder}", "/proc/x"),
    "--json": (),
    "--code": (),
    "--backward": (),
    "--full": (),
    "--help": (),
    "--no-such": (),
}
WORK = (
    *("--num-tokens", "--heads", "--head-dim", "--v-head-dim", "--mask", "--layout", "--dtype"),
    *("--wire-dtype", "--wire", "--save"),
)
COMMANDS = {
    "show": (PLANS, ("--world-size", "--rank", "--code", "--backward", "--json", *WORK)),
    "simulate": (
        PLANS,
        ("--backward-plan", "--world-size", "--trace", "--json", "--machine", *WORK),
    ),
    "plan": ((), ("--memory", "--top", "--output", "--json", "--machine", *WORK)),
    "mask": (
        MASKS,
        ("--num-tokens", "--world-size", "--layout", "--seed", "--corpus", "--png", "--json"),
    ),
    "report": (
        ("{rows}", "{file}", "{torn}", "{folder}", "nobody.jsonl", ""),
        ("--output", "--csv", "--full", "--json", "--machine", *WORK),
    ),
    "parity": (
        ("math:tau", "no.such:f", "x", "", ":", "{file}:f", "{torn}", "os:getcwd", "math:no"),
        ("--world-size", "--timeout", "--backend", "--json"),
    ),
}
# Where a command is not given these it works on a size that takes long, or starts processes.
USUAL = {
    "plan": {"--world-size": "4", "--num-tokens": "64", "--machine": "cpu-gloo"},
    "simulate": {"--num-tokens": "64"},
    "mask": {"--num-tokens": "64"},
    "report": {"--num-tokens": "64"},
}


def any_or_usual(draw: st.DrawFn, values: tuple[str, ...]) -> tuple[str, ...]:
    """All values, or as often the first few, which are right: so that commands also run."""
    return values if draw(st.booleans()) else values[:3]


@st.composite
def words(draw: st.DrawFn, command: str) -> list[str]:
    """Words for a command: mostly its own options with a fitting or another value."""
    arguments, own = COMMANDS[command]
    given = []
    if arguments and draw(st.integers(0, 9)):
        given = [draw(st.sampled_from(any_or_usual(draw, arguments)))]
    asked = dict(USUAL.get(command, {}))
    for _ in range(draw(st.integers(0, 5))):
        name = draw(st.sampled_from(own if draw(st.integers(0, 9)) else sorted(VALUES)))
        values = VALUES[name]
        asked[name] = draw(st.sampled_from(any_or_usual(draw, values))) if values else ""
    options = [[name, value] if VALUES[name] else [name] for name, value in asked.items()]
    if draw(st.integers(0, 14)) == 0:
        options.append(
            [draw(st.sampled_from(("ring(2)", "--", "-x", "\0", "-", "--json=3", "\ud800")))]
        )
    said = [word for option in draw(st.permutations(options)) for word in option]
    return said + given if draw(st.booleans()) else given + said


@pytest.fixture(scope="module")
def files():
    """A plan's file, a page's rows, a file that is neither, and a folder to write to."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        (here / "plan.json").write_text(tw.to_json(tw.mesh(4, q_tile=2)))
        (here / "torn").write_bytes(b'{"format": 1, "key": "\xff\xfe')
        rows = write_rows(here / "rows.jsonl", [*many_rows()[:6], json.loads('{"a": 1}')])
        yield {"file": here / "plan.json", "torn": here / "torn", "rows": rows, "folder": folder}


@pytest.mark.parametrize("command", COMMANDS)
@examples(0.5)
@given(data=st.data())
def test_any_words_end_in_an_answer_or_a_message(data: st.DataObject, command: str, files):
    said = []
    for word in data.draw(words(command), "words"):
        for name, path in files.items():
            word = word.replace(f"{{{name}}}", str(path))
        said.append(word)
    ended = CliRunner().invoke(app, [command, *said])
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise AssertionError(f"{said}: {ended.exception!r}") from ended.exception
    assert ended.exit_code in (0, 1, 2), said
    assert "Traceback" not in ended.output and "Error(" not in ended.stderr, said
    if ended.exit_code:
        assert ended.stderr.strip() or "differ" in ended.output, said
