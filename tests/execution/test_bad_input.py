"""Bad input is the same ValueError on every rank, before any tensor is sent, with both numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import tilewise as tw
from tilewise.plan.ir import Plan

N, NUM_TOKENS = 3, 12


class Wrong(NamedTuple):
    """Arguments that replace good ones, and what the error says of them."""

    changed: dict[str, Any]
    message: str


def good(rank: int) -> dict[str, Any]:
    q, k, v = (torch.zeros(4, heads, 8) for heads in (4, 2, 2))
    layout = tw.contiguous(NUM_TOKENS, N)
    return {"q": q, "k": k, "v": v, "plan": tw.ring(N), "layout": layout, "mask": tw.Full()}


def call(group, arguments: dict[str, Any]) -> torch.Tensor:
    rest = dict(arguments)
    q, k, v = (rest.pop(name) for name in "qkv")
    return tw.attention(q, k, v, group=group, **rest)


def outcomes(changed: dict[str, Any], wrong_ranks: set[int]) -> list[str]:
    """Every rank's error; no bytes may have been sent."""

    def on_rank(rank: int, group) -> str:
        arguments = good(rank) | (changed if rank in wrong_ranks else {})
        try:
            call(group, arguments)
        except ValueError as error:
            assert group.bytes_sent == 0
            return str(error)
        return "no error"

    return tw.loopback(N, on_rank)


def zeros(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, **options)


BROKEN = tw.ring(N).replaced("broken", tw.ring(N).steps[:-1])
ELSEWHERE = Plan("elsewhere", N, 1, (((1,), (0,), (2,)),) * 2, ())

WRONG = {
    "plan world size": Wrong({"plan": tw.ring(4)}, r"for 4 ranks, but the group has 3"),
    "backward plan world size": Wrong({"backward_plan": tw.ring(2)}, "for 2 ranks, but the group"),
    "backward plan owners": Wrong({"backward_plan": ELSEWHERE}, "own shards differently"),
    "backward plan kind": Wrong(
        {"backward_plan": tw.tree(N)}, r"tree\(3\) and ring.* has all queries on every rank only if"
    ),
    "layout world size": Wrong({"layout": tw.zigzag(12, 4)}, "layout is for 4 ranks, but ring.* 3"),
    "kv_layout world size": Wrong({"kv_layout": tw.zigzag(12, 2)}, "kv_layout is for 2 ranks"),
    "layout tokens": Wrong({"layout": tw.contiguous(16, N)}, r"q has 4 tokens on rank 0.* 6 of 16"),
    "rows of k": Wrong(
        {"k": zeros(5, 2, 8), "v": zeros(5, 2, 8)}, "k has 5 tokens on rank .* 4 of"
    ),
    "not a partition": Wrong(
        {"layout": tw.Layout(12, [[tw.Run(0, 4)]] * 3)}, "layout has 12 rows for 12 tokens"
    ),
    "mask too short": Wrong({"mask": tw.Document([0, 11])}, r"11.*12|12.*11"),
    "mask too long": Wrong({"mask": tw.Document([0, 4, 13])}, r"13.*12|12.*13"),
    "mask heads": Wrong({"mask": tw.PerHead([tw.Full()] * 3)}, "for 3 KV heads, but k has 2"),
    "dimensions": Wrong({"q": zeros(4, 8)}, r"q \(4, 8\).* must all be"),
    "one dimension": Wrong({n: zeros(4) for n in "qkv"}, r"q \(4,\).* must all be"),
    "batch": Wrong(
        {"q": zeros(1, 4, 4, 8), "k": zeros(2, 4, 2, 8), "v": zeros(2, 4, 2, 8)},
        r"batch of q \(1\) and k \(2\)",
    ),
    "heads of k and v": Wrong({"v": zeros(4, 1, 8)}, r"k \(4, 2, 8\) and v \(4, 1, 8\) must have"),
    "tokens of k and v": Wrong({"v": zeros(3, 2, 8)}, r"k \(4, 2, 8\) and v \(3, 2, 8\) must have"),
    "no value head_dim": Wrong({"v": zeros(4, 2, 0)}, "v a head_dim of at least 1"),
    "softcap": Wrong({"softcap": 0.0}, r"softcap \(0.0\) must be finite and above 0"),
    "softcap below 0": Wrong({"softcap": -50.0}, r"softcap \(-50.0\) must be"),
    "softcap and kernel": Wrong({"softcap": 5.0, "kernel": "cpu"}, "'cpu' .* it has no softcap"),
    "softcap as text": Wrong({"softcap": "30"}, r"softcap \('30'\) must be a number"),
    "dropout as text": Wrong({"dropout_p": "0.1"}, r"dropout_p \('0.1'\) must be a number"),
    "dropout": Wrong({"dropout_p": 1.0, "dropout_seed": 1}, r"dropout_p \(1.0\) must be at"),
    "dropout below 0": Wrong({"dropout_p": -0.1, "dropout_seed": 1}, r"dropout_p \(-0.1\)"),
    "no seed": Wrong({"dropout_p": 0.1}, r"dropout_p \(0.1\) on 3 ranks needs a dropout_seed"),
    "seed": Wrong(
        {"dropout_p": 0.1, "dropout_seed": -1}, r"dropout_seed \(-1\) must be at least 0"
    ),
    "head_dim": Wrong({"q": zeros(4, 4, 4)}, r"head_dim of q \(4\) and k \(8\)"),
    "no head_dim": Wrong({n: zeros(4, 2, 0) for n in "qkv"}, r"head_dim of q \(0\)"),
    "heads": Wrong({"q": zeros(4, 3, 8)}, r"num_heads \(3\) must be a multiple of.*\(2\)"),
    "no heads": Wrong({"k": zeros(4, 0, 8), "v": zeros(4, 0, 8)}, r"num_kv_heads \(0\)"),
    "degree": Wrong({"plan": tw.ulysses(3)}, "degrees that work: 1, 2, 4"),
    "dtypes": Wrong({"k": zeros(4, 2, 8).double()}, "dtype torch.float32, torch.float64"),
    "integers": Wrong({n: zeros(4, 2, 8, dtype=torch.int32) for n in "qkv"}, r"dtype \('int32'\)"),
    "devices": Wrong({"k": zeros(4, 2, 8, device="meta")}, "device cpu, meta, cpu"),
    "device": Wrong({n: zeros(4, 2, 8, device="meta") for n in "qkv"}, "no kernel runs on meta"),
    "wire_dtype": Wrong({"wire_dtype": "float8"}, r"wire_dtype \('float8'\) must be"),
    "wire_dtype of torch": Wrong({"wire_dtype": torch.int8}, r"wire_dtype \('int8'\) must be"),
    "save": Wrong({"save": "some"}, r"save \('some'\) must be 'replay' or 'gathered'"),
    "gathered": Wrong(
        {"save": "gathered", "backward_plan": tw.ring(N, moves="q")}, "needs the same plan"
    ),
    "validate": Wrong({"validate": "sometimes"}, r"validate \('sometimes'\) must be"),
    "scale": Wrong({"softmax_scale": float("inf")}, r"softmax_scale \(inf\) must be finite"),
    "scale no number": Wrong({"softmax_scale": "1/8"}, "1/8"),
    "q_positions": Wrong({"q_positions": [3]}, "q_positions are for plans with replicated queries"),
    "q_positions count": Wrong(
        {"plan": tw.tree(N), "q_positions": [3]}, "q has 4 tokens but q_positions 1"
    ),
    "q_positions range": Wrong(
        {"plan": tw.tree(N), "q_positions": [3, 4, 12, 5]}, r"q_positions 3..12 must lie in 0..11"
    ),
    "more queries than tokens": Wrong(
        {"plan": tw.tree(N), "q": zeros(13, 4, 8)}, r"q_positions -1..11 must lie in 0..11"
    ),
    "a plan that is wrong": Wrong({"plan": BROKEN}, "broken: .*kv1"),
    "sink heads": Wrong({"sink": zeros(3)}, r"sink is float32 \[3\], but q has 4 heads"),
    "sink dtype": Wrong({"sink": zeros(4).double()}, "sink is float64, but must be float32 or q's"),
    "sink device": Wrong({"sink": zeros(4, device="meta")}, "sink is on meta, but q on cpu"),
    "sinks of other heads": Wrong({"sink": zeros(2, 3)}, r"sink is float32 \[2, 3\], but q has 4"),
    "sinks of no batch": Wrong({"sink": zeros(2, 1, 4)}, r"sink is float32 \[2, 1, 4\]"),
    "no sinks a head": Wrong({"sink": zeros(0, 4)}, r"sink is float32 \[0, 4\]"),
    "bias shape": Wrong(
        {"bias": zeros(4, 4, 12)}, r"bias is float32 \[4, 4, 12\], but must be .*\[4, 12, 12\]"
    ),
    "bias dtype": Wrong(
        {"bias": zeros(4, 12, 12).double()}, "bias is float64 .*but must be float32, bfloat16 or"
    ),
    "biases without a batch": Wrong(
        {"bias": zeros(3, 4, 12, 12)}, r"bias is \[3, 4, 12, 12\], one for each batch entry, but q"
    ),
    "complex bias": Wrong({"bias": zeros(4, 12, 12).cfloat()}, "bias is complex64"),
    "bias device": Wrong({"bias": zeros(4, 12, 12, device="meta")}, "bias is on meta, but q on"),
    "no bias": Wrong({"bias": [0.0]}, "bias is list"),
    "slopes": Wrong({"bias": tw.alibi([1.0] * 3)}, "has 3 slopes, but q has 4 heads"),
    "bias and kernel": Wrong(
        {"bias": tw.alibi([1.0] * 4), "kernel": "cpu"}, "'cpu' .* it has no bias"
    ),
    "no sink": Wrong({"sink": [0.0] * 4}, r"sink is list"),
    "no plan": Wrong({"plan": "ring"}, "ring|str"),
    "no mask": Wrong({"mask": None}, "None"),
    "no layout": Wrong({"layout": None}, "None"),
    "no tensor": Wrong({"q": [1.0, 2.0]}, "list"),
}


@pytest.mark.parametrize("what", WRONG)
def test_all_ranks_wrong(what: str):
    first, *others = outcomes(WRONG[what].changed, set(range(N)))
    assert others == [first] * (N - 1)
    assert_matches(first, what, rank=0)


@pytest.mark.parametrize("wrong_rank", range(N))
@pytest.mark.parametrize("what", WRONG)
def test_one_rank_wrong(what: str, wrong_rank: int):
    first, *others = outcomes(WRONG[what].changed, {wrong_rank})
    assert others == [first] * (N - 1)
    assert first.startswith(f"rank {wrong_rank}: ")


def assert_matches(text: str, what: str, rank: int) -> None:
    assert text.startswith(f"rank {rank}: ")
    with pytest.raises(ValueError, match=f"(?s){WRONG[what].message}"):
        raise ValueError(text)


DISAGREEING = {
    "plan": {"plan": tw.ring(N, moves="q")},
    "backward_plan": {"backward_plan": tw.all_gather(N)},
    "mask": {"mask": tw.Causal()},
    "layout": {"layout": tw.striped(NUM_TOKENS, N)},
    "kv_layout": {"kv_layout": tw.zigzag(NUM_TOKENS, N)},
    "dtype": {name: zeros(4, h, 8).double() for name, h in zip("qkv", (4, 2, 2), strict=True)},
    "num_dimensions": {name: zeros(1, 4, h, 8) for name, h in zip("qkv", (4, 2, 2), strict=True)},
    "num_heads": {"q": zeros(4, 8, 8)},
    "num_kv_heads": {"k": zeros(4, 4, 8), "v": zeros(4, 4, 8)},
    "head_dim": {name: zeros(4, h, 4) for name, h in zip("qkv", (4, 2, 2), strict=True)},
    "softmax_scale": {"softmax_scale": 0.5},
    "sink": {"sink": zeros(4)},
    "bias": {"bias": tw.alibi([1.0] * 4)},
    "softcap": {"softcap": 30.0},
    "dropout_p": {"dropout_p": 0.5, "dropout_seed": 0},
    "return_max_logit": {"return_max_logit": True},
    "v_head_dim": {"v": zeros(4, 2, 4)},
    "wire_dtype": {"wire_dtype": torch.bfloat16},
    "save": {"save": "gathered"},
    "prune": {"prune": False},
    "requires_grad": {"q": zeros(4, 4, 8, requires_grad=True)},
}


@pytest.mark.parametrize("field", DISAGREEING)
def test_ranks_that_disagree_hear_both_values(field: str):
    for wrong_rank in (0, N - 1):
        first, *others = outcomes(DISAGREEING[field], {wrong_rank})
        assert others == [first] * (N - 1)
        assert first.startswith(f"ranks disagree on {field}: rank 0 has "), first
        assert first.endswith("pass the same value on every rank")


def test_ranks_that_disagree_on_length_hear_both_numbers():
    longer = {"layout": tw.contiguous(14, N), "kv_layout": tw.contiguous(14, N)}
    rows = {name: zeros(4, h, 8) for name, h in zip("qkv", (4, 2, 2), strict=True)}
    first, *others = outcomes(longer | rows, {2})
    assert others == [first] * 2
    assert "rank 0 has 12, rank 2 has 14" in first


def test_batches_that_disagree():
    def on_rank(rank: int, group) -> str:
        q = zeros(2 if rank == 1 else 3, 4, 2, 8)
        with pytest.raises(ValueError) as error:
            call(group, good(rank) | {"q": q, "k": q, "v": q})
        return str(error.value)

    messages = tw.loopback(N, on_rank)
    assert len(set(messages)) == 1 and "batch: rank 0 has 3, rank 1 has 2" in messages[0]


def test_a_plan_that_was_read_and_one_that_was_built_are_told_apart():
    """Their steps are not compared: that would build all ranks' steps of a script."""
    first, *others = outcomes({"plan": tw.parse(tw.show(tw.ring(N)))}, {1})
    assert others == [first] * 2 and first.startswith("ranks disagree on plan")


def test_one_rank_raises_the_plain_error():
    q = torch.zeros(4, 2, 8)
    layout = tw.contiguous(5, 1)
    with pytest.raises(ValueError, match=r"^q has 4 tokens on rank 0, but the layout gives it 5"):
        tw.attention(q, q, q, plan=tw.ring(1), layout=layout, mask=tw.Full())


@pytest.mark.parametrize("keyword", ["attn_mask", "dropout", "is_causal", "soft_cap", "sinks"])
def test_what_is_not_supported_is_no_argument(keyword: str):
    q = torch.zeros(4, 2, 8)
    with pytest.raises(TypeError, match=keyword):
        tw.attention(
            q, q, q, plan=tw.ring(1), layout=tw.contiguous(4, 1), mask=tw.Full(), **{keyword: None}
        )


def test_a_group_that_is_none_of_these():
    q = torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match=r"group \(int\) must be None, a ProcessGroup"):
        tw.attention(q, q, q, plan=tw.ring(1), layout=tw.contiguous(4, 1), mask=tw.Full(), group=3)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"softmax_scale": "0.5"}, r"softmax_scale \('0.5'\) must be a number"),
        ({"softmax_scale": True}, r"softmax_scale \(True\) must be a number"),
        ({"softmax_scale": torch.tensor(0.3, requires_grad=True)}, "softmax_scale .* a number"),
        ({"prune": "no"}, r"prune \('no'\) must be a bool"),
        ({"return_lse": "no"}, r"return_lse \('no'\) must be a bool"),
        ({"return_max_logit": "no"}, r"return_max_logit \('no'\) must be a bool"),
        ({"q": torch.ones(4, 1, 4).to_sparse()}, "q is torch.sparse_coo, but must be dense"),
    ],
)
def test_arguments_of_a_wrong_kind_are_refused(changed: dict[str, Any], message: str):
    x = torch.ones(4, 1, 4)
    call = {"q": x, "k": x, "v": x, "plan": tw.ring(1), "layout": tw.contiguous(4, 1)}
    with pytest.raises(ValueError, match=message):
        tw.attention(**{**call, "mask": tw.Full(), **changed})
