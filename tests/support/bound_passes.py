"""Passes of ranks without autograd: what they allocate, and whether they ever ask the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tilewise as tw
from tilewise.execution.agree import agreed_call
from tilewise.execution.call import Call, ResolvedCall
from tilewise.execution.forward_backward import backward_pass, forward_pass
from tilewise.transport.protocol import Transport

# What needs its result on the host; on a GPU the host would wait for the device.
SYNCHRONISING = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "unique")


class Counting(TorchDispatchMode):
    """Counts operators whose results lie in memory that none of their arguments is in.

    Not counted is what kernels and merges do inside: the CPU's own, which a GPU does not use.

    Attributes:
        allocated: operators that made new memory, how often each.
        asked: operators whose result the host needs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.allocated: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self.inside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.inside:
            return result
        name = func._schema.name.removeprefix("aten::")
        if name.startswith(SYNCHRONISING):
            self.asked[name] += 1
        known = {_address(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.numel()]
        if any(_address(x) not in known for x in made):
            self.allocated[name] += 1
        return result


class Exempt:
    """A kernel whose own operators do not count."""

    def __init__(self, kernel: Any, counting: Counting):
        self._kernel, self._counting = kernel, counting
        self.name, self.supports = kernel.name, kernel.supports
        self.square_causal, self.whole_tile = kernel.square_causal, kernel.whole_tile

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return uncounted(self._kernel.forward, self._counting)(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        return uncounted(self._kernel.backward, self._counting)(*args, **kwargs)


def uncounted(function: Callable[..., Any], counting: Counting) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        counting.inside += 1
        try:
            return function(*args, **kwargs)
        finally:
            counting.inside -= 1

    return called


class Case(NamedTuple):
    """One rank's tensors and its checked call."""

    problem: ResolvedCall
    transport: Transport
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    def exempt(self, counting: Counting) -> Case:
        """The same, with a kernel whose own operators do not count."""
        return self._replace(
            problem=self.problem._replace(kernel=Exempt(self.problem.kernel, counting))
        )

    def both_passes(self) -> tuple[Tensor, ...]:
        """out, lse, dq, dk, dv."""
        q, k, v = self.q, self.k, self.v
        out, lse, kept = forward_pass(self.problem, self.transport, q, k, v, keep=True)
        grads = backward_pass(
            self.problem, self.transport, (q, k, v, out, lse), kept, (self.dout, None)
        )
        return out, lse, *grads


def on_ranks(
    plan: tw.Plan, layout: tw.Layout, mask: tw.Mask, body: Callable[[Case], Any], **options: Any
) -> list[Any]:
    """body of every rank's case: 4 heads of 8, 2 KV heads, fp32 unless options name a dtype."""
    dtype = options.pop("dtype", torch.float32)
    heads = options.pop("heads", (4, 2, 8))

    def on_rank(rank: int, group: Any) -> Any:
        generator = torch.Generator().manual_seed(rank)
        rows = layout.size(rank)
        q, dout = torch.randn(2, rows, heads[0], heads[2], generator=generator).to(dtype)
        k, v = torch.randn(2, rows, heads[1], heads[2], generator=generator).to(dtype)
        call = Call(plan=plan, layout=layout, mask=mask, group=group, needs_grad=True, **options)
        problem, transport = agreed_call(q, k, v, call)
        return body(Case(problem, transport, q, k, v, dout))

    with torch.no_grad():
        return tw.loopback(plan.world_size, on_rank)


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
