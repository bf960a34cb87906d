"""Transports: how bytes get from rank to rank, and what ranks agree on before.

process_group and posted: gloo and NCCL; loopback and cooperative_threads: all ranks in one process;
nccl_groups, nccl_batches, nodes and streams: what NCCL needs besides; lost_rank: who failed whom;
resolve: the transport of a group.
"""

from tilewise.transport.protocol import Transport
from tilewise.transport.resolve import Group, transport_for

__all__ = ["Group", "Transport", "transport_for"]
