"""A tiny Wan of diffusers trains with its video split over 4 processes, as on one process.

    torchrun --nproc-per-node 4 examples/diffusers_wan.py

Needs diffusers: pip install 'tilewise[diffusers]'. Every rank draws the same noise, passes whole
inputs, and computes the whole loss; gradients are summed.
"""

import copy
import os
from typing import Any

import torch
import torch.distributed as dist
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor, nn

from tilewise.integrations.diffusers import enable_parallelism

STEPS = 4
SIZE: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "num_layers": 2,
    "ffn_dim": 32,
}
CHANNELS: dict[str, Any] = {"in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 32}


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """A video [1, channels, frames, height, width], noise and a text, the same on every rank."""
    draw = torch.Generator().manual_seed(step)
    frames = 3 + step % 2  # the number of tokens need not divide by that of ranks
    video, noise = torch.randn(2, 1, 4, frames, 6, 10, generator=draw)
    return video, noise, torch.randn(1, 7, 16, generator=draw)


def losses(model: nn.Module, split: bool) -> list[float]:
    """Train with flow matching, and return the loss of each step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    found: list[float] = []
    for step in range(STEPS):
        video, noise, text = batch(step)
        noisy = 0.3 * noise + 0.7 * video
        velocity = model(noisy, torch.tensor([300]), text, return_dict=False)[0]
        loss = (velocity - (noise - video)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters() if split else ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)  # the sum: a mean would be too small by the ranks
        optimizer.step()
        found.append(loss.item())
    return found


def main() -> tuple[list[float], list[float]]:
    """Losses of the split model and of one process."""
    if not dist.is_initialized():
        dist.init_process_group("gloo" if not torch.cuda.is_available() else None)
    torch.manual_seed(0)
    model = WanTransformer3DModel(**SIZE, **CHANNELS, rope_max_seq_len=32).train()
    whole = losses(copy.deepcopy(model), split=False)
    split = losses(enable_parallelism(model), split=True)
    if dist.get_rank() == 0:
        for step, (one, many) in enumerate(zip(whole, split, strict=True)):
            print(f"step {step}: loss {one:.5f} on one process, {many:.5f} split")
    return split, whole


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
    dist.destroy_process_group()
