"""A row: what the ranks found about one contender, as one flat table of names and numbers."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, median, quantiles
from typing import TypeVar

from tilewise.simulation.machine import Machine
from tilewise_tools.bench.case import BenchCase, Timing
from tilewise_tools.bench.contender import Contender, Prediction
from tilewise_tools.bench.inputs import NAMES, TOLERANCES
from tilewise_tools.bench.measure import Figures
from tilewise_tools.bench.results import FORMAT, Row

T = TypeVar("T")
HEADS = ("num_heads", "num_kv_heads", "head_dim")


@dataclass(frozen=True)
class PlannedRow:
    """A row before it is measured: one contender of one case."""

    key: str  # of its row
    case: BenchCase
    timing: Timing
    contender: Contender
    machine: Machine  # what the prediction is for
    prediction: Prediction


def unfinished_row(entry: PlannedRow, outcome: str, message: str, environment: Row) -> Row:
    """A row of a case that gave no figures."""
    return {**_about(entry), "outcome": outcome, "message": message, **environment}


def finished_row(
    entry: PlannedRow, ranks: Sequence[Figures], error_rows: int, environment: Row
) -> Row:
    """A row with everything that was measured.

    Args:
        ranks: what each rank found.
        error_rows: how many queries the errors cover.
    """
    built = ("mask", "prepare_first", "prepare_cached", "first_call")
    by_rank = [median(both for _, _, both in rank.seconds) for rank in ranks]
    return {
        **_about(entry),
        "outcome": "ok",
        "message": "",
        "layout_used": ranks[0].layout,
        **_times(entry.case, ranks, by_rank),
        **_work(entry.case, ranks, by_rank),
        **_bytes(ranks),
        "peak_bytes": max(rank.peak_bytes for rank in ranks),
        **{f"{what}_seconds": max(rank.build_seconds[what] for rank in ranks) for what in built},
        **_errors(entry.case, ranks),
        "error_rows": error_rows,
        **environment,
    }


def _about(entry: PlannedRow) -> Row:
    case, timing, prediction = entry.case, entry.timing, entry.prediction
    network = case.network
    return {
        "format": FORMAT,
        "key": entry.key,
        "kind": case.kind,
        "contender": entry.contender.name,
        "library": entry.contender.library,
        "library_version": entry.contender.version,
        **{name: getattr(case, name) for name in ("mask", "seed", "num_tokens")},
        "tokens_per_rank": case.num_tokens / case.world_size,
        **{name: getattr(case, name) for name in (*HEADS, "dtype")},
        **case.axes._asdict(),
        "pass": case.which,
        **{name: getattr(case, name) for name in ("world_size", "layout", "device")},
        "network": network.name,
        **{name: getattr(network, name) for name in ("hosts", "ranks_per_host", "mbit")},
        "repeats": timing.repeats,
        "warmups": timing.warmups,
        "plan": prediction.plan,
        **{name: getattr(entry.contender, name, None) for name in ("kernel", "wire")},
        "machine": entry.machine.name,
        "predicted_seconds": prediction.seconds,
        "predicted_exposed_seconds": prediction.exposed_seconds,
        "predicted_peak_bytes": prediction.peak_bytes,
        "volume_bytes_max_rank": prediction.volume_bytes,
    }


def _of_all(values: Iterable[T | None]) -> list[T]:
    """Return the values of all ranks; nothing if one rank does not know its own."""
    every = list(values)
    known_values = [value for value in every if value is not None]
    return known_values if len(known_values) == len(every) else []


def _times(case: BenchCase, ranks: Sequence[Figures], by_rank: list[float]) -> Row:
    """Return the fields of a row that are seconds. A run lasts as long as its slowest rank."""
    runs = zip(*(rank.seconds for rank in ranks), strict=True)
    forward, backward, seconds = zip(
        *([max(times) for times in zip(*run, strict=True)] for run in runs), strict=True
    )
    waits = _of_all(rank.waited for rank in ranks)
    has_both_passes = case.which == "both"
    return {
        "seconds": list(seconds),
        "median_seconds": median(seconds),
        "p20_seconds": _quantile(seconds, 20),
        "p80_seconds": _quantile(seconds, 80),
        "slowest_rank_seconds": max(by_rank),
        "mean_rank_seconds": fmean(by_rank),
        "fastest_rank_seconds": min(by_rank),
        "exposed_seconds": median(map(max, zip(*waits, strict=True))) if waits else None,
        "forward_median_seconds": median(forward) if has_both_passes else None,
        "backward_median_seconds": median(backward) if has_both_passes else None,
    }


def _quantile(values: Sequence[float], percent: int) -> float:
    if len(values) == 1:
        return values[0]
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def _work(case: BenchCase, ranks: Sequence[Figures], by_rank: list[float]) -> Row:
    """Work by rank where the contender knows it; else all pairs, shared evenly."""
    n, slowest = len(ranks), max(by_rank)
    tokens = [rank.num_tokens for rank in ranks]
    pairs = _of_all(rank.facts.pairs for rank in ranks)
    computed = _of_all(rank.facts.computed for rank in ranks)
    allowed = sum(pairs) if pairs else _allowed(case)
    share = pairs[by_rank.index(slowest)] if pairs else allowed / n
    return {
        "pairs": allowed,
        "tflops": case.flops(share) / slowest / 1e12,
        "total_tflops": case.flops(allowed) / slowest / 1e12,
        "load_imbalance": (max(pairs) * n / allowed if allowed else 1.0) if pairs else None,
        "computed_over_allowed": sum(computed) / allowed if computed and allowed else None,
        "kernel_calls": max(_of_all(rank.facts.calls for rank in ranks), default=None),
        "token_imbalance": max(tokens) * n / sum(tokens),
        "padded_tokens": sum(rank.facts.padded_tokens for rank in ranks),
    }


@lru_cache(maxsize=4)
def _allowed(case: BenchCase) -> int:
    """Allowed (query, key, query head) triples of the whole case."""
    return round(case.make_mask().area(*[(0, case.num_tokens)] * 2) * case.num_heads)


def _bytes(ranks: Sequence[Figures]) -> Row:
    """Return the bytes that one run sent, if they could be counted."""
    unknown = sorted({name for rank in ranks for name in rank.uncounted})
    traffic = _of_all(rank.traffic for rank in ranks)
    bytes_by_rank = [sum(rank_traffic.bytes_to.values()) for rank_traffic in traffic]
    messages = [rank_traffic.messages for rank_traffic in traffic]
    links = {
        f"{src}>{dst}": count
        for src, rank_traffic in enumerate(traffic)
        for dst, count in sorted(rank_traffic.bytes_to.items())
    }
    figures = {
        "bytes_by_rank": bytes_by_rank,
        "bytes_by_link": links,
        "messages_by_rank": messages,
        "bytes_max_rank": max(bytes_by_rank, default=0),
        "bytes_total": sum(bytes_by_rank),
        "bytes_max_link": max(links.values(), default=0),
        "messages_max_rank": max(messages, default=0),
    }
    return {
        **(figures if traffic else dict.fromkeys(figures)),
        "nic_bytes_by_host": [nic.sent_bytes for nic in ranks[0].nics] or None,
        "bytes_reason": f"not counted: {', '.join(unknown)}" if unknown else None,
    }


def _errors(case: BenchCase, ranks: Sequence[Figures]) -> Row:
    """Return the largest errors over all ranks; None if the pass gives none, or they are not
    finite.
    """
    worst = {name: max(rank.errors[name] for rank in ranks) for name in ranks[0].errors}
    tolerance = TOLERANCES(case.dtype)
    finite = {name: error for name, error in worst.items() if math.isfinite(error)}
    return {
        **{f"error_{name}": finite.get(name) for name in NAMES},
        "tolerance": tolerance,
        "is_exact": finite == worst and max(worst.values()) <= tolerance,
    }
