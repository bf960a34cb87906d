"""Numbers as people write them on a command line: 1M tokens, 32:8 heads, 20GiB."""

from __future__ import annotations

import re

_COUNT = re.compile(r"(\d+)([kKmM]?)$")
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B?$")


def read_count(what: str, text: str) -> int:
    """A number of tokens: 4096, 128K or 1M, in powers of 1024.

    Raises:
        ValueError: naming what.
    """
    match = _COUNT.match(text.strip())
    if not match or not int(match[1]):
        raise ValueError(f"{what} ({text!r}) must be a number such as 4096, 128K or 1M (1048576)")
    return int(match[1]) << {"": 0, "k": 10, "m": 20}[match[2].lower()]


def read_heads(text: str) -> tuple[int, int]:
    """Query and KV heads: 32:8, or 32 for as many of both.

    Raises:
        ValueError: if it is neither.
    """
    parts = text.split(":")
    if len(parts) > 2 or not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(f"heads ({text!r}) must be query:KV heads such as 32:8, or 32")
    return int(parts[0]), int(parts[-1])


def read_bytes(what: str, text: str) -> int:
    """A number of bytes: 20GiB, 80GB or 1000000.

    Raises:
        ValueError: naming what.
    """
    match = _BYTES.match(text.strip())
    if not match:
        raise ValueError(f"{what} ({text!r}) must be a number of bytes such as 20GiB or 80GB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))
