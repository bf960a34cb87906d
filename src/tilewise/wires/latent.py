"""Latents: a few numbers a token that stand for the keys and values of all heads.

Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) makes k and v of every head from one
latent a token, and a rotary key that all heads share. What makes them is a function of the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tilewise.arguments import brief, check_fields, listed, whole_number


@dataclass(frozen=True)
class Latent:
    """Rows that travel in place of k and v, and are expanded to them where they are used.

        expand(rows [n, width], positions [n], *params) -> k [n, num_kv_heads, head_dim],
                                                           v [n, num_kv_heads, v_head_dim]

    A function of torch on any n rows of the whole sequence, each by itself: the same rows give the
    same k and v wherever and whenever it is called. Gradients go through it; those of what it
    uses are each rank's share, as of any replicated parameter.

    Args:
        expand: the function, which need not be given where only bytes and seconds are asked for;
            no part of == or hash, as params are none.
        params: tensors that it takes and that get gradients. Others that it uses and that require
            one (of an nn.Module, of a closure) get theirs without being named here.
        num_kv_heads, head_dim, v_head_dim: of k and v; head_dim is q's.
        width: of a row, all that travels of a token; None: the tensor's.
        name: what it is called in reports.
        keep: forward keeps the expanded k and v for backward, which else expands again.
    """

    expand: Callable[..., Any] | None = field(default=None, compare=False, repr=False)
    params: Sequence[Any] = field(default=(), compare=False, repr=False)
    num_kv_heads: int = field(kw_only=True)
    head_dim: int = field(kw_only=True)
    v_head_dim: int = field(kw_only=True)
    width: int | None = field(default=None, kw_only=True)
    name: str = field(default="latent", kw_only=True)
    keep: bool = field(default=False, kw_only=True, compare=False)

    def __post_init__(self) -> None:
        if self.expand is not None and not callable(self.expand):
            raise ValueError(
                f"expand ({brief(self.expand)}) must be a function (rows, positions, *params) -> "
                "k, v"
            )
        object.__setattr__(self, "params", tuple(listed("params", self.params, "tensors")))
        check_fields(self)
        for what in ("num_kv_heads", "head_dim", "v_head_dim"):
            object.__setattr__(self, what, whole_number(what, getattr(self, what)))
        if self.width is not None:
            object.__setattr__(self, "width", whole_number("width", self.width))

    def check(self, num_kv_heads: int, head_dim: int, v_head_dim: int, width: int | None) -> None:
        """Raise ValueError unless it is made for these sizes."""
        expected = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "v_head_dim": v_head_dim}
        for name, number in {**expected, "width": width}.items():
            latent_number = getattr(self, name)
            if latent_number not in (None, number):
                raise ValueError(
                    f"{name} of the latent is {latent_number}, not {number}; make them equal"
                )
        if width is None:
            raise ValueError("the width of the latent (None) is not known; pass width=")

    @property
    def sizes(self) -> Latent:
        """The value without its function: a key of memos must not hold a model's weights."""
        return replace(self, expand=None, params=(), keep=False)

    @property
    def row_width(self) -> int:
        """Numbers that travel of a token."""
        assert self.width is not None, "a call checks it before"
        return self.width

    @property
    def flop(self) -> int:
        """Floating-point operations of expanding a row, by one matrix product for k and
        one for v.
        """
        return 2 * self.row_width * self.num_kv_heads * (self.head_dim + self.v_head_dim)

    def __str__(self) -> str:
        shape = f"{self.num_kv_heads} x {self.head_dim}/{self.v_head_dim}"
        return f"{self.name} of {self.width} for {shape}"
