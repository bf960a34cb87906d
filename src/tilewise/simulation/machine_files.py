"""Machines as text: TOML files, and the presets that the package brings along.

A preset is a device's data sheet and a node around it; the speed of a kernel is its dtype's peak
times best x q / (q + half) x k / (k + half), for tiles of q queries and k keys.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

SIZES = tuple(float(1 << power) for power in range(4, 17, 2))
"""Queries and keys at which a preset's speeds are tabled."""


def read_text(path: Path) -> str:
    """What a file says.

    Raises:
        ValueError: if it is no text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no TOML: {error}") from None


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The tables of a file's text.

    Raises:
        ValueError: if it is no TOML.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where} is no TOML: {error}") from None


def write_toml(machine: Any) -> str:
    """A machine as TOML: plain fields first, then links, then one table per kernel."""
    plain, tables = [], []
    for name, value in ((f.name, getattr(machine, f.name)) for f in fields(machine)):
        if name == "kernels" or value is None:
            continue
        if is_dataclass(value):
            lines = (f"{f.name} = {_written(getattr(value, f.name))}" for f in fields(value))
            tables += ["", f"[{name}]", *lines]
        else:
            plain.append(f"{name} = {_written(value)}")
    for kernel in machine.kernels:
        tables += ["", "[[kernel]]", f'dtype = "{kernel.dtype}"']
        tables.append(f'pass = "{"backward" if kernel.backward else "forward"}"')
        for name in ("head_dim", "launch_seconds", "edge_keys"):
            if getattr(kernel, name):
                tables.append(f"{name} = {_written(getattr(kernel, name))}")
        for name in ("queries", "keys"):
            tables.append(f"{name} = {_written(getattr(kernel, name))}")
        rows = (f"    {_written(row)}," for row in kernel.flops)
        tables += ["flops = [", *rows, "]"]
    return "\n".join([*plain, *tables]) + "\n"


def _written(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
            return f'"{"".join(escapes.get(letter, letter) for letter in value)}"'
        case tuple():
            return f"[{', '.join(map(_written, value))}]"
    return repr(value)


def preset_names() -> tuple[str, ...]:
    """The presets, by name."""
    return tuple(sorted(_presets()["machine"]))


def preset_fields(name: str) -> dict[str, Any] | None:
    """The tables of a preset as a file of its own would have them; None if there is none."""
    presets = _presets()
    if name not in presets["machine"]:
        return None
    node = dict(presets["machine"][name])
    device = presets["device"][node.pop("device")]
    speeds = f"Speeds mean the kernel {device['kernel']}."
    node["source"] = f"{device['source']} {speeds} {node.get('source', presets['assumed'])}"
    made = {"name": name, "memory_bytes": device["memory_bytes"], "inside": device["inside"]}
    if "launch_seconds" in device:
        made["launch_seconds"] = device["launch_seconds"]
    return {**made, "kernel": _kernels(device, presets["half"]), **node}


def _presets() -> Mapping[str, Any]:
    text = files("tilewise.simulation").joinpath("presets.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _kernels(device: Mapping[str, Any], half: float) -> list[dict[str, Any]]:
    """The speeds of a device at all sizes, from its peaks."""
    ramp = [size / (size + half) for size in SIZES]
    return [
        {
            "dtype": dtype,
            "pass": which,
            "queries": SIZES,
            "keys": SIZES,
            "flops": [[peak * best * q * k for k in ramp] for q in ramp],
        }
        for dtype, peak in device["peak"].items()
        for which, best in device["best"].items()
    ]
