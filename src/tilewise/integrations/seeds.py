"""Random numbers that all ranks share, where the host library draws from torch's generator."""

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import tilewise as tw
from tilewise.execution.validation import MOST_SEEDS
from tilewise.transport.agreement import agree_on_largest
from tilewise.transport.loopback import LoopbackGroup


def drawn_seed(group: tw.transport.Group) -> int:
    """This rank's draw from torch's CPU generator, 0 on all but rank 0 of a loopback.

    Ranks of a loopback share the generator: rank 0 alone draws.
    """
    if isinstance(group, LoopbackGroup) and group.rank:
        return 0
    return int(torch.randint(MOST_SEEDS, (), device="cpu"))


def agreed_seed(group: tw.transport.Group, drawn: int | None = None) -> int:
    """Rank 0's draw on every rank of the group, which all call it.

    Args:
        drawn: this rank's `drawn_seed`; None: it draws here.
    """
    drawn = drawn_seed(group) if drawn is None else drawn
    transport = tw.transport.transport_for(group)
    return agree_on_largest(transport, "dropout seed", 0 if transport.rank else drawn)


def share_random_state(group: Any) -> None:
    """Every rank of a group goes on with the random numbers of its first."""
    state: list[Any] = [random.getstate(), np.random.get_state(), torch.get_rng_state()]
    if torch.cuda.is_available():
        state.append(torch.cuda.get_rng_state())
    dist.broadcast_object_list(state, dist.get_global_rank(group, 0), group=group)
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state[3])
