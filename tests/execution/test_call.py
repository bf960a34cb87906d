"""A call's options: declared once, spelled by two signatures, compared by ranks, resolved once."""

import inspect
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, ClassVar, get_overloads, get_type_hints

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise as tw
from tilewise import context_parallel, functional
from tilewise.execution import agree, operator
from tilewise.execution.call import Call
from tilewise.execution.resolve import agreement_fields, resolve, resolve_once
from tilewise.wires.wire import Plain

DERIVED = {"autocast", "needs_grad", "resolved"}
"""Fields of a call that are no options."""
OPTIONS = {x.name: x.default for x in fields(Call) if x.name not in DERIVED}
PREPARED = {"mask": None, "layout": None}
"""A prepared plan knows them, so attention can be called without."""

TOKENS = 8
SIGNATURES = {
    tw.attention: {**OPTIONS, "plan": inspect.Parameter.empty, **PREPARED},
    tw.ContextParallel.attention: {
        name: default
        for name, default in {**OPTIONS, **PREPARED, "plan": None}.items()
        if name not in ("layout", "group")
    },
}


def keywords(function: Any) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters
    return {name: x for name, x in parameters.items() if x.kind is x.KEYWORD_ONLY}


def qkv(**options: Any) -> list[Tensor]:
    return [torch.randn(TOKENS, 2, 4, dtype=torch.float64, **options) for _ in range(3)]


def together() -> dict[str, Any]:
    return {"plan": tw.ring(1), "layout": tw.contiguous(TOKENS, 1), "mask": tw.Causal()}


@pytest.mark.parametrize("function", SIGNATURES)
def test_signatures_have_the_options_of_a_call_with_their_defaults(function: Any):
    found = {name: x.default for name, x in keywords(function).items()}
    assert found == SIGNATURES[function]
    kinds = {x.kind for x in inspect.signature(function).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds


def test_both_signatures_give_an_option_the_same_type():
    whole, of_group = map(get_type_hints, SIGNATURES)
    for name in keywords(tw.ContextParallel.attention).keys() - {"plan"}:
        assert of_group[name] == whole[name], name


@pytest.mark.parametrize("function", SIGNATURES)
def test_overloads_name_parameters_of_the_signature(function: Any):
    named = inspect.signature(function).parameters
    overloads = get_overloads(function)
    assert len(overloads) == 3
    for overload in overloads:
        for name, parameter in inspect.signature(overload).parameters.items():
            assert name in named or parameter.kind is parameter.VAR_KEYWORD


def test_attention_passes_every_option_on(monkeypatch: pytest.MonkeyPatch):
    calls: list[Call] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, call: Call, *_: Any) -> Any:
        calls.append(call)
        return q, q, []

    monkeypatch.setattr(functional, "attend", attend)
    monkeypatch.setattr(functional, "kind_of", lambda sink: sink)
    monkeypatch.setattr(functional, "with_sink", lambda out, lse, sink: (out, lse))
    values: Any = {name: SimpleNamespace(name=name) for name in OPTIONS}
    flags = {"return_lse": True, "return_max_logit": True}
    tw.attention(*qkv(), **{**values, **flags})
    assert {name: getattr(calls[0], name) for name in OPTIONS} == {**values, **flags}


def test_context_parallel_passes_every_option_on(monkeypatch: pytest.MonkeyPatch):
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(context_parallel, "attention", lambda *_, **named: given.append(named))
    cp = tw.ContextParallel(num_tokens=TOKENS, strategy=tw.ring(1))
    names = keywords(tw.ContextParallel.attention)
    values: Any = {name: SimpleNamespace(name=name) for name in names}
    cp.attention(*qkv(), **values)
    assert given == [{**values, "layout": cp.layout, "group": cp.group}]


def test_ranks_compare_every_option_but_five():
    """Who computes, whom to ask and what to return may differ; queries' positions are a layout."""
    alone = {"group", "validate", "kernel", "return_lse", "q_positions"}
    call, (q, k, v) = Call(**together()), qkv()
    compared = agreement_fields(resolve(q, k, v, call, 0, 1), q, call)
    assert OPTIONS.keys() - compared.keys() == alone


def test_what_ranks_compare_are_the_options_as_resolved():
    """An option that is left out and one that says the default are the same."""
    call, (q, k, v) = Call(**together()), qkv()
    spelled = replace(
        call,
        backward_plan=call.plan,
        kv_layout=call.layout,
        softmax_scale=0.5,
        save="replay",
        wire_dtype="float64",
    )
    texts = [agreement_fields(resolve(q, k, v, x, 0, 1), q, x) for x in (call, spelled)]
    assert texts[0] == texts[1]


def test_calls_that_differ_in_values_alone_are_resolved_once():
    call, operands = Call(**together()), (qkv(), qkv())
    first, again = (resolve_once(*x, call, 0, 1) for x in operands)
    assert first.kept is again.kept is not None
    other = resolve_once(*operands[0], replace(call, softcap=3.0), 0, 1)
    assert other.kept is not first.kept and other.scores.softcap == 3.0


def test_a_lone_plain_wire_is_wire_dtype():
    """Resolved once as that is, and refused as that is."""
    call, operands = Call(**together(), wire=Plain("float32")), (qkv(), qkv())
    first, again = (resolve_once(*x, call, 0, 1) for x in operands)
    short = resolve_once(*operands[0], replace(call, wire=None, wire_dtype=torch.float32), 0, 1)
    assert first.kept is again.kept is not None
    assert short.passes[0].payload.wires == first.passes[0].payload.wires
    with pytest.raises(ValueError, match="is short for"):
        resolve_once(*operands[0], replace(call, wire_dtype=torch.float32), 0, 1)


def test_a_number_is_no_flag_even_where_it_equals_a_known_one():
    operands, options = qkv(), together()
    tw.attention(*operands, **options, prune=True)
    with pytest.raises(ValueError, match=r"prune \(1\) must be a bool"):
        tw.attention(*operands, **options, prune=1)
    tw.attention(*operands, **options, softmax_scale=1.0)
    with pytest.raises(ValueError, match=r"softmax_scale \(True\)"):
        tw.attention(*operands, **options, softmax_scale=True)


class Operators(TorchDispatchMode):
    """The names of all operators that run in it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_modes_see_one_operator_a_pass_and_all_give_the_same(monkeypatch: pytest.MonkeyPatch):
    resolved: list[Call] = []

    def counted(q: Tensor, k: Tensor, v: Tensor, call: Call, *rest: int) -> Any:
        resolved.append(call)
        return resolve_once(q, k, v, call, *rest)

    for module in (agree, operator):
        monkeypatch.setattr(module, "resolve_once", counted)
    operands, results = qkv(requires_grad=True), []
    for mode in (None, Operators()):
        if mode:
            mode.__enter__()
        out = tw.attention(*operands, **together())
        results.append((out, *torch.autograd.grad(out, operands, torch.ones_like(out))))
        if mode:
            mode.__exit__(None, None, None)
            seen = [name for name in mode.names if name.startswith("tilewise::")]
            assert seen == ["tilewise::attention", "tilewise::attention_backward"]
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    assert len(resolved) == len(results), "a call is resolved once for both passes"


class Wrapped(Tensor):
    """A tensor of a class of its own, which follows what is done to the one inside."""

    followed: ClassVar[list[str]] = []
    inside: Tensor

    @staticmethod
    def __new__(cls, x: Tensor) -> "Wrapped":
        made = Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)
        made.inside = x
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.followed.append(func._schema.name)
        return func(*(x.inside if isinstance(x, Wrapped) else x for x in args), **(kwargs or {}))


def test_a_tensors_own_class_sees_the_operator():
    q, k, v = qkv()
    expected = tw.attention(q, k, v, **together())
    Wrapped.followed.clear()
    assert torch.equal(tw.attention(Wrapped(q), k, v, **together()), expected)
    assert Wrapped.followed == ["tilewise::attention"]
