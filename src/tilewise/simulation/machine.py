"""The machine: nodes of devices, what their links carry, how fast kernels are, how much memory.

A value without any measurement in it: the simulator reads it, a data sheet or a calibration writes
it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tilewise.arguments import (
    DtypeName,
    brief,
    check_fields,
    checks_arguments,
    of_kind,
    positive_number,
    require_range,
)
from tilewise.serializer import read, write
from tilewise.simulation.machine_files import (
    in_full,
    parse_toml,
    preset_names,
    preset_tables,
    read_text,
    write_toml,
)

MOST_SECONDS = 1e6
"""Of one event: sums of absurd times overflow, and read as ranks that wait for ever."""

MOST_COUNT = 1e9
"""Of a kernel's head_dim and edge_keys, for the same reason."""


@dataclass(frozen=True)
class Link:
    """Capacity of one port in each direction.

    Args:
        bandwidth: bytes per second, one way; the other way has as much of its own.
        latency: seconds between a message's launch and its first byte.
    """

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)


LARGE_TILE = 8192  # rows and keys on which a kernel is about as fast as it gets


@dataclass(frozen=True)
class KernelSpeed:
    """FLOP per second of one dtype and pass over a grid of tile sizes, interpolated in log scale.

    Outside the grid its nearest edge counts.

    Args:
        queries, keys: ascending numbers of rows.
        flops: per number of queries, per number of keys.
        head_dim: that these are for; 0: for all.
        launch_seconds: of every call, however small, beside its FLOP.
        edge_keys: computed in vain for every query at a mask's edge, as blocks overhang it.
        heads: of the calls that these are of. A call of other heads fills a device as one of so
            many more or fewer queries does: blocks of queries of all heads run side by side. 0:
            the number of heads makes no difference.
    """

    dtype: str
    backward: bool = field(metadata={"entry": "pass", "words": ("forward", "backward")})
    queries: tuple[float, ...]
    keys: tuple[float, ...]
    flops: tuple[tuple[float, ...], ...]
    head_dim: int = 0
    launch_seconds: float = 0.0
    edge_keys: float = 0.0
    heads: int = 0

    def __post_init__(self) -> None:
        check_fields(self)

    def speed(self, queries: float, keys: float, heads: int = 0) -> float:
        """FLOP per second of a tile of these numbers of rows and heads; 0: the table's heads."""
        if heads and self.heads:
            queries *= heads / self.heads
        (i, a), (j, b) = _place(self.queries, queries), _place(self.keys, keys)
        upper, lower = self.flops[i], self.flops[min(i + 1, len(self.flops) - 1)]
        right = min(j + 1, len(self.keys) - 1)
        corners = upper[j], upper[right], lower[j], lower[right]
        weights = (1 - a) * (1 - b), (1 - a) * b, a * (1 - b), a * b
        return math.exp(sum(w * math.log(f) for w, f in zip(weights, corners, strict=True)))


@dataclass(frozen=True)
class Machine:
    """Nodes of equal devices; rank r is device r % node_size of node r // node_size.

    Args:
        inside: every device's port to the others of its node, which share nothing else.
        between: one NIC. Neighbouring devices of a node share a NIC if there are fewer NICs than
            devices; pooled: every transfer may use all NICs of its node.
        nics: per node.
        kernels: FLOP per second by dtype and pass, and by head_dim where they differ.
        launch_seconds: before every kernel.
        message_seconds: a rank's own time for each message that it posts, sent or received.
        carry_seconds: for which a message, however short, keeps its link and copy_cores busy.
        call_seconds: a rank's own time around a forward and around a backward pass.
        agree_seconds: per other rank, for the records that are compared before a forward pass.
        merge_seconds: for every partial that is added to one that is there.
        merge_bandwidth, pack_bandwidth: bytes per second of partials merged, and of rows copied
            into messages and of the passes' own tensors; None: takes no time.
        memory_bytes: per device.
        device: "cpu" or "cuda": whose code is priced. On a GPU results of kernels wait until they
            are combined; see docs/gpu.md.
        rack_nodes, across: nodes per rack, and the rack's one link to all others (None: no racks).
        cores, core_sharers: so many kernels at once run at full speed among core_sharers
            neighbouring devices (default: a node's); None: devices share no cores.
        copy_cores: cores that a message inside a node at full speed keeps busy at each end; others
            keep as many busy per byte.
        slow_ranks: whose kernels take slowness times as long.
        jitter: share by which kernels and messages take longer on average, drawn by seed.
        source: where the figures are from, and what is assumed.
    """

    name: str
    node_size: int
    inside: Link
    between: Link
    kernels: tuple[KernelSpeed, ...] = field(metadata={"entry": "kernel"})
    nics: int = 1
    pooled: bool = False
    launch_seconds: float = 0.0
    message_seconds: float = 0.0
    carry_seconds: float = 0.0
    call_seconds: tuple[float, float] = (0.0, 0.0)
    agree_seconds: float = 0.0
    merge_seconds: float = 0.0
    merge_bandwidth: float | None = None
    pack_bandwidth: float | None = None
    memory_bytes: int = 1 << 50
    device: Literal["cpu", "cuda"] = "cpu"
    rack_nodes: int | None = None
    across: Link | None = None
    cores: float | None = None
    core_sharers: int | None = None
    copy_cores: float = 0.0
    slow_ranks: tuple[int, ...] = ()
    slowness: float = 1.0
    jitter: float = 0.0
    seed: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("node_size", "nics", "memory_bytes", "rack_nodes", "core_sharers"):
            if getattr(self, name) is not None:
                require_range(name, getattr(self, name))
        if max(self.node_size, self.nics) % min(self.node_size, self.nics):
            raise ValueError(
                f"nics ({self.nics}) must divide node_size ({self.node_size}) or be divided by it"
            )
        if (self.rack_nodes is None) != (self.across is None):
            raise ValueError("rack_nodes and across describe racks together: give both or neither")
        for link in (self.inside, self.between, *([self.across] if self.across else [])):
            if not (link.bandwidth >= 1 and 0 <= link.latency <= MOST_SECONDS):
                raise ValueError(
                    f"{link} must have a bandwidth of at least 1 byte per second and a latency of "
                    f"0 to {MOST_SECONDS:g} s"
                )
        for name, lowest, highest in (
            ("slowness", 1, 1e6),
            ("jitter", 0, 1e3),
            ("seed", 0, 1 << 62),
        ):
            require_range(name, getattr(self, name), lowest, highest)
        for rank in self.slow_ranks:
            require_range("slow_ranks", rank, 0)
        _check_numbers(self)
        for kernel in self.kernels:
            _check_kernel(kernel)

    @staticmethod
    @checks_arguments
    def preset(name: str) -> Machine:
        """A machine from data sheets, such as "h100x8".

        Raises:
            ValueError: if there is none of this name; it lists those there are.
        """
        tables = preset_tables(name)
        if tables is None:
            raise ValueError(f"no preset {brief(name)}; there are {', '.join(preset_names())}")
        return _machine(tables, f"preset {name}")

    @staticmethod
    def presets() -> tuple[str, ...]:
        """The names that `preset` knows."""
        return preset_names()

    @staticmethod
    @checks_arguments
    def load(path: str | Path) -> Machine:
        """A machine from a TOML file, as `to_toml` writes it or in its short form of eight lines.

            name = "mine"                                   # FLOP and bytes per second; bytes
            peak = { bfloat16 = 989e12 }
            best = { forward = 0.65, backward = 0.55 }      # shares of the peak
            node_size = 8
            nics = 8
            inside_bandwidth = 450e9
            between_bandwidth = 50e9
            memory = 80e9

        Bandwidths are one way. The presets are in this form: see machine_files.ShortForm.

        Raises:
            ValueError: if the file is no TOML, or a field is missing, unknown or out of range.
        """
        return read_machine(read_text(Path(path)), str(path))

    def to_toml(self) -> str:
        return write_toml(write(self))

    @checks_arguments
    def scaled(self, bandwidth: float) -> Machine:
        """This machine with the bandwidth of every link multiplied."""
        inside, between, across = (
            link and replace(link, bandwidth=link.bandwidth * bandwidth)
            for link in (self.inside, self.between, self.across)
        )
        assert inside and between
        return replace(self, inside=inside, between=between, across=across)

    @property
    def is_disturbed(self) -> bool:
        """True if ranks that do the same take different times."""
        return bool(self.jitter or (self.slow_ranks and self.slowness > 1))

    @property
    def nic_sharers(self) -> int:
        """Neighbouring devices whose messages between nodes share `nic_bandwidth`."""
        return self.node_size if self.pooled else max(1, self.node_size // self.nics)

    @property
    def nic_bandwidth(self) -> float:
        """Bytes per second of one message between nodes that has the network to itself."""
        nics = self.nics if self.pooled else max(1, self.nics // self.node_size)
        return self.between.bandwidth * nics

    @checks_arguments
    def same_node(self, rank: int, other: int) -> bool:
        return rank // self.node_size == other // self.node_size

    @checks_arguments
    def kernel(self, dtype: str, backward: bool, head_dim: int | None = None) -> KernelSpeed:
        """The speeds of a dtype and pass; float16 and bfloat16 stand in for each other.

        Args:
            head_dim: between two tables' the time of a pair of rows is interpolated; outside them
                the nearest table counts. None: that of the largest.
        Raises:
            ValueError: if the machine has none.
        """
        twin = {"float16": "bfloat16", "bfloat16": "float16"}.get(dtype, dtype)
        for kernel_dtype in (dtype, twin):
            matching = [
                k for k in self.kernels if (k.dtype, k.backward) == (kernel_dtype, backward)
            ]
            if matching:
                return _between(sorted(matching, key=lambda k: k.head_dim), head_dim)
        known_dtypes = ", ".join(sorted({kernel.dtype for kernel in self.kernels}))
        pass_name = "backward" if backward else "forward"
        raise ValueError(
            f"machine {self.name!r} has no {pass_name} kernel speeds for {brief(dtype)}, only for "
            f"{known_dtypes}; add a [[kernel]] table for it"
        )

    @checks_arguments
    def linear_pairs(
        self,
        parameters: float,
        num_heads: int,
        head_dim: int,
        *,
        dtype: str = "bfloat16",
        flops: float | None = None,
    ) -> float:
        """Allowed pairs whose attention takes as long as a token's matrix products in a layer.

        Both forward: 2 FLOP a parameter, and 4 num_heads head_dim a pair. The `linear` of tw.tiled.

        Args:
            parameters: of one layer's matrices.
            flops: per second of their products; None: attention's own on large tiles.
        Raises:
            ValueError: if a number is not above 0, or the machine has no speeds for dtype.
        """
        attention = self.kernel(dtype, False, head_dim).speed(LARGE_TILE, LARGE_TILE)
        flops = attention if flops is None else flops
        sizes = {"num_heads": num_heads, "head_dim": head_dim}
        for name, value in {"parameters": parameters, **sizes, "flops": flops}.items():
            positive_number(name, value)
        return 2 * parameters / flops / (4 * num_heads * head_dim / attention)


def _between(kernels: list[KernelSpeed], head_dim: int | None) -> KernelSpeed:
    """The table of a head_dim: one of these, ascending, or what lies between two of them."""
    if head_dim is None or head_dim >= kernels[-1].head_dim:
        return kernels[-1]
    upper = next(i for i, kernel in enumerate(kernels) if kernel.head_dim > head_dim)
    if not upper or kernels[upper - 1].head_dim == head_dim:
        return kernels[max(upper - 1, 0)]
    a, b = kernels[upper - 1], kernels[upper]
    if (a.queries, a.keys) != (b.queries, b.keys):
        raise ValueError(
            f"the kernel tables of {a.dtype} for head_dim {a.head_dim} and {b.head_dim} must have "
            "the same queries and keys"
        )
    share = (head_dim - a.head_dim) / (b.head_dim - a.head_dim)

    def speed(x: float, y: float) -> float:
        return head_dim / ((1 - share) * a.head_dim / x + share * b.head_dim / y)

    rows = (map(speed, *row) for row in zip(a.flops, b.flops, strict=True))
    launch = (1 - share) * a.launch_seconds + share * b.launch_seconds
    flops = tuple(map(tuple, rows))
    edge = (1 - share) * a.edge_keys + share * b.edge_keys
    return replace(a, flops=flops, head_dim=head_dim, launch_seconds=launch, edge_keys=edge)


def _check_numbers(machine: Machine) -> None:
    for name in (
        *("launch_seconds", "message_seconds", "carry_seconds"),
        *("agree_seconds", "merge_seconds", "copy_cores"),
    ):
        require_range(name, getattr(machine, name), 0, MOST_SECONDS)
    calls = machine.call_seconds
    if len(calls) != 2 or not all(0 <= seconds <= MOST_SECONDS for seconds in calls):
        raise ValueError(f"call_seconds ({calls}) must be two numbers from 0 to {MOST_SECONDS:g}")
    for name in ("cores", "merge_bandwidth", "pack_bandwidth"):
        value = getattr(machine, name)
        if value is not None and not value > 0:
            raise ValueError(f"{name} ({value}) must be above 0, or left out")


def _check_kernel(kernel: KernelSpeed) -> None:
    of_kind("the dtype of a kernel", kernel.dtype, DtypeName)
    most = {
        "head_dim": MOST_COUNT,
        "heads": MOST_COUNT,
        "launch_seconds": MOST_SECONDS,
        "edge_keys": MOST_COUNT,
    }
    for name, limit in most.items():
        require_range(f"kernel {kernel.dtype}: {name}", getattr(kernel, name), 0, limit)
    for name, sizes in (("queries", kernel.queries), ("keys", kernel.keys)):
        if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] <= 0:
            raise ValueError(
                f"kernel {kernel.dtype}: {name} {brief(sizes)} must be positive and ascend"
            )
    shape = [len(kernel.keys)] * len(kernel.queries)
    if [len(row) for row in kernel.flops] != shape or not all(
        1 <= flops < math.inf for row in kernel.flops for flops in row
    ):
        raise ValueError(
            f"kernel {kernel.dtype}: flops must be {len(kernel.queries)} rows of "
            f"{len(kernel.keys)} numbers from 1 on, one row per number of queries"
        )


def _place(sizes: tuple[float, ...], size: float) -> tuple[int, float]:
    """The grid point at or below a size, and how far the size is to the next, in log scale."""
    size = min(max(size, sizes[0]), sizes[-1])
    index = min(bisect_right(sizes, size) - 1, max(len(sizes) - 2, 0))
    if index + 1 >= len(sizes):
        return index, 0.0
    return index, math.log(size / sizes[index]) / math.log(sizes[index + 1] / sizes[index])


def read_machine(text: str, where: str) -> Machine:
    """A machine from the text of a file, which errors call `where`."""
    return _machine(parse_toml(text, where), where)


def _machine(tables: Mapping[str, Any], where: str) -> Machine:
    """A machine from the tables of a file, whose name every error gives."""
    try:
        return read(Machine, {"kernel": [], **in_full(tables)}, "machine")
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
