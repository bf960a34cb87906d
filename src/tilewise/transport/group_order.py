"""Ranks that use two groups in different orders are found: each waits in one group for a call that
the other has yet to make.

A rank that waits long says in the store of the world in which group, and how many calls it has made
in each of its groups. Rank a waits in group G for rank b, which has not come to that call; b waits
in group H in a call to which a has not come. Each has made first what the other has yet to make.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from uuid import uuid4

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from tilewise.transport.agreement import Agreement, described
from tilewise.transport.nccl_groups import group_store


class _Wait(NamedTuple):
    """The message that a waiting rank leaves for the others.

    Attributes:
        group: name of the group that it waits in.
        call: the call that it waits in, in words.
        calls: by the names of its groups, how many calls it has made, with this one.
    """

    group: str
    call: str
    calls: Mapping[str, int]


def said(group: dist.ProcessGroup, agreements: Mapping[dist.ProcessGroup, Agreement]) -> bool:
    """Note in the store of the world that this rank waits in a group.

    Args:
        agreements: of all groups that this process has used. Where several threads call, each may
            have groups of its own, and their order is not that of the process.
    Returns:
        False if it was not noted: there is no such store, or several threads make calls, so that
        their
        order means nothing.
    """
    world = _world()
    if world is None or len(_python_threads(x.caller for x in agreements.values())) > 1:
        return False
    calls = {_name_of(g): x.state().number for g, x in agreements.items()}
    wait = _Wait(_name_of(group), described(agreements[group].state()), calls)
    world.set(str(dist.get_rank()), json.dumps(wait))
    return True


def taken_back() -> None:
    """Delete this rank's note in the store of the world that it waits."""
    world = _world()
    if world is not None:
        world.set(str(dist.get_rank()), "")


def other_order(group: dist.ProcessGroup, peers: Iterable[int]) -> str | None:
    """Return why the wait of this rank can never end, or None if that is not certain.

    Args:
        peers: ranks of the group for which it waits.
    """
    world, own = _world(), dist.get_rank()
    assert world is not None
    mine = _wait_of(world, own)
    if mine is None:
        return None
    key = f"verdict {mine.group}"
    if world.check([key]):
        return world.get(key).decode()
    ranks = dist.get_process_group_ranks(group)
    for peer in peers:
        theirs = _wait_of(world, ranks[peer])
        if theirs is None or theirs.group == mine.group:
            continue
        behind = theirs.calls.get(mine.group, 0) < mine.calls[mine.group]
        ahead = theirs.calls[theirs.group] > mine.calls.get(theirs.group, 0)
        if behind and ahead:
            verdict = (
                f"rank {group.rank()} waits for rank {peer} in {mine.call} of one group, but rank "
                f"{peer} waits in {theirs.call} of another; use groups in the same order on every "
                "rank"
            )
            for name in sorted((mine.group, theirs.group)):  # the first verdict stays, for all
                verdict = world.compare_set(f"verdict {name}", "", verdict).decode()
            return verdict
    return None


def _wait_of(world: Store, rank: int) -> _Wait | None:
    text = world.get(str(rank)) if world.check([str(rank)]) else b""
    return _Wait(*json.loads(text)) if text else None


def _world() -> Store | None:
    """The store of all ranks; None: there is none."""
    world = dist.group.WORLD
    return None if world is None else group_store(world, "waits")


def _name_of(group: dist.ProcessGroup) -> str:
    """A name of the group that all its ranks know: the first that one of them gave it."""
    return group_store(group, "calls").compare_set("name", "", uuid4().hex).decode()


def _python_threads(threads: Iterable[int | None]) -> set[int | None]:
    """Return those that Python has started: autograd's work while another one waits for them."""
    started = {x.ident for x in threading.enumerate() if not x.name.startswith("Dummy-")}
    return started & {*threads}
