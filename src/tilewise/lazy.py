"""Names of tilewise whose modules are imported when a name is first asked for.

This is the only place from which the library reaches tilewise_verify.
"""

from importlib import import_module
from typing import Any

# What most programs need a part of is imported when its name is first asked for.
LATER = (
    ("Chosen", "tilewise.indexed.chosen"),
    ("ContextParallel", "tilewise.context_parallel"),
    ("KVCache", "tilewise.decoding.kv_cache"),
    ("Machine", "tilewise.simulation.machine"),
    ("Tree", "tilewise.batches.tree"),
    ("Workload", "tilewise.workload"),
    ("alibi", "tilewise.kernels.bias"),
    ("all_gather", "tilewise.strategies.all_gather"),
    ("attention2d", "tilewise.strategies.attention2d"),
    ("balanced", "tilewise.layouts.balanced"),
    ("balanced_ring", "tilewise.strategies.balanced_ring"),
    ("double_ring", "tilewise.strategies.double_ring"),
    ("effective_mask", "tilewise_verify.effective_mask"),
    ("hierarchical", "tilewise.strategies.hierarchical"),
    ("joint", "tilewise.layouts.joint"),
    ("loopback", "tilewise.transport.loopback"),
    ("mesh", "tilewise.strategies.mesh"),
    ("needed", "tilewise.strategies.needed"),
    ("parity", "tilewise_verify.parity"),
    ("record", "tilewise.recording"),
    ("ring", "tilewise.strategies.ring"),
    ("schedule", "tilewise.batches.schedule"),
    ("search", "tilewise.planning.search"),
    ("simulate", "tilewise.simulation.simulator"),
    ("tiled", "tilewise.strategies.tiled"),
    ("tiled_layout", "tilewise.strategies.tiled"),
    ("tree", "tilewise.strategies.tree"),
    ("ulysses", "tilewise.strategies.ulysses"),
    ("volume", "tilewise.workload"),
    ("zigzag_documents", "tilewise.layouts.documents"),
)

# Modules that programs name without an import of their own.
MODULES = (
    ("context_parallel", "tilewise.context_parallel"),
    ("planning", "tilewise.planning"),
    ("simulation", "tilewise.simulation"),
    ("tokens", "tilewise.tokens"),
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
    """Return what a name of the tables stands for: a module, or a value of one.

    Raises:
        AttributeError: if no table has the name.
    """
    if name in dict(MODULES):
        return import_module(dict(MODULES)[name])
    module = dict(LATER + INTERNAL + MOVED).get(name)
    if module is None:
        raise AttributeError(f"module 'tilewise' has no attribute {name!r}")
    return getattr(import_module(module), name)
