"""Parity: whether a split model is the unsplit one, the first layer that deviates, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilewise.arguments import checks_arguments, whole_number
from tilewise.transport.loopback import MOST_THREADS
from tilewise.transport.processes import RankError, RankFailure
from tilewise.verification.causes import Facts, Finding, classify, explained
from tilewise.verification.comparison import Comparison, loss_difference, matched_positions
from tilewise.verification.diagnosis import Examination
from tilewise.verification.pictures import drawn, text_picture
from tilewise.verification.ranks import BACKENDS, RankRunner, RankShare, Split
from tilewise.verification.records import ModelRun, Record, run_whole

SHOWN = 8  # deviations, as text
TOO_LATE = (
    "gave no answer in time: it hangs, or the batch is too long for the timeout; give fewer tokens "
    "or layers, or more time"
)
UNMATCHED = (
    "rows of the ranks could not be matched with the unsplit model's by value; return (loss share, "
    "positions) from split"
)


class Deviation(NamedTuple):
    """A module's output or gradient, or a parameter's gradient, that differs."""

    kind: str  # "output", "gradient" or "parameter"
    name: str
    error: float  # of the worst row, as a multiple of what rounding explains


@dataclass(frozen=True)
class ParityReport:
    """Result of parity.

    Attributes:
        equal: whether the runs differ by no more than rounding explains.
        layer: the first module that deviates; None if none does.
        cause: a name of the closed list (verification/causes.py); None if equal.
        findings: causes with their evidence, most telling first.
        deviations: all that differs, in order.
        compared: how many outputs, gradients and parameters were compared.
        failures: of ranks that raised, ended or gave no answer.
        notes: what was not compared, and why.
        allowed: (split, unsplit), bool [num_tokens, num_tokens]: what any head of the layer
            attends to; None if it was not read.
    """

    equal: bool
    layer: str | None = None
    cause: str | None = None
    findings: tuple[Finding, ...] = ()
    deviations: tuple[Deviation, ...] = ()
    compared: int = 0
    failures: tuple[RankFailure, ...] = ()
    notes: tuple[str, ...] = ()
    allowed: tuple[Tensor, Tensor] | None = None

    def __str__(self) -> str:
        lines = [f"equal: {self.compared} outputs, gradients and parameters agree"]
        if self.failures:
            lines = [_failed(self.failures)]
        elif not self.equal:
            where = "no layer deviates" if self.layer is None else f"first deviates: {self.layer}"
            lines = [f"not equal; {where}", explained(self.findings)]
            lines += [
                f"  {d.kind} of {d.name}: {d.error:.3g} x rounding" for d in self.deviations[:SHOWN]
            ]
            more = len(self.deviations) - SHOWN
            lines += [f"  and {more} more of {self.compared}"] if more > 0 else []
        lines += [f"note: {note}" for note in self.notes]
        if self.allowed is not None:
            picture = text_picture(self.allowed[0].numpy())
            lines += ["", "what the layer attends to, split:", picture]
        return "\n".join(lines)

    def svg(self) -> str | None:
        """The layer's attended pairs beside the unsplit model's; None if they were not read."""
        if self.allowed is None:
            return None
        split, unsplit = self.allowed
        return drawn(split.numpy(), unsplit.numpy(), self.layer or "")

    def to_json(self) -> dict[str, Any]:
        """Plain values, without the picture."""
        found = {**vars(self), "notes": list(self.notes)}
        del found["allowed"]
        for name in ("findings", "deviations", "failures"):
            found[name] = [value._asdict() for value in found[name]]
        return found


@checks_arguments
def parity(
    model: nn.Module,
    inputs: Mapping[str, Any],
    split: Split | None = None,
    world_size: int = 4,
    timeout: float = 60,
    backend: str | None = None,
) -> ParityReport:
    """Compare a training step of a model with the same step split over ranks, by any library.

    Loss, every module's output and gradient, and every parameter's gradient are compared, rows by
    their positions. What rounding explains is measured: the unsplit model runs with the last digit
    of every output and gradient disturbed, and in fp64. Gradients of the ranks may be shares that
    add up, or be reduced already. Of the first layer that deviates the effective mask is read.

    Args:
        model: its call with inputs returns the loss: a scalar, or something with .loss.
        inputs: keyword arguments of the unsplit model.
        split: split(model, inputs, rank, group) runs one rank's share with a copy of the model and
            returns its share of the loss, or (share, positions of its rows); without positions rows
            are matched by value. It may run backward itself. None: transformers through tilewise.
        timeout: seconds for everything.
        backend: "gloo": local processes; "loopback": threads; None: the world of torchrun if this
            process is in one of this size, else gloo (split None: loopback).
    Raises:
        ValueError: if the unsplit model cannot be compared: no loss, no tokens, random.
    """
    whole_number("world_size", world_size, most=MOST_THREADS)
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout ({timeout!r}) must be a number of seconds above 0")
    in_world = dist.is_available() and dist.is_initialized() and dist.get_world_size() == world_size
    backend = backend or ("torchrun" if in_world else "loopback" if split is None else "gloo")
    if backend not in BACKENDS:
        raise ValueError(f"backend ({backend!r}) must be one of {', '.join(BACKENDS)}")
    share = RankShare(model, inputs, _through_tilewise(model, inputs) if split is None else split)
    world = RankRunner(share, world_size, backend, timeout)
    if backend == "torchrun" and dist.get_rank():
        result = world.serve()
    else:
        try:
            result = _compare(model, inputs, world)
        except ValueError as error:
            result = error
        finally:
            world.close()
        if backend == "torchrun":
            world.tell(result)
    if isinstance(result, ValueError):
        raise result
    return result


def _compare(model: nn.Module, inputs: Mapping[str, Any], world: RankRunner) -> ParityReport:
    num_tokens = _num_tokens(inputs)
    whole, noisy, eps = _reference(model, inputs, world)
    try:
        records = world.run([ModelRun()] * world.size)
    except RankError as error:
        finding = Finding("unknown", _failed(error.failures))
        return ParityReport(False, None, "unknown", (finding,), failures=error.failures)
    given, notes = _positions(whole, records, num_tokens), ()
    if given is None:
        notes, given = (UNMATCHED,), [torch.zeros(0, dtype=torch.int64)] * world.size
    counted = torch.ones(num_tokens, dtype=torch.bool)
    padding = inputs.get("attention_mask")
    if isinstance(padding, Tensor) and padding.ndim == 2 and padding.shape[1] == num_tokens:
        counted = padding.bool().all(0).cpu()
    found = Comparison(whole, records, given, noisy, counted, eps)
    names = [name for name in whole.outputs if found.rows("output", name) is not None]
    if not names and not notes:
        counts = ", ".join(str(len(own)) for own in given)
        raise ValueError(
            f"split returned positions of {counts} rows by rank, but no module gave so many; "
            "positions are those of a rank's rows in the whole sequence"
        )
    examination = Examination(model, inputs, world, found)
    both = [("output", name) for name in names] + [("gradient", name) for name in reversed(names)]
    deviations = [Deviation(*of, found.error(*of)) for of in both]
    deviations += [Deviation("parameter", *pair) for pair in examination.parameters.items()]
    compared = len(deviations) + 1
    try:
        facts, layer, allowed = examination.diagnosis()
    except Exception as error:  # whatever it is: that the runs differ must be told
        facts, layer, allowed = _undiagnosed(error, found, deviations), None, None
    if not facts:
        return ParityReport(True, compared=compared, notes=notes)
    findings = classify(facts) or [
        Finding("unknown", "no cause of the list explains it, or its attention could not be read")
    ]
    return ParityReport(
        equal=False,
        layer=None if layer is None else layer or "(the model)",
        cause=findings[0].cause,
        findings=tuple(findings),
        deviations=tuple(d for d in deviations if d.error > 1),
        compared=compared,
        notes=notes,
        allowed=allowed,
    )


def _undiagnosed(error: Exception, found: Comparison, deviations: list[Deviation]) -> Facts:
    """Facts of runs that differ, for a reason that could not be found; empty if they do not."""
    text = f"the diagnosis failed ({type(error).__name__}: {error})"
    wrong = [d.name for d in deviations if d.error > 1]
    losses = loss_difference(found.whole, found.ranks, found.eps * abs(found.whole.loss or 0.0))
    if wrong or losses:
        return {"undiagnosed": f"{text}; {len(wrong)} deviate, {losses or 'the loss does not'}"}
    return {}


def _positions(whole: Record, ranks: list[Record], num_tokens: int) -> list[Tensor] | None:
    """Return the positions of every rank's rows, as the split says or by their values; None if that
    cannot be said.
    """
    silent = [str(rank) for rank, record in enumerate(ranks) if record.loss is None]
    if silent:
        raise ValueError(
            f"split returned no loss on ranks {', '.join(silent)}; it must return its share of the "
            "loss, a number, or (share, positions of its rows)"
        )
    given = [record.positions for record in ranks if record.positions is not None]
    for rank, own in enumerate(given):
        if own.is_floating_point() or not bool(((own >= -1) & (own < num_tokens)).all()):
            raise ValueError(
                f"split returned positions {own[:4].tolist()}, ... on rank {rank}, which must be "
                f"whole numbers below num_tokens ({num_tokens}), or -1 for padding"
            )
    return given if len(given) == len(ranks) else matched_positions(whole, ranks, num_tokens)


def _reference(
    model: nn.Module, inputs: Mapping[str, Any], world: RankRunner
) -> tuple[Record, list[Record], float]:
    """The unsplit model's record, disturbed ones, and the coarsest rounding of what it computes."""
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
    if not dtypes:
        raise ValueError("model has no parameters; parity compares a model's training step")
    whole = run_whole(model, inputs, ModelRun())
    eps = max(whole.eps, *(torch.finfo(dtype).eps for dtype in dtypes))
    if whole.loss is None:
        raise ValueError(
            "the unsplit model returned no loss; pass labels in inputs, or a model that returns a "
            "scalar, a tuple that begins with one, or something with .loss"
        )
    if whole.loss != whole.loss:
        raise ValueError("the unsplit model's loss is not a number; parity needs one that is")
    if world.seconds_left < 0:
        raise ValueError(
            f"the unsplit model alone takes {-world.seconds_left:.3g} s longer than the timeout; "
            "give fewer tokens or layers, or more time"
        )
    noisy = [run_whole(model, inputs, ModelRun(noise=eps))]
    if eps > torch.finfo(torch.float64).eps:
        with suppress(RuntimeError, TypeError):  # code that insists on its dtype
            wide = run_whole(model, inputs, ModelRun(dtype=torch.float64))
            # Masks by the least number of fp64 are not a number where softmax is taken in fp32.
            noisy += [wide] if wide.loss == wide.loss else []
    return whole, noisy, eps


def _num_tokens(inputs: Mapping[str, Any]) -> int:
    for x in inputs.values():
        if isinstance(x, Tensor) and x.ndim:
            batched = x.ndim > 1 + x.is_floating_point()
            return x.shape[1] if batched else x.shape[0]
    raise ValueError("inputs holds no tensor; pass the unsplit model's keyword arguments")


def _through_tilewise(model: nn.Module, inputs: Mapping[str, Any]) -> Split:
    """transformers' models with attention by tilewise; for others an error."""
    if not hasattr(model, "set_attn_implementation"):
        raise ValueError(
            f"{type(model).__name__} is no model of transformers; pass split(model, inputs, rank, "
            "group), which runs one rank's share"
        )
    from tilewise.integrations import hf

    hf.check_model(model)
    mask = inputs.get("attention_mask")
    harmless = {"use_cache"} | ({"attention_mask"} if mask is None or bool(mask.all()) else set())
    if set(inputs) - harmless != {"input_ids", "labels"}:
        raise ValueError(
            f"inputs has {', '.join(sorted(inputs))}; pass input_ids and labels alone, from which "
            "tilewise makes the rest, or a split of your own"
        )
    return _tilewise_share


def _tilewise_share(model: Any, inputs: Mapping[str, Any], rank: int, group: Any) -> Any:
    from tilewise.context_parallel import ContextParallel
    from tilewise.integrations import hf
    from tilewise.masks.base import Causal

    ids = inputs["input_ids"]
    cp = ContextParallel(group, num_tokens=ids.shape[1], mask=Causal())
    out = hf.parallelize(model, cp, f"tilewise_parity_{rank}")(
        **hf.shard(cp, ids, labels=inputs["labels"])
    )
    return out.loss, cp.position_ids


def _failed(failures: tuple[RankFailure, ...]) -> str:
    """Say who failed first: not those that lost their connection to another, or waited for it."""
    own = [f for f in failures if "gloo" not in f.text] or list(failures)
    texts = []
    for rank, kind, text in own:
        error = text.strip().rpartition("\n")[2] or "an error"
        how = {"error": f"raised {error}", "died": "ended without an answer"}.get(kind, TOO_LATE)
        texts.append(f"{'a rank' if rank < 0 else f'rank {rank}'} {how}")
    if len(own) < len(failures):
        others = ", ".join(str(f.rank) for f in failures if f not in own)
        texts.append(f"ranks {others} failed after it")
    return "; ".join(texts)
