"""A type checker sees what is wrong in a user's file."""

import json
import subprocess
import sys
from pathlib import Path

import tilewise as tw

USERS_FILE = """
import tilewise as tw

plan = tw.ring(4)
right: str = plan.name
plan.traits.no_such_field
plan.owners.foo()
a: int = plan.name
steps: int = len(plan.changed(name="another").steps)
text: str = plan.to_json() + str(tw.plan.parse(str(plan))) + tw.Plan.from_json("").name
pruned: tw.Plan = plan.pruned(tw.masks.causal(8), tw.zigzag(8, 4))
wires: tw.wire.Wires = tw.wire.Wires(tw.wire.Float8(64))
kernel: tw.kernels.Kernel = tw.kernels.kernel("cpu")
group: tw.transport.Group = tw.transport.transport_for(None)
lengths = tw.lengths.sample("pile", 64, seed=0)
tw.atention
tw.show(plan)
"""


def test_wrong_uses_of_a_plan_are_errors_and_right_ones_are_not(tmp_path: Path):
    (tmp_path / "user.py").write_text(USERS_FILE)
    package = Path(tw.__file__).parents[1]
    settings = {"include": ["user.py"], "extraPaths": [str(package)], "pythonVersion": "3.11"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(
        [*command, "-p", str(tmp_path)], capture_output=True, text=True, check=False
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    errors = {(x["range"]["start"]["line"], x["rule"]) for x in found if x["severity"] == "error"}
    lines = USERS_FILE.splitlines()
    assert {(lines[line], rule) for line, rule in errors} == {
        ("plan.traits.no_such_field", "reportAttributeAccessIssue"),
        ("plan.owners.foo()", "reportAttributeAccessIssue"),
        ("a: int = plan.name", "reportAssignmentType"),
        ("tw.atention", "reportAttributeAccessIssue"),
        ("tw.show(plan)", "reportAttributeAccessIssue"),
    }
