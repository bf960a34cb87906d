"""An exchange as groups of NCCL operations, in one order on all ranks."""

from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist

from tilewise.transport.protocol import Message

# An NCCL group of operations fails above 256; half of them are sends.
_NCCL_PAIRS = 128


def post_batch(group: dist.ProcessGroup, batch: Sequence[tuple[bool, Message]]) -> dist.Work:
    """Start a batch's sends and receives as one operation.

    As dist.batch_isend_irecv does, which knows no groups but those of new_group.
    """
    device = batch[0][1].tensor.device
    if not group._get_backend(device).supports_coalescing:
        raise ValueError(
            f"the group's backend for {device.type} tensors cannot start sends and receives "
            "together; leave out TORCH_DISTRIBUTED_DEBUG=DETAIL, which wraps it"
        )
    group._start_coalescing(device)
    for is_send, (tensor, peer, _) in batch:
        post = group.send if is_send else group.recv
        post([tensor], peer, 0)
    return group._end_coalescing(device)


def nccl_batches(
    sends: Sequence[Message], recvs: Sequence[Message], rank: int, world_size: int
) -> list[list[tuple[bool, Message]]]:
    """Split an exchange into batches that NCCL takes, the same way on both ends of each message.

    The i-th message from rank a to rank b has the number i world_size + (b - a) mod world_size.
    Both ends know it, a rank has at most one send and one receive of a number, and all ranks
    run the batches in the order of their numbers, so no batch waits for a later one.

    Returns:
        Batches of at most 256 (is_send, message).
    """
    batches: dict[int, list[tuple[bool, Message]]] = {}
    for is_send, messages in ((True, sends), (False, recvs)):
        seen: Counter[int] = Counter()
        for message in messages:
            distance = (message.peer - rank if is_send else rank - message.peer) % world_size
            number = seen[message.peer] * world_size + distance
            seen[message.peer] += 1
            batches.setdefault(number // _NCCL_PAIRS, []).append((is_send, message))
    return [batches[number] for number in sorted(batches)]
