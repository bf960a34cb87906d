"""Any plan, layout, mask, heads, dtype and options: a canonical call has the bits of one rank."""

from __future__ import annotations

from typing import Any

import torch
from conformance.bits import Case, alone, assert_same, results
from hypothesis import given
from hypothesis import strategies as st
from support.drawn_calls import DrawnCall, exact_calls
from support.fuzzing import examples

import tilewise as tw

MOST_TOKENS = 300  # several blocks
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@st.composite
def cases(draw: st.DrawFn, call: DrawnCall) -> Case:
    """Tensors of a call and its options, each of which is left out more often than not."""
    words: dict[str, Any] = {"mask": call.mask}
    for name, values in (
        ("softcap", st.floats(0.2, 20.0)),
        ("softmax_scale", st.floats(0.05, 3.0)),
        ("return_max_logit", st.just(True)),
        ("bias", st.just(tw.alibi([2.0**-i for i in range(call.num_heads)]))),
    ):
        if draw(st.integers(0, 4)) == 0:
            words[name] = draw(values)
    if draw(st.integers(0, 4)) == 0:
        words |= {"dropout_p": draw(st.floats(0.0, 0.9)), "dropout_seed": draw(st.integers(0, 99))}
    dtype, batch = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(((), (), (2,))))
    torch.manual_seed(draw(st.integers(0, 2**32)))
    tokens, q, kv, width = call.sizes
    shapes = ((q, width), (kv, width), (kv, call.v_head_dim), (q, call.v_head_dim), (q,))
    *tensors, dlse = (torch.randn(*batch, tokens, *shape, dtype=torch.float64) for shape in shapes)
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    sink = torch.linspace(-2, 2, q, dtype=dtype) if draw(st.integers(0, 3)) == 0 else None
    return Case(*(x.to(dtype) for x in tensors), dlse.to(statistics), sink, words)


@examples(0.5)
@given(data=st.data(), call=exact_calls(most_tokens=MOST_TOKENS))
def test_any_canonical_call_has_the_bits_of_one_rank(data: st.DataObject, call: DrawnCall):
    case = data.draw(cases(call), "case")
    save = data.draw(st.sampled_from((None, "replay", "gathered")), "save")
    assert_same(results(case, call.plan, call.layout, save=save), alone(case))
