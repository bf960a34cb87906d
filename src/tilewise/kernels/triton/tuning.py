"""Blocks, warps and stages of our Triton kernels, by GPU, head_dim and dtype.

Stands apart because it is a table: chosen from what the compiler makes of each entry (registers,
spills, shared memory, matrix instructions; `python -m benchmarks.triton_code`), no entry measured.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch


class LaunchBlocks(NamedTuple):
    """Rows (at most 128) and keys of a block, and how Triton is to run it.

    Attributes:
        registers: that a thread may have at most (None: as many as the compiler takes).
    """

    rows: int
    keys: int
    warps: int = 4
    stages: int = 1
    registers: int | None = None


class Tuning(NamedTuple):
    """Blocks of the kernels.

    Attributes:
        forward, dq: of blocks of rows.
        keys: of blocks of keys: one pass for dk and dv, or one for dk and one for dv.
        at_once: dq, dk and dv in one pass with atomic additions; None where that is not offered.
    """

    forward: LaunchBlocks
    dq: LaunchBlocks
    keys: tuple[LaunchBlocks, ...]
    at_once: LaunchBlocks | None = None


# By the largest head_dim. Two blocks of 64 fit a multiprocessor at 128 registers. Of 128, a third
# stage keeps loads ahead of the matrix products. Of 256, dk and dv together do not fit registers.
_HOPPER: Mapping[int, Tuning] = MappingProxyType(
    {
        64: Tuning(
            forward=LaunchBlocks(128, 64, 8, 3, 128),
            dq=LaunchBlocks(128, 64, 8, 3, 128),
            keys=(LaunchBlocks(64, 128, 8, 3),),
            at_once=LaunchBlocks(64, 128, 8, 3),
        ),
        128: Tuning(
            forward=LaunchBlocks(128, 128, 8, 3),
            dq=LaunchBlocks(128, 64, 8, 3),
            keys=(LaunchBlocks(64, 128, 8, 3),),
            at_once=LaunchBlocks(64, 128, 8, 3),
        ),
        256: Tuning(
            forward=LaunchBlocks(128, 64, 8, 2),
            dq=LaunchBlocks(128, 32, 8, 3),
            keys=(LaunchBlocks(32, 128, 8, 3), LaunchBlocks(64, 128, 8, 2)),
        ),
    }
)
# Triton 3.6 makes a trap of the pass that does all at once.
_BLACKWELL: Mapping[int, Tuning] = MappingProxyType(
    {
        64: Tuning(
            LaunchBlocks(128, 128, 8, 3),
            LaunchBlocks(128, 64, 8, 3),
            (LaunchBlocks(64, 128, 8, 3),),
        ),
        128: Tuning(
            LaunchBlocks(128, 128, 8, 2),
            LaunchBlocks(128, 64, 8, 3),
            (LaunchBlocks(64, 128, 8, 3),),
        ),
        256: _HOPPER[256]._replace(
            dq=LaunchBlocks(128, 32, 8, 2), keys=(LaunchBlocks(32, 128, 8, 2),) * 2
        ),
    }
)
# Fits the 99 KiB of shared memory that every GPU from Ampere on has.
_OTHERS: Mapping[int, Tuning] = MappingProxyType(
    {
        64: Tuning(
            LaunchBlocks(128, 64, 8, 3), LaunchBlocks(128, 64, 8, 3), (LaunchBlocks(64, 128, 8, 3),)
        ),
        128: Tuning(
            LaunchBlocks(128, 64, 8, 3), LaunchBlocks(128, 32, 8, 3), (LaunchBlocks(32, 128, 8, 3),)
        ),
        256: Tuning(
            LaunchBlocks(64, 32, 8, 2),
            LaunchBlocks(64, 32, 8, 1),
            (LaunchBlocks(32, 64, 8, 1), LaunchBlocks(32, 64, 8, 2)),
        ),
    }
)
_FLOAT32: Mapping[int, Tuning] = MappingProxyType(
    {
        64: Tuning(
            LaunchBlocks(64, 32, 4, 2), LaunchBlocks(64, 32, 4, 2), (LaunchBlocks(64, 32, 4, 2),)
        ),
        256: Tuning(
            LaunchBlocks(32, 32, 4, 1), LaunchBlocks(32, 32, 4, 1), (LaunchBlocks(32, 32, 4, 1),)
        ),
    }
)


def tuning_for(head_dim: int, dtype: torch.dtype, major: int = 9) -> Tuning:
    """Blocks for a GPU whose compute capability begins with major."""
    by_major = {9: _HOPPER, 10: _BLACKWELL}
    table = _FLOAT32 if dtype == torch.float32 else by_major.get(major, _OTHERS)
    return next(tuning for most, tuning in table.items() if head_dim <= most)
