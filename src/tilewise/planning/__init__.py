"""The search for the fastest plan, its bounds, and its answer.

options: what is tried; pass_model: a pass on a machine, as those who weigh plans see it; bounds:
least times of a plan; trials: one pass of the options; teams: a sample of a split by heads; pairs:
both passes; distances: what no plan can fall below; reasons, candidate: the answer and its file;
advisor, model_attention: settings of other libraries beside it; hybrid: models with layers that
carry a state; indexed_layers: layers whose indexer chooses keys.
"""

from tilewise.planning.candidate import Candidate, load_candidate
from tilewise.planning.hybrid import HybridWork, StateLayer, search_hybrid
from tilewise.planning.indexed_layers import IndexedLayer

__all__ = [
    "Candidate",
    "HybridWork",
    "IndexedLayer",
    "StateLayer",
    "load_candidate",
    "search_hybrid",
]
