"""The example of gpt-oss: over ranks it says what eager attention says, token for token."""

from typing import Any

import pytest
from processes.launcher import run_processes

import tilewise as tw


@pytest.fixture(scope="module")
def example() -> Any:
    """Imported when a test needs it: it imports a model of transformers."""
    pytest.importorskip("transformers")
    from examples import decode_gpt_oss

    return decode_gpt_oss


def decode(rank: int) -> list[list[int]]:
    from examples import decode_gpt_oss

    return decode_gpt_oss.main(["--num-tokens", "6"])


def test_ranks_decode_the_tokens_of_eager_attention(example: Any):
    example.AttentionInterface.register(example.NAME, example.attend)
    model = example.build()
    whole = [example.unsplit(model, prompt, 12) for prompt in example.PROMPTS]
    assert min(len(set(tokens)) for tokens in whole) > 3, "text that says something"
    model.set_attn_implementation(example.NAME)
    ranks = tw.loopback(4, lambda _, group: example.continued(model, example.PROMPTS, 12, group))
    assert ranks == [whole] * 4


@pytest.mark.slow
def test_processes_compare_themselves(example: Any):
    """main exits if split and eager decoding differ."""
    first, second = run_processes(2, decode)
    assert first == second and [len(tokens) for tokens in first] == [6] * 3
