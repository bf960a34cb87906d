"""The results file: nothing finished is lost, nothing torn is kept, one run writes at a time."""

import json
from pathlib import Path

import pytest

from tilewise_tools.bench.results import FORMAT, Results, read_results


def row(key: str, **more) -> dict:
    return {"format": FORMAT, "key": key, "outcome": "ok", **more}


def write(path: Path, *rows: dict) -> None:
    with Results(path) as results:
        for one in rows:
            results.append(one)


def test_rows_are_there_again(tmp_path: Path):
    path = tmp_path / "new" / "results.jsonl"
    write(path, row("a"), row("b"))
    write(path, row("c"))
    assert [one["key"] for one in read_results(path).rows] == ["a", "b", "c"]
    assert read_results(path).num_lost == 0


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_last_row_is_dropped_and_told(tmp_path: Path, cut: int):
    path = tmp_path / "results.jsonl"
    write(path, row("a", seconds=[0.25] * 9), row("b", seconds=[0.5] * 9))
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert [one["key"] for one in read_results(path).rows] == ["a"]
    assert read_results(path).num_lost == 1
    with Results(path) as results:
        assert results.num_lost == 1 and set(results.rows) == {"a"}
        results.append(row("c"))
    found = read_results(path)
    assert ([one["key"] for one in found.rows], found.num_lost) == (["a", "c"], 0)


def test_a_file_cut_at_its_start_gives_its_whole_rows(tmp_path: Path):
    path = tmp_path / "results.jsonl"
    write(path, row("a"), row("b"), row("c"))
    path.write_bytes(path.read_bytes()[9:])
    found = read_results(path)
    assert [one["key"] for one in found.rows] == ["b", "c"]
    assert found.num_lost == 1


def test_a_later_row_replaces_an_earlier_one(tmp_path: Path):
    path = tmp_path / "results.jsonl"
    write(path, row("a", outcome="failed"), row("b"), row("a"))
    assert {one["key"]: one["outcome"] for one in read_results(path).rows} == {"a": "ok", "b": "ok"}


def test_two_runs_cannot_write_one_file(tmp_path: Path):
    path = tmp_path / "results.jsonl"
    with Results(path), pytest.raises(ValueError, match="being written by another run"):
        Results(path).__enter__()
    write(path, row("a"))


@pytest.mark.parametrize("text", ["not json\n", '{"a": 1}\n[2]\n', json.dumps({"key": "a"}) + "\n"])
def test_another_kind_of_file_is_refused_and_left_alone(tmp_path: Path, text: str):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match="holds no rows of a benchmark"):
        read_results(path)
    with pytest.raises(ValueError, match="holds no rows of a benchmark"):
        Results(path).__enter__()
    assert path.read_text() == text


def test_files_that_cannot_be_opened_are_told(tmp_path: Path):
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_results(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="cannot be written"):
        Results(tmp_path).__enter__()


def test_a_row_that_is_no_json_is_refused(tmp_path: Path):
    with Results(tmp_path / "r.jsonl") as results, pytest.raises(ValueError, match="JSON"):
        results.append(row("a", seconds=float("nan")))
