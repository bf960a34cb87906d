"""What a plan makes each host's NIC send: transfers inside a host do not count.

With several ranks on a host it is the NIC that is busy, not the rank.
"""

from __future__ import annotations

from tilewise.plan.ir import Plan
from tilewise.workload import Workload


def nic_bytes(
    plan: Plan, work: Workload, ranks_per_host: int, *, backward: bool, prune: bool = True
) -> tuple[int, ...]:
    """Bytes sent by each host in one pass; for one rank a host, and pruned, as tw.volume.

    Args:
        ranks_per_host: rank r is on host r // ranks_per_host; must divide the world size.
    """
    if plan.world_size % ranks_per_host:
        raise ValueError(
            f"world_size ({plan.world_size}) must be a multiple of "
            f"ranks_per_host ({ranks_per_host})"
        )
    resolved = work.resolve(plan)[backward]
    plan = resolved.pruned if prune else resolved.plan

    def sent(rank: int) -> int:
        return sum(
            resolved.hop_bytes(hop)
            for step in plan.rank_steps(rank)
            for hop in step.sends
            if hop.dst // ranks_per_host != rank // ranks_per_host
        )

    hosts = range(plan.world_size // ranks_per_host)
    return tuple(
        sum(map(sent, range(host * ranks_per_host, (host + 1) * ranks_per_host))) for host in hosts
    )
