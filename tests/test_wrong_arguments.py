"""Every public function with one wrong argument, each in turn, ends in a ValueError."""

import inspect
import random
import re
import resource
import time
import warnings
from itertools import count, repeat

import numpy as np
import pytest
import torch
from support.wrong_arguments import CALLS, HEADS, Called, pool

import tilewise as tw

NUM_CALLS = 5000
MOST_SECONDS, MOST_BYTES = 2.0, 200 << 20  # of a refusal, which should take none
MOST_LETTERS = 2000  # beside a text that was given
FOREIGN = re.compile(
    "truth value|ambiguous|Internal error|Could not run|setting an array|could not convert|"
    "cannot convert|unsupported operand|has no attribute|not supported between|object is not"
)
"""Words of numpy, torch and Python, which do not say what to write."""
ITEM = "data.TokenDataset[]"  # IndexError ends iteration over a sequence
GIVEN = {"loopback": "fn", "search": "progress"}  # functions that are called, and may raise


def drawn(number: int) -> list[tuple[Called, str, str]]:
    """So many calls of all, the same in every run; each function and argument is among them."""
    draw, values = random.Random(29), list(pool())
    every = [(called, argument) for called in CALLS for argument in called.arguments()]
    first = [(*one, draw.choice(values)) for one in every]
    more = [(*draw.choice(every), draw.choice(values)) for _ in range(number - len(first))]
    return first + more


def refused(called: Called, argument: str, value: str, again: bool = True) -> str | None:
    """Return what is wrong with the end of a call; None if nothing is, and "" if it was no wrong
    call. A slow one is tried again.

    The first call of a function may import what it needs.
    """
    given = pool()[value]
    began = time.process_time()
    try:
        called.run({argument: given})
        return ""  # a right argument may take long: a million tokens' blocks are drawn
    except ValueError as error:
        letters = len(str(error)) - (len(given) if isinstance(given, str) else 0)
        if letters > MOST_LETTERS or FOREIGN.search(str(error)):
            return f"{called.name}({argument}={value}): {letters} letters: {str(error)[:200]}"
    except Exception as error:
        is_end = called.name == ITEM and isinstance(error, IndexError)
        if not is_end and GIVEN.get(called.name) != argument:
            return f"{called.name}({argument}={value}): {type(error).__name__}: {error}"
    if time.process_time() - began > MOST_SECONDS:
        if again:
            return refused(called, argument, value, again=False)
        return f"{called.name}({argument}={value}): {time.process_time() - began:.1f} s"
    return None


def test_wrong_arguments_end_in_a_value_error():
    import transformers  # noqa: F401 - so that the memory it takes is no call's

    wrong, grown = list[str](), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of the tensors in the pool
        for call in drawn(NUM_CALLS):
            before = peak_bytes()
            text = refused(*call)
            wrong += [text] * bool(text)
            grown += (peak_bytes() - before) * (text != "")
    assert not wrong, "\n".join(wrong)
    assert grown < MOST_BYTES, f"{grown >> 20} MiB"


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize("called", CALLS, ids=lambda called: called.name)
def test_the_right_arguments_are_those_of_the_function(called: Called):
    """No argument of a function is left out, so that a new one is tried too."""
    if called.name in TRIED_OTHERWISE:
        return
    names = {
        name
        for name, parameter in inspect.signature(called.function).parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    assert names <= {*called.arguments()}, called.name


TRIED_OTHERWISE = (
    *("lower", "Plan.program", "masks.chunked_causal(no cu)", "data.shard_inputs(attention_mask)"),
    "masks.random(block_sparse_uniform)",
)


def test_every_public_name_is_tried():
    tried = {called.name.split(".")[0] for called in CALLS} | {"Tree"}
    assert set(tw.__all__) <= tried


WIDE = torch.ones(1, dtype=torch.int64).expand(10**9)


def test_sizes_without_end_are_refused():
    from tilewise.masks import lengths

    for call in (
        lambda: tw.loopback(10**6, lambda rank, group: rank),
        lambda: tw.effective_mask(lambda q, k, v: v, num_tokens=10**6, num_heads=1),
        lambda: tw.effective_mask(lambda q, k, v: v, num_tokens=4, num_heads=10**6),
        lambda: lengths.sample("pile", 10**18, seed=0),
        lambda: lengths.sample("pile", 10**9, seed=0, cap=1),
        lambda: tw.masks.chunked_causal(10**18, 2),
        lambda: tw.masks.block_causal_document([0, 10**18], 2),
        lambda: tw.balanced(tw.Causal(), 10**18, 2),
        lambda: tw.tiled_layout(tw.Full(), 10**18, 2),
        lambda: tw.attention2d(10**9, 10**9),
        lambda: tw.KVCache(10**18, num_kv_heads=2, head_dim=64),
        lambda: tw.masks.random("block_sparse_uniform", 10**9, seed=0),
        lambda: tw.joint(2, range(10**9)),
        lambda: tw.ContextParallel(num_tokens=16).pieces(range(10**9)),
        lambda: tw.zigzag_documents(range(10**9), 2),
        lambda: tw.Slices(((0, 1), (0, 1), "full") for _ in count()),
        lambda: tw.alibi(range(10**9)),
        lambda: tw.alibi(torch.zeros(10**9, device="meta")),
        lambda: tw.Layout.from_positions([range(10**9)]),
        lambda: tw.balanced(repeat(tw.Causal()), 16, 2),
        lambda: tw.Document([range(10**9), range(10**9)]),
        lambda: tw.Document(np.broadcast_to(np.float64(1.5), 10**9)),
        lambda: tw.masks.block_sparse([range(10**9)] * 4, 8),
        lambda: tw.zigzag_documents([0] * 10**6, 2),
        lambda: tw.Layout.from_positions([torch.zeros(1).expand(10**9)]),
        lambda: next(iter(tw.schedule(WIDE, world_size=2, tokens_per_rank=4, **HEADS))),
        lambda: tw.KVCache(float("nan"), num_kv_heads=2, head_dim=64),  # pyright: ignore[reportArgumentType]
        lambda: tw.KVCache(float("inf"), num_kv_heads=2, head_dim=64),  # pyright: ignore[reportArgumentType]
    ):
        began = time.process_time()
        with pytest.raises(ValueError):
            call()
        assert time.process_time() - began < MOST_SECONDS


def test_numpys_numbers_are_numbers():
    assert tw.zigzag(np.int64(16), np.int32(2)) == tw.zigzag(16, 2)
    plan = tw.mesh(np.int64(4), np.int8(2), kv_bytes=np.float64(0.5))
    assert plan == tw.mesh(4, 2, kv_bytes=0.5)
    assert plan.name == "mesh(4, q_tile=2, schedule='greedy', kv_bytes=0.5)"
