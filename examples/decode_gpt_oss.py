"""Greedy decoding with gpt-oss of transformers, its keys and values split over ranks.

    torchrun --nproc-per-node 4 examples/decode_gpt_oss.py

The model's own code runs; its attention reads and writes a tw.KVCache a layer, with the layer's
window and its sinks. Prompts of different length are prefilled with their rows sharded, then every
new token is decoded on every rank. Rank 0 also continues each prompt by eager attention, with
nothing split and nothing cached; the tokens must be the same. The model is tiny and its weights are
random: nothing is downloaded. Plain python is one rank.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, GptOssConfig, GptOssForCausalLM

import tilewise as tw
from tilewise.transport.protocol import Transport
from tilewise.transport.resolve import transport_for

VOCABULARY, WINDOW = 64, 8
PROMPTS = ([*range(1, 20)], [7] * 5, [*range(60, 30, -1)])
NAME = "tilewise_cache"


def build() -> GptOssForCausalLM:
    """gpt-oss with two small layers, one of them with a window."""
    config = GptOssConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    torch.manual_seed(0)
    model = GptOssForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # louder, so that every token hangs on all before
            parameter.copy_(parameter + 0.2 * torch.randn(parameter.shape))
    return model


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: tw.masks.Mask,
    **given,
) -> tuple[Tensor, None]:
    """A layer's attention through its cache; tensors are [batch, heads, rows, head_dim].

    Args:
        attention_mask: what of MASKS the model takes for this layer.
        given: the model passes on `caches`, and `prefill` where rows are a chunk's.
    """
    cache = given["caches"][module.layer_idx]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    how = {"mask": attention_mask, "sink": given["s_aux"]}
    if given.get("prefill"):
        return cache.prefill(q[0], k[0], v[0], **given["prefill"], **how)[None], None
    return cache.decode(q, k, v, **how), None


MASKS = {"full_attention": tw.Causal(), "sliding_attention": tw.Window(WINDOW - 1, 0)}


@torch.no_grad()
def continued(
    model: GptOssForCausalLM, prompts: tuple[list[int], ...], num_tokens: int, group: Transport
) -> list[list[int]]:
    """The next tokens of each prompt, over the ranks of a group: the same on every rank."""
    config = model.config
    sizes = {"num_kv_heads": config.num_key_value_heads, "head_dim": config.head_dim}
    longest = max(map(len, prompts)) + num_tokens
    caches = [
        tw.KVCache(longest, **sizes, batch=len(prompts), dtype=model.dtype, group=group)
        for _ in range(config.num_hidden_layers)
    ]
    common: dict[str, Any] = {"attention_mask": MASKS, "caches": caches, "use_cache": False}
    chunk = caches[0].chunk([len(prompt) - 1 for prompt in prompts])
    packed = torch.tensor([token for prompt in prompts for token in prompt[:-1]])
    model(
        chunk.layout.shard(packed, group.rank, dim=0)[None],
        position_ids=chunk.position_ids(group.rank)[None],
        prefill={"chunk": chunk, "plan": tw.ring(group.world_size)},
        **common,
    )
    steps = [torch.tensor([prompt[-1:] for prompt in prompts])]
    for _ in range(num_tokens):
        position_ids = torch.tensor(caches[0].lengths)[:, None]
        logits = model(steps[-1], position_ids=position_ids, **common).logits
        steps.append(logits[:, -1:].argmax(-1))
    return torch.cat(steps[1:], 1).tolist()


@torch.no_grad()
def unsplit(model: GptOssForCausalLM, prompt: list[int], num_tokens: int) -> list[int]:
    """As continued, for one prompt by eager attention: all tokens anew for each."""
    tokens = [*prompt]
    for _ in range(num_tokens):
        logits = model(torch.tensor([tokens]), use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def main(argv: list[str] | None = None) -> list[list[int]]:
    """Decode, and compare."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--num-tokens", type=int, default=24, help="new ones of each prompt")
    num_tokens = parser.parse_args(argv).num_tokens
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo")
    group = transport_for(None)
    AttentionInterface.register(NAME, attend)
    model = build()
    model.set_attn_implementation(NAME)
    found = continued(model, PROMPTS, num_tokens, group)
    if group.rank == 0:
        model.set_attn_implementation("eager")
        whole = [unsplit(model, prompt, num_tokens) for prompt in PROMPTS]
        for prompt, tokens in zip(PROMPTS, found, strict=True):
            print(f"{len(prompt)} tokens, then {tokens}")
        print(f"as eager greedy decoding, token for token: {'yes' if whole == found else 'NO'}")
        if whole != found:
            raise SystemExit("split and eager decoding differ")
    if dist.is_initialized():
        dist.barrier()
    return found


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
