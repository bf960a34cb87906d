"""The protocol of attention kernels, and the conventions at their boundary.

Every kernel yields natural-log lse, -inf on rows no key reaches, where out is 0: made so once, here
at the boundary, so that merging, gradients and transports need not know kernels apart.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import compress
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewise.kernels.bias import Bias
from tilewise.kernels.merge import merge_into
from tilewise.plan.payload import ALIGNMENT_BYTES
from tilewise.tiles.call_rows import CallStyle
from tilewise.tiles.calls import KernelCall


class Places(NamedTuple):
    """Positions of a call's rows, keys and heads in the whole attention; batch rows count from 0.

    Attributes:
        q_positions, k_positions: global, int64 [m] and [n], on the device of the tensors.
        first_head: which of all query heads the call's first one is.
    """

    q_positions: Tensor
    k_positions: Tensor
    first_head: int


class Scores(NamedTuple):
    """out = dropout(softmax(cap(scale q k^T) + bias + mask)) v;  cap(x) = c tanh(x / c), c softcap.

    Attributes:
        softcap: None: no cap.
        dropout_p: the share of weights that are dropped; the others grow by 1 / (1 - dropout_p).
            lse is that without dropout.
        dropout_seed: with it and `places`, kernels.dropout says which pairs are dropped.
        max_logit: the largest score of every row is asked for, after cap and bias.
        places: of one kernel call, if there is dropout or a bias.
        bias: with `places`, kernels.bias says what is added to each pair's score.
    """

    scale: float
    softcap: float | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0
    max_logit: bool = False
    places: Places | None = None
    bias: Bias | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        """Features that not every kernel has, by the name of the argument that asks for each."""
        asked = self.softcap is not None, self.dropout_p > 0, self.max_logit, self.bias is not None
        names = "softcap", "dropout_p", "return_max_logit", "bias"
        return tuple(compress(names, asked)) if any(asked) else ()

    @property
    def by_place(self) -> bool:
        """True if a kernel must know where its rows and keys lie in the sequence."""
        return self.dropout_p > 0 or self.bias is not None


def lacks(needs: tuple[str, ...], *has: str) -> str | None:
    """Why a kernel that has these cannot serve what needs those; None if it can."""
    missing = [name for name in needs if name not in has]
    return f"it has no {', '.join(missing)}" if missing else None


Accumulators: TypeAlias = tuple[Tensor, ...]
Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor]
Tensors: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""q, k and v of a call."""


class Kernel(Protocol):
    """Attention of one call's rows, gathered in call order; `kernel=` takes any object that has it.

    One object serves all ranks of a loopback world and both passes, one call at a time.

    q is [m, batch, num_heads, head_dim], k and v are [n, batch, num_kv_heads, head_dim], of any
    strides with unit last stride; query head h reads KV head h // (num_heads // num_kv_heads). v
    may be wider or narrower than q and k; out, dout and dv are as wide as v.

    `needs` and `scores` are passed only where something beside scale is asked for: a kernel without
    these parameters serves all other calls.

    A kernel of whole rows, which gives each row its complete result, also has `backward_q` (dq
    alone), `backward_kv` (dk and dv alone) and `row_sum(x, out)`, the sums over the last dimension.

    A kernel of whole tiles with the attribute `lists` = True takes calls of Kind.LISTS too, always
    with `into`: it reads and writes the rows that the call names, where they lie in its operands.

    Attributes:
        name: for messages.
        square_causal: causal calls must have as many queries as keys (`tile_calls` obliges).
        whole_tile: a tile is best one call, however many slices it has (`tile_calls` obliges).
    """

    name: str
    square_causal: bool
    whole_tile: bool

    def supports(
        self,
        device_type: str,
        dtype: torch.dtype,
        head_dim: int,
        backward: bool = True,
        needs: tuple[str, ...] = (),
    ) -> str | None:
        """None if the kernel can (with backward: both passes), else the reason why not.

        Args:
            head_dim: the larger one, where that of v differs.
            needs: what `Scores.needs` says of a call.
        """
        ...

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: KernelCall,
        scale: float,
        into: Accumulators | None = None,
        scores: Scores | None = None,
    ) -> Accumulators:
        """out = softmax(scale q k^T + mask) v and its lse, over the call's keys alone.

        Args:
            into: (out, lse) of the call's rows so far, fp32 or wider, changed in place by merging.
            scores: what is done beside; with max_logit `into` and the result have a third tensor,
                the largest score of every row [m, batch, num_heads], -inf where there is none.
        Returns:
            out [m, batch, num_heads, head_dim] in the kernel's own dtype, lse [m, batch, num_heads]
            in `accumulator_dtype`; `into` itself where it is given.
        """
        ...

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        call: KernelCall,
        scale: float,
        into: Gradients | None = None,
        scores: Scores | None = None,
    ) -> Gradients:
        """The call's share of dq, dk, dv.

        p = exp(scale q k^T - lse);  ds = p (dout v^T - delta);
        dq = scale ds k;  dk = scale ds^T q;  dv = p^T dout.

        With a cap, s = softcap t, t = tanh(scale q k^T / softcap): p = exp(s - lse), and ds grows
        by 1 - t^2. A bias is added to s; its gradient is ds without that factor and scale, summed
        over the batch, and is added to `scores.bias.grad`. With dropout p of dv and dout v^T are
        multiplied by what the weights are.

        Args:
            lse, delta: [m, batch, num_heads], of the whole attention, not of this call;
                delta = rowsum(out * dout) - dlse.
            into: (dq, dk, dv) so far, fp32 or wider, which the call's share is added to in place.
        Returns:
            `into` itself where it is given.
        """
        ...


def call_style(kernel: Kernel) -> CallStyle:
    """Return how a kernel wants tiles cut."""
    return CallStyle(kernel.square_causal, kernel.whole_tile, lists=getattr(kernel, "lists", False))


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, else fp32: of lse, delta and partials in memory."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def no_keys(q: Tensor, v: Tensor, max_logit: bool = False) -> Accumulators:
    """(out, lse) of queries that see nothing, as accumulators: 0 and -inf.

    Args:
        max_logit: with the largest scores, -inf too.
    """
    dtype = accumulator_dtype(q.dtype)
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype)
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=dtype)
    return (out, lse, lse.clone()) if max_logit else (out, lse)


def deliver(found: Accumulators, into: Accumulators | None) -> Accumulators:
    """Merge a call's result into the accumulators, if there are any; what `forward` returns."""
    if into is None:
        return found
    merge_into(into[0], into[1], found[0], found[1])
    if len(into) == 3:
        torch.maximum(into[2], found[2], out=into[2])
    return into


def widened(width: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors with columns of 0 up to this width, for kernels that need equal widths."""
    return tuple(F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in tensors)


def loadable(x: Tensor) -> Tensor:
    """x as kernels load it: of unit last stride (of a single column, too), and aligned if rows can
    be. Else a copy."""
    if x.is_contiguous() and x.stride(-1) == 1 and x.data_ptr() % ALIGNMENT_BYTES == 0:
        return x
    return x if is_loadable(x, x.data_ptr()) else x.clone(memory_format=torch.contiguous_format)


def is_loadable(x: Tensor, address: int) -> bool:
    """Return whether kernels load a tensor as it is, if its first number is at this address.

    Args:
        address: in bytes; of a tensor without memory its place in the storage.
    """
    unit = ALIGNMENT_BYTES if x.shape[-1] * x.itemsize % ALIGNMENT_BYTES == 0 else x.itemsize
    *strides, last = x.stride()
    aligned = x.is_contiguous() or not any(stride * x.itemsize % unit for stride in strides)
    return last == 1 and address % unit == 0 and aligned


def heads_first(x: Tensor) -> Tensor:
    """[rows, batch, heads, head_dim] seen as [batch, heads, rows, head_dim]."""
    return x.permute(1, 2, 0, 3)


def no_gradients(q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    """Zeros, of a call without rows or without keys."""
    dq, dk, dv = (torch.zeros_like(x, dtype=accumulator_dtype(x.dtype)) for x in (q, k, v))
    return dq, dk, dv


class Asked(NamedTuple):
    """Facts of a call that a kernel is asked to serve; see `Kernel.supports`."""

    device_type: str
    dtype: torch.dtype
    head_dim: int
    backward: bool


class Operands(NamedTuple):
    """Tensors of a call that `backward` takes."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor


class ProvidedKernel(ABC):
    """A kernel of this package, with what it can serve as values.

    Attributes:
        device, dtypes: on which it runs, and of what; device None: on any that it does not refuse.
        most_width: the largest head_dim.
        has: what of `Scores.needs` it can.
    """

    device: str | None = "cuda"
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    most_width: int | None = 256
    has: tuple[str, ...] = ()

    def unable(self, asked: Asked) -> str | None:
        """Why it cannot serve this, beside what the attributes say."""
        return None

    def supports(
        self,
        device_type: str,
        dtype: torch.dtype,
        head_dim: int,
        backward: bool = True,
        needs: tuple[str, ...] = (),
    ) -> str | None:
        reason = self.unable(Asked(device_type, dtype, head_dim, backward))
        if reason is not None:
            return reason
        if self.device not in (None, device_type):
            return f"it runs on {self.device}, not on {device_type}"
        if dtype not in self.dtypes:
            names = [str(known).removeprefix("torch.") for known in self.dtypes]
            which = (
                f"none of {', '.join(names)}"
                if len(names) > 2
                else f"neither {' nor '.join(names)}"
            )
            return f"dtype {dtype} is {which}"
        if self.most_width is not None and head_dim > self.most_width:
            return f"head_dim ({head_dim}) is over {self.most_width}"
        return lacks(needs, *self.has)

    @abstractmethod
    def attend_into(
        self, qkv: Tensors, call: KernelCall, scores: Scores, into: Accumulators | None
    ) -> Accumulators:
        """Return what `forward` does, of at least one row and one key."""

    @abstractmethod
    def differentiate_into(
        self, operands: Operands, call: KernelCall, scores: Scores, into: Gradients | None
    ) -> Gradients:
        """Return what `backward` does, of at least one row and one key."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: KernelCall,
        scale: float,
        into: Accumulators | None = None,
        scores: Scores | None = None,
    ) -> Accumulators:
        scores = scores or Scores(scale)
        if not (q.shape[0] and k.shape[0]):
            return into or no_keys(q, v, scores.max_logit)
        return self.attend_into((q, k, v), call, scores, into)

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        call: KernelCall,
        scale: float,
        into: Gradients | None = None,
        scores: Scores | None = None,
    ) -> Gradients:
        if not (q.shape[0] and k.shape[0]):
            return into or no_gradients(q, k, v)
        operands = Operands(q, k, v, dout, lse, delta)
        return self.differentiate_into(operands, call, scores or Scores(scale), into)


class AsideKernel(ProvidedKernel):
    """A kernel that computes its results aside, and then merges or adds them to accumulators.

    Attributes:
        equal_widths: `attend` and `differentiate` are given v, and dout, as wide as q and k.
    """

    equal_widths = True

    @abstractmethod
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, scores: Scores
    ) -> Accumulators:
        """out and lse of a call's keys alone."""

    @abstractmethod
    def differentiate(
        self, operands: Operands, call: KernelCall, scores: Scores
    ) -> Iterable[Tensor]:
        """The call's share of dq, dk, dv."""

    def attend_into(
        self, qkv: Tensors, call: KernelCall, scores: Scores, into: Accumulators | None
    ) -> Accumulators:
        q, k, v = qkv
        width, v_width = q.shape[-1], v.shape[-1]
        if width == v_width or not self.equal_widths:
            return deliver(self.attend(q, k, v, call, scores), into)
        q, k, v = widened(max(width, v_width), q, k, v)
        out, *rest = self.attend(q, k, v, call, scores)
        return deliver((out[..., :v_width], *rest), into)

    def differentiate_into(
        self, operands: Operands, call: KernelCall, scores: Scores, into: Gradients | None
    ) -> Gradients:
        q, k, v, dout, lse, delta = operands
        width, v_width = q.shape[-1], v.shape[-1]
        if self.equal_widths and width != v_width:
            q, k, v, dout = widened(max(width, v_width), q, k, v, dout)
            operands = Operands(q, k, v, dout, lse, delta)
        dq, dk, dv = self.differentiate(operands, call, scores)
        if self.equal_widths and width != v_width:
            dq, dk, dv = dq[..., :width], dk[..., :width], dv[..., :v_width]
        if into is None:
            return dq, dk, dv
        for total, grad in zip(into, (dq, dk, dv), strict=True):
            total += grad
        return into
