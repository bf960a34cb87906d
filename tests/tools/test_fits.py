"""How long a sequence fits: what is counted is what torch holds, and the longest is the longest."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import tilewise as tw
from benchmarks.fits import MODELS, SMALL, measured_bytes, write_config
from tilewise_tools.cli import app
from tilewise_tools.fits.longest import UNIT, longest, memory_of
from tilewise_tools.fits.model import read_config
from tilewise_tools.fits.parts import Peak
from tilewise_tools.fits.setting import Setting

CPU = tw.Machine.preset("cpu-gloo")
OTHERS: Mapping[str, Mapping[str, Any]] = {  # fused matrices, windows, norms of q and k
    "phi3": {**SMALL, "num_key_value_heads": 2, "pad_token_id": 0},
    "gemma3_text": {**SMALL, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 100},
    "qwen3": {**SMALL, "num_key_value_heads": 2, "head_dim": 64},
}
LLAMA = MODELS["llama"]
WIDTH, INNER, HEADS, KV_HEADS, HEAD_DIM, WORDS, LAYERS = 256, 704, 8, 2, 32, 4096, 4


@pytest.fixture
def config(tmp_path: Path) -> Any:
    return read_config(write_config(LLAMA, "llama", tmp_path))


def fits(path: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["fits", "--model", str(path), *words])


def sizes(peak: Peak) -> dict[str, int]:
    return {part.name: part.num_bytes for part in peak.parts}


@pytest.mark.parametrize("dtype, c", [("float32", 4), ("bfloat16", 2)])
def test_a_llama_takes_what_the_pages_formulas_say(config: Any, dtype: str, c: int):
    t, h, f = 1024, WIDTH, INNER
    fit = memory_of(config, Setting(CPU, dtype=dtype), t)
    number, held = fit.step.facts.num_parameters, sizes(fit.peak)
    attention = 2 * (HEADS + KV_HEADS) * HEAD_DIM * c + 4 * HEADS
    head = 4 * WORDS + 4 * h + 2 * h * c + 4 + 2 * HEAD_DIM * c
    assert held == {
        "parameters": number * c,
        "optimizer": 2 * number * c,
        "layers": LAYERS * t * (4 * f * c + 2 * (4 * h + 2 * h * c + 4)),
        "attention": LAYERS * t * attention + fit.step.passes.workspace_bytes(),
        "head": t * head + 4,  # and the loss, in fp32
        "backward": t * 8 * WORDS + 4,
    }
    again = memory_of(config, Setting(CPU, dtype=dtype, checkpointing=True), t)
    saved = sizes(again.peak)  # the first layer's input is the embeddings', of the head
    assert saved["layers"] + saved["head"] == LAYERS * t * h * c + t * head + 4


def check(config: Any, setting: Setting, num_tokens: int) -> None:
    said = memory_of(config, setting, num_tokens).peak.num_bytes
    assert said == pytest.approx(measured_bytes(config, setting, num_tokens), rel=0.03)


def test_what_is_said_is_what_torch_held(config: Any):
    check(config, Setting(CPU, dtype="float32"), 512)


@pytest.mark.slow
def test_two_ranks_hold_what_is_said(config: Any):
    check(config, Setting(CPU, cp=2, dtype="float32", checkpointing=True), 1024)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*MODELS, *OTHERS])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("num_tokens", [128, 512, 2048])
def test_models_hold_what_is_said(kind: str, checkpointing: bool, num_tokens: int, tmp_path: Path):
    config = read_config(write_config({**MODELS, **OTHERS}[kind], kind, tmp_path))
    check(config, Setting(CPU, dtype="float32", checkpointing=checkpointing), num_tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"dp": 2},
        {"cp": 2, "plan": tw.ring(2)},
        {"cp": 2},
        {"offload": ("activations",)},
        {"offload": ("activations",), "checkpointing": True},
    ],
    ids=str,
)
def test_settings_hold_what_is_said(config: Any, changes: dict[str, Any]):
    # What FSDP2 has reduced lives until Python frees its cycles.
    setting = replace(Setting(CPU, dtype="float32"), **changes)
    said = memory_of(config, setting, 1024).peak.num_bytes
    assert said == pytest.approx(measured_bytes(config, setting, 1024), rel=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"cp": 4, "checkpointing": True}], ids=str)
def test_the_longest_fits_and_the_next_one_does_not(config: Any, changes: dict[str, Any]):
    setting, memory = replace(Setting(CPU, dtype="float32"), **changes), 400_000_000
    fit = longest(config, setting, memory)
    assert fit.num_tokens and fit.peak.num_bytes <= memory
    after = memory_of(config, setting, fit.num_tokens + UNIT * setting.cp)
    assert after.peak.num_bytes > memory
    assert longest(config, setting, 30_000_000).num_tokens == 0


def test_shards_and_the_host_take_their_parts(config: Any):
    whole = memory_of(config, Setting(CPU), 512)
    number = whole.step.facts.num_parameters
    sharded = sizes(memory_of(config, Setting(CPU, dp=4, param_dtype="float32"), 512).peak)
    assert (sharded["parameters"], sharded["optimizer"]) == (number, 2 * number)
    assert sharded["gathered"] > 0
    host = sizes(memory_of(config, Setting(CPU, offload=("optimizer",)), 512).peak)
    assert host == {k: v for k, v in sizes(whole.peak).items() if k != "optimizer"}
    away = sizes(memory_of(config, Setting(CPU, dp=4, offload=("parameters",)), 512).peak)
    assert not away.keys() & {"parameters", "optimizer"} and "gathered" in away


def test_the_command_says_the_same(config: Any, tmp_path: Path):
    words = "--machine", "cpu-gloo", "--memory", "300MB", "--dtype", "float32"
    fit = longest(config, Setting(CPU, dtype="float32"), 300_000_000)
    found = json.loads(fits(tmp_path, *words, "--json").stdout)
    assert (found["num_tokens"], found["peak_bytes"]) == (fit.num_tokens, fit.peak.num_bytes)
    assert found["fits"] and sum(x["num_bytes"] for x in found["parts"]) == found["peak_bytes"]
    shown = fits(tmp_path / "config.json", *words, "--num-tokens", "2K")
    assert shown.exit_code == 0 and "2,048 tokens (cp 1, dp 1): does not fit" in shown.stdout
    assert "4 layers x 2,048 rows x 17,416 B" in shown.stdout
    nothing = fits(tmp_path, *words[:2], "--memory", "1MB")
    assert nothing.exit_code == 0 and nothing.stdout.startswith("nothing fits")


@pytest.mark.parametrize(
    "words, part",
    [
        (("--dtype", "int8"), "dtype 'int8' is not known; take one of bfloat16"),
        (("--offload", "disk"), "offload 'disk' is not known; take one of optimizer"),
        (("--optimizer", "lion"), "optimizer 'lion' is not known; take one of adamw, sgd"),
        (("--param-dtype", "float32"), "shard them (dp of 2 or more)"),
        (("--machine", "abacus"), "--machine ('abacus') is neither a preset nor a file"),
        (("--memory", "much"), "--memory ('much') must be a number of bytes"),
        (("--num-tokens", "-1"), "--num-tokens ('-1') must be a number"),
        (("--cp", "4", "--num-tokens", "3"), "--num-tokens (3) must be at least --cp (4)"),
        (("--cp", "4", "--strategy", "ring(2)"), "is for 2 ranks, but --cp is 4"),
        (("--cp", "4", "--strategy", "rung(4)"), "rung"),
    ],
)
def test_bad_options_are_refused_by_name(config: Any, tmp_path: Path, words: Any, part: str):
    ended = fits(tmp_path, *words)
    assert ended.exit_code == 2 and part in ended.stderr and ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "fields, part",
    [
        ({"model_type": "mixtral"}, "means a mixture of experts"),
        ({"model_type": "mamba"}, "carries a state along the sequence"),
        ({"model_type": "t5"}, "has no model that predicts the next token"),
        ({"model_type": "llava", "text_config": {}}, "has a text_config beside"),
        ({"model_type": "orrery"}, "model_type ('orrery') is not known to transformers"),
        ({"hidden_size": 64}, "model_type is missing"),
        ({"model_type": "llama", "num_attention_heads": "many"}, "transformers refuses it"),
        ([], "the file must hold one object"),
        ({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2}, "dropout (0.1) runs on"),
    ],
)
def test_models_that_are_not_counted_are_refused_by_name(tmp_path: Path, fields: Any, part: str):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    ended = fits(path, "--machine", "cpu-gloo", "--num-tokens", "128")
    *progress, reason = ended.stderr.splitlines()  # a slow start says what it is about
    assert ended.exit_code == 2 and part in reason, ended.output
    assert all(line.startswith("a step of") for line in progress)
