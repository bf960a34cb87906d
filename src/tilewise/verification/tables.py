"""In which facts two tables differ: who may attend to whom, and with what weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray
LEAST_KEYS = 4  # of a query, to tell one curve from another
MOSTLY = 0.1  # of a change that is left unexplained, where rounding is coarse
MOST_TIMES = 64  # that a key is counted
MOST_ROWS = 256  # that a curve is fitted to


class Parts(NamedTuple):
    """A mask [num_tokens, num_tokens] as causal & window & documents.

    Attributes:
        reach: of the window: keys to the left and to the right at most, None without one.
        edges: of the documents, 0 and num_tokens included.
    """

    causal: bool
    reach: tuple[int, int] | None
    edges: tuple[int, ...]

    def dense(self, n: int) -> Array:
        at = np.arange(n)
        offset = at[None] - at[:, None]
        allowed = offset <= 0 if self.causal else np.ones((n, n), bool)
        if self.reach:
            allowed = allowed & (offset >= -self.reach[0]) & (offset <= self.reach[1])
        which = np.searchsorted(self.edges, at, "right")
        return allowed & (which[:, None] == which[None])


def parts_of(allowed: Array) -> Parts:
    """The parts that a table of allowed pairs is made of, if it is made of such parts."""
    n = len(allowed)
    rows, columns = np.nonzero(allowed)
    offset = np.append(columns - rows, 0)
    # An edge stands where no pair reaches over it.
    over = np.zeros(n + 1, np.int64)
    np.add.at(over, np.minimum(rows, columns) + 1, 1)
    np.add.at(over, np.maximum(rows, columns) + 1, -1)
    edges = (*np.flatnonzero(np.cumsum(over)[:n] == 0).tolist(), n)
    causal, longest = bool(len(rows)) and int(offset.max()) <= 0, int(np.diff(edges).max()) - 1
    reach = -int(offset.min()), int(offset.max())
    wide = reach[0] >= longest and (causal or reach[1] >= longest)
    return Parts(causal, None if wide else reach, edges)


def facts_of_masks(want: Array, got: Array, asked: str = "the mask") -> dict[str, Any]:
    """What two tables of allowed pairs [num_heads, n, n] (or one for all heads) differ in.

    Args:
        asked: what the first is called in evidence.
    """
    want, got = np.broadcast_arrays(want, got)
    want, got = (x[None] if x.ndim == 2 else x for x in (want, got))
    empty = want.any((1, 2)) & ~got.any((1, 2))
    facts: dict[str, Any] = {"num_heads": len(want), "asked": asked}
    if empty.any():
        facts |= {"empty_heads": int(empty.sum()), "which": _some(np.flatnonzero(empty))}
    want, got = want[~empty], got[~empty]
    extra, missed = got & ~want, want & ~got
    facts |= {"extra": int(extra.sum()), "missed": int(missed.sum())}
    facts["differing"] = facts["extra"] + facts["missed"]
    if not facts["differing"]:
        return facts
    for name, table in (("extra_first", extra), ("missed_first", missed)):
        if table.any():
            head, query, key = np.argwhere(table)[0].tolist()
            facts[name] = f"head {head}, query {query}, key {key}"
    head = int((extra | missed).sum((1, 2)).argmax())
    return facts | _shape(want[head], got[head])


def _shape(want: Array, got: Array) -> dict[str, Any]:
    """What the tables of one head are like."""
    n, rows, columns = len(want), want.any(1), want.any(0)
    seen, parts = np.logical_and.outer(rows, columns), parts_of(want)
    extra, missed = got & ~want, want & ~got
    found: dict[str, Any] = {}
    if extra.any() and not (extra & seen)[rows].any():
        found["padding_keys"] = int(extra[:, ~columns].any(0).sum())
    labels = _components(got)
    if missed.any() and not extra.any() and (want & (labels[:, None] == labels) == got).all():
        found["cut"] = len(np.unique(labels))
    window = f"({parts.reach[0]}, {parts.reach[1]})" if parts.reach else ""
    if (parts.dense(n) & seen == want).all():
        loose = parts._replace(edges=(0, n)), parts._replace(reach=None)
        no_documents, no_window = ((x.dense(n) & seen == got & seen).all() for x in loose)
        documents = len(np.unique(np.searchsorted(parts.edges, np.flatnonzero(rows), "right")))
        if documents > 1 and no_documents:
            found["without_documents"] = documents
        if window and no_window:
            found["without_window"] = window
    else:
        window = ""
    found["as_a_whole"] = not found
    silent = rows & ~got.any(1)
    if missed[silent].any() and not extra.any() and not missed[~silent].any():
        found["silent_rows"] = int(silent.sum())
    plain = {"Causal()": np.tri(n, dtype=bool), "Full()": np.ones((n, n), bool)}
    names = [name for name, table in plain.items() if (got == table).all()]
    return found | {"window": window, "is_plain": names[0] if names else ""}


def _components(allowed: Array) -> Array:
    """Per token the smallest one it is connected with by pairs, in either direction."""
    linked = allowed | allowed.T | np.eye(len(allowed), dtype=bool)
    labels = np.arange(len(allowed))
    while True:
        smallest = np.where(linked, labels[None], len(labels)).min(1)
        smallest = smallest[smallest]
        if (smallest == labels).all():
            return labels
        labels = smallest


def facts_of_weights(
    want: Array, got: Array, tolerance: float, blocks: Array | None = None
) -> dict[str, Any]:
    """What two tables of weights [num_heads, n, n] differ in, where both attend.

    Args:
        want: the weights that are right.
        tolerance: of the logarithm of a weight.
        blocks: per token the shard that has it, if known.
    """
    both = (want > 0) & (got > 0)
    facts: dict[str, Any] = {}
    sums, right = (x.sum(-1)[both.any(-1)] for x in (got, want))
    more = sums - right
    if ((sums > 1 + tolerance) & (more > tolerance)).any():
        facts["row_sum"] = float(sums[more.argmax()])
    elif len(more) and abs(more.mean()) > tolerance / 8:
        facts["sink_gone" if more.mean() > 0 else "lost"] = float(abs(more.mean()))
    rows = both.sum(-1) > 1
    if not rows.any():
        return facts
    right, found = (np.log(x, out=np.full(x.shape, np.nan), where=both)[rows] for x in (want, got))
    crossing = None
    if blocks is not None:
        crossing = blocks[np.nonzero(rows)[1]][:, None] != blocks[None]
    return facts | _values(right, found, tolerance, crossing)


def _values(want: Array, got: Array, tolerance: float, crossing: Array | None) -> dict[str, Any]:
    """How rows of log weights differ from what is right; nan where nobody attends."""
    ratio = got - want
    if _largest(ratio - np.nanmedian(ratio, -1, keepdims=True)) <= tolerance:
        return {}
    right, change = (x - np.nanmean(x, -1, keepdims=True) for x in (want, ratio))
    slope = float(np.nansum(right * change) / max(np.nansum(right**2), 1e-300))
    if _largest(change - slope * right) <= tolerance + abs(slope) * tolerance:
        return {"scale_ratio": 1 + slope}
    times = np.exp(ratio - np.nanmin(ratio, -1, keepdims=True))
    whole = np.round(times)
    most = np.nanmax(whole)
    if 2 <= most <= MOST_TIMES and _largest(times - whole) <= 2 * tolerance * most:
        count = int(np.isfinite(whole).sum())
        return {"multiple": int(most), "times": int((whole > 1).sum()), "values": count}
    if crossing is not None:
        home = np.where(crossing, np.nan, ratio)
        home = home[np.isfinite(home).sum(-1) > 1]
        if len(home) and _largest(home - np.nanmean(home, -1, keepdims=True)) <= tolerance:
            text = "weights between rows of one shard are right, those between shards are not"
            return {"moved_blocks": text}
    total, scaled = np.nansum(change**2), np.nansum((change - slope * right) ** 2)
    cap, capped = _dropped_cap(want, got)
    if capped < MOSTLY * min(total, 2 * scaled):
        return {"curved": f"they are right if scores are capped with about {cap:.3g}"}
    if scaled < MOSTLY * total:
        return {"scale_ratio": 1 + slope}
    return {"values_differ": float(np.expm1(_largest(change)))}


def _dropped_cap(want: Array, got: Array) -> tuple[float, float]:
    """The cap that best makes the right scores of those that were found, and what it leaves.

    Scores are log weights but for a number a row, which is tried.
    """
    rows = np.flatnonzero(np.isfinite(got).sum(-1) >= LEAST_KEYS)
    rows = rows[:: max(1, len(rows) // MOST_ROWS)]
    if not len(rows):
        return 0.0, np.inf
    want, got = want[rows], got[rows] - np.nanmean(got[rows], -1, keepdims=True)
    offsets = np.linspace(-2, 2, 33) * np.nanmax(np.abs(got))
    share = np.isfinite(got).sum() / np.isfinite(got).any(-1).sum()
    return (
        fitted_cap(got, want, offsets, np.geomspace(0.3, 100, 48)) if share > 2 else (0.0, np.inf)
    )


def fitted_cap(scores: Array, logs: Array, offsets: Array, caps: Array) -> tuple[float, float]:
    """The cap of log weights, logs = cap tanh((score + offset) / cap) + one number a row.

    Args:
        scores, logs: [rows, keys], nan where nobody attends.
        offsets: of which each row takes the best.
    Returns:
        cap and the sum of squares that it leaves.
    """
    left = {}
    moved = scores + offsets[:, None, None]
    for cap in caps.tolist():
        off = logs - cap * np.tanh(moved / cap)
        off -= np.nanmean(off, -1, keepdims=True)
        left[cap] = float(np.nansum(off**2, -1).min(0).sum())
    best = min(left, key=lambda cap: left[cap])
    return best, left[best]


def _largest(x: Array) -> float:
    return float(np.nanmax(np.abs(x)))


def _some(values: Array, most: int = 4) -> str:
    shown = ", ".join(str(x) for x in values[:most].tolist())
    return shown + (", ..." if len(values) > most else "")
