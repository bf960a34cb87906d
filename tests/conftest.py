"""What every test shares: one thread per rank, repeatable hypothesis runs, the gpu marker."""

import gc
import os
import warnings
from multiprocessing import forkserver
from pathlib import Path

import pytest

# Warnings are errors, but not those of other packages at import, of versions that are new to them.
with warnings.catch_warnings():
    warnings.simplefilter("default")
    import hypothesis
    import torch

GPU_TESTS = Path(__file__).parent / "gpu"

# No deadline: the first example of a test pays for torch's own start. Derandomised, and without a
# database, so that a run on one machine says something about a run on another.
# Quick runs take fewer examples where a test does not say how many.
REPEATABLE = hypothesis.settings(deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("all", REPEATABLE)
hypothesis.settings.register_profile("quick", REPEATABLE, max_examples=40)
# Of `make fuzz`: other examples in every run, and a line that gives a failing one again.
FUZZING = hypothesis.settings(deadline=None, database=None, print_blob=True, max_examples=400)
hypothesis.settings.register_profile("fuzz", FUZZING)


# Imported once for all processes that a run of many tests starts, and not once by each.
PRELOADED = ["torch.distributed", "hypothesis", "pytest", "tilewise", "transformers.trainer"]


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    asked = config.option.markexpr
    if "gpu" in asked and "not gpu" not in asked:  # what is imported at collection may warn too
        config.addinivalue_line("filterwarnings", "default")
    usual = "quick" if "not slow" in asked else "all"
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", usual))
    gc.disable()  # until all tests are collected: what they consist of stays


# Files that take longest: started first, so that no process waits for the last of them.
LONGEST = ("test_parity.py", "test_search.py", "test_symmetry.py", "test_operator.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything under tests/gpu, before the command line's -m selects."""
    for item in items:
        if item.path.is_relative_to(GPU_TESTS):
            item.add_marker(pytest.mark.gpu)
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What thousands of collected tests consist of is not looked through by each collection."""
    if len(session.items) > 100:
        forkserver.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()
