"""accelerate's ParallelismConfig with a cp_size that splits any model which tilewise can split.

    from tilewise.integrations.accelerate import ParallelismConfig

    TrainingArguments(..., parallelism_config=ParallelismConfig(cp_size=4))

It serves TrainingArguments, TRL's configurations and Accelerator. Data, collators and the script
stay as they are: rows are split in the model's forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import tilewise as tw

try:
    from accelerate.parallelism_config import ParallelismConfig as _ParallelismConfig
except ImportError as error:
    raise ImportError(
        "tilewise.integrations.accelerate needs accelerate: pip install 'tilewise[hf]'"
    ) from error

from tilewise.arguments import Reduction, of_kind, whole_number
from tilewise.integrations.transformers.internals import install, split_accelerator
from tilewise.integrations.transformers.refusals import SIZES, check_allowed

__all__ = ["ParallelismConfig"]


@dataclass(repr=False)
class ParallelismConfig(_ParallelismConfig):
    """accelerate's ParallelismConfig, whose cp_size is the number of ranks that share each row.

        ParallelismConfig(cp_size=4)                      # the other processes are data-parallel
        ParallelismConfig(cp_size=4, strategy=tw.ring(4))

    Sizes that are not given are read from the environment that `accelerate launch` sets. If no
    data-parallel size is given, the processes that cp_size leaves are data-parallel. For accelerate
    itself cp is not enabled: it would shard the batch, and Trainers would refuse it.

    Args:
        cp_size: ranks that share each row; 1: nothing is split. Sizes are given by name.
        dp_replicate_size, dp_shard_size: data-parallel ranks that replicate, or shard, the weights.
        strategy: "auto", or a plan such as tw.ring(4).
        reduction: of attention, as ContextParallel takes it: "canonical" for the same bits at any
            cp_size, on the CPU (docs/numerics.md).
    Raises:
        ValueError: for sizes that cannot be combined.
    """

    strategy: Literal["auto"] | tw.Plan = "auto"
    reduction: Reduction = "fast"

    def __new__(cls, *sizes: Any, **given: Any) -> ParallelismConfig:
        if sizes:  # accelerate would take the first for dp_replicate_size
            raise ValueError(
                f"sizes ({', '.join(map(str, sizes))}) must be given by name: "
                f"ParallelismConfig(cp_size={sizes[0]})"
            )
        return super().__new__(cls)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}_size={size}" for name, size in self._sizes.items() if size > 1)
        return (
            f"ParallelismConfig({sizes or 'cp_size=1'}, strategy={self.strategy!r}, "
            f"reduction={self.reduction!r})"
        )

    def __post_init__(self) -> None:
        given = self.cp_size
        if given is None:
            launched = _ParallelismConfig(1, 1, 1, sp_size=1)  # reads cp_size alone
            given = launched.cp_size
        given = whole_number("cp_size", given)
        self.cp_size = 1  # accelerate's checks of cp are of its own cp
        super().__post_init__()
        self.cp_size = self._sizes["cp"] = given
        if given == 1:
            return
        check_allowed(SIZES, self)
        of_kind("reduction", self.reduction, Reduction)
        if isinstance(self.strategy, tw.Plan) and self.strategy.world_size != given:
            raise ValueError(
                f"strategy is for {self.strategy.world_size} ranks, cp_size is {given}; make it "
                "for as many"
            )
        install()

    @property
    def row_ranks(self) -> int:
        """Ranks that share each row; cp_size, also while a Trainer is told that it is 1."""
        return self._sizes["cp"]

    @property
    def splits_forward(self) -> bool:
        """True if models that an Accelerator prepares are split."""
        return self.row_ranks > 1

    @property
    def cp_enabled(self) -> bool:
        """False: accelerate, transformers and TRL leave the sequence alone."""
        return False

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Dimensions whose ranks read the same batch."""
        return ["cp"] * self.splits_forward + super().non_dp_dim_names

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Dimensions over which FSDP shards."""
        return super().dp_shard_cp_dim_names + ["cp"] * self.splits_forward

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Dimensions over which gradients are averaged."""
        return super().dp_cp_dim_names + ["cp"] * self.splits_forward

    def build_device_mesh(self, device_type: str) -> Any:
        """accelerate's mesh; the processes that no size names are data-parallel."""
        if self.splits_forward:
            self._fill_data_parallel()
        return super().build_device_mesh(device_type)

    def _fill_data_parallel(self) -> None:
        from accelerate.state import AcceleratorState, PartialState

        num_processes, sizes = PartialState().num_processes, self._sizes
        others, rest = divmod(num_processes, sizes["cp"])
        if rest:
            raise ValueError(
                f"cp_size ({sizes['cp']}) must divide the number of processes ({num_processes})"
            )
        if sizes["dp_replicate"] * sizes["dp_shard"] == 1 and others > 1:
            shards = AcceleratorState().distributed_type.value == "FSDP"
            self._set_size("dp_shard" if shards else "dp_replicate", others)
        if self.total_size != num_processes:
            raise ValueError(
                f"dp_replicate_size ({sizes['dp_replicate']}) x dp_shard_size "
                f"({sizes['dp_shard']}) x cp_size ({sizes['cp']}) must be the number of "
                f"processes ({num_processes}); leave the dp sizes out to have them set"
            )

    def _validate_accelerator(self, accelerator: Any) -> None:
        if not self.splits_forward:
            super()._validate_accelerator(accelerator)
            return
        split_accelerator(accelerator)
