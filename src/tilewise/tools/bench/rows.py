"""A row: what the ranks found about one contender, as one flat table of names and numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, median, quantiles

from tilewise.simulation.machine import Machine
from tilewise.tools.bench.case import BenchCase, Timing
from tilewise.tools.bench.contender import Contender, Prediction
from tilewise.tools.bench.inputs import NAMES, TOLERANCES
from tilewise.tools.bench.measure import Figures
from tilewise.tools.bench.results import FORMAT, Row

HEADS = ("num_heads", "num_kv_heads", "head_dim")


@dataclass(frozen=True)
class PlannedRow:
    """One contender of one case, before it is run."""

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
    return {
        **_about(entry),
        "outcome": "ok",
        "message": "",
        "layout_used": ranks[0].layout,
        **_times(entry.case, ranks),
        **_work(entry.case, ranks),
        **_bytes(ranks),
        "peak_bytes": max(rank.peak_bytes for rank in ranks),
        **{
            f"{what}_seconds": max(rank.build_seconds[what] for rank in ranks)
            for what in ("mask", "prepare_first", "prepare_cached", "first_call")
        },
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


def _times(case: BenchCase, ranks: Sequence[Figures]) -> Row:
    """A run lasts as long as its slowest rank."""
    runs = list(zip(*(rank.seconds for rank in ranks), strict=True))
    seconds = [max(both for _, _, both in run) for run in runs]
    by_rank = [median(both for _, _, both in rank.seconds) for rank in ranks]
    waits = [rank.waited for rank in ranks if rank.waited is not None]
    row = {
        "seconds": seconds,
        "median_seconds": median(seconds),
        "p20_seconds": _quantile(seconds, 20),
        "p80_seconds": _quantile(seconds, 80),
        "slowest_rank_seconds": max(by_rank),
        "mean_rank_seconds": fmean(by_rank),
        "fastest_rank_seconds": min(by_rank),
        "exposed_seconds": (
            median(map(max, zip(*waits, strict=True))) if len(waits) == len(ranks) else None
        ),
        "forward_median_seconds": None,
        "backward_median_seconds": None,
    }
    if case.which == "both":
        for index, name in enumerate(("forward", "backward")):
            row[f"{name}_median_seconds"] = median(max(times[index] for times in r) for r in runs)
    return row


def _quantile(values: Sequence[float], percent: int) -> float:
    if len(values) == 1:
        return values[0]
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def _work(case: BenchCase, ranks: Sequence[Figures]) -> Row:
    """Work by rank where the contender knows it."""
    by_rank = [median(both for _, _, both in rank.seconds) for rank in ranks]
    slowest = by_rank.index(max(by_rank))
    tokens = [rank.num_tokens for rank in ranks]
    row: Row = {
        **dict.fromkeys(("pairs", "tflops", "total_tflops", "load_imbalance")),
        **dict.fromkeys(("computed_over_allowed", "kernel_calls")),
        "token_imbalance": max(tokens) * len(tokens) / sum(tokens),
        "padded_tokens": sum(rank.facts.padded_tokens for rank in ranks),
    }
    pairs = [rank.facts.pairs for rank in ranks if rank.facts.pairs is not None]
    if len(pairs) < len(ranks):  # a contender that does not count: all pairs, shared evenly
        row["pairs"] = total = _allowed(case)
        row["total_tflops"] = case.flops(total) / max(by_rank) / 1e12
        return row | {"tflops": row["total_tflops"] / len(ranks)}
    row["pairs"] = sum(pairs)
    row["tflops"] = case.flops(pairs[slowest]) / by_rank[slowest] / 1e12
    row["total_tflops"] = case.flops(sum(pairs)) / max(by_rank) / 1e12
    row["load_imbalance"] = max(pairs) * len(pairs) / sum(pairs) if sum(pairs) else 1.0
    computed = [rank.facts.computed for rank in ranks if rank.facts.computed is not None]
    if len(computed) == len(ranks) and sum(pairs):
        row["computed_over_allowed"] = sum(computed) / sum(pairs)
    calls = [rank.facts.calls for rank in ranks if rank.facts.calls is not None]
    row["kernel_calls"] = max(calls, default=None)
    return row


@lru_cache(maxsize=4)
def _allowed(case: BenchCase) -> int:
    """Allowed (query, key, query head) triples of the whole case."""
    return round(case.make_mask().area(*[(0, case.num_tokens)] * 2) * case.num_heads)


def _bytes(ranks: Sequence[Figures]) -> Row:
    """What one run sent, where it could be counted."""
    names = "bytes_by_rank", "bytes_by_link", "messages_by_rank", "bytes_max_rank", "bytes_total"
    row: Row = dict.fromkeys((*names, "bytes_max_link", "messages_max_rank"))
    row["nic_bytes_by_host"] = [nic.sent_bytes for nic in ranks[0].nics] or None
    unknown = sorted({name for rank in ranks for name in rank.uncounted})
    row["bytes_reason"] = f"not counted: {', '.join(unknown)}" if unknown else None
    traffic = [rank.traffic for rank in ranks if rank.traffic is not None]
    if len(traffic) < len(ranks):
        return row
    sent = [sum(one.bytes_to.values()) for one in traffic]
    links = {
        f"{src}>{dst}": count
        for src, one in enumerate(traffic)
        for dst, count in sorted(one.bytes_to.items())
    }
    return row | {
        "bytes_by_rank": sent,
        "bytes_by_link": links,
        "messages_by_rank": [one.messages for one in traffic],
        "bytes_max_rank": max(sent),
        "bytes_total": sum(sent),
        "bytes_max_link": max(links.values(), default=0),
        "messages_max_rank": max(one.messages for one in traffic),
    }


def _errors(case: BenchCase, ranks: Sequence[Figures]) -> Row:
    """The worst of all ranks; null of what the pass does not give, or where it is not finite."""
    worst = {name: max(rank.errors[name] for rank in ranks) for name in ranks[0].errors}
    tolerance = TOLERANCES(case.dtype)
    finite = {name: error for name, error in worst.items() if math.isfinite(error)}
    return {
        **{f"error_{name}": finite.get(name) for name in NAMES},
        "tolerance": tolerance,
        "is_exact": finite == worst and max(worst.values()) <= tolerance,
    }
