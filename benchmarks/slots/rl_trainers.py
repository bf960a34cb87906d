"""OpenRLHF's and prime-rl's helper modules, unchanged, on `tilewise.compat.ring_flash_attn`.

    git clone https://github.com/OpenRLHF/OpenRLHF; git clone https://github.com/PrimeIntellect-ai/prime-rl
    python -m benchmarks.slots.rl_trainers --openrlhf OpenRLHF --prime-rl prime-rl

Of each a step of a small model in fp64 on two gloo processes, through the helpers alone, against
the same step of the whole rows: logits and every gradient.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.slots import stand_ins
from tilewise.compat import ring_flash_attn
from tilewise.transport.processes import run_ranks
from tilewise_tools.naming import Parser, run_script

RANKS = 2
LENGTHS = (5, 12, 8)
"""Of rows; OpenRLHF's helper adds a token, prime-rl is given a fourth row of one."""
BOUND = 1e-10


def _imported(clone: str, package: str, name: str) -> Any:
    """A module of a clone, without running the packages above it, which import a whole trainer."""
    parts = name.split(".")
    root = Path(clone) / package
    for depth in range(1, len(parts)):
        above = ".".join(parts[:depth])
        if above not in sys.modules:
            made = stand_ins.module(above)
            made.__path__ = [str(root.joinpath(*parts[:depth]))]
    return importlib.import_module(name)


def _prepare() -> None:
    ring_flash_attn.install()
    stand_ins.flash_attn()
    torch.cuda.current_device = lambda: torch.device("cpu")


def _model(implementation: str) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).double()
    model.config._attn_implementation = implementation  # as an argument it looks for flash-attn
    return model


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def _padded() -> tuple[Tensor, Tensor]:
    """Rows of a batch of uneven lengths, padded on the right, and their attention mask."""
    lengths = torch.tensor(LENGTHS)
    seen = torch.arange(max(LENGTHS)) < lengths[:, None]
    tokens = torch.arange(seen.numel()).mul(7).remainder(31).view_as(seen) + 1
    return tokens * seen, seen.long()


def openrlhf_step(rank: int, clone: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of the padded batch, made as OpenRLHF's Actor does it."""
    _prepare()
    helpers = _imported(clone, "", "openrlhf.models.ring_attn_utils")
    helpers.patch_transformers_for_ring_flash_attn()
    helpers.set_ring_attn_group(dist.group.WORLD)
    group = helpers.get_ring_attn_group()
    importlib.import_module("ring_flash_attn").substitute_hf_flash_attn(group, 1)
    model, (tokens, seen) = _model("flash_attention_2"), _padded()
    ids, positions, _, padding, rows = helpers.unpad_and_slice_tensor(tokens, seen, group)
    logits = model(input_ids=ids, position_ids=positions).logits
    whole = helpers.gather_and_pad_tensor(logits, group, padding, rows, *tokens.shape).squeeze(2)
    # The gather's backward sums what the ranks ask of it, hence each asks for its share.
    (whole.square().sum() / RANKS).backward()
    for grad in _gradients(model).values():
        dist.all_reduce(grad)
    return whole.detach(), _gradients(model)


def check_openrlhf(clone: str) -> float:
    """The largest difference from the model on each row by itself."""
    model, (tokens, _) = _model("sdpa"), _padded()
    wanted = torch.zeros(*tokens.shape, 32, dtype=torch.float64)
    for row, length in enumerate(LENGTHS):
        logits = model(input_ids=tokens[row : row + 1, :length]).logits[0]
        logits.square().sum().backward()
        wanted[row, :length] = logits.detach()
    found = run_ranks(RANKS, openrlhf_step, clone, timeout_seconds=300)
    return max(_distance(out, wanted, grads, _gradients(model)) for out, grads in found)


def _distance(
    out: Tensor, wanted: Tensor, grads: dict[str, Tensor], own: dict[str, Tensor]
) -> float:
    assert grads.keys() == own.keys()
    apart = [float((grads[name] - own[name]).abs().max()) for name in own]
    return max(float((out - wanted).abs().max()), *apart)


def _prime_attention(clone: str, *, ring: bool) -> Any:
    """prime-rl's FlashAttention layer, in fp64; with its own ring on two ranks."""
    attn = _imported(clone, "src", "prime_rl.trainer.models.layers.attn")
    _imported(clone, "src", "prime_rl.trainer.models.layers.ring_attn")
    for model, name in (
        ("afmoe", "AfmoeFlashAttention"),
        ("qwen3_5_moe", "Qwen3_5MoeGatedFlashAttention"),
        ("qwen3_5", "Qwen3_5GatedFlashAttention"),
    ):  # classes of models that need its whole trainer; the layer tried here is none of them
        package = f"prime_rl.trainer.models.{model}"
        stand_ins.module(package)
        stand_ins.module(f"{package}.modeling_{model}", **{name: type(name, (), {})})
    if ring:
        attn.substitute_ring_attn(dist.group.WORLD, 1, "flash_attention_2")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "head_dim": 8, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "is_causal": True, "attention_bias": False}
    config = attn.AttentionConfig(**sizes, use_qk_norm=False, rms_norm_eps=1e-6)
    layer = attn.FlashAttention(config).double()
    layer.sliding_window = 4
    return layer


def prime_rl_step(rank: int, clone: str, ring: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """A layer's output of the packed rows, made as prime-rl's trainer does it.

    Args:
        ring: over the ranks by its helpers; else on one process, by its own code.
    """
    _prepare()
    _imported(clone, "src", "prime_rl._compat")
    cp = _imported(clone, "src", "prime_rl.utils.cp")
    layer = _prime_attention(clone, ring=ring)
    lengths = torch.tensor([*LENGTHS, 1])
    ids = torch.arange(int(lengths.sum()))[None]
    positions = torch.cat([torch.arange(n) for n in lengths.tolist()])[None]
    group = dist.group.WORLD
    if not ring:
        edges = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        out, _ = layer(_hidden(ids), cu_seqlens=edges, max_seqlen=max(LENGTHS))
    else:
        ids, _ = cp.setup_cp_params(
            *(ids, positions, rank, RANKS, group), seq_lens=lengths, cp_style="ring"
        )
        out, _ = layer(_hidden(ids))
    out.square().sum().backward()
    for grad in _gradients(layer).values():
        dist.all_reduce(grad)
    out = out.detach()
    return cp.gather_for_cp_wo_grad(out, RANKS, group) if ring else out, _gradients(layer)


def _hidden(ids: Tensor) -> Tensor:
    return (ids[..., None] * torch.arange(1, 33)).double().cos()


def check_prime_rl(clone: str) -> float:
    """The largest difference from the layer on the whole row."""
    ((wanted, own),) = run_ranks(1, prime_rl_step, clone, False, timeout_seconds=300)
    found = run_ranks(RANKS, prime_rl_step, clone, True, timeout_seconds=300)
    return max(_distance(out, wanted, grads, own) for out, grads in found)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--openrlhf")
    parser.add_argument("--prime-rl")
    options = parser.parse_args()
    worst = 0.0
    for name, check in (("openrlhf", check_openrlhf), ("prime_rl", check_prime_rl)):
        clone = getattr(options, name)
        if clone:
            distance = check(str(Path(clone).resolve()))
            print(f"{name}: out and gradients differ by {distance:.3g} at most")
            worst = max(worst, distance)
    sys.exit(0 if worst <= BOUND else 1)


if __name__ == "__main__":
    run_script(main)
