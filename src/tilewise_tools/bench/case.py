"""Values that say what one benchmark measures: the case, the network it runs on, how it is timed.

Everything that decides a figure is a field here, since a row's key is made of them.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any

import torch

from tilewise.arguments import DtypeName, of_kind, positive_number, require_known, require_range
from tilewise.layouts.balanced import default_layout
from tilewise.layouts.layout import Layout
from tilewise.masks import ALL_NAMES
from tilewise.masks.base import Mask
from tilewise.plan.payload import Payload, head_groups
from tilewise.strategies.tiled import tiled_layout
from tilewise.wires.wire import Wires
from tilewise_tools.mask_report import figures
from tilewise_tools.mask_report.named import USUAL, Axes, mask_of
from tilewise_tools.naming import naming

KINDS = ("kernels", "strategies", "network")
PASSES = ("forward", "backward", "both")
NETWORKS = ("none", "loopback", "cluster", "lab", "limited")
LAYOUTS: Mapping[str, Callable[[Mask, int, int], Layout]] = MappingProxyType(
    {"own": default_layout, **figures.LAYOUTS, "tiled": tiled_layout}
)
"""How the tokens lie: (mask, num_tokens, world_size); "own": each contender's best."""


@dataclass(frozen=True)
class LabNetwork:
    """The network lab over which the messages of a case travel.

    Args:
        name: "none" (one rank), "loopback" (sockets inside one machine), "cluster" (hosts that
            torchrun joined), "lab" (namespaces whose NICs have a rate), or "limited" (a transport
            that waits as a slow link would).
        hosts, ranks_per_host: loopback is one host.
    """

    name: str = "none"
    hosts: int = 1
    ranks_per_host: int = 1
    mbit: float = 0.0  # megabits per second of a host's NIC, each way; 0: no limit was set

    def __post_init__(self) -> None:
        require_known("network", self.name, NETWORKS)
        require_range("hosts", self.hosts)
        require_range("ranks_per_host", self.ranks_per_host)
        if self.name in NETWORKS[3:]:
            positive_number("mbit", self.mbit)

    @property
    def world_size(self) -> int:
        return self.hosts * self.ranks_per_host


@dataclass(frozen=True)
class BenchCase:
    """One attention problem; contenders of the same case are measured side by side.

    Args:
        mask, seed, axes: the mask as `mask_of` reads it; axes that it has not are None.
    """

    kind: str  # one of KINDS
    mask: str
    num_tokens: int  # of the whole sequence
    num_heads: int = 8
    num_kv_heads: int = 8
    head_dim: int = 64
    dtype: DtypeName = "float32"
    which: str = "both"  # the pass that is timed, one of PASSES
    world_size: int = 1
    layout: str = "own"  # one of LAYOUTS, for all contenders
    seed: int = 0
    device: str = "cpu"  # "cpu" or "cuda"
    network: LabNetwork = LabNetwork()
    axes: Axes = USUAL

    def __post_init__(self) -> None:
        for what, value, known in (
            ("pass", self.which, PASSES),
            ("layout", self.layout, LAYOUTS),
            ("device", self.device, ("cpu", "cuda")),
        ):
            require_known(what, value, known)
        for what in ("num_tokens", "num_heads", "num_kv_heads", "head_dim", "world_size"):
            require_range(what, getattr(self, what))
        require_range("seed", self.seed, 0)
        of_kind("dtype", self.dtype, DtypeName)
        head_groups(self.num_heads, self.num_kv_heads, 1)
        self.axes.check()
        if self.mask not in ALL_NAMES:
            self.make_mask()

    @property
    def heads(self) -> tuple[int, int, int]:
        return self.num_heads, self.num_kv_heads, self.head_dim

    @property
    def ranks_here(self) -> int:
        """Ranks that share a machine: hosts of a lab are all on one."""
        return self.network.ranks_per_host if self.network.name == "cluster" else self.world_size

    @property
    def asked(self) -> tuple[str, torch.dtype, int, bool]:
        """Return what a kernel is asked to serve, as `Kernel.supports` takes it."""
        return self.device, getattr(torch, self.dtype), self.head_dim, self.which != "forward"

    def make_mask(self) -> Mask:
        """The mask, the same on every rank."""
        with naming("mask"):
            return mask_of(self.mask, self.num_tokens, self.seed, self.axes)

    def timed(self, forward: Iterable[Any], backward: Iterable[Any]) -> list[Any]:
        """Return figures of the timed pass, from those of forward and of backward; of both, their
        sums.
        """
        if self.which == "both":
            return [a + b for a, b in zip(forward, backward, strict=True)]
        return list(forward if self.which == "forward" else backward)

    def flops(self, pairs: float) -> float:
        """Floating-point operations of a number of (query, key, head) triples in the timed pass."""
        widths = self.head_dim, self.head_dim
        forward, backward = (
            Payload(backward, 1, 1, *widths, self.dtype, Wires()).flop for backward in (False, True)
        )
        (flop,) = self.timed([forward], [backward])
        return float(flop * pairs)


@dataclass(frozen=True)
class Timing:
    """Number and length of the runs of a case.

    Args:
        truth_pairs: pairs of (sampled query, key) that the fp64 truth is computed for, at most.
    """

    repeats: int = 5  # timed runs, after `warmups` runs that are not
    warmups: int = 1
    timeout_seconds: float = 60.0  # of one contender's step: its preparation, its check, or one run
    truth_pairs: int = 1 << 22

    def __post_init__(self) -> None:
        for what, least in (("repeats", 1), ("warmups", 0), ("truth_pairs", 1)):
            require_range(what, getattr(self, what), least)
        positive_number("timeout_seconds", self.timeout_seconds)


def known_fields(of: type) -> tuple[str, ...]:
    """Names of a dataclass's fields."""
    return tuple(field.name for field in fields(of))


FIRST_AXES = 5
"""Axes that every key has. Later ones count where they are set: older rows keep their keys."""


def key_of(
    case: BenchCase, timing: Timing, contender: dict[str, str], versions: dict[str, str]
) -> str:
    """Return the key of a finished row: 16 digits that depend on everything given."""
    entries: dict[str, Any] = {"case": asdict(case), "timing": asdict(timing)}
    axes = list(case.axes)
    while len(axes) > FIRST_AXES and axes[-1] is None:
        axes.pop()
    entries["case"]["axes"] = axes
    entries |= {"contender": contender, "versions": versions}
    text = json.dumps(entries, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
