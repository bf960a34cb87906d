"""Groups that an NCCL group needs beside itself, made once and found again under its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist

# Private in torch, but where torch itself keeps groups by name, until the world is destroyed.
from torch._C._distributed_c10d import _register_process_group, _resolve_process_group

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName


def companion(group: dist.ProcessGroup, name: str, backend: str) -> dist.ProcessGroup:
    """Return a second group of the same ranks, made by all of them together at first use."""
    alias = _alias(group, name)
    known = _registered(alias)
    if known is not None:
        return known
    ranks = dist.get_process_group_ranks(group)
    made = dist.new_group(ranks, backend=backend, use_local_synchronization=True, group_desc=alias)
    assert isinstance(made, dist.ProcessGroup), "this rank is one of the group's"
    _register_process_group(alias, made)
    return made


def warm_up(group: dist.ProcessGroup) -> None:
    alias = _alias(group, "warm")
    if _registered(alias) is None:
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
        _register_process_group(alias, group)


def _alias(group: dist.ProcessGroup, name: str) -> GroupName:
    return cast("GroupName", f"tilewise/{name}/{group.group_name}")


def _registered(alias: GroupName) -> dist.ProcessGroup | None:
    try:
        return _resolve_process_group(alias)
    except RuntimeError:
        return None


def agreed_node_size(group: dist.ProcessGroup, node_size: int | None) -> int | None:
    """The node size if all ranks name the same, else None; they compare them at first use.

    One rank that has two lanes where others have one would wait for ever.
    """
    named = node_size or 0
    for answer, agreed in (("agreed", node_size), ("refused", None)):
        if _registered(_alias(group, f"node_size{named}/{answer}")) is not None:
            return agreed
    both = torch.tensor([named, -named], device="cuda")
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    highest, lowest = both.tolist()
    same = highest == -lowest
    answer = "agreed" if same else "refused"
    _register_process_group(_alias(group, f"node_size{named}/{answer}"), group)
    return node_size if same else None
