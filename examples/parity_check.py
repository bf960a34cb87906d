"""Is a model that is split by other means than tilewise still the same model?

A Mistral of transformers, whose layers see a window, is split by gathering keys and values with
plain torch.distributed. The first split forgets the window, as several public integrations did:
its loss looks plausible. Run

    python examples/parity_check.py
    tilewise parity examples/parity_check.py:forgets_the_window --html parity.html
"""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, MistralConfig
from transformers import MistralForCausalLM as Mistral

import tilewise as tw

NUM_TOKENS, WINDOW = 64, 6


class GatherKeys(torch.autograd.Function):
    """Every rank's rows, in rank order; backward sums each rank's gradient over ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group), 2)[dist.get_rank(ctx.group)], None


def split(model, inputs, rank, group, keeps_the_window=True):
    """One rank's share of the loss; neighbouring ranks have neighbouring tokens."""
    n = dist.get_world_size(group)
    mine = torch.arange(NUM_TOKENS).chunk(n)[rank]

    def attend(module, query, key, value, mask, **options):
        key, value = (GatherKeys.apply(x, group) for x in (key, value))
        distance = mine[:, None] - torch.arange(NUM_TOKENS)
        allowed = distance >= 0
        if keeps_the_window:
            allowed &= distance < WINDOW
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=allowed, scale=options["scaling"], enable_gqa=True
        )
        return out.transpose(1, 2), None

    AttentionInterface.register("gathered", attend)
    AttentionMaskInterface.register("gathered", lambda **options: None)
    model.set_attn_implementation("gathered")
    labels = pad(inputs["labels"][:, 1:], (0, 1), value=-100)  # shifted before they are split
    logits = model(input_ids=inputs["input_ids"][:, mine], position_ids=mine[None]).logits
    total = cross_entropy(logits.flatten(0, 1), labels[:, mine].flatten(), reduction="sum")
    return total / (labels != -100).sum(), mine


def split_without_window(model, inputs, rank, group):
    return split(model, inputs, rank, group, keeps_the_window=False)


def make():
    """A small model with random weights, and a batch."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = Mistral(MistralConfig(sliding_window=WINDOW, **sizes, **heads))
    tokens = torch.randint(50, (1, NUM_TOKENS))
    return model, {"input_ids": tokens, "labels": tokens}


def forgets_the_window():
    """What the command line asks for: model, inputs, split."""
    return *make(), split_without_window


def is_right():
    return *make(), split


if __name__ == "__main__":
    print(tw.parity(*forgets_the_window()))
    print(tw.parity(*is_right()))
