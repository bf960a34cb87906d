"""The registered operator: compiled whole, checkpointed selectively, checked by torch's opcheck."""

import copy
import logging
import subprocess
import sys
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from conformance.oracle import dense, draw
from processes.launcher import run_processes
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import tilewise as tw
from tilewise.execution.call import Call
from tilewise.execution.operator import MASKS

# Warnings of torch itself: forward mode compiles scripts, opcheck asks clones for .grad.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script`"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

TOKENS, HEADS, KV_HEADS, WIDTH = 24, 4, 2, 8
ATTENTION = torch.ops.tilewise.attention


def call(plan: tw.Plan) -> Call:
    layout = tw.contiguous(TOKENS, plan.world_size)
    return Call(plan=plan, layout=layout, mask=tw.Causal(), save="replay", needs_grad=True)


def inputs(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(TOKENS, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [
        torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for shape in shapes
    ]


def test_every_mask_is_registered():
    """torch 2.11 looks up the very class."""

    def below(kind: type) -> set[type]:
        return {kind}.union(*map(below, kind.__subclasses__()))

    ours = {kind for kind in below(tw.Mask) if kind.__module__.startswith("tilewise.")}
    assert ours == set(MASKS)


def test_frozen_values_are_their_own_copies():
    made = call(tw.ring(2))
    for value in (made, made.plan, made.layout, made.mask):
        assert copy.deepcopy(value) is value


def test_no_two_names_in_written_code_are_the_same():
    made = call(tw.ring(2))
    names = [made.__fx_repr__() for _ in range(3)]
    assert len({name for name, _ in names}) == 3
    assert all(name.isidentifier() and where == {name: made} for name, where in names)


def test_torchs_checks_of_an_operator_pass():
    torch.library.opcheck(ATTENTION.default, (*inputs(), call(tw.ring(1))))


def test_torchs_checks_of_the_backward_operator_pass():
    q, k, v = (x.detach() for x in inputs())
    made = call(tw.ring(1))
    out, lse, kept = ATTENTION(q, k, v, made)
    saved = q, k, v, out, lse, kept, made
    tests = "test_schema", "test_faketensor", "test_autograd_registration"
    for grads in ((torch.ones_like(out), None), (None, torch.ones_like(lse))):
        torch.library.opcheck(
            torch.ops.tilewise.attention_backward.default, (*grads, *saved), test_utils=tests
        )


class Model(torch.nn.Module):
    """Attention between two pointwise layers, its lse in the loss."""

    def __init__(self, cp: tw.ContextParallel):
        super().__init__()
        self.cp, self.scale = cp, torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, q, k, v, mask=None):
        out, lse = self.cp.attention(q * self.scale, k, v, mask=mask, return_lse=True)
        return out.sin().sum() + lse.clamp(min=-9).sum()


def gradients(model, tensors, mask=None):
    model(*tensors, mask).backward()
    grads = [x.grad for x in (*tensors, model.scale)]
    for x in (*tensors, model.scale):
        x.grad = None
    return grads


def compiled_rank(rank: int, world_size: int, plan: tw.Plan, backend: str) -> int:
    """Compare a compiled model with itself uncompiled; returns how often it was compiled."""
    layout = tw.zigzag(TOKENS, world_size)
    cp = tw.ContextParallel(num_tokens=TOKENS, mask=tw.Causal(), strategy=plan, layout=layout)
    model = Model(cp)
    tensors = [cp.shard(x.detach(), dim=0).clone().requires_grad_() for x in inputs()]
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for mask in (None, tw.Full(), tw.Causal() & tw.Window(5, 0), None):
        expected = gradients(model, tensors, mask)
        compiled(*tensors, mask).backward()
        for x, wanted in zip((*tensors, model.scale), expected, strict=True):
            torch.testing.assert_close(x.grad, wanted, rtol=0, atol=1e-12)
            x.grad = None
    return counter.frame_count


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_it_compiles_whole_and_anew_for_another_mask(backend):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own, about its compiler
        assert compiled_rank(0, 1, tw.ring(1), backend) == 3


def _silent(rank: int) -> list[int]:
    warnings.simplefilter("ignore")
    plans = tw.mesh(2, q_tile=2), tw.ulysses(2)
    return [compiled_rank(rank, 2, plan, "aot_eager") for plan in plans]


@pytest.mark.slow
def test_compiled_ranks_of_a_process_group_agree_with_eager_ones():
    assert run_processes(2, _silent) == [[3, 3]] * 2


def checkpointed_bytes(kind: str) -> tuple[int, list[torch.Tensor]]:
    """Bytes that rank 0 of 2 sends in forward and backward, and its gradients."""
    plan, layout = tw.ring(2), tw.zigzag(TOKENS, 2)
    attend = partial(tw.attention, plan=plan, layout=layout, mask=tw.Full())
    policy = {ATTENTION.default: CheckpointPolicy.MUST_SAVE}

    def rank_main(rank, group):
        tensors = [layout.shard(x.detach(), rank, 0).clone().requires_grad_() for x in inputs()]

        def layer(q, k, v):
            return attend(q.sin(), k, v, group=group).cos()

        if kind == "none":
            out = layer(*tensors)
        else:
            contexts = partial(
                create_selective_checkpoint_contexts,
                lambda ctx, op, *args, **kwargs: policy.get(op, CheckpointPolicy.PREFER_RECOMPUTE),
            )
            chosen = {"context_fn": contexts} if kind == "selective" else {}
            out = checkpoint(layer, *tensors, use_reentrant=False, **chosen)
        out.sum().backward()
        return group.bytes_sent, [x.grad for x in tensors]

    return tw.loopback(2, rank_main)[0]


def test_selective_checkpointing_does_not_send_forward_again():
    plain, wanted = checkpointed_bytes("none")
    full, again = checkpointed_bytes("full")
    selective, saved = checkpointed_bytes("selective")
    layout = tw.zigzag(TOKENS, 2)
    work = tw.Workload(TOKENS, HEADS, KV_HEADS, WIDTH, "float64", mask=tw.Full(), layout=layout)
    forward = tw.volume(tw.ring(2), work).forward[0]
    assert plain > forward > 0
    assert full == plain + forward
    assert selective == plain
    for left, middle, right in zip(wanted, again, saved, strict=True):
        assert torch.equal(left, middle) and torch.equal(left, right)


def test_the_operator_computes_attention():
    x = draw((TOKENS, HEADS, WIDTH), (TOKENS, KV_HEADS, WIDTH), seed=1)
    out, lse, kept = ATTENTION(*x[:3], call(tw.ring(1)))
    wanted = dense(x, tw.Causal())
    torch.testing.assert_close(out, wanted.out, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, wanted.lse, rtol=0, atol=1e-12)
    assert kept == []


def test_compiled_code_says_what_it_cannot_do():
    plan, layout, (q, k, v) = tw.ring(1), tw.contiguous(TOKENS, 1), inputs()
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="eager")
    def keeping(q, k, v):
        return tw.attention(q, k, v, plan=plan, layout=layout, mask=tw.Full(), save="gathered")

    with pytest.raises(Exception, match="must be 'replay' in compiled code"):
        keeping(q, k, v)
    undecided = Model(tw.ContextParallel(num_tokens=TOKENS, layout=layout))
    with pytest.raises(Exception, match=r"call ContextParallel\.plan"):
        torch.compile(undecided, fullgraph=True, backend="eager")(q, k, v)
    undecided.cp.plan(q, k)
    assert torch.compile(undecided, fullgraph=True, backend="eager")(q, k, v).isfinite()


LOSSES = {
    "sum": lambda out, lse: out.sum(),
    "square": lambda out, lse: out.square().sum(),
    "lse": lambda out, lse: lse.sum(),
    "both": lambda out, lse: out.sum() + lse.square().sum(),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("wanted", ["q", "k", "v"])
def test_a_second_derivative_is_an_error_and_never_missing(loss: str, wanted: str):
    tensors = {name: torch.randn(4, 2, 4, dtype=torch.float64) for name in "qkv"}
    together = {"plan": tw.ring(1), "layout": tw.contiguous(4, 1), "mask": tw.Causal()}

    def value(x: torch.Tensor) -> torch.Tensor:
        return LOSSES[loss](*tw.attention(**{**tensors, wanted: x}, **together, return_lse=True))

    x = tensors[wanted].clone().requires_grad_()
    (plain,) = torch.autograd.grad(value(x), x)
    (gradient,) = torch.autograd.grad(value(x), x, create_graph=True)
    assert torch.equal(gradient, plain) and gradient.requires_grad
    with pytest.raises(RuntimeError, match="attention has no second derivative"):
        (value(x) + gradient.square().sum()).backward()
    with pytest.raises(RuntimeError, match="attention has no second derivative"):
        torch.autograd.functional.hvp(value, tensors[wanted], tensors[wanted])


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](x.new_ones(())),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "vmap": lambda f, x: torch.func.vmap(f)(x[None]),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "a hessian by autograd": torch.autograd.functional.hessian,
    "jvp by autograd": lambda f, x: torch.autograd.functional.jvp(f, x, x),
    "second gradients": lambda f, x: torch.autograd.gradgradcheck(
        f, (x.requires_grad_(),), fast_mode=True
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_that_are_not_there_raise_and_give_no_numbers(name: str):
    q, k, v = (x.detach() for x in inputs())
    together = {"plan": tw.ring(1), "layout": tw.contiguous(TOKENS, 1), "mask": tw.Causal()}
    with pytest.raises(RuntimeError, match=r"functorch|Batching rule|no second derivative"):
        TRANSFORMS[name](lambda x: tw.attention(x, k, v, **together).square().sum(), q)


def test_forward_mode_raises():
    q, k, v = (x.detach() for x in inputs())
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        dual = torch.autograd.forward_ad.make_dual(q, q)
        together = {"plan": tw.ring(1), "layout": tw.contiguous(TOKENS, 1), "mask": tw.Causal()}
        tw.attention(dual, k, v, **together)


def test_what_inductor_does_not_keep_is_no_warning():
    """Cached code would stand for a call of this process; the warning has twenty lines a graph."""
    told = logging.getLogger("torch._inductor.codecache")

    def shown(text: str) -> bool:
        error = AttributeError(text)
        given = told.name, logging.WARNING, "", 0, "Failed to pickle cache key", ()
        return bool(told.filter(told.makeRecord(*given, (type(error), error, None))))

    assert shown("'Model' object has no attribute '__name__'")
    assert not shown("'Call' object has no attribute '__name__'")


NEWER = """
import sys
import torch
from torch._library import opaque_object as names

old = names.register_opaque_type
def new(cls, *, typ, members):
    assert typ == "constant"
    old(cls, typ="value", members=members)

names.register_custom_class = new
names.register_opaque_type = None
base = sys.modules.get("torch._opaque_base")
sys.modules["torch._opaque_base"] = None  # to import it is an error
import tilewise as tw
names.register_opaque_type = old  # torch itself still has these
sys.modules.pop("torch._opaque_base") if base is None else sys.modules.update(
    {"torch._opaque_base": base}
)

layout = tw.contiguous(8, 1)
def attend(q, k, v):
    return tw.attention(q, k, v, plan=tw.ring(1), layout=layout, mask=tw.Causal())

q, k, v = torch.randn(3, 8, 2, 4, dtype=torch.float64).unbind()
whole = attend(q, k, v)
assert torch.equal(torch.compile(attend, backend="eager", fullgraph=True)(q, k, v), whole)
print("done")
"""


@pytest.mark.slow
def test_the_names_of_torch_from_2_14_on_are_enough():
    command = [sys.executable, "-W", "error::FutureWarning", "-c", NEWER]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "done\n", "")


def layered(*tensors: Tensor, seed: int | None) -> tuple[Tensor, Tensor]:
    """A loss with all that models add to attention, and the largest scores."""
    q, k, v, sink = tensors
    call = {"plan": tw.ring(1), "layout": tw.contiguous(len(q), 1), "mask": tw.Causal()}
    more = {"sink": sink, "softcap": 3.0, "dropout_p": 0.4, "dropout_seed": seed}
    out, lse, largest = tw.attention(
        q, k, v, **call, **more, return_lse=True, return_max_logit=True
    )
    return out.square().sum() + lse.sum(), largest


def leaves() -> list[Tensor]:
    make = torch.Generator().manual_seed(2)
    shapes = (12, 2, 4), (12, 2, 4), (12, 2, 6), (2,)
    drawn = (torch.randn(x, generator=make, dtype=torch.float64) for x in shapes)
    return [x.requires_grad_() for x in drawn]


def test_compiled_code_takes_every_seed_and_all_that_models_add():
    """Compiled twice: for the first seed, and for any."""
    compilations = []

    def backend(graph: Any, _: Any) -> Any:
        compilations.append(graph)
        return graph

    torch._dynamo.reset()
    compiled, given = torch.compile(layered, fullgraph=True, backend=backend), leaves()
    for seed in (3, 4, 5, 1 << 60):
        results = [f(*given, seed=seed) for f in (compiled, layered)]
        grads = [torch.autograd.grad(loss, given) for loss, _ in results]
        for x, y in zip((*results[0], *grads[0]), (*results[1], *grads[1]), strict=True):
            assert torch.allclose(x, y, rtol=1e-12, atol=1e-12)
    assert len(compilations) == 2


def test_recomputation_drops_the_same_pairs_without_a_seed_too():
    given, grads = leaves(), []
    for seed in (None, 9):
        for f in (layered, partial(checkpoint, layered, use_reentrant=False)):
            torch.manual_seed(1)
            grads.append(torch.autograd.grad(f(*given, seed=seed)[0], given))
    for first, again in zip(grads[::2], grads[1::2], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
