"""Parity within a time limit, and its result in a few lines: it serves the fixture cp_parity."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from tilewise.arguments import positive_number, whole_number
from tilewise_verify.causes import CAUSES, FIXES
from tilewise_verify.parity import ParityReport, parity, place
from tilewise_verify.records import forget_runs
from tilewise_verify.small_step import small_step

TIMEOUT = 60.0
MOST_LINES = 15
MOST_DEVIATIONS = 3  # lines of them
MOST_CAUSES = 2  # beside the first
MOST_SIGNS = 400  # of a line
SHARE_OF_PARITY = 0.8  # of the time limit; the rest is for starting and ending processes


class Checked(NamedTuple):
    """Result of one comparison.

    Attributes:
        report: None if nothing could be compared.
        text: what a test shows: MOST_LINES lines at most.
        note: how the model was made smaller, and what was not compared; empty if neither is so.
        svg: what the first layer that differs attends to; empty if it was not read.
    """

    report: ParityReport | None
    text: str
    note: str = ""
    svg: str = ""

    @property
    def verdict(self) -> str:
        """The result in a few words, for a property in JUnit's file."""
        if self.report is None:
            return "not compared"
        return _verdict(self.report)


def checked(
    model: nn.Module,
    inputs: Mapping[str, Any],
    seconds: float | None = None,
    timeout: float | None = None,
    **options: Any,
) -> Checked:
    """Compare a split model with the unsplit one, as the fixture cp_parity says; never raise.

    Args:
        options: of tw.parity: split, world_size, backend.
    """
    note = ""

    def compare() -> ParityReport:
        nonlocal model, inputs, note
        if seconds is not None:
            model, inputs, note = small_step(model, inputs, options["world_size"], seconds)
        return parity(model, inputs, timeout=SHARE_OF_PARITY * limit, **options)

    try:
        whole_number("world_size", options["world_size"])
        for name, value in (("seconds", seconds), ("timeout", timeout)):
            if value is not None:
                positive_number(name, value)
        limit = max(TIMEOUT, seconds or 0.0) if timeout is None else timeout
        report = _within(limit, compare)
    except Exception as error:  # whatever the model's code raises
        return Checked(None, _lines([f"cp_parity cannot compare: {_reason(error)}", note]), note)
    note = "; ".join(text for text in (note, *report.notes) if text)
    lines = [*_told(report, options["world_size"]), note]
    return Checked(report, _lines(lines), note, report.svg() or "")


def _verdict(report: ParityReport) -> str:
    if report.equal:
        return "equal"
    if report.failures:
        return "a rank failed"
    return f"{report.cause}{f' in {report.layer}' if report.layer else ''}"


def _told(report: ParityReport, world_size: int) -> list[str]:
    """Lines of a report: the first layer, the cause, its evidence, the fix, then the rest."""
    if report.equal or report.failures:
        return [f"world_size {world_size}: {str(report).splitlines()[0]}"]
    first, *others = report.findings
    lines = [
        f"{_verdict(report)}: with world_size {world_size} the model is not the unsplit one",
        f"first layer that differs: {report.layer or 'none; the loss or all gradients'}",
        f"cause: {first.cause}. {CAUSES[first.cause]}",
        f"evidence: {first.text}",
        f"fix: {FIXES[first.cause]}",
        *(f"also {finding.cause}: {finding.text}" for finding in others[:MOST_CAUSES]),
    ]
    for deviation in report.deviations[:MOST_DEVIATIONS]:
        name = deviation.name or "(the model)"
        lines.append(f"  {deviation.kind} of {name}: {deviation.error:.3g} x rounding")
    num_more = len(report.deviations) - MOST_DEVIATIONS
    return lines + ([f"  and {num_more} more of {report.compared}"] if num_more > 0 else [])


def _lines(lines: list[str]) -> str:
    one_line_each = [" ".join(line.split()) if line[:1] != " " else line for line in lines if line]
    return "\n".join(line[:MOST_SIGNS] for line in one_line_each[:MOST_LINES])


def _reason(error: Exception) -> str:
    """The reason in one line; of errors that tilewise did not raise, also their place."""
    if isinstance(error, ValueError | TimeoutError):
        return str(error)
    where = place("".join(traceback.format_exception(error)))
    return f"{type(error).__name__}: {error}{where}"


def _within(seconds: float, call: Callable[[], ParityReport]) -> ParityReport:
    """Return what call gives, from a thread of its own, which may be left to itself.

    Raises:
        TimeoutError: naming the line at which the thread is, if it takes longer.
    """
    box: list[ParityReport | BaseException] = []

    def run() -> None:
        try:
            box.append(call())
        except BaseException as error:
            box.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not box:
        number = thread.ident or 0
        stack = traceback.format_stack(sys._current_frames().get(number))
        forget_runs([number])
        raise TimeoutError(
            f"no answer within {seconds:g} s{place(''.join(stack))}; it hangs, or needs a smaller "
            "model or fewer tokens (seconds=), or more time (timeout=)"
        )
    if isinstance(box[0], BaseException):
        raise box[0]
    return box[0]
