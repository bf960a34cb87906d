"""Machines as text: TOML files, and the presets that the package brings along.

A preset is a device's data sheet and a node around it; the speed of a kernel is its dtype's peak
times best x q / (q + half) x k / (k + half), for tiles of q queries and k keys.
"""

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

SIZES = tuple(float(1 << power) for power in range(4, 17, 2))
"""Queries and keys at which a preset's speeds are tabled."""


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
