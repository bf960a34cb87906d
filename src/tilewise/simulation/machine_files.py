"""Machines as text: TOML files, their short form, and the presets that the package brings along.

A preset is a device's data sheet and a node around it, in short form. There the speed of a kernel
is its dtype's peak times best x q / (q + half) x k / (k + half), for tiles of q queries and k keys.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from tilewise.serializer import read

SIZES = tuple(float(1 << power) for power in range(4, 17, 2))
"""Queries and keys at which the speeds of a short form are tabled."""


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        ValueError: if it is no text, or cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no TOML: {error}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The tables of a file's text.

    Raises:
        ValueError: if it is no TOML.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where} is no TOML: {error}") from None


def write_toml(data: Mapping[str, Any]) -> str:
    """Plain values as TOML: first those that are no tables; None is left out."""
    lines: list[str] = []
    tables: list[str] = []
    for name, value in data.items():
        match value:
            case None:
                continue
            case dict():
                tables += ["", f"[{name}]", *map(_line, value.items())]
            case [{}, *_]:
                for row in value:
                    tables += ["", f"[[{name}]]", *map(_line, row.items())]
            case _:
                lines.append(_line((name, value)))
    return "\n".join([*lines, *tables]) + "\n"


def _line(entry: tuple[str, Any]) -> str:
    name, value = entry
    return f"{name} = {_written(value)}"


def _written(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
            return f'"{"".join(escapes.get(letter, letter) for letter in value)}"'
        case [[*_], *_]:
            return "".join(["[\n", *(f"    {_written(row)},\n" for row in value), "]"])
        case list():
            return f"[{', '.join(map(_written, value))}]"
    return repr(value)


def preset_names() -> tuple[str, ...]:
    """The presets, by name."""
    return tuple(sorted(_presets()["machine"]))


def preset_tables(name: str) -> dict[str, Any] | None:
    """The tables of a preset, in short form; None if there is none of this name."""
    presets = _presets()
    if name not in presets["machine"]:
        return None
    node = dict(presets["machine"][name])
    device = dict(presets["device"][node.pop("device")])
    kernel = device.pop("kernel")
    device["device"] = "cpu" if kernel == "cpu" else "cuda"
    speeds = f"Speeds mean the kernel {kernel}."
    node["source"] = f"{device['source']} {speeds} {node.get('source', presets['assumed'])}"
    return {"name": name, "half": presets["half"], **device, **node}


def _presets() -> Mapping[str, Any]:
    text = files("tilewise.simulation").joinpath("presets.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@dataclass(frozen=True)
class ShortForm:
    """A machine of GPUs in eight lines; a file that has peak or best is one.

    Args:
        peak: FLOP per second of a device by dtype, without sparsity.
        best: share of the peak that the kernel's fastest calls reach, "forward" and "backward".
        node_size: devices of a node.
        nics: per node.
        inside_bandwidth: bytes per second of a device's port to the others of its node, one way.
        between_bandwidth: bytes per second of a NIC, one way.
        memory: bytes of a device.
        inside_latency, between_latency, launch_seconds: seconds; assumed unless given.
        half: queries, or keys, of calls that run at half the speed of very long ones.
        heads: of the calls that half counts queries of: blocks of queries of all heads run side by
            side, and the last of them leave half a device idle on average. 0: any number of heads.
        memory_bandwidth: bytes per second of a device's memory, read and written: adding to an fp32
            partial passes over three such, copying over two. None: both take no time.
    """

    name: str
    peak: dict[str, float]
    best: dict[str, float]
    node_size: int
    nics: int
    inside_bandwidth: float
    between_bandwidth: float
    memory: int
    inside_latency: float = 4e-6
    between_latency: float = 8e-6
    launch_seconds: float = 5e-6
    half: float = 256.0
    heads: int = 0
    memory_bandwidth: float | None = None
    source: str = ""

    def __post_init__(self) -> None:
        passes = ("forward", "backward")
        if set(self.best) != set(passes):
            names = ", ".join(self.best) or "nothing"
            raise ValueError(f"best ({names}) must have forward and backward, and nothing else")
        wrong_shares = {f"best.{which}": x for which, x in self.best.items() if not 0 < x <= 1}
        for name, share in wrong_shares.items():
            raise ValueError(f"{name} ({share}) must be a share of the peak: above 0, at most 1")
        if not self.peak:
            raise ValueError("peak lacks a dtype, as in peak = { bfloat16 = 989e12 }")
        for dtype, flops in self.peak.items():
            if flops < 1:
                raise ValueError(f"peak.{dtype} ({flops:g}) must be FLOP per second, at least 1")
        if self.half < 0:
            raise ValueError(f"half ({self.half:g}) must be at least 0 rows")
        if self.memory_bandwidth is not None and not self.memory_bandwidth >= 1:
            raise ValueError(
                f"memory_bandwidth ({self.memory_bandwidth:g}) must be bytes per second, at least 1"
            )


def in_full(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of a machine in full, as `Machine.to_toml` writes them, from its short
    form.

    Tables that are full already are returned as they are. The short form may have a link or the
    memory as a full file does: `inside = { bandwidth = 450e9, latency = 4e-6 }`, `memory_bytes =
    80_000_000_000`. Fields of a full file that the short form lacks (`pooled`, `merge_bandwidth`,
    ...) may follow.

    Raises:
        ValueError: if a field of the short form is missing, or its value is wrong.
    """
    if "peak" not in tables and "best" not in tables:
        return dict(tables)
    short_fields = {parameter.name for parameter in fields(ShortForm)}
    short = {name: value for name, value in tables.items() if name in short_fields}
    other_fields = {name: value for name, value in tables.items() if name not in short_fields}
    for link in ("inside", "between"):
        port = other_fields.pop(link, None)
        if isinstance(port, Mapping):
            short |= {f"{link}_{name}": x for name, x in cast("Mapping[str, Any]", port).items()}
        elif port is not None:
            raise ValueError(f"machine.{link} ({port!r}) must be an object with a bandwidth")
    if "memory_bytes" in other_fields:
        short["memory"] = other_fields.pop("memory_bytes")
    form = read(ShortForm, short, "machine")
    return {
        "name": form.name,
        "node_size": form.node_size,
        "nics": form.nics,
        "inside": {"bandwidth": form.inside_bandwidth, "latency": form.inside_latency},
        "between": {"bandwidth": form.between_bandwidth, "latency": form.between_latency},
        "memory_bytes": form.memory,
        "device": "cuda",
        "launch_seconds": form.launch_seconds,
        **_memory(form),
        "source": form.source,
        "kernel": _kernels(form),
        **other_fields,
    }


def _memory(form: ShortForm) -> dict[str, float]:
    """Return the bandwidths of merging and packing that follow from the memory's bandwidth."""
    speed = form.memory_bandwidth
    return {} if speed is None else {"merge_bandwidth": speed / 3, "pack_bandwidth": speed / 2}


def _kernels(form: ShortForm) -> list[dict[str, Any]]:
    """The speeds of a device at all sizes, from its peaks."""
    ramp = [size / (size + form.half) for size in SIZES]
    return [
        {
            "dtype": dtype,
            "pass": pass_name,
            "queries": SIZES,
            "keys": SIZES,
            "heads": form.heads,
            "flops": [[peak * best * q * k for k in ramp] for q in ramp],
        }
        for dtype, peak in form.peak.items()
        for pass_name, best in form.best.items()
    ]
