"""A transport on which messages arrive at once: random bytes, copied in on a stream of its own.

Random, because a GPU that multiplies zeros draws less power and runs faster. In every two bytes
the exponent's highest bits are those of numbers below 2, so that bf16 has neither inf nor nan.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.compiler.program import LAUNCHES_IN_FLIGHT
from tilewise.transport.protocol import Message
from tilewise.transport.streams import Moment, current_moment, follow, new_stream, on_stream


class Instant:
    """One rank of a world of which the others only send."""

    receives_ahead = 0
    sends_in_flight = LAUNCHES_IN_FLIGHT
    node_size: int | None = None

    def __init__(self, rank: int, world_size: int, device: torch.device, num_bytes: int):
        self.rank, self.world_size = rank, world_size
        self.bytes_sent = self.messages_sent = 0
        numbers = torch.rand(num_bytes // 2, device=device).sub_(0.5).to(torch.bfloat16)
        self._bytes = numbers.view(torch.uint8)
        self.num_bytes = num_bytes
        self._stream = new_stream(device)

    def exchange(
        self, sends: Sequence[Message], recvs: Sequence[Message], lane: int = 0
    ) -> _Arrived:
        self.bytes_sent += sum(message.tensor.nbytes for message in sends)
        self.messages_sent += len(sends)
        posted = current_moment(self._bytes.device)
        with on_stream(self._stream):
            follow(posted)
            for message in recvs:
                room = message.tensor.view(-1)
                room.copy_(self._bytes[: len(room)], non_blocking=True)
            return _Arrived(current_moment(self._bytes.device), [m.tensor for m in recvs])

    def gather_records(self, record: Tensor) -> list[Tensor]:
        return [record] * self.world_size

    def finish(self) -> None:
        if self._stream is not None:
            with on_stream(self._stream):
                last = current_moment(self._bytes.device)
            follow(last)


class _Arrived:
    def __init__(self, moment: Moment | None, rooms: list[Tensor]):
        self._moment, self._rooms = moment, rooms  # rooms: alive until they are waited for

    def wait(self) -> None:
        follow(self._moment)
        self._rooms = []
