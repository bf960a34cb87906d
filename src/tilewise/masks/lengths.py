"""Document lengths as in real corpora: a sampler, and the per-document bookkeeping around it.

Packed training sees documents of wildly different lengths, and every cost of a document mask hangs
on them. The histograms are published figures, kept in lengths.toml with their source.
"""

import csv
import tomllib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tilewise.arguments import (
    brief,
    checks_arguments,
    require_dense,
    require_range,
    shown,
    whole_number,
)
from tilewise.masks.base import Document
from tilewise.masks.strips import LIMIT

__all__ = ["Bin", "corpora", "histogram", "position_ids", "sample", "shift_labels"]

Array = NDArray[np.int64]
MOST_DOCUMENTS = 1 << 20
LONG = (8192, 30000)  # the benchmark's long documents, uniform
Draw: TypeAlias = Literal["tilewise", "longca"]
PILE_TOKENS, PROLONG64K_TOKENS = 12 << 10, 64 << 10  # longest sequences that it draws from these


class Bin(NamedTuple):
    """Documents of first_length to last_length tokens, both included."""

    first_length: int
    last_length: int
    num_documents: int


def corpora() -> tuple[str, ...]:
    """Names of the corpora with a histogram."""
    return tuple(_tables())


@checks_arguments
def histogram(corpus: str) -> tuple[Bin, ...]:
    """Published histogram of a corpus's document lengths, shortest first; or that of a CSV file.

    Source: LongCA-bench (arXiv 2510.17896). One word is taken as one token.

    Args:
        corpus: one of `corpora()`; or the path of a .csv whose column `length` has the tokens of a
            document a line, or whose columns are those of `Bin`.
    Raises:
        ValueError: if there is none for this corpus; of a file, naming the line.
    """
    if corpus.endswith(".csv"):
        return _read_csv(Path(corpus))
    tables = _tables()
    if corpus not in tables:
        raise ValueError(
            f"corpus {brief(corpus)} is not known; take one of {', '.join(tables)}, or the path of "
            "a .csv with a column length"
        )
    return tuple(Bin(*row) for row in tables[corpus])


@checks_arguments
def sample(
    corpus: str,
    num_tokens: int,
    *,
    seed: int,
    cap: int | None = None,
    mix: float = 0.0,
    draw: Draw = "tilewise",
) -> tuple[int, ...]:
    """cu_seqlens of num_tokens tokens of documents, drawn by a corpus's lengths.

    A bin is drawn by its number of documents, then a length log-uniformly within it; the document
    that reaches past the end is cut.

    Args:
        corpus: as for `histogram`; with draw "longca" one of `corpora()`.
        num_tokens: tokens to fill, at least 1.
        seed: the same seed gives the same documents.
        cap: longest document; longer ones are cut to it. None: no limit.
        mix: share of the tokens in documents of U[8192, 30000] tokens instead, shuffled among the
            others (the benchmark's distributed runs use 0.6).
        draw: "longca": as the benchmark's own sampler does: its bins, of which the last has all
            longer documents, and a length uniformly within one. So most tokens are in documents
            that fill the sequence.
    """
    whole_number("num_tokens", num_tokens, most=LIMIT)
    if cap is not None:
        whole_number("cap", cap)
    require_range("mix", mix, 0, 1)
    rng = np.random.default_rng(whole_number("seed", seed, 0))
    is_uniform = draw == "longca"
    bins = np.array(_bins_of_longca(corpus) if is_uniform else histogram(corpus), np.int64)
    num_long = round(mix * num_tokens)
    limit = num_tokens if cap is None else min(cap, num_tokens)
    _check_affordable(bins, num_tokens, limit)
    lengths = np.concatenate(
        [
            _fill(num_tokens - num_long, lambda count: _draw(bins, count, rng, is_uniform), limit),
            _fill(num_long, lambda count: rng.integers(LONG[0], LONG[1] + 1, count), limit),
        ]
    )
    if num_long:
        rng.shuffle(lengths)
    return (0, *np.cumsum(lengths).tolist())


@checks_arguments
def position_ids(cu_seqlens: Any) -> Array:
    """int64 [num_tokens]: each token's position within its own document."""
    boundaries = np.array(Document(cu_seqlens).cu_seqlens, np.int64)
    starts = np.repeat(boundaries[:-1], np.diff(boundaries))
    return np.arange(int(boundaries[-1])) - starts


@checks_arguments
def shift_labels(tokens: Any, cu_seqlens: Any, ignore_index: int = -100) -> Any:
    """Labels for next-token prediction: at each token the one after it in its own document.

    Shift before sharding: a rank's last token needs the first one of another rank.

    Args:
        tokens: [..., num_tokens], a tensor or an array; it is not changed.
        cu_seqlens: document boundaries, ending at num_tokens.
        ignore_index: the label of each document's last token, which predicts nothing.
    """
    boundaries = Document(cu_seqlens).cu_seqlens
    if hasattr(tokens, "is_nested"):
        require_dense("tokens", tokens)
    if not getattr(tokens, "shape", ()):
        raise ValueError(f"tokens ({shown(tokens)}) must be a tensor or an array of tokens")
    if tokens.shape[-1] != boundaries[-1]:
        raise ValueError(
            f"tokens has {tokens.shape[-1]} tokens, but cu_seqlens ends at {boundaries[-1]}; "
            "shift the whole sequence, before it is sharded"
        )
    labels = tokens.clone() if hasattr(tokens, "clone") else tokens.copy()
    labels[..., :-1] = tokens[..., 1:]
    last_tokens = sorted({stop - 1 for stop in boundaries if stop > 0})
    labels[..., last_tokens] = ignore_index
    return labels


def _check_affordable(bins: Array, num_tokens: int, longest: int) -> None:
    """Raise ValueError if num_tokens tokens would be more than MOST_DOCUMENTS documents."""
    counts, first, last = bins[:, 2], bins[:, 0], bins[:, 1]
    mean = float((counts * np.minimum((first + last) / 2, longest)).sum() / counts.sum())
    if num_tokens / mean > MOST_DOCUMENTS:
        raise ValueError(
            f"num_tokens ({num_tokens}) are about {num_tokens / mean:.2g} documents, more than "
            f"{MOST_DOCUMENTS}; draw fewer tokens"
        )


def _read_csv(path: Path) -> tuple[Bin, ...]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no UTF-8, {error.reason}"
        raise ValueError(f"corpus {path} cannot be read: {reason}") from None
    reader = csv.DictReader(lines)
    column_names = tuple(reader.fieldnames or ())
    names = next((x for x in (("length",), Bin._fields) if set(x) <= set(column_names)), None)
    if names is None:
        raise ValueError(
            f"corpus {path}, line 1: columns are {', '.join(column_names) or 'none'}; there must "
            f"be a column length, the tokens of a document a line, or {', '.join(Bin._fields)}"
        )
    bins: list[Bin] = []
    for row in reader:
        texts = [(row[name] or "").strip() for name in names]
        values = [int(text) if text.isdecimal() else 0 for text in texts]
        wrong_values = [
            f"{n} ({t!r})" for n, t, v in zip(names, texts, values, strict=True) if v < 1
        ]
        if wrong_values:
            raise ValueError(
                f"corpus {path}, line {reader.line_num}: {', '.join(wrong_values)} must be a whole "
                "number, at least 1"
            )
        if len(values) == 3 and values[0] > values[1]:
            raise ValueError(
                f"corpus {path}, line {reader.line_num}: first_length ({values[0]}) is above "
                f"last_length ({values[1]})"
            )
        bins.append(Bin(*values) if len(values) == 3 else Bin(values[0], values[0], 1))
    if not bins:
        raise ValueError(f"corpus {path}, line 2: there is no length; give one a line")
    return tuple(sorted(bins))


def _tables(kind: str = "corpora") -> dict[str, list[list[int]]]:
    path = resources.files("tilewise.masks") / "lengths.toml"
    return tomllib.loads(path.read_text())[kind]


def corpus_for(num_tokens: int) -> str:
    """The corpus from which LongCA-bench draws a sequence of this length."""
    if num_tokens <= PILE_TOKENS:
        return "pile"
    return "prolong64k" if num_tokens <= PROLONG64K_TOKENS else "prolong512k"


def _bins_of_longca(corpus: str) -> list[list[int]]:
    tables = _tables("longca")
    if corpus not in tables:
        raise ValueError(
            f"corpus ({brief(corpus)}) has no bins of draw 'longca'; take one of "
            f"{', '.join(tables)}"
        )
    return tables[corpus]


def _draw(bins: Array, count: int, rng: np.random.Generator, is_uniform: bool) -> Array:
    """Lengths of this many documents. With u uniform in [0, 1), first ((last + 1) / first)^u cut to
    a whole number is log-uniform over first..last, both included.

    Args:
        is_uniform: uniform instead.
    """
    first, last, documents = bins.T
    index = rng.choice(len(bins), count, p=documents / documents.sum())
    first, last = np.maximum(first, 1)[index], last[index]
    if is_uniform:
        return np.floor(first + (last + 1 - first) * rng.random(count)).astype(np.int64)
    lengths = np.floor(first * ((last + 1) / first) ** rng.random(count)).astype(np.int64)
    return np.clip(lengths, first, last)


def _fill(num_tokens: int, draw: Callable[[int], Array], limit: int) -> Array:
    """Lengths that add up to num_tokens, the last one cut."""
    parts: list[Array] = []
    total = 0
    while total < num_tokens:
        parts.append(np.minimum(draw(1024), limit))
        total += int(parts[-1].sum())
    ends = np.cumsum(np.concatenate([*parts, np.zeros(0, np.int64)]))
    ends = np.append(ends[ends < num_tokens], num_tokens) if num_tokens else ends
    return np.diff(ends, prepend=0)
