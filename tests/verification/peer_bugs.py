"""Faults of public libraries, told in their issue threads, on models of transformers and torch.

Each is written again from what a thread says happened; tests/verification/zoo.py has one fault a
cause, on one model. Keys and values of all ranks are gathered, then attention is dense.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from support.hf_models import VOCABULARY, build
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from transformers import AttentionInterface, AttentionMaskInterface
from verification.zoo import SHARED, Wrong, joint

import tilewise as tw
from tilewise.transport.resolve import transport_for

T = 40


class Bug(NamedTuple):
    """A thread, the model that shows it, and what parity should say.

    Attributes:
        says: what the split does wrong; a branch of share or attend.
        causes: any of these is right.
    """

    thread: str
    says: str
    model: str
    layer: str | None
    causes: tuple[str, ...]
    changes: dict[str, Any] = {}  # noqa: RUF012 - never changed
    layout: Any = tw.contiguous


FIRST, LAST = "model.layers.0.self_attn", "model.layers.2.self_attn"
FIRST_NORM = "model.layers.0.input_layernorm"
WINDOW, SOFTCAP = {"sliding_window": 6}, {"attn_logit_softcapping": 5.0}
BUGS = (
    Bug("accelerate #4177", "no window", "gpt_oss", FIRST, ("window_ignored",), WINDOW),
    Bug("accelerate #4177", "no window", "gemma3", FIRST, ("window_ignored",)),
    Bug("accelerate #4177", "full", "mistral", FIRST, ("mask_ignored",)),
    Bug("ring-flash-attention #35", "block window", "mistral", FIRST, ("window_per_block",)),
    Bug("axolotl #3608", "no documents", "llama", FIRST, ("documents_ignored",)),
    Bug("axolotl #3608", "no documents", "gpt2", "transformer.h.0.attn", ("documents_ignored",)),
    Bug("prime-rl #3397", "no sink", "gpt_oss", FIRST, ("sink_dropped",)),
    Bug("ringmaster", "no softcap", "gemma2", FIRST, ("softcap_dropped",), SOFTCAP),
    Bug("a config's own scale", "default scale", "gemma2", FIRST, ("scale_wrong",)),
    Bug("axolotl #3928", "own shard", "qwen3", FIRST, ("shard_only",), {}, tw.zigzag),
    Bug("sglang #33353", "half the ranks", "llama", FIRST, ("shard_only",)),
    Bug("sglang #33327", "text per rank", "llama", FIRST, ("shared_counted_per_rank",), {}, joint),
    Bug("sglang #33327", "text again", "llama", FIRST, ("counted_twice",)),
    Bug("vllm-omni #5716", "padded heads", "llama", FIRST, ("gqa_shifted",)),
    Bug("DeepSpeed #8316", "last head", "qwen3", FIRST, ("heads_missing",)),
    Bug("ISEEKYAN/Megatron #111", "own shard", "deepseek_v3", FIRST, ("shard_only",)),
    Bug("Megatron #1464", "no reduction", "llama", LAST, ("dk_wrong", "dv_wrong")),
    Bug("TransformerEngine #1557", "half dk", "gpt2", "transformer.h.1.attn", ("dk_wrong",)),
    Bug("Automodel #1482", "own positions", "llama", "model.rotary_emb", ("positions_wrong",)),
    Bug("Automodel #1482", "own positions", "gpt2", "transformer.wpe", ("positions_wrong",)),
    Bug("verl #4250", "labels shifted", "llama", None, ("labels_shifted",)),
    Bug("SkyRL #1420", "own mean", "llama", None, ("loss_scaled",)),
    Bug("Megatron #906", "mean of means", "llama", None, ("loss_scaled",)),
    Bug("Megatron #1764", "no labels", "llama", None, ("no_label_nan",)),
    Bug("Megatron #673", "gradients averaged", "llama", None, ("gradient_scaled",)),
    Bug("a sink a rank", "sinks not reduced", "gpt_oss", FIRST, ("missing_all_reduce",)),
    Bug("transformers #42496", "padding", "llama", FIRST, ("padding_attended",)),
    Bug("transformers #42496", "late padding", "llama", LAST, ("padding_attended",)),
    Bug("rtp-llm #876", "scan", "scan", "scan", ("order_sensitive_layer",), {}, tw.zigzag),
    Bug("Automodel #1441", "scan", "conv", "conv", ("order_sensitive_layer",), {}, tw.zigzag),
    Bug("LlamaFactory #10727", "scan", "scan", "scan", ("state_restarts",)),
    Bug("prime-rl #3003", "scan", "conv", "conv", ("order_sensitive_layer",), {}, tw.striped),
    Bug("diffusers #14265", "first keys", "llama", LAST, ("dv_wrong", "dk_wrong", "dq_wrong")),
    Bug("tt-metal #53205", "own lse", "llama", LAST, ("lse_gradient_lost",)),
    Bug("Automodel's guide", "averaged twice", "llama", None, ("gradient_scaled",)),
    Bug("slime #1748", "layer inflated", "llama", "model.layers.1.mlp.down_proj", ("unknown",)),
    Bug("axolotl #3498", "split twice", "llama", None, ("unknown", "loss_scaled")),
    Bug("verl #6068", "labels rolled", "qwen3", None, ("labels_shifted",), {}, tw.zigzag),
    Bug("AReno #511", "other ranks' labels", "llama", None, ("labels_shifted",)),
    Bug(
        "vllm-omni #7437", "text per rank", "qwen3", FIRST, ("shared_counted_per_rank",), {}, joint
    ),
    Bug("vllm-omni #7437", "text again", "qwen3", FIRST, ("counted_twice",), {}, tw.striped),
    Bug("Automodel #2384", "nan", "llama", LAST, ("dk_wrong",)),
    Bug("Automodel's guide", "noise", "llama", FIRST_NORM, ("noise_per_rank",)),
)


class Neighbours(nn.Module):
    """A model with a layer that goes over tokens in order, and no attention."""

    def __init__(self, kind: str):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.scan = nn.GRU(16, 16, batch_first=True) if kind == "scan" else None
        self.conv = nn.Conv1d(16, 16, 4) if kind == "conv" else None
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **given: Any) -> Any:
        x = self.embed(input_ids)
        x = x + (self.conv(pad(x.mT, (3, 0))).mT if self.scan is None else self.scan(x)[0])
        logits = self.head(x)
        loss = None
        if labels is not None:
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(loss, logits)


class Output(NamedTuple):
    loss: Tensor | None
    logits: Tensor


def made(bug: Bug) -> tuple[nn.Module, dict[str, Tensor]]:
    make = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (1, T), generator=make)
    inputs = {"input_ids": ids, "labels": ids.clone()}
    if bug.says == "no documents":
        inputs["position_ids"] = torch.cat([torch.arange(17), torch.arange(T - 17)])[None]
    if "padding" in bug.says:
        inputs["attention_mask"] = (torch.arange(T) >= 6).long()[None]
        inputs["labels"][:, :7] = -100
    if bug.model in ("scan", "conv"):
        return Neighbours(bug.model), inputs
    model = build(bug.model, **bug.changes)
    model.config.use_cache = False
    return model, inputs


def split_of(bug: Bug) -> Any:
    return partial(share, bug.says, bug.layout)


def share(
    says: str, layout: Any, model: Any, inputs: Mapping[str, Tensor], rank: int, group: Any
) -> Any:
    """One rank's share, with one fault."""
    world_size = transport_for(group).world_size
    cp = tw.ContextParallel(group, num_tokens=T, layout=layout(T, world_size))
    labels = pad(inputs["labels"][:, 1:], (0, 1), value=-100)
    if says == "labels shifted":
        labels = pad(cp.shard(inputs["labels"], 1)[:, 1:], (0, 1), value=-100)
    else:
        labels = cp.shard(labels, 1)
    if says == "labels rolled":
        labels = cp.shard(inputs["labels"], 1).roll(-1, 1)
    if len(cp.layout.replicated) and rank:  # the loss of shared rows counts once
        labels = labels.masked_fill(cp.position_ids < SHARED, -100)
    if says == "other ranks' labels":
        whole = pad(inputs["labels"][:, 1:], (0, 1), value=-100)
        labels = cp.layout.shard(whole, (rank + 1) % world_size, 1)
    count: Any = (inputs["labels"][:, 1:] != -100).sum()
    positions = inputs.get("position_ids", torch.arange(T)[None])
    given = {"input_ids": cp.shard(inputs["input_ids"], 1), "position_ids": cp.shard(positions, 1)}
    if says == "own positions":
        given["position_ids"] = torch.arange(len(cp.position_ids))[None]
    rows = cp.position_ids
    if says == "split twice":
        once = tw.ContextParallel(group, num_tokens=len(rows) * world_size)
        kept = once.layout.runs[rank][0].count // world_size
        mine = slice(rank * kept, (rank + 1) * kept)
        given, labels = {k: x[:, mine] for k, x in given.items()}, labels[:, mine]
        rows = rows[mine]
        cp = tw.ContextParallel(
            group,
            num_tokens=T,
            layout=tw.Layout(T, [[tw.Run(10 * r + r * kept, kept)] for r in range(world_size)]),
        )
    if says == "noise":
        draw = torch.Generator().manual_seed(rank)
        model.get_input_embeddings().register_forward_hook(
            lambda _, __, x: x + 0.1 * torch.randn(x.shape, generator=draw)
        )
    if hasattr(model, "set_attn_implementation"):
        name = f"peer_{rank}"
        AttentionInterface.register(name, partial(attend, says, cp, inputs))
        AttentionMaskInterface.register(name, lambda **_: None)
        model.set_attn_implementation(name)
    logits = model(**given).logits
    if says == "no labels" and rank == 1:
        labels = torch.full_like(labels, -100)
    if says in ("no labels", "own mean", "mean of means"):
        count = (labels != -100).sum() * (world_size if says == "mean of means" else 1)
    loss = cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / count
    if says == "gradients averaged":
        loss = Wrong.apply(loss, 1 / world_size)
    if says in ("averaged twice", "layer inflated"):
        loss.backward()
        for parameter_name, x in model.named_parameters():
            if x.grad is not None:
                x.grad.copy_(summed(cp, x.grad))
                if says == "averaged twice":
                    x.grad /= world_size
                elif "layers.1.mlp.down_proj" in parameter_name:
                    x.grad *= world_size
        loss = loss.detach()
    if says == "sinks not reduced":
        loss.backward()
        for parameter_name, x in model.named_parameters():
            if x.grad is not None and "sinks" not in parameter_name:
                x.grad.copy_(summed(cp, x.grad))
        loss = loss.detach()
    return loss, rows


def summed(cp: tw.ContextParallel, x: Tensor) -> Tensor:
    size = x.numel()
    rows = tw.contiguous(cp.world_size * size, cp.world_size)
    whole = tw.ContextParallel(cp.group, num_tokens=rows.num_tokens, layout=rows)
    return whole.unshard(x.reshape(-1), 0).reshape(cp.world_size, *x.shape).sum(0)


def attend(
    says: str,
    cp: tw.ContextParallel,
    inputs: Mapping[str, Tensor],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    **given: Any,
) -> tuple[Tensor, None]:
    """Dense attention to the keys of all ranks; operands [batch, heads, rows, width]."""
    if says in ("half dk", "nan"):
        key = Wrong.apply(key, 0.5 if says == "half dk" else float("nan"))
    parts = [cp.unshard(x, 2) for x in (key, value)]
    if says == "no reduction":
        parts = [own_gradient(cp, x, y) for x, y in zip((key, value), parts, strict=True)]
    keys, values = parts
    at, here = torch.arange(T), cp.position_ids
    allowed = here[:, None] >= at
    rank_of = torch.empty(T, dtype=torch.int64)
    for rank in range(cp.world_size):
        rank_of[cp.layout.positions(rank)] = rank
    window = given.get("sliding_window") or getattr(module, "sliding_window", None)
    if window and says == "block window":
        allowed = allowed & ((here % 10)[:, None] - at % 10 < window)
    elif window and says != "no window":
        allowed = allowed & (here[:, None] - at < window)
    if "position_ids" in inputs and says != "no documents":
        starts = (inputs["position_ids"][0] == 0).cumsum(0)
        allowed = allowed & (starts[here][:, None] == starts)
    attends_padding = says == "padding" or (says == "late padding" and module.layer_idx == 2)
    if "attention_mask" in inputs and not attends_padding:
        allowed = allowed & inputs["attention_mask"][0].bool()
    if says == "full":
        allowed = torch.ones_like(allowed)
    if says == "own shard":
        allowed = allowed & (rank_of == cp.rank)
    if says == "half the ranks":
        allowed = allowed & (rank_of // 2 == cp.rank // 2)
    if says in ("text again", "text per rank"):
        again = torch.arange(SHARED).repeat(2 if says == "text again" else cp.world_size - 1)
        keys, values = (torch.cat([x, x[:, :, again]], 2) for x in (keys, values))
        allowed = torch.cat([allowed, allowed[:, again]], 1)
    heads = torch.arange(query.shape[1])
    ratio = query.shape[1] // keys.shape[1] + (says == "padded heads")
    keys, values = (x[:, heads // ratio] for x in (keys, values))
    scale = query.shape[-1] ** -0.5 if says == "default scale" else given["scaling"]
    scores = query @ keys.mT * scale
    softcap, sink = given.get("softcap"), given.get("s_aux")
    if softcap and says != "no softcap":
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed, -torch.inf)
    if sink is not None and says != "no sink":
        column = sink.to(scores)[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    p = scores.softmax(-1).nan_to_num()[..., : keys.shape[2]]
    out = (p @ values).transpose(1, 2)
    if says == "first keys":  # backward multiplies by the keys of the first step for all others
        own = keys[:, :, cp.position_ids].repeat(1, 1, cp.world_size, 1)[:, :, :T]
        other = (query @ own.mT * scale).masked_fill(~allowed, -torch.inf)
        backwards = (other.softmax(-1) @ values).transpose(1, 2)
        out = out.detach() + backwards - backwards.detach()
    if says == "own lse":  # backward takes each chunk's own out, weighed by what it is of the whole
        chunks = [scores.masked_fill(rank_of != r, -1e30) for r in range(cp.world_size)]
        sums = torch.stack([chunk.logsumexp(-1, keepdim=True) for chunk in chunks])
        parts = torch.stack([chunk.softmax(-1) @ values for chunk in chunks])
        backwards = (sums.softmax(0).detach() * parts).sum(0).transpose(1, 2)
        out = out.detach() + backwards - backwards.detach()
    return out * (heads < len(heads) - 1)[:, None] if says == "last head" else out, None


def own_gradient(cp: tw.ContextParallel, own: Tensor, whole: Tensor) -> Tensor:
    """The gathered rows, whose gradient is what this rank's queries give to its own rows."""
    out = whole.detach().clone()
    return out.index_copy(2, cp.position_ids, own)
