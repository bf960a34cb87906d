"""A training step made so small that parity of it fits a budget of seconds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilewise_verify.hf_shrink import POSITIONS, VOCABULARY
from tilewise_verify.parity import num_tokens_of

START_SECONDS = 8.0  # for the ranks to start
RUNS = 40  # of the unsplit model, as long as those of parity and a diagnosis take
PROBE = 1024  # rows and columns of the product that measures this machine
BYTES_PER_SECOND = 2e9  # of copying a model
SHOWN = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")


class Step(NamedTuple):
    """A model, the inputs of its call, and how they were made smaller; empty if they were not."""

    model: nn.Module
    inputs: Mapping[str, Any]
    note: str = ""


def small_step(
    model: nn.Module, inputs: Mapping[str, Any], world_size: int, seconds: float
) -> Step:
    """Return a step as it is if parity of it takes about `seconds` or less, else a smaller one.

    A model of transformers is made anew from its configuration, by hf_shrink: its kinds of layers,
    windows, experts and ratios of heads stay. Of the inputs the first tokens are kept, POSITIONS
    at most and a multiple of 2 world_size of them.

    Raises:
        ValueError: if it takes longer, and the model or an input cannot be made smaller.
    """
    num_tokens = num_tokens_of(inputs)
    expected = _expected_seconds(model, inputs)
    if expected <= seconds:
        return Step(model, inputs)
    why = f"about {expected:.0f} s expected, and seconds is {seconds:g}"
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_diff_dict"):
        raise ValueError(
            f"{why}, but {type(model).__name__} is no model of transformers, which alone are made "
            "smaller; give a smaller model or fewer tokens, or leave seconds out"
        )
    from tilewise_verify.hf_proof import tiny_model

    with torch.random.fork_rng(devices=[]):
        small = tiny_model(type(model), config)
    small = small.to(model.device, model.dtype).train(model.training)
    if small.config._attn_implementation != config._attn_implementation:
        small.set_attn_implementation(config._attn_implementation)
    most = min(num_tokens, POSITIONS)
    kept = num_tokens if most == num_tokens else most - most % (2 * world_size) or most
    sizes = [(name, getattr(config, name, 0), getattr(small.config, name, 0)) for name in SHOWN]
    changed = [*sizes, ("tokens", num_tokens, kept)]
    listed = ", ".join(f"{name} {old} -> {new}" for name, old, new in changed if old != new)
    short = {name: _shortened(name, x, num_tokens, kept) for name, x in inputs.items()}
    return Step(small, short, f"made smaller ({why}): {listed}; weights are new")


def _expected_seconds(model: nn.Module, inputs: Mapping[str, Any]) -> float:
    """Seconds of parity, from the model's size and one matrix product on this machine."""
    x = torch.ones(PROBE, PROBE)
    torch.mm(x, x)  # the first one starts threads
    start = time.perf_counter()
    torch.mm(x, x)
    flops_per_second = 2 * PROBE**3 / (time.perf_counter() - start)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    rows = max(
        x[..., 0].numel() if x.is_floating_point() else x.numel()
        for x in inputs.values()
        if isinstance(x, Tensor) and x.ndim
    )
    step = 6 * numbers * rows / flops_per_second + 4 * numbers / BYTES_PER_SECOND
    return START_SECONDS + RUNS * step


def _shortened(name: str, x: Any, num_tokens: int, kept: int) -> Any:
    """The first tokens of an input [batch, tokens, ...] or [tokens, ...]; ids in the vocabulary."""
    if not isinstance(x, Tensor) or not x.ndim:
        return x
    dims = [dim for dim in (0, 1) if dim < x.ndim and x.shape[dim] == num_tokens]
    if not dims:
        raise ValueError(
            f"seconds cannot make inputs[{name!r}] of shape {tuple(x.shape)} shorter: none of its "
            f"first two dimensions has {num_tokens} tokens; give fewer tokens"
        )
    x = x.narrow(dims[-1], 0, kept).clone()
    is_ids = not x.is_floating_point() and x.dtype != torch.bool and name in ("input_ids", "labels")
    return torch.where(x >= 0, x % VOCABULARY, x) if is_ids else x
