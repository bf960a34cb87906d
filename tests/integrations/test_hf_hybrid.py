"""Models of transformers whose layers carry a state: split, each document is as if run alone."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")

from support.hf_models import case, result, summed
from support.hybrid_models import CONFIGS, VOCABULARY, build, run_apart, split_in_threads, wrong
from torch import Tensor

import tilewise as tw
from tilewise.integrations import hf, state_rules
from tilewise.integrations.hf_forward import split_forward

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
        cache = model(ids[:, :12], use_cache=True).cache_params
        return model(ids[:, 12:], cache_params=cache).logits.detach()

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


def mamba(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
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
    return state_rules.delta_rule(cp, edges, delta, x["q"], k, x["v"], g, x["beta"].sigmoid())


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
            d=x["channels"][:, 0],
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
