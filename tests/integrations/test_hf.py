"""Models of transformers with their sequence split: the unsplit model's loss and gradients."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")

from processes.launcher import run_processes
from support.hf_models import (
    Case,
    Result,
    build,
    case,
    errors,
    result,
    run_split,
    run_whole,
    split_in_threads,
    summed,
)
from support.hybrid_models import run_apart
from support.thinned import thinned
from transformers import BertConfig, BertModel

import tilewise as tw
from tilewise.integrations import hf
from tilewise.integrations.transformers.forward import split_forward

N = 4
WHOLE, PACKED, SHORT = (0, 22), (0, 5, 16, 17, 22), (0, 3)
WINDOWED = ("qwen2", "mistral", "gemma2", "gemma3", "cohere2")
MODELS = ("llama", "granite", "deepseek_v3", "qwen3", "mixtral", "gpt2", *WINDOWED)


def compare(name: str, given: Case, **options: Any) -> None:
    got, want = split_in_threads(name, given, **options), run_whole(build(name), given)
    wrong = {what: error for what, error in errors(got, want).items() if not error < 1e-5}
    assert not wrong, name


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_a_split_model_is_the_unsplit_model(name: str):
    compare(name, case(PACKED))


@pytest.mark.parametrize("cu_seqlens", [WHOLE, SHORT], ids=["whole", "short"])
def test_one_document_and_ranks_without_tokens(cu_seqlens: tuple[int, ...]):
    compare("gemma3", case(cu_seqlens))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo reads it
def test_a_compiled_model_is_the_eager_model():
    model, given = build("llama"), case(PACKED)
    cp = tw.ContextParallel(num_tokens=given.input_ids.shape[-1], mask=tw.Causal())
    hf.parallelize(model, cp)
    eager = run_split(model, cp, given)
    model.zero_grad()
    model.compile(backend="eager")
    assert max(errors(run_split(model, cp, given), eager).values()) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("cu_seqlens", [WHOLE, PACKED, SHORT], ids=["whole", "packed", "short"])
@pytest.mark.parametrize("name", MODELS)
def test_all_models_in_all_cases(name: str, cu_seqlens: tuple[int, ...]):
    compare(name, case(cu_seqlens))


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_in_bfloat16_a_split_model_errs_at_most_twice_as_much(name: str):
    given = case((0, 20, 64))
    exact = build(name, dtype=torch.bfloat16).float()
    want = run_whole(exact, given)
    dense = run_whole(build(name, dtype=torch.bfloat16), given)
    split = split_in_threads(name, given, dtype=torch.bfloat16)
    allowed, got = errors(dense, want, mean=True), errors(split, want, mean=True)
    assert not {n: (e, allowed[n]) for n, e in got.items() if e > 2 * allowed[n]}


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_under_autocast_a_split_model_errs_at_most_twice_as_much(name: str, autocast, weights):
    """RoPE leaves q and k in fp32 there, and v in autocast's dtype."""
    given = case((0, 64) if name == "gpt_oss" else (0, 20, 64))
    want = run_whole(build(name, dtype=weights).float(), given)
    with torch.autocast("cpu", dtype=autocast):
        dense = run_whole(build(name, "eager" if name == "gpt_oss" else "sdpa", weights), given)
    split = split_in_threads(name, given, dtype=weights, autocast=autocast)
    allowed, got = errors(dense, want, mean=True), errors(split, want, mean=True)
    many = {"logits"} | {name for name, x in want.grads.items() if x.numel() >= 32}  # not by chance
    assert not {n: (e, allowed[n]) for n, e in got.items() if n in many and e > 2 * allowed[n]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"strategy": tw.ring(N)},
        {"strategy": tw.mesh(N, q_tile=2), "layout": tw.contiguous(22, N)},
        {"strategy": tw.ulysses(2, inner=tw.ring(2)), "layout": tw.striped(22, N)},
    ],
    ids=["ring", "mesh", "usp"],
)
def test_any_strategy_and_layout(options: dict):
    compare("qwen2", case(PACKED), **options)


@pytest.mark.parametrize("cu_seqlens", [WHOLE, PACKED, SHORT], ids=["whole", "packed", "short"])
def test_llama_4_counts_chunks_and_temperature_from_each_document(cu_seqlens: tuple[int, ...]):
    """Unsplit, transformers counts the temperature over the whole row: documents run apart."""
    given = case(cu_seqlens)
    got, want = split_in_threads("llama4", given), run_apart(build("llama4"), given)
    assert not {what: error for what, error in errors(got, want).items() if not error < 1e-5}


def test_the_temperature_of_llama_4_matters():
    given = case(PACKED)
    want = run_apart(build("llama4"), given)
    for other in (
        run_apart(build("llama4", attn_temperature_tuning=False), given),
        run_whole(build("llama4"), given),
    ):
        assert errors(other, want)["logits"] > 1e-2


def test_scores_are_capped_as_unsplit():
    given, changes = case(PACKED), {"attn_logit_softcapping": 2.0}
    want = run_whole(build("gemma2", **changes), given)

    def on_rank(rank: int, group) -> Result:
        cp = tw.ContextParallel(group, num_tokens=22, mask=tw.Causal())
        return run_split(build("gemma2", hf.register(cp, f"tilewise_{rank}"), **changes), cp, given)

    assert max(errors(summed(tw.loopback(N, on_rank)), want).values()) < 1e-5


@pytest.mark.parametrize("cu_seqlens", [WHOLE, SHORT], ids=["whole", "short"])
def test_sinks_take_part_in_the_softmax_of_all_ranks(cu_seqlens: tuple[int, ...]):
    compare("gpt_oss", case(cu_seqlens))


@pytest.mark.parametrize("cu_seqlens", [WHOLE, PACKED, SHORT], ids=["whole", "packed", "short"])
def test_values_of_another_width_than_keys(cu_seqlens: tuple[int, ...]):
    compare("deepseek_v3", case(cu_seqlens))


def test_packed_documents_of_a_model_with_sinks_are_documents_alone():
    """Unsplit, gpt-oss of transformers does not keep documents in one row apart: docs/peers.md."""
    given = case(PACKED)
    got, stock = (
        split_in_threads("gpt_oss", given).logits,
        run_whole(build("gpt_oss"), given).logits,
    )
    for start, stop in pairwise(PACKED):
        want = run_whole(build("gpt_oss"), Case(given.input_ids[:, start:stop], (0, stop - start)))
        assert (got[:, start:stop] - want.logits).abs().max() < 1e-5
        off = float((stock[:, start:stop] - want.logits).abs().max())
        assert off < 1e-5 if start == 0 else off > 1e-2


def test_each_layer_keeps_its_own_mask():
    """With windows only in the sliding layers, other results than with all or none."""
    want = run_whole(build("gemma3"), case(WHOLE)).logits
    kinds = ["full_attention", "sliding_attention"]
    for kind in kinds:
        other = run_whole(build("gemma3", layer_types=[kind] * 3), case(WHOLE)).logits
        assert (other - want).abs().max() > 1e-2


def test_a_batch_of_rows_with_the_same_documents():
    compare("llama", case(PACKED, batch=3))


@pytest.mark.parametrize("name", ["gemma2", "qwen3"])
def test_documents_from_position_ids_alone(name: str):
    """No cu_seq_lens: the ranks put their position_ids together, which may differ between rows."""
    other = (0, 9, 22)
    rows = [case(PACKED), case(other)]
    ids = torch.cat([x.input_ids for x in rows])
    positions = torch.cat([x.position_ids for x in rows])
    want = torch.cat([run_apart(build(name), one).logits for one in rows])

    def on_rank(rank: int, group) -> torch.Tensor:
        cp = tw.ContextParallel(group, num_tokens=22, mask=tw.Causal())
        model = build(name, hf.register(cp, f"tilewise_{rank}"))
        own, places = (cp.shard(x, 1) for x in (ids, positions))
        both = model(own, position_ids=places, use_cache=False).logits
        one = model(own[:1], position_ids=places[:1], use_cache=False).logits
        return cp.unshard(torch.cat([both, one]), 1)

    for got in tw.loopback(N, on_rank):
        assert (got - torch.cat([want, want[:1]])).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_positions_of_ones_own_beside_a_mask_are_one_document(name: str):
    """They skip (PoSE), come twice, stand still: to transformers such a row is one document."""
    whole, ids = build(name), case((0, 24)).input_ids.view(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 9:] = 0
    at = torch.arange(12)
    for positions in (at + 20 * (at > 4), at // 2, at * 0, 30 - at):
        given = {"position_ids": positions[None], "attention_mask": mask, "use_cache": False}
        want = whole(ids, **given).logits.detach() * mask[..., None]

        def on_rank(rank: int, group, given=given) -> torch.Tensor:
            model = copy.deepcopy(whole)
            split_forward(model, group)
            return model(ids, **given).logits.detach()

        assert (tw.loopback(2, on_rank)[0] - want).abs().max() < 1e-5


def test_a_bidirectional_model_sees_everything():
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    config = BertConfig(vocab_size=50, num_hidden_layers=2, **sizes)
    whole = BertModel._from_config(config, attn_implementation="eager").eval()
    ids = case(WHOLE, batch=2).input_ids
    want = whole(ids).last_hidden_state

    def on_rank(rank: int, group) -> torch.Tensor:
        cp = tw.ContextParallel(group, num_tokens=22)
        name = hf.register(cp, f"tilewise_{rank}")
        model = BertModel._from_config(BertConfig(**config.to_dict()), attn_implementation=name)
        model.eval().load_state_dict(whole.state_dict())
        out = model(cp.shard(ids, 1), position_ids=cp.position_ids[None])
        return cp.unshard(out.last_hidden_state, 1)

    assert all((got - want).abs().max() < 1e-5 for got in tw.loopback(N, on_rank))


def test_rows_padded_on_their_right_become_documents():
    """The unsplit model gets them as they are; labels of padding count for neither."""
    rows, lengths = (
        torch.randint(1, 50, (3, 9), generator=torch.Generator().manual_seed(2)),
        (9, 4, 6),
    )
    mask = (torch.arange(9) < torch.tensor(lengths)[:, None]).long()
    labels = rows.masked_fill(mask == 0, -100)
    whole = build("llama")
    want = whole(rows, attention_mask=mask, labels=labels)
    want.loss.backward()

    def on_rank(rank: int, group) -> Result:
        cp = tw.ContextParallel(group, num_tokens=22, mask=tw.Causal())
        model = hf.parallelize(build("llama"), cp, f"tilewise_{rank}")
        out = model(**hf.shard(cp, rows, labels=labels, attention_mask=mask))
        out.loss.backward()
        return result(model, hf.unshard(cp, out.logits), out.loss)

    got = summed(tw.loopback(N, on_rank))
    logits = torch.cat([want.logits[row, :n] for row, n in enumerate(lengths)])
    assert (got.logits[0, :19] - logits).abs().max() < 1e-5
    wanted = result(whole, got.logits, want.loss)
    assert max(errors(got, wanted).values()) < 1e-5


def test_padding_that_is_not_on_the_right_is_refused():
    cp = tw.ContextParallel(num_tokens=6)
    rows, left = torch.zeros(1, 4, dtype=torch.long), torch.tensor([[0, 1, 1, 1]])
    with pytest.raises(ValueError, match="row 0 hides a token before its last one"):
        hf.shard(cp, rows, attention_mask=left)
    with pytest.raises(ValueError, match=r"\(1, 3\) must have the shape of input_ids \(1, 4\)"):
        hf.shard(cp, rows, attention_mask=left[:, 1:])
    with pytest.raises(ValueError, match="have 8 tokens, but the layout is for 6"):
        hf.shard(cp, rows.expand(2, -1), attention_mask=torch.ones(2, 4))


def test_gradient_checkpointing_gives_the_same_gradients():
    given = case(PACKED)
    want = run_whole(build("llama"), given)

    def on_rank(rank: int, group):
        cp = tw.ContextParallel(group, num_tokens=22, mask=tw.Causal())
        model = build("llama", hf.register(cp, f"tilewise_{rank}"))
        model.activation_checkpointing_enable()
        return run_split(model, cp, given)

    assert max(errors(summed(tw.loopback(2, on_rank)), want).values()) < 1e-5


def dropped(rank: int, group: Any, given: Case, drop: float, checkpoint: bool) -> list[Result]:
    """Two steps of a model that drops weights of attention, its random state begun by the rank."""
    cp = tw.ContextParallel(group, num_tokens=given.cu_seqlens[-1], mask=tw.Causal())
    model = build("granite", hf.register(cp, f"tilewise_{rank}"), attention_dropout=drop)
    if checkpoint:
        model.activation_checkpointing_enable()
    torch.manual_seed(rank)
    steps = []
    for _ in range(2):
        steps.append(run_split(model, cp, given))
        model.zero_grad()
    return steps


def dropped_over_gloo(rank: int, given: Case, drop: float, checkpoint: bool) -> list[Result]:
    return dropped(rank, None, given, drop, checkpoint)


@pytest.mark.parametrize("checkpoint", thinned((True, False)), ids=["recomputed", "kept"])
def test_dropout_is_that_of_one_rank(checkpoint: bool):
    given = case(PACKED)
    one = dropped(0, None, given, 0.4, checkpoint=False)
    ranks = run_processes(N, dropped_over_gloo, given, 0.4, checkpoint)
    for step, want in enumerate(one):
        assert max(errors(summed([rank[step] for rank in ranks]), want).values()) < 1e-5
    without = dropped(0, None, given, 0.0, checkpoint=False)[0]
    for other in (one[1], without):  # of another step, of none
        assert (one[0].logits - other.logits).abs().max() > 1e-2


def test_ranks_of_a_loopback_drop_what_one_rank_drops():
    given = case(PACKED)
    whole = build("granite", attention_dropout=0.4)

    def on_rank(rank: int, group) -> Result:
        cp = tw.ContextParallel(group, num_tokens=22, mask=tw.Causal())
        model = copy.deepcopy(whole)
        model.set_attn_implementation(hf.register(cp, f"tilewise_{rank}"))
        return run_split(model, cp, given)

    found = []
    for world_size in (1, N):
        torch.manual_seed(5)
        found.append(summed(tw.loopback(world_size, on_rank)))
    assert max(errors(*found).values()) < 1e-5


def test_recomputed_layers_drop_the_same_of_all_that_they_drop():
    """A layer draws random numbers of its own after its attention has."""
    found = []
    for checkpoint in (False, True):
        cp = tw.ContextParallel(num_tokens=22, mask=tw.Causal())
        model = build("gpt2", hf.register(cp), attn_pdrop=0.3, resid_pdrop=0.3)
        if checkpoint:
            model.activation_checkpointing_enable()
        torch.manual_seed(3)
        found.append(run_split(model, cp, case(PACKED)))
    assert max(errors(*found).values()) < 1e-6


def test_layers_drop_different_pairs():
    layer = hf.LayerMask(tw.ContextParallel(num_tokens=3), tw.Causal(), False)
    first, second = torch.nn.Identity(), torch.nn.Identity()
    seeds = [layer.dropout_seed(x) for x in (first, second, first, second)]
    assert seeds[:2] == seeds[2:] and seeds[0] != seeds[1]


def test_two_names_serve_two_contexts_in_one_process():
    cases = {"short": case((0, 7)), "long": case((0, 9, 31))}
    contexts = {n: tw.ContextParallel(num_tokens=c.cu_seqlens[-1]) for n, c in cases.items()}
    models = {n: build("llama", hf.register(cp, f"tilewise_{n}")) for n, cp in contexts.items()}
    for name, given in cases.items():
        got = run_split(models[name], contexts[name], given)
        assert max(errors(got, run_whole(build("llama"), given)).values()) < 1e-5


def test_registering_again_replaces_the_context():
    given = case((0, 4, 9))
    for num_tokens in (5, 9):
        cp = tw.ContextParallel(num_tokens=num_tokens, mask=tw.Causal())
        name = hf.register(cp)
    got = run_split(build("llama", name), cp, given)
    assert name == "tilewise"
    assert max(errors(got, run_whole(build("llama"), given)).values()) < 1e-5


def split_over_gloo(rank: int, names: tuple[str, ...], given: Case) -> dict:
    cp = tw.ContextParallel(num_tokens=given.cu_seqlens[-1], mask=tw.Causal())
    return {n: run_split(build(n, hf.register(cp)), cp, given) for n in names}


def over_gloo(names: tuple[str, ...], cu_seqlens: tuple[int, ...]) -> None:
    given = case(cu_seqlens)
    ranks = run_processes(N, split_over_gloo, names, given)
    for name in names:
        got = summed([rank[name] for rank in ranks])
        assert max(errors(got, run_whole(build(name), given)).values()) < 1e-5, name


@pytest.mark.slow
@pytest.mark.parametrize("cu_seqlens", [(0, 131), (0, 3), (0, 40, 41, 131)], ids=str)
def test_all_models_over_gloo(cu_seqlens: tuple[int, ...]):
    over_gloo(MODELS, cu_seqlens)
