"""Contenders that misbehave, for the tests of the benchmark; and one that only others count."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.layouts.layout import Layout
from tilewise.simulation.machine import Machine
from tilewise_tools.bench.case import BenchCase
from tilewise_tools.bench.contender import Facts, Prediction, Running, Traffic
from tilewise_tools.bench.our_strategies import strategy


@dataclass(frozen=True)
class Bad:
    """A ring, until it is asked to attend: then it does what its name says."""

    name: str
    version: str = "1"

    @property
    def library(self) -> str:
        return "tests"

    def supports(self, case: BenchCase) -> str | None:
        return "it has no such mask" if self.name == "refuses" else None

    def predict(self, case: BenchCase, machine: Machine) -> Prediction:
        return Prediction(peak_bytes=1 << 50 if self.name == "huge" else 0)

    def prepare(self, case: BenchCase, rank: int, group: Any) -> Running:
        return Misbehaving(self.name, rank, strategy("ring").prepare(case, rank, group))


@dataclass(frozen=True)
class Misbehaving:
    name: str
    rank: int
    ring: Running

    @property
    def layout(self) -> Layout:
        return self.ring.layout

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        last = self.rank == self.layout.world_size - 1
        match self.name:
            case "dies" if last:
                os._exit(3)
            case "hangs" if last:
                time.sleep(600)
            case "raises" if last:
                raise KeyError("this one")
            case "runs out" if last:
                raise MemoryError("no more")
            case "errs":
                return self.ring.attend(q, k, v) * 1.01
            case "gives nan":
                return self.ring.attend(q, k, v) * torch.nan
        return self.ring.attend(q, k, v)

    def facts(self) -> Facts:
        return Facts()

    def traffic(self) -> Traffic | None:
        return None


def contenders() -> list[Bad]:
    return [Bad("counted by others"), Bad("dies")]
