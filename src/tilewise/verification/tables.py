"""In which facts two tables differ: who may attend to whom, and with what weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray
LEAST_KEYS = 8  # of a query, to tell one curve from another
MOSTLY = 0.1  # of a change that another scale leaves unexplained, where rounding is coarse
MOST_TIMES = 64  # that a key is counted


class Parts(NamedTuple):
    """A mask [num_tokens, num_tokens] as causal & window & documents.

    Attributes:
        reach: of the window: keys to the left and to the right at most, None without one.
        edges: of the documents, 0 and num_tokens included.
        exact: whether these parts are the mask.
    """

    causal: bool
    reach: tuple[int, int] | None
    edges: tuple[int, ...]
    exact: bool

    def dense(self, n: int, *, window: bool = True, documents: bool = True) -> Array:
        """The mask of the parts, without those that are dropped."""
        at = np.arange(n)
        offset = at[None] - at[:, None]
        allowed = offset <= 0 if self.causal else np.ones((n, n), bool)
        if window and self.reach:
            allowed = allowed & (offset >= -self.reach[0]) & (offset <= self.reach[1])
        if documents:
            which = np.searchsorted(self.edges, at, "right")
            allowed = allowed & (which[:, None] == which[None])
        return allowed


def parts_of(allowed: Array) -> Parts:
    """Which parts a table of allowed pairs is made of; rows and columns without any count not."""
    n = len(allowed)
    rows, columns = np.nonzero(allowed)
    offset = columns - rows
    # An edge stands where no pair reaches over it.
    over = np.zeros(n + 1, np.int64)
    np.add.at(over, np.minimum(rows, columns) + 1, 1)
    np.add.at(over, np.maximum(rows, columns) + 1, -1)
    edges = (*np.flatnonzero(np.cumsum(over)[:n] == 0).tolist(), n)
    causal = bool(len(offset)) and int(offset.max()) <= 0
    reach = (-int(offset.min()), int(offset.max())) if len(offset) else (0, 0)
    plain = Parts(causal, None, edges, False)
    lengths = np.diff(edges)
    longest = int(lengths.max()) - 1
    if reach[0] >= longest and (causal or reach[1] >= longest):
        found = plain
    else:
        found = plain._replace(reach=reach)
    seen = np.logical_and.outer(allowed.any(1), allowed.any(0))
    return found._replace(exact=bool((found.dense(n) & seen == allowed).all()))


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
    n = len(want)
    parts = parts_of(want)
    facts: dict[str, Any] = {}
    columns = ~want.any(0)
    extra, missed = got & ~want, want & ~got
    rows = want.any(1)
    if extra.any() and not extra[rows][:, ~columns].any():
        facts["padding_keys"] = int(extra[:, columns].any(0).sum())
    labels = _components(got)
    if missed.any() and not extra.any():
        cut = want & (labels[:, None] == labels[None])
        if (cut == got).all():
            facts["cut"] = len(np.unique(labels))
    seen = np.logical_and.outer(rows, ~columns)
    same = {
        name: bool(((table & seen) == (got & seen)).all())
        for name, table in {
            "documents": parts.dense(n, documents=False),
            "window": parts.dense(n, window=False),
        }.items()
    }
    documents = len(np.unique(np.searchsorted(parts.edges, np.flatnonzero(rows), "right")))
    if parts.exact and documents > 1 and same["documents"]:
        facts["without_documents"] = documents
    if parts.exact and parts.reach:
        facts["window"] = f"({parts.reach[0]}, {parts.reach[1]})"
        if same["window"]:
            facts["without_window"] = facts["window"]
    silent = rows & ~got.any(1)
    if missed[silent].any() and not extra.any() and not missed[~silent].any():
        facts["silent_rows"] = int(silent.sum())
    if facts.keys().isdisjoint(("without_documents", "without_window", "padding_keys", "cut")):
        facts["as_a_whole"] = True
    lower = np.tri(n, dtype=bool)
    for name, table in (("Causal()", lower), ("Full()", np.ones((n, n), bool))):
        if (got == table).all():
            facts["is_plain"] = name
    return facts


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
    elif len(more) and float(more.mean()) > tolerance / 8:
        facts["sink_gone"] = float(more.mean())
    elif len(more) and float(-more.mean()) > tolerance / 8:
        facts["lost"] = float(-more.mean())
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where(both, np.log(np.where(both, want, 1)), np.nan)
        ratio = np.where(both, np.log(np.where(both, got, 1)), np.nan) - logs
    rows = both.sum(-1) > 1
    if not rows.any():
        return facts
    shift = ratio[rows] - np.nanmedian(ratio[rows], -1, keepdims=True)
    if np.nanmax(np.abs(shift)) <= tolerance:
        return facts
    return facts | _values(logs[rows], ratio[rows], tolerance, _crossing(rows, blocks))


def _crossing(rows: Array, blocks: Array | None) -> Array | None:
    """Per chosen row and key: whether they lie in different shards."""
    if blocks is None:
        return None
    _, queries = np.nonzero(rows)
    return blocks[queries][:, None] != blocks[None]


def _values(logs: Array, ratio: Array, tolerance: float, crossing: Array | None) -> dict[str, Any]:
    """How rows of log weights differ from what is right; nan where nobody attends."""
    centred = logs - np.nanmean(logs, -1, keepdims=True)
    change = ratio - np.nanmean(ratio, -1, keepdims=True)
    slope = float(np.nansum(centred * change) / max(np.nansum(centred**2), 1e-300))
    if np.nanmax(np.abs(change - slope * centred)) <= tolerance + abs(slope) * tolerance:
        return {"scale_ratio": 1 + slope}
    lowest = ratio - np.nanmin(ratio, -1, keepdims=True)
    times = np.exp(lowest)
    whole = np.round(times)
    most = np.nanmax(whole)
    if 2 <= most <= MOST_TIMES and np.nanmax(np.abs(times - whole)) <= 2 * tolerance * most:
        values = np.isfinite(whole)
        return {
            "multiple": int(most),
            "times": int((whole[values] > 1).sum()),
            "values": int(values.sum()),
        }
    steepness = _in_order(logs, logs + ratio, tolerance)
    if steepness:
        centre, ends = steepness
        if ends < centre:  # both are capped, after another scale
            return {"scale_ratio": centre}
        return {"curved": f"differences grow {centre:.3g} times amid a row, {ends:.3g} at its ends"}
    if crossing is not None:
        home = np.where(crossing, np.nan, ratio)
        with np.errstate(invalid="ignore"):
            some = np.isfinite(home).sum(-1) > 1
            inside = home[some] - np.nanmean(home[some], -1, keepdims=True)
        if some.any() and np.nanmax(np.abs(inside)) <= tolerance:
            text = "weights between rows of one shard are right, those between shards are not"
            return {"moved_blocks": text}
    if np.nanmean((change - slope * centred) ** 2) < MOSTLY * np.nanmean(change**2):
        return {"scale_ratio": 1 + slope}
    return {"values_differ": float(np.nanmax(np.abs(np.expm1(change))))}


def _in_order(want: Array, got: Array, tolerance: float) -> tuple[float, float] | None:
    """How differences have grown amid a row and at its ends, if all rows order keys alike."""
    middle, ends = [], []
    for a, b in zip(want, got, strict=True):
        kept = np.isfinite(a)
        if kept.sum() < LEAST_KEYS:
            continue
        order = np.argsort(a[kept])
        right, found = a[kept][order], b[kept][order]
        if (np.diff(found) < -tolerance).any():
            return None
        quarter = len(order) // 4
        inner, whole = right[-1 - quarter] - right[quarter], right[-1] - right[0]
        grown, all_grown = found[-1 - quarter] - found[quarter], found[-1] - found[0]
        if inner > 0 and whole > inner:
            middle.append(grown / inner)
            ends.append((all_grown - grown) / (whole - inner))
    return (float(np.median(middle)), float(np.median(ends))) if middle else None


def _some(values: Array, most: int = 4) -> str:
    shown = ", ".join(str(x) for x in values[:most].tolist())
    return shown + (", ..." if len(values) > most else "")
