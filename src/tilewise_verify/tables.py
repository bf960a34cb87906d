"""Facts about two tables that differ: the allowed pairs, and the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray
LEAST_KEYS = 4  # of a query, to tell one curve from another
LEAST_DROPPED = 1.02  # times: weights beside those that dropout leaves out
NEAR_DROPPED = 0.1  # between the share that is left out and what the others say of it
LEAST_EXCESS = 0.02  # of a sum of weights, which another dtype alone does not make
LEAST_MOVE = 0.1  # of a weight that another position gives; another dtype changes less
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
        """Return the narrowest band with the edges and offsets of a table of allowed pairs."""
        n = len(allowed)
        rows, columns = np.nonzero(allowed)
        # An edge stands where no pair reaches over it.
        pairs_over_edge = np.zeros(n + 1, np.int64)
        np.add.at(pairs_over_edge, np.minimum(rows, columns) + 1, 1)
        np.add.at(pairs_over_edge, np.maximum(rows, columns) + 1, -1)
        edges = (*np.flatnonzero(np.cumsum(pairs_over_edge)[:n] == 0).tolist(), n)
        longest, offset = int(np.diff(edges).max()) - 1, columns - rows
        left, right = int(offset.min(initial=n)), int(offset.max(initial=-n))
        return cls(-n if left <= -longest else left, n if right >= longest else right, edges)

    def dense(self) -> Array:
        positions = np.arange(self.edges[-1])
        offset = positions[None] - positions[:, None]
        document = np.searchsorted(self.edges, positions, "right")
        in_band = (offset >= self.left) & (offset <= self.right)
        return in_band & (document[:, None] == document[None])

    @property
    def window(self) -> str:
        """The window as tw.Window's arguments; empty without one."""
        n = self.edges[-1]
        if self.left == -n and (self.right <= 0 or self.right == n):
            return ""
        left, right = ("any" if abs(x) == n else x for x in (-self.left, self.right))
        return f"({left}, {right})"


def facts_of_attention(
    want: Array, got: Array, tolerance: float, name: str, blocks: Array | None = None
) -> dict[str, Any]:
    """Return the facts in which two tables of weights [num_heads, n, n] differ; 0: not attended.

    Args:
        want: the weights that are right.
        tolerance: of the logarithm of a weight.
        name: the name of the right weights in the evidence.
        blocks: for each token the number of the run of tokens that lies on one rank, if known.
    """
    tables_of_seen_keys = [of_seen_keys(table) for table in (want, got)]
    has_no_keys = [
        (x != table).any(-1) for x, table in zip(tables_of_seen_keys, (want, got), strict=True)
    ]
    want, got = tables_of_seen_keys
    facts = {"asked": name, "keyless": int((has_no_keys[0] != has_no_keys[1]).any(0).sum())}
    in_both = (want > 0) & (got > 0)
    facts |= _masks(want > 0, got > 0, blocks) | _sums(want, got, in_both, tolerance)
    facts |= _dropped(want, got, in_both, tolerance)
    comparable_rows = in_both.sum(-1) > 1
    if comparable_rows.any():
        right_logs, logs = (
            np.log(x, out=np.full(x.shape, np.nan), where=in_both)[comparable_rows]
            for x in (want, got)
        )
        queries = np.nonzero(comparable_rows)[1]
        facts |= _values(right_logs, logs, tolerance, blocks, queries)
    return facts


def _dropped(want: Array, got: Array, in_both: Array, tolerance: float) -> dict[str, Any]:
    """Return whether pairs are missed as by dropout.

    Dropout leaves out pairs at random, and multiplies the others by 1 / (1 - share left out).
    """
    num_missed = int(((want > 0) & (got == 0)).sum())
    if not num_missed or ((got > 0) & (want == 0)).any() or not in_both.any():
        return {}
    deviates = in_both & (np.abs(got / np.where(in_both, want, 1) - 1) > tolerance)
    in_both = in_both & deviates.any(-1, keepdims=True)  # a rank may draw none
    if not in_both.any():
        return {}
    num_missed = int(((want > 0) & (got == 0) & deviates.any(-1, keepdims=True)).sum())
    ratios = got[in_both] / want[in_both]
    factor, share = float(np.median(ratios)), num_missed / (num_missed + int(in_both.sum()))
    is_uniform = float(np.abs(ratios / factor - 1).max()) <= 2 * tolerance
    if not is_uniform or factor < LEAST_DROPPED or abs((1 - 1 / factor) - share) > NEAR_DROPPED:
        return {}
    return {
        "dropped": f"{100 * share:.1f} % of weights are left out, and the others are {factor:.4g} "
        "times what is right, as dropout with other random numbers makes them; compare with "
        "dropout off"
    }


def of_seen_keys(weights: Array) -> Array:
    """The weights, with 0 in rows whose weights are all equal.

    Such a row belongs to a query that may see no key: its softmax is over equal, very low scores.
    """
    is_uniform = weights.min(-1) > (1 - SAME) * weights.max(-1)
    is_uniform &= 2 * is_uniform.sum(-1, keepdims=True) < weights.shape[-1]
    return np.where(is_uniform[..., None], 0.0, weights)


def _masks(want: Array, got: Array, blocks: Array | None) -> dict[str, Any]:
    """Return the facts in which two tables of allowed pairs [num_heads, n, n] differ."""
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
        sees_nothing = want.any(2) & ~got.any(2)
        facts["some_heads"] = bool((sees_nothing.any(0) & ~sees_nothing.all(0)).any())
    return facts


def _shape(want: Array, got: Array, blocks: Array | None) -> dict[str, Any]:
    """Return facts about the shape of the masks: bands, documents, windows, missing shards."""
    rows, columns = want.any(1), want.any(0)
    extra, missed = got & ~want, want & ~got
    rows_and_columns = np.logical_and.outer(rows, columns)
    right_band, other = Band.of(want & rows_and_columns), Band.of(got & rows_and_columns)

    def is_band(band: Band, table: Array) -> bool:
        return bool((band.dense() == table)[rows_and_columns].all())

    unbroken = right_band._replace(edges=(0, len(got))).dense()
    right_is_band, has_fewer_edges = is_band(right_band, want), {*other.edges} < {*right_band.edges}
    window = right_band.window if right_is_band else ""
    facts: dict[str, Any] = {}
    if extra.any() and not (extra & rows_and_columns)[rows].any():
        facts["padding_keys"] = int(extra[:, ~columns].any(0).sum())
    elif not extra.any():
        facts |= _cut(want, got, blocks)
    if right_is_band and has_fewer_edges and is_band(right_band._replace(edges=other.edges), got):
        missing_edges = some(sorted({*right_band.edges} - {*other.edges}))
        facts["other_documents"] = f"borders of documents are ignored, at {missing_edges}"
    elif right_is_band and not facts and extra.any() and not (missed | got & ~unbroken).any():
        facts["other_documents"] = "all of them reach over borders of documents"
    elif (
        right_is_band
        and right_band[:2] != other[:2]
        and is_band(other._replace(edges=right_band.edges), got)
    ):
        if right_band.right != other.right and min(right_band.right, other.right) <= 0:
            last_key_words = {0: "their own", -1: "the one before their own"}
            last_keys = [last_key_words.get(x.right, "later ones") for x in (other, right_band)]
            facts["other_mask"] = f"queries see keys up to {last_keys[0]}, not up to {last_keys[1]}"
        elif other.window:
            facts["other_window"] = f"the window is {other.window}, not {window or 'unlimited'}"
        else:
            facts["other_window"] = f"the window {window} is ignored"
    sums = [(np.sort(want.sum(i)), np.sort(got.sum(i))) for i in (0, 1)]
    if not facts and extra.any() and all(np.array_equal(a, b) for a, b in sums):
        facts["reordered"] = "every query has as many keys as the mask gives another one"
    if not facts and (got == np.tri(len(got), dtype=bool)).all():
        facts["other_mask"] = "the mask is that of Causal()"
    facts |= {"window": window, "as_a_whole": not facts}
    rows_without_keys = rows & ~got.any(1)
    if missed[rows_without_keys].any() and not extra.any() and not missed[~rows_without_keys].any():
        facts["silent_rows"] = int(rows_without_keys.sum())
    return facts


def _cut(want: Array, got: Array, blocks: Array | None) -> dict[str, Any]:
    """Return whether all missed pairs lie between shards. No pair is attended that should not be.

    "cut": shards see only themselves. "skipped": some pairs of shards do not meet.
    """
    linked = got | got.T | np.eye(len(got), dtype=bool)
    labels, old_labels = np.arange(len(got)), np.full(len(got), -1)
    while not np.array_equal(labels, old_labels):  # per token the smallest that is linked with it
        old_labels = labels
        labels = np.where(linked, labels[None], len(labels)).min(1)
    lost, is_alone = want & ~got, np.bincount(labels)[labels] == 1
    # Parts are of whole shards. A token by itself is none, where shards are not known.
    splits_shards = (
        (lost & is_alone).any() if blocks is None else (lost & (blocks[:, None] == blocks)).any()
    )
    if (want & (labels[:, None] == labels) == got).all() and not splits_shards:
        num_parts = len(np.unique(labels))
        return {"cut": f"all between {num_parts} parts of the sequence that do not see each other"}
    if blocks is not None and (got.any(1) | ~want.any(1)).all():
        tiles = [np.ix_(blocks == a, blocks == b) for a in set(blocks) for b in set(blocks)]
        lost_tiles = [tile for tile in tiles if want[tile].any() and not got[tile].any()]
        if lost_tiles and all((got[t] == want[t]).all() or not got[t].any() for t in tiles):
            return {"skipped": f"all that {len(lost_tiles)} pairs of shards have"}
    return {}


def _sums(want: Array, got: Array, in_both: Array, tolerance: float) -> dict[str, Any]:
    """Return whether weights of a query add up to too much or too little."""
    sums, right_sums = (x.sum(-1)[in_both.any(-1)] for x in (got, want))
    excess = sums - right_sums
    if ((sums > 1 + tolerance) & (excess > max(tolerance, LEAST_EXCESS))).any():
        return {"row_sum": float(sums[excess.argmax()])}
    if not len(excess) or abs(excess.mean()) <= tolerance / 8:
        return {}
    if len(excess) > 1 and np.ptp(sums / right_sums) <= tolerance:
        return {"shrunk": float(-100 * excess.mean())}
    if right_sums.min() < 1 - tolerance:
        lost, right_lost = (100 * (1 - x.mean()) for x in (sums, right_sums))
        return {"other_sink": f"{lost:.2f} % of weight, not {right_lost:.2f} %"}
    return {"lost": float(-100 * excess.mean())}


def _values(
    want: Array, got: Array, tolerance: float, blocks: Array | None, queries: Array
) -> dict[str, Any]:
    """Return how rows of log weights differ from what is right; nan where nobody attends.

    Args:
        queries: the query of each row.
    """
    deviations = np.abs(got - want - np.nanmedian(got - want, -1, keepdims=True))
    is_wrong = np.nanmax(deviations, -1) > tolerance  # rows: a fault may be of one rank alone
    if not is_wrong.any():
        return {}
    want, got, queries = want[is_wrong], got[is_wrong], queries[is_wrong]
    ratio = got - want
    slope, residual = fitted_slope(want, ratio)
    if largest(residual) <= tolerance + abs(slope) * tolerance:
        return {"scale_ratio": 1 + slope}
    multiples = np.exp(ratio - np.nanmin(ratio, -1, keepdims=True))
    rounded_times = np.round(multiples)
    largest_multiple = np.nanmax(rounded_times)
    if (
        2 <= largest_multiple <= MOST_TIMES
        and largest(multiples - rounded_times) <= 2 * tolerance * largest_multiple
    ):
        count = int(np.isfinite(rounded_times).sum())
        return {
            "multiple": int(largest_multiple),
            "times": int((rounded_times > 1).sum()),
            "values": count,
        }
    if blocks is not None:
        parts = [ratio[:, blocks == block] for block in np.unique(blocks)]
        if max(largest(centred(part)) for part in parts) <= tolerance:
            return {"merged": True}
        of_others = np.where(blocks[queries][:, None] == blocks, np.nan, ratio)
        if np.isfinite(of_others).any() and largest(centred(of_others)) <= tolerance:
            return {"own_shard": True}
    change, rows = centred(ratio), np.isfinite(got).sum(-1) >= LEAST_KEYS
    total_change, change_after_scaling = np.nansum(change**2), np.nansum(residual**2)
    # Scores are log weights but for a number a row, which is tried.
    scores, caps = centred(got)[rows], np.geomspace(0.3, 100, 48)
    cap, capped = fitted_cap(scores, want[rows], caps, np.linspace(-2, 2, 33) * largest(scores))
    if rows.any() and capped < MOSTLY * min(total_change, 2 * change_after_scaling):
        return {"curved": cap}
    if change_after_scaling < MOSTLY * total_change:
        return {"scale_ratio": 1 + slope}
    times = float(np.expm1(largest(change)))
    return {"values_differ": times, "values_move": times > LEAST_MOVE}


def fitted_slope(x: Array, y: Array) -> tuple[float, Array]:
    """Fit y = slope x + one number a row; return the slope and the residual. nan is left out."""
    x, y = centred(x), centred(y)
    slope = float(np.nansum(x * y) / max(np.nansum(x * x), 1e-300))
    return slope, y - slope * x


def fitted_cap(
    scores: Array, logs: Array, caps: Array, offsets: Array | Sequence[float] = (0.0,)
) -> tuple[float, float]:
    """The cap of log weights, logs = cap tanh((score + offset) / cap) + one number a row.

    Args:
        scores, logs: [rows, keys], nan where nobody attends.
        offsets: tried for each row, which takes the best one.
    Returns:
        cap and the sum of squares that it leaves.
    """
    step, residuals = max(1, len(scores) // MOST_ROWS), {}
    logs, shifted_scores = logs[::step], scores[::step] + np.asarray(offsets)[:, None, None]
    for cap in caps.tolist():
        difference = centred(logs - cap * np.tanh(shifted_scores / cap))
        residuals[cap] = float(np.nansum(difference**2, -1).min(0).sum())
    best = min(residuals, key=lambda cap: residuals[cap])
    return best, residuals[best] * step


def centred(x: Array) -> Array:
    """Rows less their mean; nan is left out."""
    return x - np.nansum(x, -1, keepdims=True) / np.isfinite(x).sum(-1, keepdims=True).clip(1)


def largest(x: Array) -> float:
    """Return the largest absolute value; 0 if there is none."""
    return float(np.nanmax(np.abs(x), initial=0.0))


def some(values: Any, num_shown: int = 4) -> str:
    """The first of some values, as text."""
    text = ", ".join(str(x) for x in list(values)[:num_shown])
    return text + (", ..." if len(values) > num_shown else "")
