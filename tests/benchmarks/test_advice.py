"""The advisor's page has the lines of its command, and does not hide where public orders differ."""

from pathlib import Path

from benchmarks import advice
from benchmarks.advice import CLUSTERS, advice_of, line, public, public_lines, ranking

PAGE = (Path(__file__).parents[2] / "docs" / "advisor.md").read_text(encoding="utf-8")


def test_the_cases_of_one_node_are_in_the_page():
    assert advice.HEADER in PAGE
    for library in advice.LIBRARIES:
        assert line(CLUSTERS[0], advice_of(library, CLUSTERS[0])) in PAGE


def test_public_orders_are_in_the_page_with_those_that_the_simulation_does_not_meet():
    for row in public_lines():
        assert row in PAGE
    alike, pairs = map(sum, zip(*(ranking(one).pairs for one in public()), strict=True))
    assert f"{alike} of {pairs} pairs" in PAGE and alike < pairs
