"""What tilewise cannot honour in a model of transformers is refused by name, on all ranks alike."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")

from support.hf_models import build, cache_name, case, config
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BloomConfig,
    JambaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    RwkvConfig,
    T5Config,
    WhisperConfig,
)
from transformers import masking_utils as mu

import tilewise as tw
from tilewise.integrations import hf
from tilewise.integrations.transformers.attention import masks_of
from tilewise.integrations.transformers.masks import packs, read_mask
from tilewise.integrations.transformers.refusals import refused_model
from tilewise.integrations.transformers.rope import RopeLengths

N, NUM_TOKENS = 2, 22
IDS = case((0, NUM_TOKENS)).input_ids
PACKED = case((0, 5, NUM_TOKENS)).position_ids
TINY = {"vocab_size": 50, "hidden_size": 32}

Call = Callable[[tw.ContextParallel, Any], Any]


def plain(cp: tw.ContextParallel, **more: Any) -> dict[str, Any]:
    """This rank's tokens and their positions."""
    return {"input_ids": cp.shard(IDS, 1), "position_ids": cp.position_ids[None], **more}


def refusal(call: Call, make: Callable[[str], Any], mask: tw.Mask | None = None, **options) -> str:
    """The message of all ranks."""

    def on_rank(rank: int, group) -> str:
        seen = tw.Causal() if mask is None else mask
        fields = {"num_tokens": NUM_TOKENS, "mask": seen, **options}
        cp = tw.ContextParallel(group, **fields)
        model = make(hf.register(cp, f"tilewise_{rank}"))
        with pytest.raises(ValueError) as raised:
            call(cp, model)
        return str(raised.value)

    (message,) = set(tw.loopback(N, on_rank))
    return message


def llama(name: str, **changes: Any) -> Any:
    return build("llama", name, **changes)


def test_ranks_that_do_not_all_drop_raise():
    """One in training, one in evaluation: no rank waits, none gives a number."""
    dropped = lambda name: llama(name, attention_dropout=0.1)  # noqa: E731
    text = refusal(lambda cp, m: m.train(cp.rank == 1)(**plain(cp)), dropped)
    assert "ranks disagree" in text
    text = refusal(lambda cp, m: m(**plain(cp)), lambda n: llama(n, attention_dropout=1.0))
    assert "dropout_p (1.0) must be at least 0 and below 1" in text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"head_mask": torch.ones(2)}, "head_mask=Tensor cannot be honoured"),
        ({"sliding_window": 4}, "sliding_window=4 cannot be honoured"),
        ({"output_attentions": True}, "output_attentions=True cannot be honoured"),
        ({"attention_mask": torch.zeros(1, 1, 11, 11)}, "an attention_mask of its own (Tensor)"),
        ({"cu_seq_lens_q": torch.tensor([0, 11])}, "must go from 0 to 22"),
        ({"cu_seq_lens_q": torch.tensor([0, 3, 22])}, None),
        ({"cu_seq_lens_k": torch.tensor([0, 22])}, "cu_seq_lens_k=Tensor cannot be honoured"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_keywords(more: dict, message: str | None):
    if message is None:  # documents given beside positions that go on: both say what they mean
        cp = tw.ContextParallel(num_tokens=NUM_TOKENS, mask=tw.Causal())
        got = llama(hf.register(cp))(**plain(cp, **more)).logits
        apart = llama("eager")(IDS, position_ids=case((0, 3, 22)).position_ids, use_cache=False)
        assert (got - apart.logits).abs().max() < 1e-5
        return
    assert message in refusal(lambda cp, m: m(**plain(cp, **more)), llama)


def test_is_causal_false_is_honoured_as_transformers_does():
    cp = tw.ContextParallel(num_tokens=NUM_TOKENS)
    got = llama(hf.register(cp))(**plain(cp, is_causal=False)).logits
    causal, wanted = (
        llama("eager")(IDS, use_cache=False, is_causal=x).logits for x in (True, False)
    )
    assert (got - wanted).abs().max() < 1e-5 < (causal - wanted).abs().max()


def test_forgotten_position_ids_are_noticed_in_every_layout():
    for layout in (tw.contiguous, tw.zigzag, tw.striped):
        text = refusal(lambda cp, m: m(cp.shard(IDS, 1)), llama, layout=layout(NUM_TOKENS, N))
        assert "start at 0 on every rank" in text and "cp.position_ids" in text


def test_position_ids_of_another_layout_are_noticed():
    other = tw.contiguous(NUM_TOKENS, N)
    call = lambda cp, m: m(cp.shard(IDS, 1), position_ids=other.positions(cp.rank)[None])  # noqa: E731
    assert "neither goes on nor starts a document" in refusal(call, llama)
    inputs = lambda cp: hf.shard(cp, IDS) | {"position_ids": other.positions(cp.rank)[None]}  # noqa: E731
    assert "not those of this rank's tokens" in refusal(lambda cp, m: m(**inputs(cp)), llama)


def test_documents_that_transformers_would_ignore_are_refused():
    """With a cache, an attention_mask, or a model that does not pack, documents would leak."""
    packed = lambda cp: plain(cp, position_ids=cp.shard(PACKED, 1))  # noqa: E731
    ones = torch.ones(1, NUM_TOKENS)
    calls: list[Call] = [
        lambda cp, m: m(**packed(cp), use_cache=True),
        lambda cp, m: m(**packed(cp), use_cache=False, attention_mask=cp.shard(ones, 1)),
    ]
    for call in calls:
        assert "start 2 documents, which transformers ignores here" in refusal(call, llama)
    opt = lambda name: build("opt", name)  # noqa: E731
    text = refusal(lambda cp, m: m(**packed(cp), use_cache=False), opt)
    assert "which transformers ignores here" in text


def test_padding_is_refused_on_all_ranks_also_where_one_alone_has_it():
    padded = torch.ones(1, NUM_TOKENS)
    padded[0, 8] = 0
    text = refusal(lambda cp, m: m(**plain(cp, attention_mask=cp.shard(padded, 1))), llama)
    assert text.startswith("rank 1: attention_mask hides padding") and "ShardingCollator" in text


def test_a_filled_cache_is_refused():
    def call(cp: tw.ContextParallel, model: Any) -> None:
        name = cache_name(type(model).forward)
        cache = model(**plain(cp), use_cache=True)[name]
        model(IDS[:, :1], position_ids=torch.tensor([[NUM_TOKENS]]), **{name: cache})

    assert "past_key_values that hold tokens (use_cache)" in refusal(call, llama)


def test_the_whole_sequence_on_every_rank_is_refused():
    text = refusal(lambda cp, m: m(IDS), llama)
    assert "the model runs on 22 tokens, but the layout gives this rank 11" in text


def test_a_rank_without_tokens_says_what_pads_it():
    ids = IDS[:, :1]
    call = lambda cp, m: m(cp.shard(ids, 1), position_ids=cp.position_ids[None])  # noqa: E731
    assert "models cannot run on none: hf.shard pads" in refusal(call, llama, num_tokens=1)


@pytest.mark.parametrize("own_names", [True, False], ids=["one configuration", "one name"])
def test_ranks_of_a_loopback_that_share_what_they_may_not_raise(own_names: bool):
    """A configuration holds the name of the attention, and a name stands for one rank."""
    whole = llama("eager")

    def on_rank(rank: int, group) -> Any:
        cp = tw.ContextParallel(group, num_tokens=NUM_TOKENS, mask=tw.Causal())
        name = hf.register(cp, f"tilewise_{rank}" if own_names else "tilewise")
        model = type(whole)(whole.config) if own_names else copy.deepcopy(whole)
        model.set_attn_implementation(name)
        return model(**plain(cp))

    with pytest.raises(ValueError, match=r"another rank uses .* a copy of its own"):
        tw.loopback(N, on_rank)


def test_documents_of_cp_that_the_batch_does_not_have():
    documents = tw.Causal() & tw.Document((0, 5, NUM_TOKENS))
    text = refusal(lambda cp, m: m(**plain(cp)), llama, mask=documents)
    assert "cp.mask has documents Document((0, 5, 22)), but the batch has" in text


def test_llama_4_counts_no_places_in_a_tree():
    tree = tw.Slices([((0, NUM_TOKENS), (0, NUM_TOKENS), "causal")])
    make = lambda name: build("llama4", name, no_rope_layers=[0] * 4)  # noqa: E731
    text = refusal(lambda cp, m: m(**plain(cp)), make, mask=tree)
    assert "attn_temperature_tuning counts a token's place in its document" in text


@pytest.mark.parametrize(
    ("name", "slices", "message"),
    [
        ("llama4", [((0, 22), (0, 22), "causal")], r"a layer asks for .*use a model whose layers"),
        ("gemma3", [((0, 22), (0, 22), "full")], "these 1 slices are not those of a tree"),
    ],
)
def test_layers_that_no_tree_serves_are_refused(name: str, slices: Any, message: str):
    """Chunks; and windows in Slices that are no tree's, whose paths nobody knows."""
    text = refusal(lambda cp, m: m(**plain(cp)), partial(build, name), mask=tw.Slices(slices))
    assert re.search(message, text)


def test_a_model_beside_transformers_attention_interface_is_refused():
    config, message = BloomConfig(**TINY, n_layer=1, n_head=4), "does not go through transformers'"
    config.num_attention_heads, config.num_key_value_heads, config.intermediate_size = 4, 2, 32
    cp = tw.ContextParallel(num_tokens=NUM_TOKENS)
    name = hf.register(cp)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=name)
    with pytest.raises(ValueError, match=message):
        model(**plain(cp))
    with pytest.raises(ValueError, match=message):
        hf.check_model(model)


def test_a_model_with_a_state_is_not_run_by_a_name_alone():
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}
    config = JambaConfig(**TINY, **sizes, num_hidden_layers=5)
    make = lambda name: AutoModelForCausalLM.from_config(config, attn_implementation=name)  # noqa: E731
    text = refusal(lambda cp, m: m(**plain(cp)), make)
    assert "JambaConfig: the model carries a state" in text and "hf.parallelize" in text


class OwnConfig(LlamaConfig):
    """Of a model whose code is not transformers' own."""


def test_a_model_of_other_code_is_tried_or_refused():
    cp = tw.ContextParallel(num_tokens=NUM_TOKENS, mask=tw.Causal())
    model = LlamaForCausalLM(OwnConfig(**config("llama").to_dict()))
    want = model(**plain(cp)).logits
    model.set_attn_implementation(hf.register(cp, "tilewise_untried"))
    with pytest.raises(ValueError, match=r"OwnConfig is not of transformers.*hf.parallelize"):
        model(**plain(cp))
    got = hf.parallelize(model, cp)(**plain(cp)).logits
    assert (got - want).abs().max() < 1e-5


def test_check_model_sees_what_never_asks_for_attention():
    model = AutoModelForCausalLM.from_config(RwkvConfig(**TINY, num_hidden_layers=2))
    with pytest.raises(ValueError, match="RwkvConfig: the model carries a state"):
        hf.check_model(model)
    hf.check_model(llama("eager"))


@pytest.mark.parametrize(
    "made", [T5Config(), BartConfig(), WhisperConfig()], ids=lambda x: type(x).__name__
)
def test_cross_attention_is_refused_by_its_reason(made: Any):
    reason = f"{type(made).__name__}: the model has cross attention, which tilewise does not run; "
    assert str(refused_model(made)).startswith(reason)


def test_attention_written_by_hand_is_noticed_when_it_takes_the_mask():
    layer = hf.LayerMask(tw.ContextParallel(num_tokens=3), tw.Causal(), False)
    for use in (lambda: torch.zeros(3, 3) + layer, lambda: torch.where(layer, 0, 1)):
        with pytest.raises(ValueError, match="tilewise cannot reach it"):
            use()


def test_mask_functions_are_read_by_their_structure():
    window = mu.sliding_window_causal_mask_function(4)
    ids = torch.tensor([[0, 1, 0, 1]])
    sequences, places = torch.tensor([[0, 0, 1, 1]]), ids
    if hasattr(mu, "packed_sequence_compatibility_function"):  # before transformers 5.24
        packed = mu.packed_sequence_compatibility_function(window, places, sequences)
    else:
        packed = mu.remap_positions_for_packed_sequence(window, places)
        packed = mu.and_masks(packed, mu.packed_sequence_mask_function(sequences))
    for function in (window, packed):
        mask = read_mask(function)
        for q in range(12):
            for k in range(12):
                wanted = k <= q and k > q - 4
                assert mask.area((q, q + 1), (k, k + 1)) == wanted
    assert packs(packed) and not packs(window)
    assert read_mask(mu.causal_mask_function) == tw.Causal()
    assert read_mask(mu.bidirectional_mask_function) == tw.Full()
    both = mu.or_masks(mu.causal_mask_function, mu.sliding_window_bidirectional_overlay(2))
    assert read_mask(both) == tw.Causal() | tw.Window(2, 2)


def test_masks_are_made_as_transformers_5_0_asks_for_them():
    """It gives the positions of the queries in place of their number and the first one."""
    cp = tw.ContextParallel(num_tokens=5)
    make: Any = masks_of(cp, RopeLengths(cp), True)
    asked: dict[str, Any] = {"mask_function": mu.causal_mask_function, "attention_mask": None}
    asked |= {"config": LlamaConfig(), "batch_size": 1}
    assert make(cache_position=torch.arange(5), kv_length=5, **asked).mask == tw.Causal()
    with pytest.raises(ValueError, match="5 queries from position 3 on"):
        make(cache_position=torch.arange(3, 8), kv_length=8, **asked)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (mu.chunked_causal_mask_function(4, torch.zeros(1)), "chunked_overlay"),
        (mu.and_masks(mu.causal_mask_function, lambda b, h, q, k: q > 3), "<lambda>"),
        (mu.padding_mask_function(torch.ones(1, 4)), "padding_mask_function"),
    ],
    ids=["chunked", "own", "padding"],
)
def test_a_mask_function_that_is_not_known_is_refused_by_name(function: Any, name: str):
    with pytest.raises(ValueError, match="which tilewise cannot represent") as raised:
        read_mask(function)
    assert name in str(raised.value) or "test_hf_refusals" in str(raised.value)


@pytest.mark.parametrize("name", ["sdpa", "my_flash", "eager", ""])
def test_names_that_transformers_treats_its_own_way(name: str):
    with pytest.raises(ValueError, match="must not be empty or hold any of"):
        hf.register(tw.ContextParallel(num_tokens=3), name)


@pytest.mark.parametrize("given", ["labels alone", "with num_items_in_batch"])
def test_labels_sharded_by_hand(given: str):
    def on_rank(rank: int, group) -> str:
        cp = tw.ContextParallel(group, num_tokens=NUM_TOKENS, mask=tw.Causal())
        model = hf.parallelize(build("llama"), cp, f"tilewise_{rank}")
        more = {"num_items_in_batch": 21} if given != "labels alone" else {}
        with pytest.raises(ValueError) as raised:
            model(**plain(cp, labels=cp.shard(IDS, 1), **more))
        model(**hf.shard(cp, IDS, labels=IDS)).loss.backward()  # the right way goes on
        return str(raised.value)

    (message,) = set(tw.loopback(N, on_rank))
    assert "labels are given without shift_labels" in message
    assert "hf.shard(cp, input_ids, labels=labels)" in message


def test_labels_of_a_masked_language_model():
    def on_rank(rank: int, group) -> str:
        cp = tw.ContextParallel(group, num_tokens=NUM_TOKENS)
        options = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        model = ModernBertForMaskedLM(
            ModernBertConfig(**TINY, **options, pad_token_id=0, cls_token_id=1, sep_token_id=2)
        )
        model = hf.parallelize(model, cp, f"tilewise_{rank}")
        model(**hf.shard(cp, IDS, labels=IDS, shift_labels=False))
        with pytest.raises(ValueError) as raised:
            model(**plain(cp, labels=cp.shard(IDS, 1)))
        return str(raised.value)

    (message,) = set(tw.loopback(N, on_rank))
    assert "labels are given without num_items_in_batch" in message


def test_generate_says_how_the_model_becomes_whole_again():
    def on_rank(rank: int, group) -> str:
        cp = tw.ContextParallel(group, num_tokens=NUM_TOKENS, mask=tw.Causal())
        model = hf.parallelize(build("llama"), cp, f"tilewise_{rank}").eval()
        with pytest.raises(ValueError) as raised:
            model.generate(IDS[:, :3], max_new_tokens=2, do_sample=False)
        model.set_attn_implementation("sdpa")
        assert model.generate(IDS[:, :3], max_new_tokens=2, do_sample=False).shape == (1, 5)
        return str(raised.value)

    (message,) = set(tw.loopback(N, on_rank))
    assert "set_attn_implementation('sdpa')" in message


def test_documents_that_differ_name_the_trainers_arguments():
    def call(cp: tw.ContextParallel, model: Any) -> None:
        split = 5 + cp.rank
        model(**hf.shard(cp, IDS, cu_seqlens=[0, split, NUM_TOKENS]))

    message = refusal(call, llama)
    assert "ranks disagree on cu_seq_lens_q" in message
    assert "tilewise.integrations.accelerate" in message
