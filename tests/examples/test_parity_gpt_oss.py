"""The notebook runs from top to bottom, and finds what it says."""

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "parity_gpt_oss.ipynb"


def test_the_notebook_holds_no_results_and_is_of_a_format_that_all_read():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(code) >= 3 and not any(cell["outputs"] for cell in code)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_split_model_is_the_same_and_the_wrong_one_is_named():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "notebook"}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    assert names["report"].equal
    wrong = names["wrong"]
    assert wrong.layer == "model.layers.0.self_attn" and wrong.cause
