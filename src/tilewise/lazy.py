"""Names of tilewise whose modules are imported when a name is first asked for.

This is the only place from which the library reaches tilewise_verify.
"""

from importlib import import_module
from typing import Any

# What most programs need a part of is imported when its name is first asked for.
LATER = (
    ("KVCache", "tilewise.decoding.kv_cache"),
    ("Tree", "tilewise.batches.tree"),
    ("effective_mask", "tilewise_verify.effective_mask"),
    ("parity", "tilewise_verify.parity"),
    ("schedule", "tilewise.batches.schedule"),
    ("search", "tilewise.planning.search"),
)

# Names for the library's own use alone.
INTERNAL = (("ModelUnderTest", "tilewise_verify.hf_proof"),)

# Names that stood in tilewise itself before they had a module of their own; they work until 1.0.
MOVED = (
    ("Candidate", "tilewise.planning"),
    ("EffectiveMask", "tilewise_verify"),
    ("ErrorBound", "tilewise_verify"),
    ("Group", "tilewise.transport"),
    ("Item", "tilewise.plan"),
    ("Kernel", "tilewise.kernels"),
    ("Mask", "tilewise.masks"),
    ("ParityReport", "tilewise_verify"),
    ("PlanError", "tilewise.plan"),
    ("Program", "tilewise.compiler"),
    ("RankBuilder", "tilewise.plan"),
    ("Role", "tilewise.plan"),
    ("Run", "tilewise.layouts"),
    ("Side", "tilewise.plan"),
    ("Simulation", "tilewise.simulation"),
    ("Step", "tilewise.plan"),
    ("Tile", "tilewise.plan"),
    ("Transfer", "tilewise.plan"),
    ("Transport", "tilewise.transport"),
    ("Volume", "tilewise.workload"),
    ("check", "tilewise.compiler.checker"),
    ("droppable", "tilewise.compiler"),
    ("error_bound", "tilewise_verify"),
    ("from_json", "tilewise.plan.json"),
    ("kernel", "tilewise.kernels"),
    ("load_candidate", "tilewise.planning"),
    ("lower", "tilewise.compiler.lowering"),
    ("operand", "tilewise.plan"),
    ("parse", "tilewise.plan"),
    ("partial", "tilewise.plan"),
    ("prune", "tilewise.compiler.pruning"),
    ("show", "tilewise.plan.text"),
    ("to_json", "tilewise.plan.json"),
    ("transport_for", "tilewise.transport"),
)


def find(name: str) -> Any:
    """Return the value of a name of the tables.

    Raises:
        AttributeError: if no table has the name.
    """
    module = dict(LATER + INTERNAL + MOVED).get(name)
    if module is None:
        raise AttributeError(f"module 'tilewise' has no attribute {name!r}")
    return getattr(import_module(module), name)
