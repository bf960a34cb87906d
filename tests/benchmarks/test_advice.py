"""The advisor's page has the lines of its command, and public orders as they were measured."""

from pathlib import Path

from benchmarks import advice
from benchmarks.advice import CLUSTERS, advice_of, line, public, public_lines, ranking

PAGE = (Path(__file__).parents[2] / "docs" / "advisor.md").read_text(encoding="utf-8")


def test_the_cases_of_one_node_are_in_the_page():
    assert advice.HEADER in PAGE
    for library in advice.LIBRARIES:
        assert line(CLUSTERS[0], advice_of(library, CLUSTERS[0])) in PAGE


def test_public_orders_are_in_the_page_and_are_those_that_were_measured():
    for row in public_lines():
        assert row in PAGE
    alike, pairs = map(sum, zip(*(ranking(one).pairs for one in public()), strict=True))
    assert f"{alike} of {pairs} pairs" in PAGE and alike == pairs
