"""Contenders: a kernel, a strategy of ours, or another library that takes part in the benchmark.

One protocol for all, so that they are checked, counted and timed by the same code. An adapter of
another library needs nothing else of tilewise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from tilewise.layouts.layout import Layout
from tilewise.simulation.machine import Machine
from tilewise_tools.bench.case import BenchCase


class Traffic(NamedTuple):
    """Totals of one rank since it was prepared, agreement records left out."""

    bytes_to: Mapping[int, int]  # bytes sent, by the peer's rank
    messages: int  # sent
    waited_seconds: float | None  # the rank stood still for messages; None: not known

    def since(self, earlier_total: Traffic) -> Traffic:
        """Return the traffic that was added to an earlier total."""
        new_bytes = {
            to: count - earlier_total.bytes_to.get(to, 0) for to, count in self.bytes_to.items()
        }
        waited, earlier = self.waited_seconds, earlier_total.waited_seconds
        return Traffic(
            {to: count for to, count in new_bytes.items() if count},
            self.messages - earlier_total.messages,
            None if waited is None or earlier is None else waited - earlier,
        )


class Facts(NamedTuple):
    """Facts that a prepared contender knows of its own work; None where it does not."""

    pairs: int | None = None  # allowed (query, key, query head) triples that this rank computes
    computed: int | None = None  # triples that its kernels work on; above pairs is waste
    calls: int | None = None  # kernel calls in forward
    padded_tokens: int = 0  # rows of this rank that hold no token


class Prediction(NamedTuple):
    """Figures that are expected of a case; None where there is no telling.

    Attributes:
        peak_bytes: memory above the inputs of the rank that needs most; a case over what there is
            is not run.
        seconds, exposed_seconds: of the timed pass on the machine asked about.
    """

    peak_bytes: int | None = None
    seconds: float | None = None
    exposed_seconds: float | None = None
    volume_bytes: int | None = None  # sent by the busiest rank in it, by formula
    plan: str | None = None  # its name


@runtime_checkable
class Running(Protocol):
    """A contender prepared for one case, on one rank."""

    @property
    def layout(self) -> Layout:
        """The layout by which the framework cuts q, k, v and dout: every rank's own tokens, each
        token once.
        """
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out of this rank's rows, differentiable in all three.

        Args:
            q, k, v: [num_tokens of this rank, heads, head_dim], contiguous. The framework calls
                torch.autograd.grad on the result, so nothing is accumulated into .grad.
        Returns:
            out as q.
        """
        ...

    def facts(self) -> Facts: ...

    def traffic(self) -> Traffic | None:
        """None: the framework counts the operations of torch.distributed instead."""
        ...


@runtime_checkable
class Contender(Protocol):
    """A thing that computes attention. A frozen value that pickles: ranks get copies.

    Attributes:
        name: in rows, filters and charts; says the variant too: "ring", "ring-flash-attn zigzag".
        library: "tilewise", or the other library's name.
        version: of that library; a row is measured anew when it changes.
    """

    @property
    def name(self) -> str: ...
    @property
    def library(self) -> str: ...
    @property
    def version(self) -> str: ...

    def supports(self, case: BenchCase) -> str | None:
        """None, or in one line why this contender cannot run the case. Asked before any rank."""
        ...

    def predict(self, case: BenchCase, machine: Machine) -> Prediction:
        """Return what can be said beforehand of a case that it supports."""
        ...

    def prepare(self, case: BenchCase, rank: int, group: Any) -> Running:
        """Everything that can be done before tensors are there: plans, metadata, buffers.

        Args:
            group: the default process group (None in a world of one), or a Transport.
        """
        ...
