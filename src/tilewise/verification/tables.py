"""In which facts two tables differ: who may attend to whom, and with what weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray
LEAST_KEYS = 4  # of a query, to tell one curve from another
LEAST_DROPPED = 1.02  # times: weights beside those that dropout leaves out
NEAR_DROPPED = 0.1  # between the share that is left out and what the others say of it
MOSTLY = 0.1  # of a change that is left unexplained, where rounding is coarse
MOST_TIMES = 64  # that a key is counted
MOST_ROWS = 256  # that a curve is fitted to
SAME = 1e-4  # of the largest weight: no score changes it


class Band(NamedTuple):
    """A mask: left <= key - query <= right within documents.

    Attributes:
        left, right: minus and plus the number of tokens where nothing ends the band. right is 0 for
            a causal mask, -1 if a query does not see its own key.
        edges: of the documents, 0 and num_tokens included.
    """

    left: int
    right: int
    edges: tuple[int, ...]

    @classmethod
    def of(cls, allowed: Array) -> Band:
        """The band that a table of allowed pairs is, if it is one."""
        n = len(allowed)
        rows, columns = np.nonzero(allowed)
        # An edge stands where no pair reaches over it.
        over = np.zeros(n + 1, np.int64)
        np.add.at(over, np.minimum(rows, columns) + 1, 1)
        np.add.at(over, np.maximum(rows, columns) + 1, -1)
        edges = (*np.flatnonzero(np.cumsum(over)[:n] == 0).tolist(), n)
        longest, offset = int(np.diff(edges).max()) - 1, columns - rows
        left, right = int(offset.min(initial=n)), int(offset.max(initial=-n))
        return cls(-n if left <= -longest else left, n if right >= longest else right, edges)

    def dense(self) -> Array:
        at = np.arange(self.edges[-1])
        offset, which = at[None] - at[:, None], np.searchsorted(self.edges, at, "right")
        in_band = (offset >= self.left) & (offset <= self.right)
        return in_band & (which[:, None] == which[None])

    @property
    def window(self) -> str:
        """The window as tw.Window's arguments; empty without one."""
        n = self.edges[-1]
        if self.left == -n and (self.right <= 0 or self.right == n):
            return ""
        left, right = ("any" if abs(x) == n else x for x in (-self.left, self.right))
        return f"({left}, {right})"


def facts_of_attention(
    want: Array, got: Array, tolerance: float, asked: str, blocks: Array | None = None
) -> dict[str, Any]:
    """Return in what two tables of weights [num_heads, n, n] differ; they are 0 where nobody
    attends.

    Args:
        want: the weights that are right.
        tolerance: of the logarithm of a weight.
        asked: what they are called in evidence.
        blocks: per token the run of tokens that a rank has, if known.
    """
    keyed = [of_seen_keys(table) for table in (want, got)]
    hidden = [(x != table).any(-1) for x, table in zip(keyed, (want, got), strict=True)]
    want, got = keyed
    facts = {"asked": asked, "keyless": int((hidden[0] != hidden[1]).any(0).sum())}
    both = (want > 0) & (got > 0)
    facts |= _masks(want > 0, got > 0, blocks) | _sums(want, got, both, tolerance)
    facts |= _dropped(want, got, both, tolerance)
    rows = both.sum(-1) > 1
    if rows.any():
        right, found = (
            np.log(x, out=np.full(x.shape, np.nan), where=both)[rows] for x in (want, got)
        )
        facts |= _values(right, found, tolerance, blocks)
    return facts


def _dropped(want: Array, got: Array, both: Array, tolerance: float) -> dict[str, Any]:
    """Return whether pairs are missed as dropout leaves them out: at random, the others larger by
    1 / (1 - share of those that are missed).
    """
    missed = int(((want > 0) & (got == 0)).sum())
    if not missed or ((got > 0) & (want == 0)).any() or not both.any():
        return {}
    times = got[both] / want[both]
    factor, share = float(np.median(times)), missed / (missed + int(both.sum()))
    alike = float(np.abs(times / factor - 1).max()) <= 2 * tolerance
    if not alike or factor < LEAST_DROPPED or abs((1 - 1 / factor) - share) > NEAR_DROPPED:
        return {}
    return {
        "dropped": f"{share:.1%} of weights are left out, and the others are {factor:.4g} times "
        "what is right, as dropout with other random numbers makes them; compare with dropout off"
    }


def of_seen_keys(weights: Array) -> Array:
    """Weights, 0 in rows that are all alike: softmax over nothing but the least number, of a query
    that may see no key."""
    alike = weights.min(-1) > (1 - SAME) * weights.max(-1)
    alike &= 2 * alike.sum(-1, keepdims=True) < weights.shape[-1]
    return np.where(alike[..., None], 0.0, weights)


def _masks(want: Array, got: Array, blocks: Array | None) -> dict[str, Any]:
    """Return in what two tables of allowed pairs [num_heads, n, n] differ."""
    empty = want.any((1, 2)) & ~got.any((1, 2))
    facts: dict[str, Any] = {"num_heads": len(want)}
    facts |= {"empty_heads": int(empty.sum()), "which": some(np.flatnonzero(empty))}
    want, got = want[~empty], got[~empty]
    for name, table in (("extra", got & ~want), ("missed", want & ~got)):
        facts[name] = int(table.sum())
        if facts[name]:
            head, query, key = np.argwhere(table)[0].tolist()
            facts[f"{name}_first"] = f"head {head}, query {query}, key {key}"
    facts["differing"] = facts["extra"] + facts["missed"]
    if facts["differing"]:
        head = int((want != got).sum((1, 2)).argmax())
        facts |= _shape(want[head], got[head], blocks)
    return facts


def _shape(want: Array, got: Array, blocks: Array | None) -> dict[str, Any]:
    """Return what shape of mask the tables of one head have."""
    rows, columns = want.any(1), want.any(0)
    extra, missed = got & ~want, want & ~got
    seen = np.logical_and.outer(rows, columns)
    asked, other = Band.of(want & seen), Band.of(got & seen)

    def is_band(band: Band, table: Array) -> bool:
        return bool((band.dense() == table)[seen].all())

    known, fewer = is_band(asked, want), {*other.edges} < {*asked.edges}
    window = asked.window if known else ""
    found: dict[str, Any] = {}
    if extra.any() and not (extra & seen)[rows].any():
        found["padding_keys"] = int(extra[:, ~columns].any(0).sum())
    elif not extra.any():
        found |= _cut(want, got, blocks)
    if known and fewer and is_band(asked._replace(edges=other.edges), got):
        gone = some(sorted({*asked.edges} - {*other.edges}))
        found["other_documents"] = f"borders of documents are ignored, at {gone}"
    elif known and asked[:2] != other[:2] and is_band(other._replace(edges=asked.edges), got):
        if asked.right != other.right and min(asked.right, other.right) <= 0:
            last = {0: "their own", -1: "the one before their own"}
            ends = [last.get(x.right, "later ones") for x in (other, asked)]
            found["other_mask"] = f"queries see keys up to {ends[0]}, not up to {ends[1]}"
        elif other.window:
            found["other_window"] = f"the window is {other.window}, not {window or 'unlimited'}"
        else:
            found["other_window"] = f"the window {window} is ignored"
    sums = [(np.sort(want.sum(i)), np.sort(got.sum(i))) for i in (0, 1)]
    if not found and extra.any() and all(np.array_equal(a, b) for a, b in sums):
        found["reordered"] = "every query has as many keys as the mask gives another one"
    if not found and (got == np.tri(len(got), dtype=bool)).all():
        found["other_mask"] = "the mask is that of Causal()"
    found |= {"window": window, "as_a_whole": not found}
    silent = rows & ~got.any(1)
    if missed[silent].any() and not extra.any() and not missed[~silent].any():
        found["silent_rows"] = int(silent.sum())
    return found


def _cut(want: Array, got: Array, blocks: Array | None) -> dict[str, Any]:
    """Return whether what is missed is all between shards; pairs are missed, and none is attended
    more: "cut" if shards see themselves alone, "skipped" if some pairs of shards do not meet.
    """
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
            return {"skipped": f"all that {len(lost)} pairs of shards have"}
    return {}


def _sums(want: Array, got: Array, both: Array, tolerance: float) -> dict[str, Any]:
    """Return whether weights of a query add up to too much or too little."""
    sums, right = (x.sum(-1)[both.any(-1)] for x in (got, want))
    more = sums - right
    if ((sums > 1 + tolerance) & (more > tolerance)).any():
        return {"row_sum": float(sums[more.argmax()])}
    if not len(more) or abs(more.mean()) <= tolerance / 8:
        return {}
    if len(more) > 1 and np.ptp(sums / right) <= tolerance:
        return {"shrunk": float(-more.mean())}
    if right.min() < 1 - tolerance:
        return {"other_sink": f"{1 - sums.mean():.2%} of weight, not {1 - right.mean():.2%}"}
    return {"lost": float(-more.mean())}


def _values(want: Array, got: Array, tolerance: float, blocks: Array | None) -> dict[str, Any]:
    """Return how rows of log weights differ from what is right; nan where nobody attends."""
    ratio = got - want
    if largest(ratio - np.nanmedian(ratio, -1, keepdims=True)) <= tolerance:
        return {}
    slope, left = fitted_slope(want, ratio)
    if largest(left) <= tolerance + abs(slope) * tolerance:
        return {"scale_ratio": 1 + slope}
    times = np.exp(ratio - np.nanmin(ratio, -1, keepdims=True))
    whole = np.round(times)
    most = np.nanmax(whole)
    if 2 <= most <= MOST_TIMES and largest(times - whole) <= 2 * tolerance * most:
        count = int(np.isfinite(whole).sum())
        return {"multiple": int(most), "times": int((whole > 1).sum()), "values": count}
    if blocks is not None:
        parts = [ratio[:, blocks == block] for block in np.unique(blocks)]
        if max(largest(centred(part)) for part in parts) <= tolerance:
            return {"merged": True}
    change, rows = centred(ratio), np.isfinite(got).sum(-1) >= LEAST_KEYS
    total, scaled = np.nansum(change**2), np.nansum(left**2)
    # Scores are log weights but for a number a row, which is tried.
    scores, caps = centred(got)[rows], np.geomspace(0.3, 100, 48)
    cap, capped = fitted_cap(scores, want[rows], caps, np.linspace(-2, 2, 33) * largest(scores))
    if rows.any() and capped < MOSTLY * min(total, 2 * scaled):
        return {"curved": cap}
    if scaled < MOSTLY * total:
        return {"scale_ratio": 1 + slope}
    return {"values_differ": float(np.expm1(largest(change)))}


def fitted_slope(x: Array, y: Array) -> tuple[float, Array]:
    """The number that rows y are x times, but for a number a row, and what is left; skips nan."""
    x, y = centred(x), centred(y)
    slope = float(np.nansum(x * y) / max(np.nansum(x * x), 1e-300))
    return slope, y - slope * x


def fitted_cap(
    scores: Array, logs: Array, caps: Array, offsets: Array | Sequence[float] = (0.0,)
) -> tuple[float, float]:
    """The cap of log weights, logs = cap tanh((score + offset) / cap) + one number a row.

    Args:
        scores, logs: [rows, keys], nan where nobody attends.
        offsets: of which each row takes the best.
    Returns:
        cap and the sum of squares that it leaves.
    """
    step, left = max(1, len(scores) // MOST_ROWS), {}
    logs, moved = logs[::step], scores[::step] + np.asarray(offsets)[:, None, None]
    for cap in caps.tolist():
        off = centred(logs - cap * np.tanh(moved / cap))
        left[cap] = float(np.nansum(off**2, -1).min(0).sum())
    best = min(left, key=lambda cap: left[cap])
    return best, left[best] * step


def centred(x: Array) -> Array:
    """Rows less their mean; nan is left out."""
    return x - np.nansum(x, -1, keepdims=True) / np.isfinite(x).sum(-1, keepdims=True).clip(1)


def largest(x: Array) -> float:
    """Return the largest absolute value; 0 if there is none."""
    return float(np.nanmax(np.abs(x), initial=0.0))


def some(values: Any, most: int = 4) -> str:
    """The first of some values, as text."""
    shown = ", ".join(str(x) for x in list(values)[:most])
    return shown + (", ..." if len(values) > most else "")
