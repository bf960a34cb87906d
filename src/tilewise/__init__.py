"""Exact softmax attention over sequences split across many devices."""

from tilewise import masks
from tilewise import wires as wire
from tilewise.batches.schedule import schedule
from tilewise.batches.tree import Tree
from tilewise.compiler.checker import check
from tilewise.compiler.lowering import lower
from tilewise.compiler.program import Program
from tilewise.compiler.pruning import droppable, prune
from tilewise.context_parallel import ContextParallel
from tilewise.decoding.kv_cache import KVCache
from tilewise.functional import attention
from tilewise.kernels.protocol import Kernel
from tilewise.kernels.registry import kernel_named as kernel
from tilewise.layouts.balanced import balanced
from tilewise.layouts.layout import Layout, Run, contiguous, striped, zigzag
from tilewise.masks import lengths
from tilewise.masks.base import Causal, Document, Full, Mask, Window
from tilewise.masks.tables import PerHead, Slices
from tilewise.plan.builder import RankBuilder, operand, partial
from tilewise.plan.ir import Item, Plan, PlanError, Role, Side, Step, Tile, Transfer
from tilewise.plan.json import from_json, to_json
from tilewise.plan.text import parse, show
from tilewise.planning.candidate import Candidate, load_candidate
from tilewise.planning.search import search
from tilewise.simulation.machine import Machine
from tilewise.simulation.simulator import Simulation, simulate
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
from tilewise.transport.protocol import Transport
from tilewise.transport.resolve import Group, transport_for
from tilewise.verification.effective_mask import EffectiveMask, effective_mask
from tilewise.verification.gradient_bound import ErrorBound, error_bound
from tilewise.verification.parity import ParityReport, parity
from tilewise.workload import Volume, Workload, volume

__all__ = [
    "Candidate",
    "Causal",
    "ContextParallel",
    "Document",
    "EffectiveMask",
    "ErrorBound",
    "Full",
    "Group",
    "Item",
    "KVCache",
    "Kernel",
    "Layout",
    "Machine",
    "Mask",
    "ParityReport",
    "PerHead",
    "Plan",
    "PlanError",
    "Program",
    "RankBuilder",
    "Role",
    "Run",
    "Side",
    "Simulation",
    "Slices",
    "Step",
    "Tile",
    "Transfer",
    "Transport",
    "Tree",
    "Volume",
    "Window",
    "Workload",
    "all_gather",
    "attention",
    "attention2d",
    "balanced",
    "balanced_ring",
    "check",
    "contiguous",
    "double_ring",
    "droppable",
    "effective_mask",
    "error_bound",
    "from_json",
    "hierarchical",
    "kernel",
    "lengths",
    "load_candidate",
    "loopback",
    "lower",
    "masks",
    "mesh",
    "needed",
    "operand",
    "parity",
    "parse",
    "partial",
    "prune",
    "ring",
    "schedule",
    "search",
    "show",
    "simulate",
    "striped",
    "tiled",
    "tiled_layout",
    "to_json",
    "transport_for",
    "tree",
    "ulysses",
    "volume",
    "wire",
    "zigzag",
]
