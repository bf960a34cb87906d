"""Exact softmax attention over sequences split across many devices."""

from typing import TYPE_CHECKING, Any

from tilewise import kernels as kernels
from tilewise import layouts as layouts
from tilewise import lazy as _lazy
from tilewise import masks as masks
from tilewise import plan as plan
from tilewise import plan_methods as plan_methods
from tilewise import strategies as strategies
from tilewise import transport as transport
from tilewise import wires as _wires
from tilewise.functional import attention
from tilewise.layouts.layout import Layout, contiguous, striped, zigzag
from tilewise.masks import lengths as lengths
from tilewise.masks.base import Causal, Document, Full, Window
from tilewise.masks.tables import PerHead as PerHead
from tilewise.masks.tables import Slices as Slices
from tilewise.plan.ir import Plan

if TYPE_CHECKING:
    from tilewise import planning as planning
    from tilewise.batches.schedule import schedule
    from tilewise.batches.tree import Tree
    from tilewise.context_parallel import ContextParallel
    from tilewise.decoding.kv_cache import KVCache
    from tilewise.indexed.chosen import Chosen
    from tilewise.kernels.bias import alibi
    from tilewise.layouts.balanced import balanced
    from tilewise.layouts.documents import zigzag_documents
    from tilewise.layouts.joint import joint
    from tilewise.planning.search import search
    from tilewise.recording import record
    from tilewise.simulation.machine import Machine
    from tilewise.simulation.simulator import simulate
    from tilewise.strategies.all_gather import all_gather
    from tilewise.strategies.attention2d import attention2d
    from tilewise.strategies.balanced_ring import balanced_ring
    from tilewise.strategies.double_ring import double_ring
    from tilewise.strategies.hierarchical import hierarchical
    from tilewise.strategies.mesh import mesh
    from tilewise.strategies.needed import needed
    from tilewise.strategies.ring import ring
    from tilewise.strategies.tiled import tiled, tiled_layout
    from tilewise.strategies.tree import tree
    from tilewise.strategies.ulysses import ulysses
    from tilewise.transport.loopback import loopback
    from tilewise.workload import Workload, volume
    from tilewise_verify.effective_mask import effective_mask
    from tilewise_verify.parity import parity

__version__ = "0.1.0"

wire = _wires

__all__ = [
    "Causal",
    "Chosen",
    "ContextParallel",
    "Document",
    "Full",
    "KVCache",
    "Layout",
    "Machine",
    "Plan",
    "Tree",
    "Window",
    "Workload",
    "alibi",
    "all_gather",
    "attention",
    "attention2d",
    "balanced",
    "balanced_ring",
    "contiguous",
    "double_ring",
    "effective_mask",
    "hierarchical",
    "joint",
    "loopback",
    "mesh",
    "needed",
    "parity",
    "record",
    "ring",
    "schedule",
    "search",
    "simulate",
    "striped",
    "tiled",
    "tiled_layout",
    "tree",
    "ulysses",
    "volume",
    "zigzag",
    "zigzag_documents",
]

if not TYPE_CHECKING:  # a type checker knows the names above alone

    def __getattr__(name: str) -> Any:
        return globals().setdefault(name, _lazy.find(name))

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *dict(_lazy.MODULES)})
