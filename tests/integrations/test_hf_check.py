"""check_model proves a class by running a tiny model of it; what it cannot prove it refuses."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")

from support.hf_models import SIZES, Result, case, config, errors, result, run_whole, summed
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    DeepseekV3Config,
    DogeConfig,
    DogeForCausalLM,
    EuroBertConfig,
    EuroBertForMaskedLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
    LlamaModel,
    MobileBertConfig,
    MobileBertForMaskedLM,
    OPTForCausalLM,
    Phi3Config,
)
from transformers.loss.loss_utils import ForCausalLMLoss

import tilewise as tw
from tilewise.integrations import hf
from tilewise.integrations.transformers.forward import split_forward
from tilewise_verify.hf_shrink import NUM_TOKENS, SWITCH, shrunk

N = 4
BERT: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "rope_theta": 1e4,
    "original_max_position_embeddings": 11,
}


def with_rope(kind: str) -> Any:
    """A fresh model: one that has run remembers lengths."""
    if kind == "dynamic":
        made: Any = LlamaConfig(**SIZES, max_position_embeddings=8, rope_parameters=dict(DYNAMIC))
    else:
        fields = {"original_max_position_embeddings": 11, "max_position_embeddings": 64}
        made = Phi3Config(**SIZES, **fields, rope_parameters=dict(LONGROPE))
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager")
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.1 * torch.randn(x.shape))
    return model.train()


@pytest.mark.parametrize("cu_seqlens", [(0, 22), (0, 5, 22), (0, 3)], ids=str)
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_ranks_agree_on_the_length_that_rope_depends_on(kind: str, cu_seqlens: tuple[int, ...]):
    given = case(cu_seqlens)
    want = run_whole(with_rope(kind), given)

    def on_rank(rank: int, group) -> Result:
        cp = tw.ContextParallel(group, num_tokens=cu_seqlens[-1], mask=tw.Causal())
        model = hf.parallelize(with_rope(kind), cp, f"tilewise_{rank}")
        inputs = hf.shard(cp, given.input_ids, labels=given.input_ids, cu_seqlens=cu_seqlens)
        out = model(**inputs)
        out.loss.backward()
        return result(model, hf.unshard(cp, out.logits), out.loss)

    got = errors(summed(tw.loopback(N, on_rank)), want)
    assert not {what: error for what, error in got.items() if not error < 1e-5}


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_without_agreement_other_lengths_on_other_ranks_are_refused(kind: str):
    def on_rank(rank: int, group) -> str:
        layout = tw.contiguous(22, N)
        cp = tw.ContextParallel(group, num_tokens=22, mask=tw.Causal(), layout=layout)
        model = with_rope(kind)
        model.set_attn_implementation(hf.register(cp, f"tilewise_{rank}"))
        with pytest.raises(
            ValueError, match=r"depends on the largest position.*hf\.parallelize"
        ) as e:
            model(**hf.shard(cp, case((0, 22)).input_ids))
        return str(e.value)

    assert len(set(tw.loopback(N, on_rank))) == 1


def test_parallelizing_again_takes_the_new_context():
    model = with_rope("longrope")
    for num_tokens in (5, 22):
        cp = tw.ContextParallel(num_tokens=num_tokens, mask=tw.Causal())
        given = case((0, num_tokens))
        got = hf.parallelize(model, cp)(**hf.shard(cp, given.input_ids)).logits
        want = with_rope("longrope")(given.input_ids).logits
        assert (got - want).abs().max() < 1e-5


class MeanOfRows(LlamaForCausalLM):
    """Takes a mean over the tokens at hand away."""

    def forward(self, input_ids=None, **given):
        out = super().forward(input_ids, **given)
        loss = None if out.loss is None else out.loss + out.logits.mean(1).square().mean()
        return out if loss is None else type(out)(loss=loss, logits=out.logits)


class MixesRows(LlamaModel):
    """Looks at the token before, on this rank."""

    def forward(self, input_ids=None, **given):
        out = super().forward(input_ids, **given)
        out.last_hidden_state = out.last_hidden_state + out.last_hidden_state.roll(1, 1)
        return out


class Counted(LlamaForCausalLM):
    """Counts how many models are made."""

    made = 0

    def __init__(self, given: Any):
        super().__init__(given)
        type(self).made += 1


class OnlyLarge(LlamaForCausalLM):
    """Cannot be made tiny."""

    def __init__(self, given: Any):
        if given.hidden_size < 128:
            raise RuntimeError("this model needs 128 features")
        super().__init__(given)


def plain(**changes: Any) -> Any:
    return config("llama", **changes)


@pytest.mark.parametrize("model_class", [MeanOfRows, MixesRows], ids=lambda c: c.__name__)
def test_a_class_that_computes_from_its_own_rows_is_refused(model_class: type):
    with pytest.raises(ValueError, match=r"is not the unsplit model"):
        hf.check_model(model_class(plain()))
    hf.check_model(model_class(plain()), numerical=False)


def test_models_with_and_without_a_loss_are_proven():
    for model in (LlamaForCausalLM(plain()), LlamaModel(plain())):
        hf.check_model(model)
        hf.check_model(model, loss=False)


def test_a_class_that_cannot_be_made_tiny_is_an_error_that_says_how_to_go_on():
    with pytest.raises(ValueError, match=r"this model needs 128 features\).*numerical=False"):
        hf.check_model(OnlyLarge(plain(hidden_size=128, head_dim=32)))


def test_results_are_kept_by_class_and_configuration():
    model = Counted(plain())
    hf.check_model(model)
    made = Counted.made
    hf.check_model(model)
    hf.check_model(Counted(plain()))
    assert Counted.made == made + 1
    hf.check_model(Counted(plain(rms_norm_eps=1e-3)))
    assert Counted.made > made + 2


@pytest.mark.parametrize(
    ("model_class", "outcome"),
    [
        (BertModel, "pools this rank's rows"),
        (BertForPreTraining, "pools this rank's rows"),
        (BertForQuestionAnswering, "loss is not its share"),
        (BertForTokenClassification, "loss is not its share"),
        (
            BertForSequenceClassification,
            "computes from this rank's tokens .* put a head of your own on the model without one",
        ),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_heads_that_pool_or_have_a_loss_of_their_own_are_refused(model_class: type, outcome: str):
    model = model_class(BertConfig(**BERT))
    with pytest.raises(ValueError, match=outcome):
        hf.check_model(model)
    if "computes" in outcome:
        with pytest.raises(ValueError, match=outcome):
            hf.check_model(model, loss=False)
    else:
        hf.check_model(model, loss=False)


def test_a_loss_function_that_a_model_was_given_is_tried():
    def mean_of_rows(logits, labels, vocab_size, **_):
        return torch.nn.functional.cross_entropy(logits.view(-1, vocab_size), labels.view(-1))

    def share(logits, shift_labels=None, num_items_in_batch=None, **given):
        return ForCausalLMLoss(
            logits, shift_labels=shift_labels, num_items_in_batch=num_items_in_batch, **given
        )

    model = LlamaForCausalLM(plain())
    hf.check_model(model)
    model.loss_function = mean_of_rows
    with pytest.raises(ValueError, match="loss is not its share"):
        hf.check_model(model)
    model.loss_function = share
    hf.check_model(model)


def test_layers_skipped_at_random_are_refused():
    model = OPTForCausalLM(config("opt", layerdrop=0.1))
    with pytest.raises(ValueError, match=r"layerdrop skips layers.*set it to 0"):
        hf.check_model(model)


def test_models_checked_at_the_same_time_do_not_meet():
    models = [LlamaForCausalLM(plain(rms_norm_eps=6e-5 + i * 1e-6)) for i in range(3)]
    torch.set_default_dtype(torch.float64)
    try:
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(hf.check_model, models)) == [None] * 3
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_random_states_modes_and_registries_are_left_as_they_were():
    def state() -> tuple:
        seen = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # pyright: ignore
        modes = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
        )
        names = [set(x._global_mapping) for x in (AttentionInterface, AttentionMaskInterface)]
        return *seen, *modes, *names

    models = [LlamaForCausalLM(plain(rms_norm_eps=eps)) for eps in (2e-5, 3e-5, 4e-5)]
    for mode, model in zip((nullcontext, torch.no_grad, torch.inference_mode), models, strict=True):
        torch.set_default_dtype(torch.float64)
        try:
            with mode():
                before = state()
                hf.check_model(model)
                assert state() == before
        finally:
            torch.set_default_dtype(torch.float32)


def test_ranks_of_one_process_check_their_models():
    def on_rank(rank: int, group) -> None:
        hf.check_model(LlamaForCausalLM(plain(rms_norm_eps=5e-5 + rank * 1e-6)))

    tw.loopback(2, on_rank)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DogeForCausalLM(DogeConfig(**SIZES)), "makes a mask of its own"),
        (lambda: MobileBertForMaskedLM(MobileBertConfig()), "is not the unsplit model"),
    ],
    ids=["doge", "mobilebert"],
)
def test_models_that_are_not_the_unsplit_ones_are_refused(make: Callable[[], Any], message: str):
    with pytest.raises(ValueError, match=message):
        hf.check_model(make())


def test_a_loss_that_is_no_share_of_the_whole_one_is_told_from_wrong_logits():
    model = BertForMaskedLM(BertConfig(**BERT))
    with pytest.raises(
        ValueError, match=r"Its loss is not its share.*check_model\(model, loss=False"
    ):
        hf.check_model(model)
    hf.check_model(model, loss=False)


def test_a_model_with_dropout_of_a_fixed_probability_is_tried_without():
    """LlamaForTokenClassification drops a tenth of its inputs, whatever its configuration says."""
    model = LlamaForTokenClassification(plain())
    hf.check_model(model, loss=False)
    with pytest.raises(ValueError, match="loss is not its share"):
        hf.check_model(model)


@pytest.mark.parametrize(
    ("model_class", "made", "name"),
    [
        (LlamaForTokenClassification, plain(), "labels"),
        (BertForMaskedLM, BertConfig(**BERT, is_decoder=False), "labels"),
        (BertForQuestionAnswering, BertConfig(**BERT), "start_positions"),
    ],
    ids=["token head", "masked", "answers"],
)
def test_a_model_with_a_loss_of_its_own_runs_without_labels(model_class: Any, made: Any, name: str):
    torch.manual_seed(0)
    whole = model_class._from_config(made, attn_implementation="eager").eval()
    ids = case((0, 22)).input_ids
    want = whole(ids)[0]

    def on_rank(rank: int, group) -> torch.Tensor:
        cp = tw.ContextParallel(group, num_tokens=22)
        model = hf.parallelize(copy.deepcopy(whole), cp, f"tilewise_{rank}")
        inputs = hf.shard(cp, ids)
        with pytest.raises(ValueError, match=r"its share.*call it without labels"):
            model(**inputs, **{name: ids[:, 0] if "positions" in name else inputs["input_ids"]})
        return hf.unshard(cp, model(**inputs)[0]).detach()

    for got in tw.loopback(N, on_rank):
        torch.testing.assert_close(got, want.detach(), rtol=1e-4, atol=1e-5)


def test_answers_are_whole_where_rows_are_called_whole_and_none_is_padded():
    torch.manual_seed(0)
    whole = BertForQuestionAnswering(BertConfig(**BERT)).eval()
    ids = case((0, 22)).input_ids.view(2, 11)
    want, mask = whole(ids), torch.ones_like(ids)
    mask[1, 9:] = 0

    def on_rank(rank: int, group) -> tuple[torch.Tensor, torch.Tensor]:
        model = copy.deepcopy(whole)
        split_forward(model, group)
        with pytest.raises(ValueError, match="start_logits has no values at padding"):
            model(ids, attention_mask=mask)
        out = model(ids)
        return out.start_logits.detach(), out.end_logits.detach()

    for start, end in tw.loopback(2, on_rank):
        torch.testing.assert_close(start, want.start_logits.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(end, want.end_logits.detach(), rtol=1e-4, atol=1e-5)


def test_rows_that_are_pooled_are_refused_when_they_are_returned():
    made = BertConfig(**BERT)
    ids = case((0, 22)).input_ids

    def on_rank(rank: int, group) -> str:
        cp = tw.ContextParallel(group, num_tokens=22)
        for pools in (False, True):
            model = BertModel(copy.deepcopy(made), add_pooling_layer=pools).eval()
            hf.parallelize(model, cp, f"tilewise_{rank}")
            if pools:
                with pytest.raises(ValueError, match="returned pooler_output, made of") as e:
                    model(**hf.shard(cp, ids))
                return str(e.value)
            model(**hf.shard(cp, ids))
        raise AssertionError

    assert len(set(tw.loopback(N, on_rank))) == 1


def test_a_masked_language_model_predicts_labels_where_they_are():
    made = EuroBertConfig(**SIZES, mask_token_id=3)
    torch.manual_seed(0)
    whole = EuroBertForMaskedLM._from_config(made, attn_implementation="eager")
    ids = case((0, 22)).input_ids
    labels = ids.where(ids % 3 == 0, -100)
    want = whole(ids, labels=labels).loss
    weights = whole.state_dict()

    def on_rank(rank: int, group) -> torch.Tensor:
        cp = tw.ContextParallel(group, num_tokens=22)
        model = EuroBertForMaskedLM(EuroBertConfig(**SIZES, mask_token_id=3))
        model.load_state_dict(weights)
        hf.parallelize(model, cp, f"tilewise_{rank}")
        return model(**hf.shard(cp, ids, labels=labels, shift_labels=False)).loss.detach()

    assert abs(sum(tw.loopback(N, on_rank)) - want) < 1e-5


def test_a_tiny_configuration_keeps_what_decides_how_a_model_is_split():
    gemma = shrunk(Gemma4TextConfig())
    assert list(dict.fromkeys(gemma.layer_types)) == ["sliding_attention", "full_attention"]
    assert len({gemma.per_layer_config[i].head_dim for i in range(gemma.num_hidden_layers)}) == 2
    assert gemma.sliding_window < NUM_TOKENS and gemma.tie_word_embeddings
    deepseek = shrunk(DeepseekV3Config())
    assert deepseek.qk_head_dim > deepseek.v_head_dim
    assert 0 < deepseek.first_k_dense_replace < deepseek.num_hidden_layers
    assert 1 < deepseek.num_experts_per_tok < deepseek.n_routed_experts
    llama = shrunk(LlamaConfig(num_attention_heads=32, num_key_value_heads=8))
    assert llama.num_attention_heads > llama.num_key_value_heads > 1
    dynamic = shrunk(with_rope("dynamic").config)
    assert dynamic.max_position_embeddings == SWITCH < NUM_TOKENS // 2


@pytest.mark.filterwarnings("ignore:Dynamo detected a call:UserWarning")
def test_a_compiled_model_is_the_model_and_one_within_a_module_is_named():
    class Holder(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module):
            super().__init__()
            self.config, self.inner = plain(), inner

    whole = LlamaForCausalLM(plain())
    message = r"model \(Holder\) must be a model of transformers; it holds one, model.inner \(Llama"
    with pytest.raises(ValueError, match=message):
        hf.check_model(Holder(whole))
    with pytest.raises(ValueError, match=r"model \(Linear\) must be a model of transformers$"):
        hf.check_model(torch.nn.Linear(2, 2))
    hf.check_model(torch.compile(whole, backend="eager"))  # type: ignore[arg-type]
    ids = torch.arange(12)[None]
    want = whole(ids, use_cache=False).logits
    cp = tw.ContextParallel(num_tokens=12, mask=tw.Causal(), strategy=tw.ring(1))
    compiled: Any = torch.compile(whole, backend="eager")
    split = hf.parallelize(compiled, cp, "tilewise_compiled")
    with torch.no_grad():
        got = split(**hf.shard(cp, ids), use_cache=False).logits
    assert (got - want).abs().max() < 1e-5
