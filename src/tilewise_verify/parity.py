"""Parity of a split model and the unsplit one: the first layer that deviates, and the cause."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilewise.arguments import checks_arguments, positive_number, require_known, whole_number
from tilewise.transport.loopback import MOST_THREADS
from tilewise.transport.processes import RankError, RankFailure
from tilewise_verify.causes import Facts, Finding, classify, explained
from tilewise_verify.comparison import Comparison, matched_positions
from tilewise_verify.diagnosis import Examination
from tilewise_verify.image_models import (
    image_share,
    is_image_model,
    is_split_here,
    num_split_rows,
    with_loss,
)
from tilewise_verify.pictures import drawn, text_picture
from tilewise_verify.ranks import BACKENDS, RankRunner, RankShare, Split
from tilewise_verify.records import ModelRun, Record, run_whole

SOURCES = os.path.dirname(os.path.dirname(__file__))
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
        cause: a name of the closed list (tilewise_verify/causes.py); None if equal.
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
            place = "no layer deviates" if self.layer is None else f"first deviates: {self.layer}"
            lines = [f"not equal; {place}", explained(self.findings)]
            lines += [
                f"  {d.kind} of {d.name}: {d.error:.3g} x rounding" for d in self.deviations[:SHOWN]
            ]
            num_more = len(self.deviations) - SHOWN
            lines += [f"  and {num_more} more of {self.compared}"] if num_more > 0 else []
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
        values = {**vars(self), "notes": list(self.notes)}
        del values["allowed"]
        for name in ("findings", "deviations", "failures"):
            values[name] = [value._asdict() for value in values[name]]
        return values


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

    The loss, every module's output and gradient, and every parameter's gradient are compared, row
    by row of the same position. The error that rounding explains is measured: the unsplit model
    runs with the last digit of every output and gradient disturbed, and in fp64. Gradients of the
    ranks may be shares that add up, or be reduced already. The effective mask of the first layer
    that deviates is read.

    Args:
        model: its call with inputs returns the loss: a scalar, or something with .loss. Of a model
            of diffusers, which returns a sample, the loss is a sum of that with fixed weights.
        inputs: keyword arguments of the unsplit model.
        split: split(model, inputs, rank, group) runs one rank's share with a copy of the model and
            returns its share of the loss, or (share, positions of its rows); without positions rows
            are matched by value. It may run backward itself. None: transformers or diffusers
            through tilewise.
        timeout: seconds for everything.
        backend: "gloo": local processes; "loopback": threads; None: the world of torchrun if this
            process is in one of this size, else gloo (split None: loopback).
    Raises:
        ValueError: if the unsplit model cannot be compared: no copy, no loss, no tokens, random;
            or if split returns no loss, or runs the whole sequence on every rank.
    """
    whole_number("world_size", world_size, most=MOST_THREADS)
    positive_number("timeout", timeout, ": seconds")
    in_world = dist.is_available() and dist.is_initialized() and dist.get_world_size() == world_size
    backend = backend or ("torchrun" if in_world else "loopback" if split is None else "gloo")
    require_known("backend", backend, BACKENDS)
    if is_image_model(model):
        model = with_loss(model)
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
            world.broadcast(result)
    if isinstance(result, ValueError):
        raise result
    return result


def _compare(model: nn.Module, inputs: Mapping[str, Any], world: RankRunner) -> ParityReport:
    num_tokens = num_split_rows(model, inputs) if is_image_model(model) else num_tokens_of(inputs)
    whole, noisy, eps = _reference(model, inputs, world)
    try:
        records = world.run([ModelRun()] * world.size)
    except RankError as error:
        finding = Finding("unknown", _failed(error.failures))
        return ParityReport(False, None, "unknown", (finding,), failures=error.failures)
    positions, notes = _positions(whole, records, num_tokens), ()
    if positions is None:
        notes, positions = (UNMATCHED,), [torch.zeros(0, dtype=torch.int64)] * world.size
    counted = torch.ones(num_tokens, dtype=torch.bool)
    padding = inputs.get("attention_mask")
    if isinstance(padding, Tensor) and padding.ndim == 2 and padding.shape[1] == num_tokens:
        counted = padding.bool().all(0).cpu()
    comparison = Comparison(whole, records, positions, noisy, counted, eps)
    names = [name for name in whole.outputs if comparison.rows("output", name) is not None]
    if not names and not notes:
        counts = ", ".join(str(len(rank_positions)) for rank_positions in positions)
        raise ValueError(
            f"split returned positions of {counts} rows by rank, but no module gave so many; "
            "positions are those of a rank's rows in the whole sequence"
        )
    examination = Examination(model, inputs, world, comparison)
    names_by_kind = [("output", name) for name in names] + [
        ("gradient", name) for name in reversed(names)
    ]
    deviations = [
        Deviation(*kind_and_name, comparison.error(*kind_and_name))
        for kind_and_name in names_by_kind
    ]
    deviations += [Deviation("parameter", *pair) for pair in examination.parameters.items()]
    compared = len(deviations) + 1
    try:
        facts, layer, allowed = examination.diagnosis()
    except Exception as error:  # of any kind: the report must still say that the runs differ
        facts, layer, allowed = _undiagnosed(error, comparison, deviations), None, None
    if not facts:
        if world.size > 1 and _is_unsplit(whole, records):
            raise ValueError(
                f"split runs the whole sequence ({num_tokens} rows) on every rank, so nothing is "
                "split; it must run a rank's share of the rows"
            )
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


def _is_unsplit(whole: Record, ranks: list[Record]) -> bool:
    """Return whether no module of any rank gave fewer rows than that of the unsplit model."""
    shapes = {
        (x.shape, record.outputs[name].shape)
        for name, x in whole.outputs.items()
        for record in ranks
        if name in record.outputs
    }
    return bool(shapes) and all(want == got for want, got in shapes)


def _undiagnosed(error: Exception, comparison: Comparison, deviations: list[Deviation]) -> Facts:
    """Facts of runs that differ when their diagnosis failed; empty if they do not differ."""
    text = f"the diagnosis failed ({type(error).__name__}: {error})"
    wrong_names = [d.name for d in deviations if d.error > 1]
    losses = comparison.loss_difference()
    if wrong_names or losses:
        return {
            "undiagnosed": f"{text}; {len(wrong_names)} deviate, {losses or 'the loss does not'}"
        }
    return {}


def _positions(whole: Record, ranks: list[Record], num_tokens: int) -> list[Tensor] | None:
    """Return the positions of every rank's rows, from the split or by their values.

    None if the values do not show them.
    """
    ranks_without_loss = [str(rank) for rank, record in enumerate(ranks) if record.loss is None]
    if ranks_without_loss:
        raise ValueError(
            f"split returned no loss on ranks {', '.join(ranks_without_loss)}; it must return its "
            "share of the loss, a number, or (share, positions of its rows)"
        )
    split_positions = [record.positions for record in ranks if record.positions is not None]
    for rank, rank_positions in enumerate(split_positions):
        if rank_positions.is_floating_point() or not bool(
            ((rank_positions >= -1) & (rank_positions < num_tokens)).all()
        ):
            raise ValueError(
                f"split returned positions {rank_positions[:4].tolist()}, ... on rank {rank}, "
                f"which must be whole numbers below num_tokens ({num_tokens}), or -1 for padding"
            )
    return (
        split_positions
        if len(split_positions) == len(ranks)
        else matched_positions(whole, ranks, num_tokens)
    )


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
            fp64_record = run_whole(model, inputs, ModelRun(dtype=torch.float64))
            # Masks by the least number of fp64 are not a number where softmax is taken in fp32.
            noisy += [fp64_record] if fp64_record.loss == fp64_record.loss else []
    return whole, noisy, eps


def num_tokens_of(inputs: Mapping[str, Any]) -> int:
    for x in inputs.values():
        if isinstance(x, Tensor) and x.ndim:
            batched = x.ndim > 1 + x.is_floating_point()
            return x.shape[1] if batched else x.shape[0]
    raise ValueError("inputs holds no tensor; pass the unsplit model's keyword arguments")


def _through_tilewise(model: nn.Module, inputs: Mapping[str, Any]) -> Split:
    """transformers' and diffusers' models with attention by tilewise; for others an error."""
    if is_split_here(model):
        return image_share
    if not hasattr(model, "set_attn_implementation"):
        raise ValueError(
            f"{type(model).__name__} is no model of transformers or of diffusers that is split by "
            "itself; pass split(model, inputs, rank, group), which runs one rank's share"
        )
    from tilewise.integrations.transformers import hf

    hf.check_model(model)
    mask = inputs.get("attention_mask")
    harmless = {"use_cache"} | ({"attention_mask"} if mask is None or bool(mask.all()) else set())
    if set(inputs) - harmless != {"input_ids", "labels"}:
        lacks = [name for name in ("input_ids", "labels") if name not in inputs]
        what = f"lacks {' and '.join(lacks)}" if lacks else f"has {', '.join(sorted(inputs))}"
        raise ValueError(
            f"inputs {what}; pass input_ids and labels alone, from which tilewise makes the rest, "
            "or a split of your own"
        )
    return _tilewise_share


def _tilewise_share(model: Any, inputs: Mapping[str, Any], rank: int, group: Any) -> Any:
    from tilewise.context_parallel import ContextParallel
    from tilewise.integrations.transformers import hf
    from tilewise.masks.base import Causal

    ids = inputs["input_ids"]
    cp = ContextParallel(group, num_tokens=ids.shape[1], mask=Causal())
    output = hf.parallelize(model, cp, f"tilewise_parity_{rank}")(
        **hf.shard(cp, ids, labels=inputs["labels"])
    )
    return output.loss, cp.position_ids


def place(text: str) -> str:
    """Return where a traceback last left code of the user's: " (file:line, in function)"."""
    frames = re.findall(r'File "(.+?)", line (\d+), in (\S+)', text)
    library = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), SOURCES)
    own = [frame for frame in frames if not frame[0].startswith(("<", *library))]
    if not own:
        return ""
    file, line, function = own[-1]
    return f" ({file}:{line}, in {function})"


def _failed(failures: tuple[RankFailure, ...]) -> str:
    """Name the ranks that failed first, not those that then lost their connection or waited."""
    first_failures = [f for f in failures if "gloo" not in f.text] or list(failures)
    texts = []
    for rank, kind, text in first_failures:
        error = text.strip().rpartition("\n")[2] or "an error"
        error += place(text)
        what_happened = {"error": f"raised {error}", "died": "ended without an answer"}.get(
            kind, TOO_LATE
        )
        texts.append(f"{'a rank' if rank < 0 else f'rank {rank}'} {what_happened}")
    if len(first_failures) < len(failures):
        later_ranks = ", ".join(str(f.rank) for f in failures if f not in first_failures)
        texts.append(f"ranks {later_ranks} failed after it")
    return "; ".join(texts)
