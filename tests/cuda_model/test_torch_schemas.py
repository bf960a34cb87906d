"""What our kernels hand to torch's operators fits torch 2.11, which GPU machines have, and 2.13.

Schemas are facts of those versions: 2.11's are 2.13's but for what `NEWER` adds.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_model.fake_cuda import FakeCuda
from cuda_model.test_fake_cuda import operands
from support.kernel_cases import CALLS, HEADS, SCALE, call_of
from torch import Tensor

from tilewise.kernels import torch_cpu, torch_flash, torch_sdpa
from tilewise.kernels.call_cache import CallCache
from tilewise.kernels.registry import kernel_named
from tilewise.tiles.calls import Kind

SDPA = "aten::_scaled_dot_product_"
QKV = "Tensor query, Tensor key, Tensor value"
SIZES = "SymInt max_q, SymInt max_k, float dropout_p, bool is_causal"
WINDOW = "*, float? scale=None, SymInt? window_size_left=None, SymInt? window_size_right=None"
NEWER = ", Tensor? block_table=None, int? num_splits=None"
GRADS = "(Tensor, Tensor, Tensor"
SCHEMAS = {
    (torch_flash, "_forward"): (
        f"aten::_flash_attention_forward({QKV}, Tensor? cum_seq_q, Tensor? cum_seq_k, {SIZES}, "
        f"bool return_debug_mask, {WINDOW}, Tensor? seqused_k=None, Tensor? alibi_slopes=None"
        f"{NEWER}) -> (Tensor output, Tensor softmax_logsumexp, Tensor rng_state, Tensor unused, "
        "Tensor debug_attn_mask)"
    ),
    (torch_flash, "_backward"): (
        f"aten::_flash_attention_backward(Tensor grad_out, {QKV}, Tensor out, Tensor logsumexp, "
        f"Tensor cum_seq_q, Tensor cum_seq_k, {SIZES}, Tensor rng_state, Tensor unused, {WINDOW}) "
        f"-> {GRADS})"
    ),
    (torch_sdpa, "_cudnn"): (
        f"{SDPA}cudnn_attention({QKV}, Tensor? attn_bias, bool compute_log_sumexp, "
        "float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *, "
        "float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, "
        "Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor philox_seed, Tensor philox_offset, "
        "Tensor debug_attn_mask)"
    ),
    (torch_sdpa, "_cudnn_backward"): (
        f"{SDPA}cudnn_attention_backward(Tensor grad_out, {QKV}, Tensor out, Tensor logsumexp, "
        "Tensor philox_seed, Tensor philox_offset, Tensor attn_bias, Tensor cum_seq_q, "
        f"Tensor cum_seq_k, {SIZES}, *, float? scale=None) -> {GRADS})"
    ),
    (torch_sdpa, "_efficient"): (
        f"{SDPA}efficient_attention({QKV}, Tensor? attn_bias, bool compute_log_sumexp, "
        "float dropout_p=0., bool is_causal=False, *, float? scale=None) -> (Tensor output, "
        "Tensor log_sumexp, Tensor philox_seed, Tensor philox_offset)"
    ),
    (torch_sdpa, "_efficient_backward"): (
        f"{SDPA}efficient_attention_backward(Tensor grad_out_, {QKV}, Tensor attn_bias, "
        "Tensor out, Tensor logsumexp, Tensor philox_seed, Tensor philox_offset, float dropout_p, "
        f"bool[4] grad_input_mask, bool is_causal=False, *, float? scale=None) -> {GRADS}, Tensor)"
    ),
    (torch_cpu, "_forward"): (
        f"{SDPA}flash_attention_for_cpu({QKV}, float dropout_p=0., bool is_causal=False, *, "
        "Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)"
    ),
    (torch_cpu, "_backward"): (
        f"{SDPA}flash_attention_for_cpu_backward(Tensor grad_out, {QKV}, Tensor out, "
        "Tensor logsumexp, float dropout_p, bool is_causal, *, Tensor? attn_mask=None, "
        "float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
    ),
}
VERSIONS = {"2.11": lambda text: text.replace(NEWER, ""), "2.13": str}
KINDS = {"int": int, "float": float, "bool": bool, "List[bool]": list, "Tensor": Tensor}
USED = {
    "cuda": (torch_flash, "_forward", "_backward"),
    "cudnn": (torch_sdpa, "_cudnn", "_cudnn_backward"),
    "efficient": (torch_sdpa, "_efficient", "_efficient_backward"),
    "cpu": (torch_cpu, "_forward", "_backward"),
}


def fits(text: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """As torch binds arguments: by place, then by name; None is an absent tensor or a default."""
    schema = torch._C.parse_schema(text).arguments
    by_place = [x for x in schema if not x.kwarg_only]
    assert len(args) <= len(by_place), (text, len(args))
    given = dict(zip([x.name for x in by_place], args, strict=False))
    assert not given.keys() & named.keys() and named.keys() <= {x.name for x in schema}, text
    given |= named
    for one in schema:
        if one.name not in given:
            assert one.has_default_value(), (text, one.name)
            continue
        value, kind = given[one.name], str(one.type).replace("SymInt", "int")
        if value is None:
            assert kind == "Tensor" or kind.startswith("Optional"), (text, one.name)
        else:
            kind = kind.removeprefix("Optional[").removesuffix("]") if "Opt" in kind else kind
            assert isinstance(value, KINDS[kind]), (text, one.name, value)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", USED)
def test_arguments_fit_the_operators_of_both_versions(name, version, monkeypatch):
    seen = set()
    module, *operators = USED[name]
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch_sdpa, "CALL_CACHE", CallCache())  # no fake tensors of other tests
    for operator in operators:
        text, real = VERSIONS[version](SCHEMAS[module, operator]), getattr(module, operator)

        def watched(*args: Any, text: str = text, real: Any = real, **named: Any) -> Any:
            seen.add(text)
            fits(text, args, named)
            return real(*args, **named)

        monkeypatch.setattr(module, operator, watched)
    kernel = kernel_named(name)
    calls = [
        CALLS["full"],
        call_of(16, 16, Kind.CAUSAL),
        *(CALLS[x] for x in CALLS if "window" in x),
    ]
    cuda = FakeCuda(monkeypatch)
    if name == "cpu":
        cuda.empty = lambda *shape, dtype: torch.ones(shape, dtype=dtype)
    with cuda() if name != "cpu" else torch.no_grad():
        for call in calls:
            q, k, v, *rest = operands(cuda, call, HEADS["GQA"], torch.bfloat16, 64, False)
            kernel.forward(q, k, v, call, SCALE)
            kernel.backward(q, k, v, *rest, call, SCALE)
    assert len(seen) == 2


def test_the_installed_torch_has_these_schemas():
    version = ".".join(torch.__version__.split(".")[:2])
    for (module, name), text in SCHEMAS.items():
        found = getattr(module, name)
        found = getattr(found, "default", found)._schema
        wanted = torch._C.parse_schema(VERSIONS.get(version, VERSIONS["2.11"])(text))
        assert found.is_backward_compatible_with(wanted), found
        if version in VERSIONS:
            assert str(found) == str(wanted)
