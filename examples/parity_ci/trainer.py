"""A small trainer of packed documents, split over ranks by ring-flash-attn.

torchrun --nproc-per-node 4 trainer.py
"""

import torch
import torch.distributed as dist
from flash_attn import flash_attn_varlen_func
from ring_flash_attn import llama3_flash_attn_prepare_cu_seqlens, llama3_flash_attn_varlen_func
from torch import nn
from torch.nn.functional import cross_entropy, gelu

VOCABULARY, WIDTH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 64, 32, 4, 2, 8
WINDOW = 8  # tokens before a query that it sees


class Attention(nn.Module):
    """Attention within documents, causal and in a window; split where it has a group."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, NUM_HEADS * HEAD_DIM)
        self.k = nn.Linear(WIDTH, NUM_KV_HEADS * HEAD_DIM)
        self.v = nn.Linear(WIDTH, NUM_KV_HEADS * HEAD_DIM)
        self.out = nn.Linear(NUM_HEADS * HEAD_DIM, WIDTH)
        self.group = None

    def forward(self, x, cu_seqlens):
        q, k, v = (f(x).unflatten(1, (-1, HEAD_DIM)) for f in (self.q, self.k, self.v))
        if self.group is None:
            longest = int(cu_seqlens.diff().max())
            lengths = cu_seqlens, cu_seqlens, longest, longest
            out = flash_attn_varlen_func(q, k, v, *lengths, causal=True, window_size=(WINDOW, 0))
        else:
            rank, world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
            *lengths, keys = llama3_flash_attn_prepare_cu_seqlens(
                cu_seqlens, True, rank, world_size
            )
            out = llama3_flash_attn_varlen_func(
                q,
                k,
                v,
                *lengths,
                heads_k_stride=1,
                local_k_slice=keys,
                causal=True,
                window_size=(WINDOW, 0),
                group=self.group,
            )
        return self.out(out.flatten(1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.mlp_norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, cu_seqlens):
        x = x + self.attention(self.norm(x), cu_seqlens)
        return x + self.down(gelu(self.up(self.mlp_norm(x))))


class Model(nn.Module):
    """A decoder of packed documents; its call returns the mean loss over num_labels tokens."""

    def __init__(self, num_layers=2):
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(512, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, labels, positions, cu_seqlens, num_labels):
        x = self.embed(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, cu_seqlens)
        return cross_entropy(self.head(x), labels, reduction="sum") / num_labels


def make_batch(lengths=(20, 31, 13)):
    """Packed documents of random tokens; each predicts the next token of its document."""
    tokens = torch.randint(VOCABULARY, (sum(lengths),))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    labels = tokens.roll(-1)
    labels[cu_seqlens[1:].long() - 1] = -100
    return {
        "tokens": tokens,
        "labels": labels,
        "positions": torch.cat([torch.arange(n) for n in lengths]),
        "cu_seqlens": cu_seqlens,
        "num_labels": (labels != -100).sum(),
    }


def split_step(model, batch, rank, group):
    """One rank's share of the loss, and the positions of its rows in the batch."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.group = group
    rows = torch.arange(len(batch["tokens"])).chunk(dist.get_world_size(group))[rank]
    mine = {name: batch[name][rows] for name in ("tokens", "labels", "positions")}
    return model(**mine, cu_seqlens=batch["cu_seqlens"], num_labels=batch["num_labels"]), rows


def train(num_steps=10):
    """Train on random documents: all ranks share each batch, and add up their gradients."""
    dist.init_process_group("nccl")
    rank, group = dist.get_rank(), dist.group.WORLD
    torch.cuda.set_device(rank)
    torch.manual_seed(0)  # the same model and batches on every rank
    model = Model().to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(num_steps):
        batch = {name: x.cuda() for name, x in make_batch().items()}
        loss, _ = split_step(model, batch, rank, group)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    train()
