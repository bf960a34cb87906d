"""A cache of what kernels make of a call on a device (lists of work, masks), kept with the call.

It goes with the call, hence with the plan that the call belongs to; when all of it takes too many
bytes, what was used longest ago goes first. What a CUDA graph is captured with stays as long as the
graph, whose replays read it where it lies; for good where torch does not say which graph that is.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tilewise.tiles.calls import KernelCall, Life
from tilewise.transport.streams import Stream, current_stream, is_capturing

MOST_BYTES = 1 << 28
Value = TypeVar("Value")


class _Entry(NamedTuple):
    end: "weakref.ref[Life]"
    value: object
    tensors: Sequence[Tensor]
    stream: Stream | None  # whose allocations they are

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in self.tensors)


class CallCache:
    """Values by call and key.

    Args:
        most_bytes: of all tensors together, those of graphs aside.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes, self.num_bytes = most_bytes, 0
        self._lock = threading.RLock()  # a call may end while the lock is held
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._captured: dict[int, object] = {}

    def get(
        self,
        call: KernelCall,
        key: Hashable,
        device: torch.device,
        make: Callable[[], tuple[Value, Sequence[Tensor | None]]],
    ) -> Value:
        """The value of a call and key on a device, made if it is not there.

        Args:
            make: the value, and the tensors that it holds.
        """
        life = call.life
        place = id(life), key, device
        stream = current_stream(device)
        with self._lock:
            entry = self._entries.get(place)
            if entry is not None:
                self._entries.move_to_end(place)
        if entry is None or entry.end() is not life:
            value, tensors = make()
            end = weakref.ref(life, lambda _: self._drop(place))
            entry = _Entry(end, value, [x for x in tensors if x is not None], stream)
            with self._lock:
                self._drop(place)  # another thread's
                self._entries[place] = entry
                self.num_bytes += entry.num_bytes
                while self.num_bytes > self.most_bytes and len(self._entries) > 1:
                    self._drop(next(iter(self._entries)))
        elif stream is not None and stream != entry.stream:
            for x in entry.tensors:
                x.record_stream(stream)
        self.keep_if_capturing(device, entry)
        return entry.value  # pyright: ignore[reportReturnType]

    def keep_if_capturing(self, device: torch.device, value: object) -> None:
        """Keep what a graph that is being captured reads; from 2.15 on torch's graphs can."""
        graphs: Any = torch.cuda.CUDAGraph
        if is_capturing(device):
            try:
                graph = graphs.get_currently_capturing_graph()
                graph.retain_object(value, synchronize_before_release=True)
            except (AttributeError, RuntimeError):  # an older torch; a graph that is not torch's
                self._captured[id(value)] = value

    def _drop(self, place: Hashable) -> None:
        with self._lock:
            entry = self._entries.pop(place, None)
            if entry is not None:
                self.num_bytes -= entry.num_bytes


CALL_CACHE = CallCache()
