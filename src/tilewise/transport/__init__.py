"""How bytes get from rank to rank, and what ranks agree on before.

process_group: gloo and NCCL; loopback and cooperative_threads: all ranks in one process;
nccl_groups and streams: what NCCL needs besides; resolve: the transport of a group.
"""
