"""Train a DeepSeek-V3 of transformers with its sequence split, its latents on the wire.

    python examples/mla_latent.py                               # ranks are threads
    torchrun --nproc-per-node 4 examples/mla_latent.py          # ranks are processes

A tiny model with random weights is made by transformers, and its weights are loaded into one whose
attention sends a latent and a rotary key a token instead of the keys and values of all heads. Both
are trained, the first unsplit and by transformers' own attention; their losses must be equal.
"""

import argparse
import copy
import os
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    apply_rotary_pos_emb_interleave,
)

import tilewise as tw

TOLERANCE = 1e-6  # relative, of a loss; transformers computes norms and routers in float32


def tiny() -> DeepseekV3Config:
    """A model with every part of DeepSeek-V3, and few of each."""
    return DeepseekV3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        attn_implementation="eager",
        experts_implementation="eager",
    )


class LatentAttention(DeepseekV3Attention):
    """DeepSeek's attention with its sequence split: hidden states are this rank's rows.

    Attributes:
        cp: of the ranks; an existing layer gets it by `split`.
    """

    cp: tw.ContextParallel

    def forward(self, hidden_states: Tensor, position_embeddings: Any, *_: Any, **__: Any) -> Any:
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        q, q_rotary = q.unflatten(-1, (-1, self.qk_head_dim)).split(
            [self.qk_nope_head_dim, self.qk_rope_head_dim], -1
        )
        latent, k_rotary = self.kv_a_proj_with_mqa(hidden_states).split(
            [self.kv_lora_rank, self.qk_rope_head_dim], -1
        )
        q_rotary, k_rotary = apply_rotary_pos_emb_interleave(
            q_rotary, k_rotary.unsqueeze(-2), *position_embeddings, unsqueeze_dim=2
        )
        wire = tw.wire.Latent(
            self.expand,
            num_kv_heads=self.num_heads,
            head_dim=self.qk_head_dim,
            v_head_dim=self.v_head_dim,
        )
        rows = torch.cat([self.kv_a_layernorm(latent), k_rotary.squeeze(-2)], -1)
        out = self.cp.attention(
            torch.cat([q, q_rotary], -1), rows, None, softmax_scale=self.scaling, wire=wire
        )
        assert isinstance(out, Tensor)
        return self.o_proj(out.flatten(-2)), None

    def expand(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all heads; the shared part of the keys is rotated already."""
        latent, k_rotary = rows.split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        k, v = self.expand_kv(latent[None, None], k_rotary[None, None])
        return k[0].transpose(0, 1), v[0].transpose(0, 1)


def split(model: DeepseekV3ForCausalLM, cp: tw.ContextParallel) -> DeepseekV3ForCausalLM:
    """A copy of a model, with its weights, whose attention is split over ranks."""
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        layer.self_attn.__class__ = LatentAttention
        layer.self_attn.cp = cp
    return model


def train(model: Any, tokens: Tensor, steps: int, cp: tw.ContextParallel) -> list[float]:
    """The loss of every step; each step's gradients are summed over ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    labels = cp.roll(cp.shard(tokens, dim=0), -1, dim=0)
    losses = []
    for _ in range(steps):
        rows = cp.shard(tokens, dim=0)[None]
        logits = model(input_ids=rows, position_ids=cp.position_ids[None], use_cache=False).logits
        total = F.cross_entropy(logits[0], labels, reduction="sum")
        loss = cp.mean(total, (labels >= 0).sum())
        optimizer.zero_grad()
        loss.backward()
        cp.sum_gradients(model)
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(rank: int, group: Any, args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Losses of the split model, and of the unsplit one."""
    torch.manual_seed(0)
    whole = DeepseekV3ForCausalLM(tiny()).double()
    tokens = torch.randint(64, (args.num_tokens,))
    given = {"num_tokens": args.num_tokens, "mask": tw.Causal()}
    cp = tw.ContextParallel(group, **given)
    losses = train(split(whole, cp), tokens, args.steps, cp)
    alone = tw.loopback(1, lambda _, one: train(whole, tokens, args.steps, _alone(one, given)))
    return losses, alone[0]


def _alone(group: Any, given: dict[str, Any]) -> tw.ContextParallel:
    return tw.ContextParallel(group, **given)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--num-tokens", type=int, default=129)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4, help="threads, without torchrun")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    args = arguments(given)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
        losses, whole = run(dist.get_rank(), None, args)
        first = dist.get_rank() == 0
        dist.destroy_process_group()
    else:
        (losses, whole), *_ = tw.loopback(args.ranks, lambda rank, group: run(rank, group, args))
        first = True
    if first:
        table = Table("step", "loss, split", "loss, unsplit", "relative difference")
        for step, (a, b) in enumerate(zip(losses, whole, strict=True)):
            table.add_row(str(step), f"{a:.9f}", f"{b:.9f}", f"{abs(a - b) / b:.1e}")
        Console().print(table)
    worst = max(abs(a - b) / b for a, b in zip(losses, whole, strict=True))
    if worst > TOLERANCE:
        raise SystemExit(f"losses differ by {worst:.1e}, more than {TOLERANCE:.0e}")


if __name__ == "__main__":
    main()
