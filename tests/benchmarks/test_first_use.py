"""The benchmark of what a new mask costs runs, and a second call finds what the first made."""

import json
import subprocess
import sys

from support.docs_blocks import ROOT


def test_rows_for_every_strategy():
    out = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_use", "--ranks=2", "--masks=1", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    rows = json.loads(out)
    assert [(row["ranks"], row["strategy"]) for row in rows] == [
        (2, "mesh"),
        (2, "needed"),
        (2, "tiled"),
        (2, "prepared"),
    ]
    assert all(row["second_call_seconds"] > 0 for row in rows)
