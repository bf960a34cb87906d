"""Programs in processes of their own, for what Triton reads once: whether it interprets."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).resolve().parents[1]
INTERPRETED = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


def run_alone(*command: str, timeout: int, **environment: str) -> str:
    """What Python prints, run with this command in a process with this environment."""
    path = f"{TESTS}:{TESTS.parent / 'src'}:{TESTS.parent}"
    run = subprocess.run(
        [sys.executable, *command],
        env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def skip_where_the_interpreter_fails() -> None:
    triton = pytest.importorskip("triton")
    if triton.__version__.startswith("3.6") and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("the interpreter of Triton 3.6 needs numpy below 2.4")
