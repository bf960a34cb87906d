"""tilewise parity: the answer, the exit code, JSON, a page with pictures, bad input."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilewise_tools.cli import app

ZOO = Path(__file__).parents[1] / "verification" / "zoo.py"
FILE = """
from functools import partial
from verification.zoo import Settings, made, share

def right():
    return *made(), share

def wrong():
    return *made(Settings(window=5)), partial(share, fault="window_ignored")

def nothing():
    return 1
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("steps") / "step_of_mine.py"
    path.write_text(FILE)
    return path


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["parity", *map(str, words)])
    return result.exit_code, result.output


def test_a_right_split_ends_with_0(file: Path):
    code, output = run(f"{file}:right", "--backend", "loopback", "--json")
    assert code == 0 and json.loads(output)["equal"] is True


def test_a_wrong_split_ends_with_1_and_a_page(file: Path, tmp_path: Path):
    page = tmp_path / "parity.html"
    code, output = run(f"{file}:wrong", "--backend", "loopback", "--html", page)
    assert code == 1 and "window_ignored" in output and "layers.0.attention" in output
    text = page.read_text()
    assert "<svg" in text and "window_ignored" in text and "default-src 'none'" in text


@pytest.mark.parametrize(
    "words, message",
    [
        (["nowhere.py:make"], "is no file; write FILE.py:name"),
        (["nowhere"], "must be FILE.py:NAME of a function"),
        (["{file}:missing"], "has no 'missing'"),
        (["{file}:nothing"], "must return three things"),
        (["{file}:right", "--timeout", "0"], "timeout (0.0) must be finite and above 0: seconds"),
    ],
)
def test_bad_input_is_one_line(file: Path, words, message):
    code, output = run(*(word.format(file=file) for word in words))
    assert code == 2 and message in output
