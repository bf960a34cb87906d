"""Settings of training: splits of a model's sequence and parameters, dtypes, what is kept."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tilewise.arguments import item_bytes, require_known, whole_number
from tilewise.layouts.balanced import default_layout
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Causal
from tilewise.plan.ir import Plan
from tilewise.simulation.machine import Machine

DTYPES = ("bfloat16", "float16", "float32", "float64")
STATES: Mapping[str, int] = MappingProxyType({"adamw": 2, "sgd": 0})
"""Numbers that an optimizer keeps for each parameter: torch.optim's AdamW, and SGD without
momentum."""

OFFLOADED = ("optimizer", "parameters", "activations")
MOST_RANKS = 1 << 16


@dataclass(frozen=True)
class Setting:
    """Settings by which a model is trained.

    Args:
        machine: its device decides the codes of our passes, its links the plan of "auto".
        cp: ranks that share a sequence.
        dp: ranks over which FSDP shards parameters, gradients and the optimizer's state; 1: whole.
        dtype: of the model in forward and backward.
        param_dtype: of what FSDP shards, and of the optimizer's state; None: dtype.
        optimizer: one of STATES.
        checkpointing: transformers' gradient checkpointing, of every layer.
        offload: some of OFFLOADED. "optimizer": its state is on the host. "parameters": FSDP's
            shards, their gradients and the optimizer's state are. "activations": what autograd
            keeps for backward is.
        plan: of attention; None: the choice of ContextParallel(strategy="auto").
    Raises:
        ValueError: naming the field that is wrong.
    """

    machine: Machine
    cp: int = 1
    dp: int = 1
    dtype: str = "bfloat16"
    param_dtype: str | None = None
    optimizer: str = "adamw"
    checkpointing: bool = False
    offload: tuple[str, ...] = ()
    plan: Plan | None = None

    def __post_init__(self) -> None:
        for name in ("cp", "dp"):
            whole_number(name, getattr(self, name), 1, MOST_RANKS)
        require_known("dtype", self.dtype, DTYPES)
        require_known("optimizer", self.optimizer, tuple(STATES))
        for name in self.offload:
            require_known("offload", name, OFFLOADED)
        if self.param_dtype is not None:
            require_known("param_dtype", self.param_dtype, DTYPES)
            if self.param_dtype != self.dtype and not self.shards:
                raise ValueError(
                    f"param_dtype ({self.param_dtype}) must be dtype ({self.dtype}) where "
                    "parameters are whole on every rank; shard them (dp of 2 or more)"
                )
        if self.plan is not None and self.plan.world_size != self.cp:
            raise ValueError(
                f"the plan {self.plan.name} is for {self.plan.world_size} ranks, but cp is "
                f"{self.cp}; take a plan for {self.cp}"
            )

    @property
    def shards(self) -> bool:
        """True if FSDP holds the parameters, and gathers those of a layer when it runs."""
        return self.dp > 1 or "parameters" in self.offload

    @property
    def number_bytes(self) -> int:
        """Bytes of a number that forward and backward compute with."""
        return item_bytes(self.dtype)

    @property
    def shard_bytes(self) -> int:
        """Bytes of a number of a parameter at rest, of its gradient, of its optimizer's state."""
        return item_bytes(self.param_dtype or self.dtype)

    def layout(self, num_tokens: int) -> Layout:
        """Return the tokens of each rank, as ContextParallel(mask=Causal()) lays them out."""
        return default_layout(Causal(), num_tokens, self.cp)
