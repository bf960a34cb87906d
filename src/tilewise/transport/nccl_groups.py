"""Groups that a group needs beside itself, made once and found again under its name.

They come from the group's own store, not from new_group. That names a group after how many others
a process knows, which need not be equal on its ranks; and where init_process_group was given a
device_id it splits the world's communicator, for which every rank of the world would have to come.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast
from weakref import finalize

import torch
import torch.distributed as dist

# Private in torch, but where torch itself keeps groups by name, until the world is destroyed.
from torch._C._distributed_c10d import (
    PrefixStore,
    Store,
    _register_process_group,
    _resolve_process_group,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend
    from torch.distributed.distributed_c10d import GroupName

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MOST_BLOCKS = 16
"""Of an NCCL kernel, each on a multiprocessor: NCCL takes up to 32 by itself. Not measured."""
Kinds = dist.ProcessGroup.BackendType


def gloo_group(group: dist.ProcessGroup, team: range | None = None) -> dist.ProcessGroup:
    """Neighbouring ranks of a group, or all, over gloo, made by them together at first use.

    It is the group itself where all are meant and CPU tensors go over gloo there.
    """
    on_cpu = CPU in group._device_types
    if on_cpu and (team is None or len(team) == group.size()):
        return group
    ranks, own = team or range(group.size()), CPU if on_cpu else CUDA
    name = f"gloo{ranks.start}-{ranks.stop}"
    known = _remembered(group, name)
    if known is not None:
        return known
    timeout = group._get_backend(own).options._timeout
    place = group.rank() - ranks.start, len(ranks)
    gloo = dist.ProcessGroupGloo(group_store(group, name), *place, timeout=timeout)
    return _companion(group, name, CPU, Kinds.GLOO, gloo, place)


def team_groups(group: dist.ProcessGroup) -> Iterator[dist.ProcessGroup]:
    """Yield the gloo groups that gloo_group has made for teams of neighbouring ranks."""
    rank = group.rank()
    for size in range(2, group.size() + 1):
        first = rank - rank % size
        known = _remembered(group, f"gloo{first}-{first + size}")
        if known is not None:
            yield known


def lane_group(group: dist.ProcessGroup, lane: int) -> dist.ProcessGroup:
    """An NCCL group of the same ranks with a communicator and a stream of its own, warmed up.

    The stream has high priority: its few blocks are not to wait for those of attention, which take
    all multiprocessors many times over. How many they are is bounded, as attention goes on beside.
    """
    name = f"lane{lane}"
    known = _remembered(group, name)
    if known is not None:
        return known
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = group._get_backend(CUDA).options._timeout
    options.global_ranks_in_group = dist.get_process_group_ranks(group)
    options.group_name = _alias(group, name)
    options.config.max_ctas = MOST_BLOCKS
    store = group_store(group, name)
    nccl = dist.ProcessGroupNCCL(store, group.rank(), group.size(), options)
    made = _companion(group, name, CUDA, Kinds.NCCL, nccl)
    warm_up(made)
    return made


def warm_up(group: dist.ProcessGroup) -> None:
    """Connect all ranks, at first use: the first batch of sends may involve only some of them."""
    if _remembered(group, "warm") is None:
        group.allreduce([torch.zeros(1, device=CUDA)]).wait()
        _register_process_group(_alias(group, "warm"), group)


def agreed_node_size(
    group: dist.ProcessGroup, lane: dist.ProcessGroup, node_size: int | None
) -> int | None:
    """The node size if all ranks name the same, else None; they compare them at first use.

    One rank that has two lanes where others have one would wait for ever.

    Args:
        lane: a group of our own, over which they are compared.
    """
    named = node_size or 0
    for answer, agreed in (("agreed", node_size), ("refused", None)):
        if _remembered(group, f"node_size{named}/{answer}") is not None:
            return agreed
    both = torch.tensor([named, -named], device=CUDA)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX  # pyright: ignore[reportAttributeAccessIssue]
    lane.allreduce([both], options).wait()
    highest, lowest = both.tolist()
    same = highest == -lowest
    answer = "agreed" if same else "refused"
    _register_process_group(_alias(group, f"node_size{named}/{answer}"), group)
    return node_size if same else None


def _companion(
    group: dist.ProcessGroup,
    name: str,
    device: torch.device,
    kind: dist.ProcessGroup.BackendType,
    backend: Backend,
    place: tuple[int, int] | None = None,
) -> dist.ProcessGroup:
    """Make a group of one backend, which ends when `group` does.

    Args:
        name: under which its part of the group's store is found.
        place: (this rank, number of ranks) in the new group; None: as in the group.
    """
    made = dist.ProcessGroup(group_store(group, name), *(place or (group.rank(), group.size())))
    made._set_default_backend(kind)
    made._register_backend(device, kind, backend)
    made._set_group_name(_alias(group, name))
    _register_process_group(_alias(group, name), made)
    finalize(group, made.shutdown).atexit = False
    return made


def group_store(group: dist.ProcessGroup, name: str) -> Store:
    """A part of the group's own store, for what is named so."""
    return PrefixStore(f"tilewise/{name}", group.get_group_store())


def _alias(group: dist.ProcessGroup, name: str) -> GroupName:
    return cast("GroupName", f"tilewise/{name}/{group.group_name}")


def _remembered(group: dist.ProcessGroup, name: str) -> dist.ProcessGroup | None:
    try:
        return _resolve_process_group(_alias(group, name))
    except RuntimeError:
        return None
