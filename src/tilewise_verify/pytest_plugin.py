"""Plug-in of pytest: the fixture cp_parity, and the option --cp-parity=FILE.html.

    def test_cp(cp_parity):
        cp_parity(model, inputs, split=my_split, world_size=2)

Every run of pytest loads this module, so it imports nothing of torch until the fixture is used.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from tilewise_verify.parity import ParityReport
    from tilewise_verify.ranks import Split

RESULTS = pytest.StashKey[list[dict[str, str]]]()
"""Results of one test's calls, in their order: text, svg and note of each."""


class CpParity(Protocol):
    """Type of the fixture cp_parity; see there."""

    def __call__(  # noqa: PLR0913 - a test's options
        self,
        model: Any,
        inputs: Mapping[str, Any],
        split: Split | None = None,
        world_size: int = 2,
        *,
        seconds: float | None = None,
        timeout: float | None = None,
        backend: str | None = None,
    ) -> ParityReport: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("tilewise").addoption(
        "--cp-parity",
        metavar="FILE.html",
        type=Path,
        help="write a page of what the tests with the fixture cp_parity have found",
    )


def pytest_configure(config: pytest.Config) -> None:
    page = config.getoption("--cp-parity")
    if page is not None and not page.absolute().parent.is_dir():
        raise pytest.UsageError(f"--cp-parity={page}: there is no folder {page.absolute().parent}")


@pytest.fixture
def cp_parity(request: pytest.FixtureRequest) -> CpParity:
    """Function that fails the test unless a split model computes what the unsplit one does.

    cp_parity(model, inputs, split=None, world_size=2, *, seconds=None, timeout=None, backend=None)

    The failing test shows the first layer that differs, the cause by name, the evidence and the
    fix, in 15 lines at most. Whatever cannot be compared is a failing test too, with its reason in
    one line: a model that cannot be copied, a split that splits nothing or returns no loss, a rank
    that raises or hangs.

    Args:
        model, inputs, split, world_size, backend: as of tw.parity; ranks are local processes.
        seconds: how long the test may take. A model of transformers that would take longer is made
            smaller: fewer layers, smaller widths, new weights, at most 64 tokens. The terminal
            summary says so.
        timeout: seconds after which the test fails; None: 60, or `seconds` if these are more.
    Returns:
        the ParityReport of runs that agree.
    Example:
        def test_cp(cp_parity):
            cp_parity(model, {"input_ids": ids, "labels": ids}, split=my_split, world_size=2)
    """

    def check(  # noqa: PLR0913 - a test's options
        model: Any,
        inputs: Mapping[str, Any],
        split: Split | None = None,
        world_size: int = 2,
        *,
        seconds: float | None = None,
        timeout: float | None = None,
        backend: str | None = None,
    ) -> ParityReport:
        from tilewise_verify.cp_parity import checked

        options = {"split": split, "world_size": world_size, "backend": backend}
        result = checked(model, inputs, seconds=seconds, timeout=timeout, **options)
        item = request.node
        item.user_properties.append(("cp_parity", result.verdict))
        page_part = {"text": result.text, "svg": result.svg, "note": result.note}
        item.stash.setdefault(RESULTS, []).append(page_part)
        if result.report is None or not result.report.equal:
            pytest.fail(result.text, pytrace=False)
        return result.report

    return check


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put a test's results into its report, which xdist's workers send to the main process."""
    report = yield
    if call.when != "teardown" and RESULTS in item.stash:
        report.cp_parity = item.stash[RESULTS]  # pyright: ignore[reportAttributeAccessIssue]
    return report


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> Generator[None, None, None]:
    """Write the page, and say which models were made smaller."""
    yield
    kinds = ("passed", "failed", "error", "xfailed", "xpassed")
    reports = [report for kind in kinds for report in terminalreporter.getreports(kind)]
    tests = [(x.nodeid, part) for x in reports for part in getattr(x, "cp_parity", ())]
    lines = [f"{nodeid}: {part['note']}" for nodeid, part in tests if part["note"]]
    page = config.getoption("--cp-parity")
    if page is not None:
        from tilewise_verify.parity_page import parity_page

        page.write_text(parity_page(tests), encoding="utf-8")
        lines.append(f"{len(tests)} comparisons: {page}")
    if lines:
        terminalreporter.section("cp_parity")
        terminalreporter.write("\n".join(lines) + "\n")
