"""agree: the same ValueError on every rank, or none."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewise.transport.agreement import RECORD_BYTES, agree
from tilewise.transport.loopback import LoopbackGroup, loopback
from tilewise.transport.resolve import LocalTransport


def outcomes(
    fields: list[dict[str, str] | None], errors: dict[int, str] | None = None
) -> list[str | None]:
    """Return what each rank raises, by rank."""

    def body(rank: int, group: LoopbackGroup) -> str | None:
        try:
            agree(group, fields[rank], (errors or {}).get(rank))
        except ValueError as error:
            return str(error)
        return None

    return loopback(len(fields), body)


def only(texts: list[str | None]) -> str:
    """Return what all ranks raise alike."""
    assert len(set(texts)) == 1
    assert texts[0] is not None
    return texts[0]


def test_ranks_that_agree_go_on():
    assert outcomes([{"plan": "ring(4)", "num_tokens": "100"}] * 4) == [None] * 4


def test_the_first_field_that_differs_is_named_with_both_values_on_every_rank():
    fields = [{"plan": "ring(5)", "num_tokens": "100", "dtype": "float32"} for _ in range(5)]
    fields[3] = {"plan": "ring(5)", "num_tokens": "200", "dtype": "bfloat16"}
    assert only(outcomes(fields)) == (
        "ranks disagree on num_tokens: rank 0 has 100, rank 3 has 200; "
        "pass the same value on every rank"
    )


def test_the_lowest_rank_with_an_error_wins_over_fields_that_differ():
    fields = [{"num_tokens": "1"}, {"num_tokens": "2"}, None, None]
    errors = {2: "q has 3 heads, k has 2", 3: "another"}
    assert only(outcomes(fields, errors)) == "rank 2: q has 3 heads, k has 2"


def test_all_ranks_with_the_same_error_raise_it():
    assert only(outcomes([None] * 3, dict.fromkeys(range(3), "bad"))) == "rank 0: bad"


def test_a_world_of_one_raises_the_error_as_it_is():
    agree(LocalTransport(), {"num_tokens": "5"})
    with pytest.raises(ValueError) as caught:
        agree(LocalTransport(), None, "num_tokens (5) must be 6")
    assert str(caught.value) == "num_tokens (5) must be 6"
    assert only(outcomes([None], {0: "bad"})) == "bad"


def test_ranks_on_different_code_paths_are_told_apart():
    assert only(outcomes([{"call": "attention"}, {"call": "unshard"}])).startswith(
        "ranks disagree on call: rank 0 has attention, rank 1 has unshard"
    )
    assert only(outcomes([{"a": "1"}, {"a": "1", "b": "2"}])).startswith(
        "ranks disagree on b: rank 0 has nothing, rank 1 has 2"
    )
    assert only(outcomes([{"a": "1", "b": "2"}, {"b": "2"}])).startswith(
        "ranks disagree on a: rank 0 has 1, rank 1 has nothing"
    )
    assert "another order" in only(outcomes([{"a": "1", "b": "2"}, {"b": "2", "a": "1"}]))


def test_long_values_are_compared_whole():
    long = "x" * 50_000
    fields = [{"mask": f"Document({long}1{long})", "num_tokens": "7"} for _ in range(3)]
    assert outcomes(list(fields)) == [None] * 3
    fields[1] = {"mask": f"Document({long}2{long})", "num_tokens": "7"}
    text = only(outcomes(list(fields)))
    assert text.startswith("ranks disagree on mask: rank 0 has Document(xxx")
    assert text.count("(digest ") == 2


def test_a_field_is_not_blamed_for_being_cut_differently():
    mask = "m" * 3000
    fields = [{"mask": mask, "plan": "ring"}, {"mask": mask, "plan": "mesh" * 400}]
    assert only(outcomes(list(fields))).startswith("ranks disagree on plan: rank 0 has ring, ")


def test_a_long_error_keeps_both_its_ends():
    text = only(outcomes([None, None], {1: "begins " + "é" * 5000 + " ends"}))
    assert text.startswith("rank 1: begins é")
    assert text.endswith("é ends")
    assert len(text.encode()) <= RECORD_BYTES + len("rank 1: ")


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=400)
FIELDS = st.dictionaries(st.text("abcdef", min_size=1, max_size=12), TEXTS, max_size=12)


@given(left=FIELDS, right=FIELDS)
def test_ranks_raise_exactly_if_their_fields_differ(left: dict[str, str], right: dict[str, str]):
    texts = outcomes([left, right, left])
    assert len(set(texts)) == 1
    assert (texts[0] is None) == (list(left.items()) == list(right.items()))


def test_a_record_has_one_size_and_is_not_counted():
    sizes = []

    class Recorder(LocalTransport):
        world_size = 2

        def gather_records(self, record: torch.Tensor) -> list[torch.Tensor]:
            sizes.append(record.numel())
            return [record, record]

    agree(Recorder(), {"a": "1"})
    agree(Recorder(), {str(i): "long" * 500 for i in range(30)})
    with pytest.raises(ValueError, match="rank 0: bad"):
        agree(Recorder(), None, "bad")
    assert sizes == [RECORD_BYTES] * 3
    counts = loopback(2, lambda rank, group: (agree(group, {"a": "1"}), group.bytes_sent)[1])
    assert counts == [0, 0]
