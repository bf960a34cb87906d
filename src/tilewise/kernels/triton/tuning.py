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


class ListBlocks(NamedTuple):
    """Query heads (at most) and keys of a block of the kernels of `lists.py`."""

    heads: int
    keys: int
    warps: int
    stages: int


class ListTuning(NamedTuple):
    """Blocks of the kernels of lists.

    Attributes:
        forward, dq: a block of heads, over blocks of keys.
        shares: of dk and dv: a block of keys, over blocks of heads.
    """

    forward: ListBlocks
    dq: ListBlocks
    shares: ListBlocks


MOST_LIST_WIDTHS: Mapping[torch.dtype, tuple[int, int]] = MappingProxyType(
    {torch.bfloat16: (576, 512), torch.float16: (576, 512), torch.float32: (256, 256)}
)
"""The largest head_dim and v_head_dim of lists: latents with their rotary part, and what of fp32
fits registers."""

# By the larger of head_dim and v_head_dim. Over 256, registers are what bounds blocks.
_LISTS_WIDE: Mapping[int, ListTuning] = MappingProxyType(
    {
        128: ListTuning(
            ListBlocks(64, 64, 4, 3), ListBlocks(64, 64, 4, 3), ListBlocks(32, 64, 8, 3)
        ),
        256: ListTuning(
            ListBlocks(64, 64, 8, 2), ListBlocks(64, 32, 8, 2), ListBlocks(16, 32, 8, 2)
        ),
        576: ListTuning(
            ListBlocks(64, 32, 8, 2), ListBlocks(32, 32, 8, 2), ListBlocks(32, 16, 8, 2)
        ),
    }
)
# Fits 99 KiB of shared memory.
_LISTS_OTHERS: Mapping[int, ListTuning] = MappingProxyType(
    {
        128: ListTuning(
            ListBlocks(32, 64, 4, 2), ListBlocks(32, 32, 4, 3), ListBlocks(32, 32, 4, 2)
        ),
        256: ListTuning(
            ListBlocks(32, 32, 4, 2), ListBlocks(32, 32, 8, 2), ListBlocks(16, 32, 8, 2)
        ),
        576: ListTuning(
            ListBlocks(32, 16, 8, 2), ListBlocks(16, 16, 8, 2), ListBlocks(16, 16, 8, 2)
        ),
    }
)
_LISTS_FLOAT32: Mapping[int, ListTuning] = MappingProxyType(
    {
        128: ListTuning(
            ListBlocks(16, 32, 4, 2), ListBlocks(16, 32, 4, 2), ListBlocks(16, 16, 4, 2)
        ),
        256: ListTuning(
            ListBlocks(16, 32, 8, 1), ListBlocks(16, 16, 8, 1), ListBlocks(16, 16, 8, 1)
        ),
    }
)


def list_tuning_for(width: int, dtype: torch.dtype, major: int = 9) -> ListTuning:
    """Blocks of lists for a GPU whose compute capability begins with major.

    Args:
        width: the larger of head_dim and v_head_dim; at most the first of MOST_LIST_WIDTHS.
    """
    table = _LISTS_WIDE if major in (9, 10) else _LISTS_OTHERS
    table = _LISTS_FLOAT32 if dtype == torch.float32 else table
    return next(tuning for most, tuning in table.items() if width <= most)
