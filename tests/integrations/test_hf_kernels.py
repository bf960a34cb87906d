"""Kernels of fla and mamba-ssm get the arguments that these libraries' functions take.

They need a GPU, so functions of the same signatures stand for them where transformers looks: of
flash-linear-attention 0.6.0 and mamba-ssm 2.3.2. They refuse what the kernels refuse, or would
read wrongly, and compute by transformers' torch code.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")

from support.hf_models import case, errors
from support.hybrid_models import build, run_apart, split_in_threads
from torch import Tensor

import tilewise as tw
from tilewise.integrations import hf
from tilewise.tokens.pieces import pieces_of
from tilewise_verify import hf_proof

kernels_of_transformers: Any = pytest.importorskip("transformers.integrations.hub_kernels")
TAKES_KERNELS = "use_kernel_func_from_hub_with_fallback"
pytestmark = pytest.mark.skipif(
    not hasattr(kernels_of_transformers, TAKES_KERNELS), reason="needs transformers 5.23"
)

PACKED = (0, 5, 16, 17, 29)
LAYOUT = tw.zigzag(29, 3)
Calls = list[dict[str, Any]]
Made = Callable[[Calls, Callable[..., Any]], Callable[..., Any]]


def of_fla(calls: Calls, reference: Callable[..., Any]) -> Callable[..., Any]:
    """fla.ops.gated_delta_rule.chunk_gated_delta_rule; chunk_kda has these arguments, too."""

    def kernel(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        state_v_first: bool = False,
        cu_seqlens: Tensor | None = None,
        cp_context: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        calls.append(locals())
        assert scale is cu_seqlens is cp_context is None and not state_v_first and not kwargs
        assert q.shape == k.shape and v.shape[2] % q.shape[2] == 0
        assert v.shape[:3] == beta.shape == g.shape[:3] and bool((g <= 0).all())
        if initial_state is not None:
            assert initial_state.dtype == torch.float32 and initial_state.is_contiguous()
            assert initial_state.shape == (len(q), v.shape[2], k.shape[3], v.shape[3])
        options = {"initial_state": initial_state, "output_final_state": output_final_state}
        options["use_qk_l2norm_in_kernel"] = use_qk_l2norm_in_kernel
        return reference(q, k, v, g=g, beta=beta, **options)

    return kernel


def of_mamba2(calls: Calls, reference: Callable[..., Any]) -> Callable[..., Any]:
    """mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined."""

    def kernel(
        x: Tensor,
        dt: Tensor,
        A: Tensor,  # noqa: N803
        B: Tensor,  # noqa: N803
        C: Tensor,  # noqa: N803
        chunk_size: int,
        D: Tensor | None = None,  # noqa: N803
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        return_varlen_states: bool = False,
        state_dtype: Any = None,
    ) -> Any:
        calls.append(locals())
        assert z is initial_states is seq_idx is cu_seqlens is state_dtype is None
        assert return_final_states and not return_varlen_states
        assert x.shape[:3] == dt.shape and B.shape == C.shape and A.shape == dt.shape[2:]
        assert D is not None and dt_bias is not None and D.shape == dt_bias.shape == A.shape
        options = {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
        options |= {"D": D, "return_final_states": True, "chunk_size": chunk_size}
        return reference(x, dt, A, B, C, **options)

    return kernel


def of_mamba(calls: Calls, reference: Callable[..., Any]) -> Callable[..., Any]:
    """mamba_ssm.ops.selective_scan_interface.selective_scan_fn."""

    def kernel(
        u: Tensor,
        delta: Tensor,
        A: Tensor,  # noqa: N803
        B: Tensor,  # noqa: N803
        C: Tensor,  # noqa: N803
        D: Tensor | None = None,  # noqa: N803
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
    ) -> Tensor:
        calls.append(locals())
        # It has no gradient of a last state.
        assert D is z is delta_bias is None and not delta_softplus and not return_last_state
        assert u.shape == delta.shape and B.shape == C.shape == (len(u), A.shape[1], u.shape[2])
        assert {x.dtype for x in (u, delta, A, B, C)} == {torch.float32}
        return reference(u, delta, A, B, C)

    return kernel


class Library(NamedTuple):
    """Where transformers looks for a kernel, and the function of its own that this replaces."""

    package: str
    path: str
    name: str
    function: str
    made: Made


LIBRARIES = {
    "Qwen3Next": Library(
        "fla",
        "ops.gated_delta_rule",
        "chunk_gated_delta_rule",
        "torch_chunk_gated_delta_rule",
        of_fla,
    ),
    "KimiLinear": Library("fla", "ops.kda", "chunk_kda", "chunk_kimi_delta_attention", of_fla),
    "Bamba": Library(
        "mamba_ssm",
        "ops.triton.ssd_combined",
        "mamba_chunk_scan_combined",
        "mamba2_chunk_scan",
        of_mamba2,
    ),
    "Mamba": Library(
        "mamba_ssm",
        "ops.selective_scan_interface",
        "selective_scan_fn",
        "mamba_selective_scan",
        of_mamba,
    ),
}


def installed(library: Library, model: Any, patch: pytest.MonkeyPatch) -> Calls:
    """The calls of a kernel that a model finds as if its library were there."""
    modeling = sys.modules[type(model).__module__]
    reference, calls = inspect.unwrap(vars(modeling)[library.function]), Calls()
    kernel = library.made(calls, reference)
    parts = [library.package, *library.path.split(".")]
    modules = [ModuleType(".".join(parts[: end + 1])) for end in range(len(parts))]
    for (outer, inner), name in zip(pairwise(modules), parts[1:], strict=True):
        setattr(outer, name, inner)
    setattr(modules[-1], library.name, kernel)
    for module in modules:
        patch.setitem(sys.modules, module.__name__, module)
    takes_kernels = getattr(kernels_of_transformers, TAKES_KERNELS)
    patch.setattr(
        modeling, library.function, takes_kernels(library.name, library.package)(reference)
    )
    return calls


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_kernel_runs_once_a_piece_with_its_own_arguments(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    whole, given = build(name), case(PACKED)
    want = run_apart(copy.deepcopy(whole), given)
    hf.check_model(whole)  # which runs a tiny model whole, too
    calls = installed(LIBRARIES[name], whole, monkeypatch)
    got = split_in_threads(whole, given, LAYOUT, strategy=tw.ring(3))
    assert max(errors(got, want).values()) < 1e-5

    tokens = "u" if name == "Mamba" else "x" if name == "Bamba" else "v"
    dim = 2 if name == "Mamba" else 1
    extra = 8 if name == "Mamba" else 0  # tokens that read the last state
    pieces = [piece for rank in range(3) for piece in pieces_of(LAYOUT, rank, PACKED)]
    layers = 2
    lengths = [stop - start + extra for start, stop in pieces] * layers
    assert sorted(call[tokens].shape[dim] for call in calls) == sorted(lengths)
    if LIBRARIES[name].package == "fla":
        firsts = [call for call in calls if call["initial_state"] is None]
        assert len(firsts) == layers * sum(start in PACKED for start, _ in pieces)
        assert all(call["output_final_state"] for call in calls)
        widths = {call["initial_state"] is None: call["v"].shape[3] for call in calls}
        assert widths[False] == widths[True] + calls[0]["k"].shape[3]  # the piece's matrix


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_kernel_that_takes_no_tensors_of_the_cpu_does_not_keep_a_model_from_being_tried(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    """A tiny model is tried on the CPU, where Triton's kernels raise."""
    whole, library = build(name), LIBRARIES[name]

    def for_gpus(calls: Calls, reference: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(*_: Any, **__: Any) -> None:
            raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")

        return kernel

    installed(library._replace(made=for_gpus), whole, monkeypatch)
    hf_proof._refuted.cache_clear()
    hf.check_model(whole)
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        run_apart(whole, case(PACKED))
