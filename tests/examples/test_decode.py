"""The decoding example: over ranks it says what the unsplit model says, token for token."""

from pathlib import Path

import pytest
import torch
from processes.launcher import run_processes

import tilewise as tw
from examples import decode, train_lm

N, PROMPTS = 4, [[*b"def"], [7], [*bytes(range(40))]]


def chaotic() -> train_lm.Llama:
    """A model whose every token hangs on all before: untrained, its layers louder."""
    torch.manual_seed(0)
    config = train_lm.Config(width=48, num_layers=2, hidden=64)
    model = train_lm.Llama(config).double()
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)
    return model


@pytest.mark.parametrize("count", [100, pytest.param(200, marks=pytest.mark.slow)])
def test_tokens_of_three_prompts_are_those_of_unsplit_greedy_decoding(count: int):
    model = chaotic()
    options = ["--chunk", "16", "--strategy", "mesh(4, q_tile=2)", "--num-tokens", str(count)]
    args = decode.arguments(options)
    ranks = tw.loopback(N, lambda rank, group: decode.continued(model, PROMPTS, args, group))
    whole = [decode.unsplit(model, prompt, args.num_tokens) for prompt in PROMPTS]
    assert [len(tokens) for tokens in whole] == [count] * 3
    assert min(len(set(tokens)) for tokens in whole) > 20, "text that says something"
    assert [found.tokens for found in ranks] == [whole] * N


def test_a_step_moves_one_partial_and_one_result_of_each_layer_per_edge_of_the_tree():
    model, num_tokens = chaotic(), 5
    args = decode.arguments(["--num-tokens", str(num_tokens)])
    ranks = tw.loopback(N, lambda rank, group: decode.continued(model, PROMPTS, args, group))
    c = model.config
    row = c.num_heads * (c.head_dim + 1) * 8  # out and lse, fp64
    each = num_tokens * c.num_layers * len(PROMPTS) * row
    assert sum(found.sent for found in ranks) == 2 * (N - 1) * each
    cached = sum(map(len, PROMPTS)) + len(PROMPTS) * (num_tokens - 1)
    kv = c.num_layers * cached * 2 * c.num_kv_heads * c.head_dim * 8
    assert sum(found.gathering for found in ranks) == (N - 1) * kv


def generate(rank: int, folder: str) -> list[list[int]]:
    model = str(Path(folder) / "model.pt")
    found = decode.main(["--model", model, "--chunk", "10"])
    return found.tokens


@pytest.mark.slow
def test_it_continues_what_train_lm_saved_over_processes(tmp_path: Path):
    """main compares with unsplit decoding, and exits if it differs."""
    arguments = ["--num-tokens", "64", "--steps", "2", "--no-compare"]
    train_lm.main([*arguments, "--save", str(tmp_path / "model.pt")])
    (first, *others) = run_processes(N, generate, str(tmp_path))
    assert [len(tokens) for tokens in first] == [200] * 3
    assert others == [first] * (N - 1)


def test_a_missing_model_says_how_to_make_one(tmp_path: Path):
    with pytest.raises(SystemExit, match=r"train_lm.py --save .*none.pt"):
        decode.main(["--model", str(tmp_path / "none.pt")])
