"""Models of transformers whose layers carry a state: split, each document is as if run alone."""

from __future__ import annotations

import copy
import logging
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")

import transformers
from support.hf_models import build as llama
from support.hf_models import cache_name, case, errors, result, summed
from support.hybrid_models import (
    CONFIGS,
    FULL,
    LINEAR,
    VOCABULARY,
    build,
    run_apart,
    split_in_threads,
    wrong,
)
from torch import Tensor

import tilewise as tw
from tilewise.integrations import hf
from tilewise.integrations.transformers import plan as hf_plan
from tilewise.integrations.transformers import state_rules
from tilewise.integrations.transformers.forward import split_forward
from tilewise.planning import StateLayer, search_hybrid
from tilewise.planning.hybrid import CHOICES, HybridChoice
from tilewise.simulation.machine import KernelSpeed, Link, Machine
from tilewise.tokens.moves import halo_moves, relayout_moves, scan_moves

PACKED = (0, 5, 16, 17, 29)
KINDS = ("Qwen3Next", "KimiLinear", "Bamba", "Jamba", "Lfm2", "MiniMax", "RecurrentGemma")
UNEVEN = tw.Layout.from_positions(
    [[*range(9, 13), *range(4), 28], [], [*range(13, 28)], [*range(4, 9)]]
)


@pytest.mark.parametrize(
    "name",
    [name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS],
)
def test_a_split_model_runs_each_document_as_if_alone(name: str):
    assert not wrong(build(name), case(PACKED), tw.zigzag(29, 4), 1e-5)


@pytest.mark.parametrize(
    "layout",
    [tw.contiguous(29, 3), tw.striped(29, 2), UNEVEN, tw.zigzag(29, 8), tw.contiguous(29, 1)],
    ids=["contiguous", "striped", "uneven", "8 ranks", "1 rank"],
)
@pytest.mark.parametrize("name", [*KINDS[:1], pytest.param("FalconH1", marks=pytest.mark.slow)])
def test_any_layout(name: str, layout: tw.Layout):
    assert not wrong(build(name), case(PACKED), layout, 1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_one_document_and_ranks_without_tokens(name: str):
    assert not wrong(build(name), case((0, 3)), tw.contiguous(3, 5), 1e-5)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("NemotronH", {"layer_types": ["full_attention", "moe"], "num_hidden_layers": 2}),
        ("Qwen3Next", {"layer_types": ["full_attention"] * 3}),
        ("Lfm2", {"layer_types": ["full_attention"] * 3}),
        ("Jamba", {"attn_layer_period": 1, "attn_layer_offset": 0}),
    ],
)
def test_a_hybrid_model_without_a_layer_that_carries_a_state(name: str, changes: dict[str, Any]):
    whole, given = build(name, **changes), case((0, 5, 16))
    assert not wrong(whole, given, tw.zigzag(16, 3), 1e-5)
    rows = case((0, 16)).input_ids.view(2, 8)
    want = whole(rows, use_cache=False).logits.detach()

    def on_rank(rank: int, group: Any) -> Tensor:
        model = copy.deepcopy(whole)
        split_forward(model, group)
        return model(rows).logits.detach()

    assert (tw.loopback(2, on_rank)[0] - want).abs().max() < 1e-5


def test_a_batch_of_rows_with_the_same_documents():
    given = case((0, 5, 16), batch=2)
    got = split_in_threads(build("Qwen3Next"), given, tw.zigzag(16, 3)).logits
    want = run_apart(build("Qwen3Next"), given).logits
    assert (got - want).abs().max() < 1e-5


def test_documents_are_read_from_position_ids_too():
    given, whole = case(PACKED), build("Bamba")

    def on_rank(rank: int, group: Any) -> Tensor:
        cp = tw.ContextParallel(group, num_tokens=29, mask=tw.Causal())
        model = hf.parallelize(copy.deepcopy(whole), cp, f"tilewise_{rank}")
        positions = cp.shard(given.position_ids, 1)
        out = model(cp.shard(given.input_ids, 1), position_ids=positions, use_cache=False)
        return hf.unshard(cp, out.logits).detach()

    want = run_apart(whole, given).logits
    assert (tw.loopback(3, on_rank)[0] - want).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["Qwen3Next", "Mamba"])
def test_a_layer_that_a_checkpoint_runs_again_has_its_own_documents(name: str):
    """Two passes of different documents before either backward pass."""
    whole, cases = build(name), [case(PACKED), case((0, 12, 29))]

    def on_rank(rank: int, group: Any) -> Any:
        cp = tw.ContextParallel(group, num_tokens=29, mask=tw.Causal())
        model = hf.parallelize(copy.deepcopy(whole), cp, f"tilewise_{rank}")
        model.activation_checkpointing_enable()
        losses = []
        for given in cases:
            documents = {"labels": given.input_ids, "cu_seqlens": given.cu_seqlens}
            losses.append(model(**hf.shard(cp, given.input_ids, **documents)).loss)
        total: Any = sum(losses)
        total.backward()
        return result(model, torch.zeros(()), total)

    got = summed(tw.loopback(3, on_rank)).grads
    first, second = (run_apart(copy.deepcopy(whole), given).grads for given in cases)
    for parameter, grad in got.items():
        want = first[parameter] + second[parameter]
        assert (grad - want).abs().max() < 1e-5 * max(1, float(want.abs().max())), parameter


def test_unsplit_models_run_as_before_beside_and_after_a_split_one():
    whole, given = build("Qwen3Next"), case((0, 29))
    module = sys.modules[type(whole).__module__]
    functions = dict(vars(module))
    want = whole(given.input_ids, use_cache=False).logits

    def on_rank(rank: int, group: Any) -> Any:
        if rank == 2:  # beside the others
            return copy.deepcopy(whole)(given.input_ids, use_cache=False).logits
        cp = tw.ContextParallel(group, num_tokens=29, mask=tw.Causal())
        model = hf.parallelize(copy.deepcopy(whole), cp, f"tilewise_{rank}")
        split = hf.unshard(cp, model(**hf.shard(cp, given.input_ids)).logits)
        model.set_attn_implementation("eager")
        return split, model(given.input_ids, use_cache=False).logits

    def one(rank: int, group: Any) -> Any:
        return on_rank(2, group)

    ((split, again), _) = tw.loopback(2, on_rank)
    (beside,) = tw.loopback(1, one)
    for got in (split, again, beside):
        assert (got - want).abs().max() < 1e-5
    assert vars(module) == functions


@pytest.mark.parametrize("name", ["Bamba", "Mamba"])
def test_split_inside_the_forward(name: str):
    """As of ParallelismConfig: padded rows are packed, generation runs unsplit."""
    whole = build(name)
    ids = torch.randint(0, VOCABULARY, (3, 13), generator=torch.Generator().manual_seed(1))
    lengths = (13, 9, 5)
    mask = (torch.arange(13) < torch.tensor(lengths)[:, None]).long()
    labels = ids.masked_fill(mask == 0, -100)
    count = (labels[:, 1:] != -100).sum()
    apart, rows = copy.deepcopy(whole), [ids[r : r + 1, :n] for r, n in enumerate(lengths)]
    given = {"use_cache": False, "num_items_in_batch": count}
    losses = [apart(row, labels=row, **given).loss for row in rows]
    total: Any = sum(losses)
    total.backward()
    prompt = {"inputs": ids[:1, :5], "max_new_tokens": 3, "do_sample": False}

    def on_rank(rank: int, group: Any) -> Any:
        model = copy.deepcopy(whole)
        split_forward(model, group)
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        got = result(model, torch.zeros(()), loss)
        return got, model.eval().generate(**prompt)

    ranks = tw.loopback(3, on_rank)
    assert abs(float(ranks[0][0].loss - total.detach())) < 1e-5
    for parameter, grad in summed([got for got, _ in ranks]).grads.items():
        want = apart.get_parameter(parameter).grad
        assert (grad / 3 - want).abs().max() < 1e-5 * max(1, float(want.abs().max())), parameter
    tokens = copy.deepcopy(whole).eval().generate(**prompt)
    assert all(torch.equal(made, tokens) for _, made in ranks)


def test_a_call_with_a_cache_of_states_runs_unsplit():
    whole, ids = build("Mamba").eval(), case((0, 13)).input_ids

    def two_calls(model: Any) -> Tensor:
        name = cache_name(type(model).forward)
        cache = model(ids[:, :12], use_cache=True)[name]
        return model(ids[:, 12:], **{name: cache}).logits.detach()

    def on_rank(rank: int, group: Any) -> Tensor:
        model = copy.deepcopy(whole)
        split_forward(model, group)
        return two_calls(model)

    want = two_calls(copy.deepcopy(whole))
    assert all(torch.equal(got, want) for got in tw.loopback(2, on_rank))


@pytest.mark.parametrize("name", ["Qwen3Next", "Mamba2", "FalconMamba"])
def test_a_state_that_is_lost_is_noticed_before_a_model_runs(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    """check_model runs a tiny model, by which a layer that begins anew is refused."""
    scan = tw.ContextParallel.scan
    lost = lambda self, *args, **given: 0 * scan(self, *args, **given)  # noqa: E731
    monkeypatch.setattr(tw.ContextParallel, "scan", lost)
    with pytest.raises(ValueError, match="split over ranks is not the unsplit model"):
        hf.check_model(build(name, vocab_size=51))  # a configuration that no other test has


def refusal(name: str, call: Any, **options: Any) -> str:
    """The message of all ranks."""
    whole = build(name)

    def on_rank(rank: int, group: Any) -> str:
        fields = {"num_tokens": 29, "mask": tw.Causal(), **options}
        cp = tw.ContextParallel(group, **fields)
        model = hf.parallelize(copy.deepcopy(whole), cp, f"tilewise_{rank}")
        with pytest.raises(ValueError) as raised:
            call(cp, model)
        return str(raised.value)

    (message,) = set(tw.loopback(2, on_rank))
    return message


def test_calls_that_cannot_be_split():
    ids = case((0, 29)).input_ids
    inner = lambda cp, m: m.model(**hf.shard(cp, ids))  # noqa: E731
    assert "in calls of the model itself" in refusal("Qwen3Next", inner)
    inner = lambda cp, m: m.backbone(**hf.shard(cp, ids))  # noqa: E731
    assert "call the model itself, not a part of it" in refusal("Mamba", inner)
    padded = torch.ones(1, 29)
    padded[0, 8] = 0

    def call(cp: tw.ContextParallel, model: Any) -> None:
        model(**hf.shard(cp, ids), attention_mask=cp.shard(padded, 1))

    assert "attention_mask hides padding" in refusal("Mamba", call)
    rows = torch.stack([torch.arange(29), torch.arange(29) % 20])
    apart = lambda cp, m: m(cp.shard(ids.expand(2, -1), 1), position_ids=cp.shard(rows, 1))  # noqa: E731
    assert "rows 0 and 1 of the batch have different documents" in refusal("Qwen3Next", apart)
    assert "the model runs on 29 tokens" in refusal("Mamba", lambda cp, m: m(ids))
    generate = lambda cp, m: m.eval().generate(ids[:, :3], max_new_tokens=2)  # noqa: E731
    assert "set_attn_implementation('sdpa')" in refusal("Mamba", generate)


def test_many_pieces_name_the_number_and_the_way_out():
    layout = tw.striped(140, 2)
    ids = case((0, 140)).input_ids
    call = lambda cp, m: m(**hf.shard(cp, ids))  # noqa: E731
    message = refusal("Lfm2", call, num_tokens=140, layout=layout)
    assert "has 70 pieces of neighbouring tokens, more than 64" in message
    assert "cp.relayout" in message


def delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **given: Any) -> Any:
    """A gated delta rule, token by token; g has a decay for each head, or for each of its keys."""
    batch, tokens, heads, k_dim = k.shape
    state = given["initial_state"]
    if state is None:
        state = v.new_zeros(batch, heads, k_dim, v.shape[3])
    decays, outs = (g if g.ndim == 4 else g[..., None]).exp(), list[Tensor]()
    for t in range(tokens):
        state = decays[:, t, :, :, None] * state
        error = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + k[:, t, :, :, None] * error[:, :, None]
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outs, 1), state


def mamba2(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, **given: Any) -> Any:
    """Mamba2's scan, token by token, of groups with heads that follow one another."""
    b, c = (y.repeat_interleave(x.shape[2] // y.shape[2], 2) for y in (b, c))
    dt = torch.nn.functional.softplus(dt + given["dt_bias"]).clamp(*given["dt_limit"])
    state, outs = x.new_zeros(*x.shape[:1], *x.shape[2:], b.shape[3]), list[Tensor]()
    for t in range(x.shape[1]):
        step = (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        state = (dt[:, t] * a).exp()[..., None, None] * state + step
        outs.append((state @ c[:, t, :, :, None])[..., 0])
    return torch.stack(outs, 1), state


def mamba(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, **_: Any) -> Tensor:
    """Mamba's scan, token by token."""
    state, outs = x.new_zeros(*x.shape[:2], a.shape[1]), list[Tensor]()
    for t in range(x.shape[2]):
        step = (dt * x)[:, :, t, None] * b[:, None, :, t]
        state = (dt[:, :, t, None] * a).exp() * state + step
        outs.append((state @ c[:, :, t, None])[..., 0])
    return torch.stack(outs, 2)


def gated_delta(cp: tw.ContextParallel, edges: Any, x: dict[str, Tensor], *, keys: bool) -> Tensor:
    g = -x["k2"].square() if keys else -x["g"].square()
    k = torch.nn.functional.normalize(x["k"], dim=-1)
    args = x["q"], k, x["v"], g, x["beta"].sigmoid()
    return state_rules.delta_rule(cp, edges, delta, *args)[0]


RULES = {
    "delta": lambda cp, edges, x: gated_delta(cp, edges, x, keys=False),
    "delta by key": lambda cp, edges, x: gated_delta(cp, edges, x, keys=True),
    "mamba2": lambda cp, edges, x: state_rules.state_space(
        cp,
        edges,
        mamba2,
        x["v"],
        x["g"],
        -x["a"].exp(),
        x["k"][:, :, :1],
        x["q"][:, :, :1],
        chunk_size=1,
        dt_bias=x["a"],
        dt_softplus=True,
        dt_limit=(0.0, 2.0),
        z=x["z"],
    ),
    "mamba": lambda cp, edges, x: (
        state_rules.selective_scan(
            cp,
            edges,
            mamba,
            x["v"].flatten(2).mT,
            x["z"].flatten(2).mT,
            -x["channels"].exp(),
            x["k"][:, :, 0].mT,
            x["q"][:, :, 0].mT,
            D=x["channels"][:, 0],
            z=x["v"].flatten(2).mT,
            delta_bias=x["channels"][:, 1],
            delta_softplus=True,
        ).mT
    ),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "layout",
    [tw.zigzag(29, 3), tw.striped(29, 4), UNEVEN, tw.contiguous(29, 8)],
    ids=["zigzag", "striped", "uneven", "8 ranks"],
)
def test_rules_to_the_last_digits(rule: str, layout: tw.Layout):
    """Values and every gradient, fp64, of documents whose borders lie inside shards."""
    make = torch.Generator().manual_seed(5)
    shapes = {"q": (2, 3), "k": (2, 3), "k2": (2, 3), "v": (2, 4), "z": (2, 4), "g": (2,)}
    shapes |= {"beta": (2,)}
    columns = {
        name: torch.randn(2, 29, *shape, generator=make, dtype=torch.float64)
        for name, shape in shapes.items()
    }
    weights = {
        name: torch.randn(*shape, generator=make, dtype=torch.float64)
        for name, shape in {"a": (2,), "channels": (8, 3)}.items()
    }

    def run(rank: int, group: Any, layout: tw.Layout) -> Any:
        cp = tw.ContextParallel(group, num_tokens=29, layout=layout)
        mine = {name: cp.shard(x, 1) for name, x in columns.items()}
        if not layout.size(rank):  # as models run: on a row of padding
            mine = {name: x[:, :1].clone() for name, x in columns.items()}
        leaves = {name: x.clone().requires_grad_() for name, x in (mine | weights).items()}
        out = RULES[rule](cp, PACKED, leaves)[:, : layout.size(rank)]
        out.square().sum().backward()
        grads = {name: x.grad for name, x in leaves.items() if x.grad is not None}
        return out.detach(), {
            name: x[:, : layout.size(rank)] if name in columns else x for name, x in grads.items()
        }

    ranks = tw.loopback(layout.world_size, lambda rank, group: run(rank, group, layout))
    whole = tw.contiguous(29, 1)
    ((want, grads),) = tw.loopback(1, lambda rank, group: run(rank, group, whole))
    assert (layout.unshard([out for out, _ in ranks], 1) - want).abs().max() < 1e-10
    assert len(grads) >= 5
    for name, grad in grads.items():
        parts = [found[name] for _, found in ranks]
        got = layout.unshard(parts, 1) if name in columns else sum(parts)
        assert (got - grad).abs().max() < 1e-10 * max(1, float(grad.abs().max())), name


CONTIGUOUS, ZIGZAG = tw.contiguous(29, 4), tw.zigzag(29, 4)
RELAYOUTS = {
    "zigzag": (CONTIGUOUS, ZIGZAG),
    "uneven": (UNEVEN, tw.contiguous(29, 4)),
    "striped": (tw.zigzag(29, 8), tw.striped(29, 8)),
    "one rank": (tw.contiguous(29, 1), tw.zigzag(29, 1)),
}


@pytest.mark.parametrize(
    "layouts",
    [
        "zigzag",
        "uneven",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("striped", "one rank")),
    ],
)
@pytest.mark.parametrize("name", ["Qwen3Next", "Bamba", "Lfm2"])
def test_a_relayout_around_each_layer_of_attention(name: str, layouts: str):
    """Loss and every gradient, of documents whose borders lie inside shards of either layout."""
    tokens, within = RELAYOUTS[layouts]
    whole = build(name)
    got = split_in_threads(whole, case(PACKED), tokens, attention_layout=within)
    want = run_apart(copy.deepcopy(whole), case(PACKED))
    assert max(errors(got, want).values()) < 1e-5


def test_a_rank_without_tokens_attends_for_others():
    """On contiguous tokens 3 to 5 have none; striped attention gives them some."""
    whole, given = build("Bamba"), case((0, 3))
    layouts = tw.contiguous(3, 6), tw.Layout.from_positions([[], [], [], [2], [1], [0]])
    got = split_in_threads(whole, given, layouts[0], attention_layout=layouts[1])
    assert max(errors(got, run_apart(copy.deepcopy(whole), given)).values()) < 1e-5


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        pytest.param(
            name,
            choice,
            marks=()
            if choice == "relayout" and name in ("Qwen3Next", "Bamba", "Lfm2")
            else pytest.mark.slow,
        )
        for name in CONFIGS
        for choice in CHOICES
    ],
)
def test_what_runs_is_what_was_priced_to_the_byte(name: str, choice: Any):
    """Each rank sends what volumes say of the layers that hybrid_work measured."""
    n, num_tokens = 4, 32
    options: dict[str, Any] = {"attention_window_size": 64} if name == "RecurrentGemma" else {}
    whole, given = build(name, **options), case((0, num_tokens))
    tokens, within = CHOICES[choice].make(num_tokens, n)
    work, plan = hf.hybrid_work(whole, num_tokens), tw.ring(n)

    def on_rank(rank: int, group: Any) -> int:
        cp = tw.ContextParallel(
            group,
            num_tokens=num_tokens,
            mask=tw.Causal(),
            layout=tokens,
            attention_layout=within,
            strategy=plan,
        )
        model = hf.parallelize(copy.deepcopy(whole), cp, f"tilewise_{rank}")
        model(**hf.shard(cp, given.input_ids, labels=given.input_ids)).loss.backward()
        return group.bytes_sent

    attention = tw.volume(plan, replace(work.attention, layout=within))
    passes: list[Any] = [attention] * work.num_attention_layers
    if tokens != within:
        there, back = work.relayout_bytes
        passes += [relayout_moves(tokens, within).volume(there)] * work.num_attention_layers
        passes += [relayout_moves(within, tokens).volume(back)] * work.num_attention_layers
    whole_sequence = 0, num_tokens
    for state in work.states:
        if state.num_heads:
            rounds = scan_moves(tokens, whole_sequence)
            passes += [moves.volume(state.scan_bytes) for moves in rounds]
        if state.conv_channels:
            halo = halo_moves(tokens, state.conv_width - 1, 0, whole_sequence)
            passes.append(halo.volume(4 * state.conv_channels))
    counted = [sum(f[r] + b[r] for f, b in passes) for r in range(n)]
    assert tw.loopback(n, on_rank) == counted
    (found,) = [
        one
        for one in search_hybrid(work, tw.Machine.preset("cpu-gloo"), world_size=n)
        if one.name == choice
    ]
    assert (found.layout, found.attention_layout) == (tokens, within)
    others = sum(found.sent_bytes) - found.sent_bytes[0]
    own = max(
        c - work.num_attention_layers * sum(v[r] for v in attention) for r, c in enumerate(counted)
    )
    assert own <= others


KERNELS = tuple(KernelSpeed("float32", b, (1.0,), (1.0,), ((1e9,),)) for b in (False, True))
FAST = Machine("fast", 8, Link(1e12, 1e-4), Link(1e12, 1e-4), KERNELS)
"""Kernels are slow beside its links, and as fast for any shape of call, so equal work of attention
is worth a relayout."""


THREE = {"layer_types": [LINEAR, LINEAR, FULL, LINEAR], "num_hidden_layers": 4}


def planned(
    name: str, machine: Machine | None, n: int = 3, **options: Any
) -> list[tuple[Any, str]]:
    """What every rank of a model that was parallelized with strategy "auto" has for layouts."""
    whole = build(name, **(THREE if name == "Qwen3Next" else {}))

    def on_rank(rank: int, group: Any) -> tuple[Any, str]:
        given = {"num_tokens": 2046, "mask": tw.Causal(), "machine": machine, **options}
        cp = tw.ContextParallel(group, **given)
        hf.parallelize(copy.deepcopy(whole), cp, f"tilewise_{rank}")
        return (cp.layout, cp.attention_layout), repr(cp)

    return tw.loopback(n, on_rank)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Messages of tilewise."""
    return [record.getMessage() for record in caplog.records if record.name == "tilewise"]


def test_auto_chooses_a_hybrid_models_layouts_and_says_why(caplog: pytest.LogCaptureFixture):
    slow = Machine("slow", 8, Link(1e6, 0.1), Link(1e6, 0.1), FAST.kernels)
    expected = {
        "relayout": (FAST, tw.contiguous(2046, 8), tw.zigzag(2046, 8)),
        "contiguous": (slow, tw.contiguous(2046, 8), tw.contiguous(2046, 8)),
    }
    for machine, *layouts in expected.values():
        with caplog.at_level(logging.INFO, "tilewise"):
            ranks = planned("Qwen3Next", machine, 8)
        assert [found for found, _ in ranks] == [tuple(layouts)] * 8
        (message,) = said(caplog)
        caplog.clear()
        work = hf.hybrid_work(build("Qwen3Next", **THREE), 2046)
        best, *_ = search_hybrid(work, machine, world_size=8)
        assert (best.layout, best.attention_layout) == tuple(layouts)
        start = (
            "strategy='auto' laid out 2046 tokens of Qwen3NextForCausalLM (1 layers of attention, 3"
        )
        assert message.startswith(start) and f"on 8 ranks of {machine.name}" in message
        assert best.reason.split(":")[0] in message and "relayout" in message
    assert "attention on zigzag" in planned("Qwen3Next", FAST, 8)[0][1]


def test_what_was_named_is_left_alone(caplog: pytest.LogCaptureFixture):
    contiguous, zigzag = tw.contiguous(2046, 3), tw.zigzag(2046, 3)
    with caplog.at_level(logging.INFO, "tilewise"):
        for options, layouts in (
            ({"layout": contiguous}, (contiguous, contiguous)),
            ({"attention_layout": tw.striped(2046, 3)}, (zigzag, tw.striped(2046, 3))),
            ({"strategy": tw.ring(3)}, (zigzag, zigzag)),
        ):
            assert [found for found, _ in planned("Bamba", FAST, **options)] == [layouts] * 3
    assert not said(caplog)


def test_ranks_of_which_one_has_read_its_layout_raise_the_same_error():
    """It kept the usual one, and the others took the planner's."""
    whole = build("Mamba")

    def on_rank(rank: int, group: Any) -> str:
        cp = tw.ContextParallel(group, num_tokens=29, mask=tw.Causal())
        assert rank != 1 or cp.layout == tw.zigzag(29, 3)
        model = hf.parallelize(copy.deepcopy(whole), cp, f"tilewise_{rank}")
        with pytest.raises(ValueError) as raised:
            model(**hf.shard(cp, case(PACKED).input_ids))
        return str(raised.value)

    (message,) = set(tw.loopback(3, on_rank))
    assert "ranks disagree on layout: rank 0 has contiguous(29, 3)" in message


def test_a_model_that_cannot_be_measured_keeps_its_layout_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fails(*_: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(hf_plan, "measured_work", fails)
    with caplog.at_level(logging.INFO, "tilewise"):
        ranks = planned("Bamba", FAST)
    assert ranks[0][0] == (tw.zigzag(2046, 3), tw.zigzag(2046, 3))
    (message,) = said(caplog)
    assert "could not be measured (RuntimeError: no such kernel)" in message


def test_layers_are_measured_without_a_kernel_or_a_weight():
    """Of a model on the meta device; the module's functions are what they were."""
    with torch.device("meta"):
        model = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig())
    functions = dict(vars(sys.modules[type(model).__module__]))
    work = hf.hybrid_work(model, 1 << 18)
    assert vars(sys.modules[type(model).__module__]) == functions
    state = StateLayer(32, 128, 128, "matrix", 2 * 16 * 128 + 32 * 128, 4)
    assert work.states == (state,) * 36 and work.num_attention_layers == 12
    assert work.attention.num_heads == 16 and work.attention.num_kv_heads == 2
    assert state.scan_bytes == 32 * (128 * 128 + 128 * 128) * 4
    with pytest.raises(ValueError, match="LlamaForCausalLM has no layer that carries a state"):
        hf.hybrid_work(llama("llama"), 1 << 18)


@pytest.mark.parametrize("name", ["Qwen3Next", "Bamba"])
def test_a_relayout_that_was_planned_inside_the_forward(name: str, monkeypatch: pytest.MonkeyPatch):
    """As of ParallelismConfig, for each length of batch; rows of several lengths are documents."""
    chosen = HybridChoice("relayout", "this test wants it")
    monkeypatch.setattr(hf_plan, "promising_hybrid", lambda *_: chosen)
    whole, given = build(name), case(PACKED)
    want = run_apart(copy.deepcopy(whole), given)
    labels = given.input_ids.clone()
    labels[:, list(PACKED[:-1])] = -100

    def on_rank(rank: int, group: Any) -> Any:
        model = copy.deepcopy(whole)
        split_forward(model, group)
        out = model(input_ids=given.input_ids, position_ids=given.position_ids, labels=labels)
        out.loss.backward()
        cp = model._tilewise_rows.for_length(29, "cpu")
        return result(model, torch.zeros(()), out.loss), (cp.layout, cp.attention_layout)

    ranks = tw.loopback(3, on_rank)
    assert ranks[0][1] == (tw.contiguous(29, 3), tw.zigzag(29, 3))
    assert abs(float(ranks[0][0].loss - want.loss)) < 1e-5
    for parameter, grad in summed([got for got, _ in ranks]).grads.items():
        wanted = want.grads[parameter]
        error = (grad / 3 - wanted).abs().max()
        assert error < 1e-5 * max(1, float(wanted.abs().max())), parameter
