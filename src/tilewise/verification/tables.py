"""In which facts two tables differ: who may attend to whom, and with what weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray
LEAST_KEYS = 4  # of a query, to tell one curve from another
MOSTLY = 0.1  # of a change that is left unexplained, where rounding is coarse
MOST_TIMES = 64  # that a key is counted
MOST_ROWS = 256  # that a curve is fitted to
TINY = 1e-300


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


def facts_of_masks(
    want: Array, got: Array, asked: str = "the mask", blocks: Array | None = None
) -> dict[str, Any]:
    """What two tables of allowed pairs [num_heads, n, n] (or one for all heads) differ in.

    Args:
        asked: what the first is called in evidence.
        blocks: per token the run of tokens that a rank has, if known.
    """
    want, got = np.broadcast_arrays(want, got)
    want, got = (x[None] if x.ndim == 2 else x for x in (want, got))
    empty = want.any((1, 2)) & ~got.any((1, 2))
    facts: dict[str, Any] = {"num_heads": len(want), "asked": asked}
    if empty.any():
        facts |= {"empty_heads": int(empty.sum()), "which": _some(np.flatnonzero(empty))}
    want, got = want[~empty], got[~empty]
    for name, table in (("extra", got & ~want), ("missed", want & ~got)):
        facts[name] = int(table.sum())
        if facts[name]:
            head, query, key = np.argwhere(table)[0].tolist()
            facts[f"{name}_first"] = f"head {head}, query {query}, key {key}"
    facts["differing"] = facts["extra"] + facts["missed"]
    if not facts["differing"]:
        return facts
    head = int((want != got).sum((1, 2)).argmax())
    return facts | _shape(want[head], got[head], blocks)


def _shape(want: Array, got: Array, blocks: Array | None) -> dict[str, Any]:
    """What the tables of one head are like."""
    n, rows, columns = len(want), want.any(1), want.any(0)
    seen, extra, missed = np.logical_and.outer(rows, columns), got & ~want, want & ~got
    found: dict[str, Any] = {}
    if extra.any() and not (extra & seen)[rows].any():
        found["padding_keys"] = int(extra[:, ~columns].any(0).sum())
    elif not extra.any():
        found |= _cut(want, got, blocks)
    elif all((np.sort(want.sum(i)) == np.sort(got.sum(i))).all() for i in (0, 1)):
        found["reordered"] = "every query has as many keys as the mask gives another one"
    asked, other = parts_of(want), parts_of(got & seen)

    def made_of(parts: Parts, table: Array) -> bool:
        return bool((parts.dense(n) & seen == table & seen).all())

    window = made_of(asked, want) and asked.reach
    if made_of(asked, want):
        gone = sorted({*asked.edges} - {*other.edges})
        if {*other.edges} < {*asked.edges} and made_of(asked._replace(edges=other.edges), got):
            found["other_documents"] = f"borders of documents are ignored, at {_some(gone)}"
        if window and made_of(asked._replace(reach=None), got):
            found["other_window"] = f"the window {window} is ignored"
        elif other.reach and made_of(asked._replace(reach=other.reach), got):
            found["other_window"] = f"the window is {other.reach}, not {window or 'unlimited'}"
    found["as_a_whole"] = not found
    silent = rows & ~got.any(1)
    if missed[silent].any() and not extra.any() and not missed[~silent].any():
        found["silent_rows"] = int(silent.sum())
    plain = {"Causal()": np.tri(n, dtype=bool), "Full()": np.ones((n, n), bool)}
    names = [f"that of {name}" for name, table in plain.items() if (got == table).all()]
    if asked.causal and not other.causal and made_of(other, got):
        names.append("not causal")
    return found | {"window": window, "is_plain": names[0] if names else ""}


def _cut(want: Array, got: Array, blocks: Array | None) -> dict[str, Any]:
    """Whether what is missed is all between shards; pairs are missed, and none is attended more."""
    linked = got | got.T | np.eye(len(got), dtype=bool)
    labels, before = np.arange(len(got)), np.full(len(got), -1)
    while not np.array_equal(labels, before):  # per token the smallest that is linked with it
        before = labels
        labels = np.where(linked, labels[None], len(labels)).min(1)
    if (want & (labels[:, None] == labels) == got).all():
        parts = len(np.unique(labels))
        return {"cut": f"all between {parts} parts of the sequence that do not see each other"}
    if blocks is not None and (got.any(1) | ~want.any(1)).all():
        tiles = [np.ix_(blocks == a, blocks == b) for a in set(blocks) for b in set(blocks)]
        lost = [tile for tile in tiles if want[tile].any() and not got[tile].any()]
        if lost and all((got[t] == want[t]).all() or not got[t].any() for t in tiles):
            return {"cut": f"all that {len(lost)} pairs of shards have"}
    return {}


def facts_of_weights(
    want: Array, got: Array, tolerance: float, blocks: Array | None = None
) -> dict[str, Any]:
    """What two tables of weights [num_heads, n, n] differ in, where both attend.

    Args:
        want: the weights that are right.
        tolerance: of the logarithm of a weight.
        blocks: per token the run of tokens that a rank has, if known.
    """
    both = (want > 0) & (got > 0)
    facts: dict[str, Any] = {}
    sums, right = (x.sum(-1)[both.any(-1)] for x in (got, want))
    more = sums - right
    if ((sums > 1 + tolerance) & (more > tolerance)).any():
        facts["row_sum"] = float(sums[more.argmax()])
    elif len(more) and abs(more.mean()) > tolerance / 8:
        share = sums / right
        same = right.min() > 1 - tolerance and np.ptp(share) <= tolerance
        name = "shrunk" if same and len(share) > 1 else "lost"
        facts["sink_gone" if more.mean() > 0 else name] = float(abs(more.mean()))
    rows = both.sum(-1) > 1
    if not rows.any():
        return facts
    right, found = (np.log(x, out=np.full(x.shape, np.nan), where=both)[rows] for x in (want, got))
    places = None if blocks is None else (blocks[np.nonzero(rows)[1]], blocks)
    return facts | _values(right, found, tolerance, places)


def _values(
    want: Array, got: Array, tolerance: float, blocks: tuple[Array, Array] | None
) -> dict[str, Any]:
    """How rows of log weights differ from what is right; nan where nobody attends."""
    ratio = got - want
    if _largest(ratio - np.nanmedian(ratio, -1, keepdims=True)) <= tolerance:
        return {}
    change = ratio - np.nanmean(ratio, -1, keepdims=True)
    slope, left = fitted_slope(want, ratio)
    if _largest(left) <= tolerance + abs(slope) * tolerance:
        return {"scale_ratio": 1 + slope}
    times = np.exp(ratio - np.nanmin(ratio, -1, keepdims=True))
    whole = np.round(times)
    most = np.nanmax(whole)
    if 2 <= most <= MOST_TIMES and _largest(times - whole) <= 2 * tolerance * most:
        count = int(np.isfinite(whole).sum())
        return {"multiple": int(most), "times": int((whole > 1).sum()), "values": count}
    if blocks is not None and (text := _by_block(ratio, tolerance, *blocks)):
        return text
    total, scaled = np.nansum(change**2), np.nansum(left**2)
    cap, capped = _dropped_cap(want, got)
    if capped < MOSTLY * min(total, 2 * scaled):
        return {"curved": f"they are right if scores are capped with about {cap:.3g}"}
    if scaled < MOSTLY * total:
        return {"scale_ratio": 1 + slope}
    return {"values_differ": float(np.expm1(_largest(change)))}


def _by_block(ratio: Array, tolerance: float, of_rows: Array, of_keys: Array) -> dict[str, str]:
    """Whether weights are right within a row's own block, or within every block of keys."""
    within, own = [], []
    for block in np.unique(of_keys):
        part = ratio[:, of_keys == block]
        several = np.isfinite(part).sum(-1) > 1
        off = part[several] - np.nanmean(part[several], -1, keepdims=True)
        within += [_largest(off)] if several.any() else []
        off = off[of_rows[several] == block]
        own += [_largest(off)] if len(off) else []
    if within and max(within) <= tolerance:
        return {"merged": "weights are right within every shard of keys, but not between shards"}
    if own and max(own) <= tolerance:
        return {"moved_blocks": "weights within a shard are right, those between shards are not"}
    return {}


def fitted_slope(x: Array, y: Array) -> tuple[float, Array]:
    """The number that rows y are x times, but for a number a row, and what is left; skips nan."""
    x, y = (t - np.nanmean(t, -1, keepdims=True) for t in (x, y))
    slope = float(np.nansum(x * y) / max(np.nansum(x * x), TINY))
    return slope, y - slope * x


def _dropped_cap(want: Array, got: Array) -> tuple[float, float]:
    """The cap that best makes the right scores of those that were found, and what it leaves.

    Scores are log weights but for a number a row, which is tried.
    """
    rows = np.flatnonzero(np.isfinite(got).sum(-1) >= LEAST_KEYS)
    rows = rows[:: max(1, len(rows) // MOST_ROWS)]
    if not len(rows):
        return 0.0, np.inf
    want, got = want[rows], got[rows] - np.nanmean(got[rows], -1, keepdims=True)
    return fitted_cap(got, want, np.linspace(-2, 2, 33) * _largest(got), np.geomspace(0.3, 100, 48))


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


def _some(values: Any, most: int = 4) -> str:
    shown = ", ".join(str(x) for x in list(values)[:most])
    return shown + (", ..." if len(values) > most else "")
