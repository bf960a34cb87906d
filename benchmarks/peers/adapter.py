"""What the adapters share: a mask in a peer's words, why a peer cannot, a prepared run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NamedTuple

from torch import Tensor

import tilewise as tw
from tilewise.layouts.layout import Layout
from tilewise.masks.base import And, Mask
from tilewise.simulation.machine import Machine
from tilewise_tools.bench.case import BenchCase
from tilewise_tools.bench.contender import Facts, Prediction


class CannotRunError(ValueError):
    """Why a peer has no answer to a case, in one line."""


class Words(NamedTuple):
    """A mask as flash_attn's arguments; left, right: tokens, -1 without bound."""

    causal: bool = False
    left: int = -1
    right: int = -1
    cu_seqlens: tuple[int, ...] | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {"causal": self.causal, "window_size": (self.left, self.right)}


@dataclass(frozen=True)
class Prepared:
    """A peer that is ready for one case on one rank; see tilewise_tools.bench.contender.Running."""

    layout: Layout
    attention: Callable[[Tensor, Tensor, Tensor], Tensor]
    pairs: int

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention(q, k, v)

    def facts(self) -> Facts:
        return Facts(pairs=self.pairs)

    def traffic(self) -> None:
        return None


class Adapter:
    """Base of the contenders; see tilewise_tools.bench.contender.Contender."""

    library: str

    @property
    def version(self) -> str:
        return metadata.version(self.library) if self._installed() else "not installed"

    def supports(self, case: BenchCase) -> str | None:
        if not self._installed():
            return f"{self.library} is not installed: pip install 'tilewise[peers]'"
        if case.device != "cpu":
            return f"peers are run on cpu, where they share our kernel, not on {case.device}"
        if case.network.name == "limited":
            return "it sends through torch.distributed, which the limited transport is not"
        if case.world_size == 1:
            return "world_size (1) must be at least 2: its last rank would send to itself"
        try:
            own = self.layout(case)
        except CannotRunError as reason:
            return str(reason)
        if case.layout not in ("own", own.name):
            return f"its tokens lie {own.name}, not {case.layout}; give layout own"
        return None

    def predict(self, case: BenchCase, machine: Machine) -> Prediction:
        return Prediction()

    def layout(self, case: BenchCase) -> Layout:
        """Which tokens a rank holds; raises CannotRunError where it has no answer."""
        raise NotImplementedError

    def _installed(self) -> bool:
        return importlib.util.find_spec(self.library.replace("-", "_")) is not None


def words(mask: Mask) -> Words:
    """A mask that is causal, a window, documents or several of these at once, as arguments.

    Raises:
        CannotRunError: if it is anything else.
    """
    said = Words()
    for part in _conjuncts(mask):
        match part:
            case tw.Full():
                continue
            case tw.Causal():
                said = said._replace(causal=True)
            case tw.Window() if (said.left, said.right) == (-1, -1):
                left, right = (-1 if x is None else x for x in (part.left, part.right))
                # flash_attn calls a window that ends at the query causal
                causal, right = said.causal or right == 0, -1 if (left, right) == (-1, 0) else right
                said = said._replace(causal=causal, left=left, right=right)
            case tw.Document() if said.cu_seqlens is None:
                said = said._replace(cu_seqlens=part.cu_seqlens)
            case _:
                raise CannotRunError(f"its arguments cannot say the mask {mask!r}")
    return said


def equal_shares(case: BenchCase, parts: int) -> None:
    """Raise CannotRunError unless the sequence falls into so many equal parts."""
    if case.num_tokens % parts:
        raise CannotRunError(
            f"num_tokens ({case.num_tokens}) must be a multiple of {parts}: it receives into "
            "buffers of its own share's size, and a longer share ends the process"
        )


def pairs_of(case: BenchCase, layout: Layout, ranks: Sequence[int]) -> int:
    """Allowed (query, key, query head) triples of the queries that some ranks own."""
    mask, keys = case.make_mask(), (0, case.num_tokens)
    ranges = (rows for rank in ranks for rows in layout.ranges(rank))
    return sum(int(mask.area(rows, keys)) for rows in ranges) * case.num_heads


def _conjuncts(mask: Mask) -> Iterator[Mask]:
    if type(mask) is And:
        yield from _conjuncts(mask.a)
        yield from _conjuncts(mask.b)
    else:
        yield mask
