"""Any plan, layout, mask, heads, dtype and options: results and gradients of dense attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from conformance.oracle import Changes, Inputs, assert_close, dense, draw, split
from hypothesis import given
from hypothesis import strategies as st
from support.drawn_calls import DrawnCall, calls, groups_fit, plans_of
from support.drawn_masks import layouts
from support.fuzzing import examples

import tilewise as tw
from tilewise.kernels.dropout import kept
from tilewise.kernels.protocol import Places, Scores

TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-4,
    torch.bfloat16: 0.1,
    torch.float16: 0.02,
}
USES = ((True, True), (True, True), (False, True), (True, False))  # of out and of lse by the loss
SAVES = (None, "replay", "gathered")


class Options(NamedTuple):
    """What a call is made with beside plan, layout, mask and tensors.

    Attributes:
        keywords: of tw.attention, those alone that need no tensor.
        uses: whether the loss has out, and lse.
    """

    keywords: dict[str, Any]
    dtype: torch.dtype
    batch: tuple[int, ...]
    uses: tuple[bool, bool]
    has_sink: bool


@st.composite
def options(draw: st.DrawFn, call: DrawnCall) -> Options:
    """Each option is left out more often than not."""
    plan, n = call.plan, call.plan.world_size
    words: dict[str, Any] = {}

    def sometimes(name: str, values: st.SearchStrategy[Any]) -> None:
        if draw(st.integers(0, 4)) == 0:
            words[name] = draw(values)

    sometimes("save", st.sampled_from(SAVES))
    sometimes("prune", st.just(False))
    sometimes("softmax_scale", st.floats(0.05, 3.0))
    sometimes("softcap", st.floats(0.2, 20.0))
    sometimes("validate", st.sampled_from(("first", "always", "never")))
    sometimes("kernel", st.just("reference"))
    sometimes("wire_dtype", st.sampled_from(("float64", "float32")))
    if draw(st.integers(0, 4)) == 0:
        words |= {"dropout_p": draw(st.floats(0.0, 0.9)), "dropout_seed": draw(SEEDS)}
    if plan.replicated_queries:
        places = st.integers(0, call.layout.num_tokens - 1)
        sometimes("q_positions", st.lists(places, min_size=1, max_size=4))
    else:
        other = [p for one in plans_of(n, False) for p in one if same_heads(call, p)]
        if words.get("save") == "replay":
            sometimes("backward_plan", st.sampled_from(other))
        if plan.made_for is None and draw(st.integers(0, 4)) == 0:
            kv_layout = draw(layouts(draw(st.integers(1, 40)), n))
            if fits(call.mask, call.layout.num_tokens, kv_layout.num_tokens):
                words["kv_layout"] = kv_layout
    return Options(
        words,
        draw(st.sampled_from((torch.float64, torch.float64, *TOLERANCES))),
        draw(st.sampled_from(((), (), (2,)))),
        draw(st.sampled_from(USES)),
        draw(st.integers(0, 3)) == 0,
    )


SEEDS = st.integers(0, 2**63 - 1)


def same_heads(call: DrawnCall, other: tw.Plan) -> bool:
    """Whether another plan can run a call's backward pass."""
    return other.num_head_groups in (1, call.plan.num_head_groups) and groups_fit(
        other, call.num_heads, call.num_kv_heads
    )


def fits(mask: tw.masks.Mask, num_queries: int, num_keys: int) -> bool:
    try:
        mask.check_tokens(num_queries, num_keys)
    except ValueError:
        return False
    return True


@examples(1.5)
@given(data=st.data(), call=calls(), seed=st.integers(0, 2**32))
def test_any_call_is_dense_attention(data: st.DataObject, call: DrawnCall, seed: int):
    asked = data.draw(options(call), "options")
    words, dtype, batch = {**asked.keywords}, asked.dtype, asked.batch
    num_queries = call.layout.num_tokens
    num_keys = words.get("kv_layout", call.layout).num_tokens
    positions = torch.arange(num_queries)
    if call.plan.replicated_queries:
        last = [*range(max(0, num_keys - 2), num_keys)]
        positions = torch.tensor(words.get("q_positions", last))
        num_queries = len(positions)
    shapes = (
        (*batch, num_queries, call.num_heads, call.head_dim),
        (*batch, num_keys, call.num_kv_heads, call.head_dim),
    )
    x = Inputs(*(t.to(dtype).double() for t in draw(*shapes, seed, call.v_head_dim)))
    x = x._replace(dout=x.dout * asked.uses[0], dlse=x.dlse * asked.uses[1])
    sink = torch.linspace(-2, 2, call.num_heads, dtype=dtype) if asked.has_sink else None
    changes = Changes(None if sink is None else sink.double(), words.get("softcap"))
    if dropout_p := words.get("dropout_p"):
        places = Places(positions, torch.arange(num_keys), 0)
        scores = Scores(1.0, None, dropout_p, words["dropout_seed"], places=places)
        keeps = kept(scores, *(batch or (1,)), call.num_heads).double() / (1 - dropout_p)
        changes = changes._replace(kept=keeps if batch else keeps[0])
    want = dense(x, call.mask, positions, words.get("softmax_scale"), changes)
    got = split(x, call.plan, call.layout, call.mask, dtype, uses=asked.uses, sink=sink, **words)
    rounded = torch.float32 if words.get("wire_dtype") == "float32" else dtype
    assert_close(got, want, max(TOLERANCES[dtype], TOLERANCES[rounded]))
