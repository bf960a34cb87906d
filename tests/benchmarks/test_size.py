"""The budget counts code, not prose, and says no to a module that is planted in the core."""

from pathlib import Path

from benchmarks.size import budgets, by_folder, by_package, code_lines, over_budget

SOURCE = '''"""A docstring
of two lines."""

# a comment
X = (
    1,  # a comment beside code
)
"""What X is."""


def f():
    """Of f."""
    text = """a text
    of two lines"""
    return text
'''


def test_blanks_comments_and_docstrings_are_no_code():
    assert code_lines(SOURCE) == 3 + 4


def test_the_tree_keeps_its_budget_and_a_planted_module_does_not(tmp_path: Path):
    packages, allowed = by_package(by_folder()), budgets()
    assert set(packages) == set(allowed)
    assert over_budget(packages, allowed) == []
    (tmp_path / "tilewise" / "planted").mkdir(parents=True)
    (tmp_path / "tilewise" / "planted" / "more.py").write_text("x = 1\n" * 1000)
    planted = by_package(by_folder() + by_folder(tmp_path))
    (problem,) = over_budget(planted, allowed)
    assert problem.startswith(f"tilewise has {packages['tilewise'] + 1000} lines of code")
