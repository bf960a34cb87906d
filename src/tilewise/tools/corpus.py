"""Real text that every machine has: the sources of Python's own standard library, as documents.

It stands alone because the demo and the training example read the same text.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np

__all__ = ["documents", "pack"]

Array = np.ndarray
# Before each top-level definition: a document is one of them, or what a module says before them.
_DEFINITION = re.compile(rb"\n(?=(?:@|def |class |async def ))")


def documents() -> tuple[bytes, ...]:
    """Top-level definitions of the standard library's modules, in the modules' order.

    Their lengths differ as real documents' do: from a few bytes to over 100,000, median about 600.

    Raises:
        ValueError: if this Python keeps no sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    pieces = (
        piece
        for path in sorted(folder.glob("*.py"))
        for piece in _DEFINITION.split(path.read_bytes())
    )
    found = tuple(piece + b"\n" for piece in pieces if piece.strip())
    if not found:
        raise ValueError(f"no Python sources in {folder}; use a Python installed with its library")
    return found


def pack(texts: Iterable[bytes], num_tokens: int) -> tuple[Array, tuple[int, ...]]:
    """Documents end to end, as one sequence of bytes.

    Returns:
        tokens, uint8 [num_tokens], and cu_seqlens; the last document is cut at num_tokens.
    Raises:
        ValueError: if the documents are too short together.
    """
    parts, ends = [], [0]
    for text in texts:
        if ends[-1] >= num_tokens:
            break
        parts.append(text[: num_tokens - ends[-1]])
        ends.append(ends[-1] + len(parts[-1]))
    if ends[-1] < num_tokens:
        raise ValueError(f"num_tokens ({num_tokens}) must be at most {ends[-1]}, all there is")
    return np.frombuffer(b"".join(parts), np.uint8), tuple(ends)
