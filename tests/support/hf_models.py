"""Small random models of transformers, run whole and split, and how far apart the two are."""

from __future__ import annotations

import copy
import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

import tilewise as tw
from tilewise.integrations import hf
from tilewise.integrations.transformers.states import CACHES

VOCABULARY = 50
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4}
DROPOUT = ("attn_pdrop", "resid_pdrop", "embd_pdrop")
ROPE = {"rope_type": "default", "rope_theta": 1e4}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}


def config(name: str, **changes: Any) -> PreTrainedConfig:
    """A fresh configuration; grouped queries in all but gpt2, windows where the name has them."""
    makers = {
        "llama": (LlamaConfig, SIZES),
        "qwen2": (
            Qwen2Config,
            SIZES | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        ),
        "qwen3": (Qwen3Config, SIZES | {"head_dim": 8}),
        "mistral": (MistralConfig, SIZES | {"sliding_window": 6}),
        "mixtral": (MixtralConfig, SIZES | EXPERTS),
        "gemma2": (
            Gemma2Config,
            SIZES
            | {
                "head_dim": 8,
                "sliding_window": 4,
                "attn_logit_softcapping": None,
                "query_pre_attn_scalar": 3,
            },
        ),
        "gemma3": (
            Gemma3TextConfig,
            SIZES | {"head_dim": 8, "sliding_window": 4, "sliding_window_pattern": 2},
        ),
        "cohere2": (Cohere2Config, SIZES | {"sliding_window": 4}),
        "granite": (GraniteConfig, SIZES),
        # Keys of 192, values of 128.
        "deepseek_v3": (
            DeepseekV3Config,
            SIZES
            | {
                "num_key_value_heads": 4,
                "q_lora_rank": 16,
                "kv_lora_rank": 16,
                "moe_intermediate_size": 16,
                "n_routed_experts": 4,
                "n_group": 2,
                "topk_group": 1,
                "num_experts_per_tok": 2,
                "first_k_dense_replace": 1,
            },
        ),
        "gpt2": (GPT2Config, GPT2 | dict.fromkeys(DROPOUT, 0.0)),
        "gpt_oss": (GptOssConfig, SIZES | EXPERTS | {"head_dim": 8, "rope_parameters": ROPE}),
        "llama4": (
            Llama4TextConfig,
            SIZES
            | {
                "head_dim": 8,
                "intermediate_size_mlp": 48,
                "num_local_experts": 2,
                "num_hidden_layers": 4,
                "attention_chunk_size": 6,
                "floor_scale": 3,  # tokens after which queries grow
                "attn_scale": 0.7,
            },
        ),
        "opt": (
            OPTConfig,
            {
                "vocab_size": VOCABULARY,
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "ffn_dim": 32,
                "num_attention_heads": 4,
                "word_embed_proj_dim": 32,
                "dropout": 0.0,
            },
        ),
    }
    make, fields = makers[name]
    return make(**fields | changes)


def build(name: str, implementation: str = "eager", dtype: Any = torch.float32, **changes) -> Any:
    """A model with weights of its own seed, in training mode."""
    made = config(name, **changes)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager", dtype=dtype)
    # Larger than the usual start, so that what a query sees matters.
    with torch.no_grad():
        for x in model.parameters():
            x.copy_(x + 0.1 * torch.randn(x.shape))
    if implementation != "eager":
        model.set_attn_implementation(implementation)
    return model.train()


class Case(NamedTuple):
    """A batch: token ids [1, num_tokens] of documents."""

    input_ids: Tensor
    cu_seqlens: tuple[int, ...]

    @property
    def position_ids(self) -> Tensor:
        return torch.from_numpy(tw.lengths.position_ids(self.cu_seqlens))[None]


def case(cu_seqlens: tuple[int, ...], batch: int = 1) -> Case:
    make = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCABULARY, (batch, cu_seqlens[-1]), generator=make)
    return Case(ids, cu_seqlens)


class Result(NamedTuple):
    """Logits [batch, num_tokens, vocabulary], the loss, and each parameter's gradient, fp32."""

    logits: Tensor
    loss: Tensor
    grads: dict[str, Tensor]


def result(model: Any, logits: Tensor, loss: Tensor) -> Result:
    grads = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
    return Result(logits.detach().float(), loss.detach(), grads)


def run_whole(model: Any, given: Case) -> Result:
    """Nothing split: transformers packs by position_ids and shifts the labels itself."""
    labels = given.input_ids.clone()
    labels[:, list(given.cu_seqlens[:-1])] = -100  # a document's first token is not predicted
    positions = given.position_ids.expand(len(labels), -1)
    out = model(input_ids=given.input_ids, position_ids=positions, labels=labels, use_cache=False)
    out.loss.backward()
    return result(model, out.logits, out.loss)


def run_split(model: Any, cp: tw.ContextParallel, given: Case) -> Result:
    """This rank's share of loss and gradients; the whole logits."""
    inputs = hf.shard(cp, given.input_ids, labels=given.input_ids, cu_seqlens=given.cu_seqlens)
    out = model(**inputs)
    out.loss.backward()
    return result(model, hf.unshard(cp, out.logits), out.loss)


def summed(ranks: list[Result]) -> Result:
    """What all ranks have together."""
    grads = {n: sum(r.grads[n] for r in ranks) for n in ranks[0].grads}
    return Result(ranks[0].logits, sum(r.loss for r in ranks), grads)


def errors(got: Result, want: Result, *, mean: bool = False) -> dict[str, float]:
    """max|x - y| / max(1, max|y|) of the logits, the loss and every parameter's gradient.

    Args:
        mean: the root mean square of x - y instead, which chance moves less than its largest.
    """
    assert got.grads.keys() == want.grads.keys()
    pairs = {"logits": (got.logits, want.logits), "loss": (got.loss, want.loss)}
    pairs |= {name: (got.grads[name], want.grads[name]) for name in want.grads}

    def size(x: torch.Tensor) -> torch.Tensor:
        return x.square().mean().sqrt() if mean else x.abs().max()

    return {name: float(size(x - y) / y.abs().max().clamp(min=1)) for name, (x, y) in pairs.items()}


def split_in_threads(
    name: str,
    given: Case,
    *,
    world_size: int = 4,
    dtype: Any = torch.float32,
    autocast: torch.dtype | None = None,
    **options: Any,
) -> Result:
    """The split run on a loopback world: every rank with a model and a name of its own.

    Args:
        dtype: of the weights.
        autocast: dtype of a torch.autocast region around each rank's run.
    """
    whole = build(name, dtype=dtype)

    def on_rank(rank: int, group: Any) -> Result:
        tokens = given.cu_seqlens[-1]
        cp = tw.ContextParallel(group, **{"num_tokens": tokens, "mask": tw.Causal(), **options})
        model = copy.deepcopy(whole)
        model.set_attn_implementation(hf.register(cp, f"tilewise_{rank}"))
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            return run_split(model, cp, given)

    return summed(tw.loopback(world_size, on_rank))


def cache_name(function: Any) -> str:
    """The argument by which a function of transformers takes a cache: "cache" since 5.24."""
    parameters = inspect.signature(function).parameters
    return next(name for name in CACHES if name in parameters)
