"""The memory of bound passes: slabs that passes use by turns, of one rank and device.

It stands alone because it knows no pass, only whose turn it is and on which stream.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tilewise.execution.memory_plan import Tape
from tilewise.transport.streams import Moment, current_moment, follow


class Slab:
    """Memory that one pass at a time uses, and what tapes see of it."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._views: WeakKeyDictionary[Tape, list[Tensor]] = WeakKeyDictionary()
        self._left: Moment | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.numel()

    @torch.inference_mode(False)  # else later passes outside of it could not write
    def enter(self, tape: Tape, device: torch.device) -> list[Tensor]:
        """The buffers of a tape, for a pass that begins now on the current stream."""
        if self._buffer is not None:
            follow(self._left, self._buffer)
        if self.num_bytes < tape.num_bytes:
            self._views.clear()
            self._buffer = None  # before the larger one is made
            self._buffer = torch.empty(tape.num_bytes, dtype=torch.uint8, device=device)
        views = self._views.get(tape)
        if views is None:
            whole = torch.empty(0, device=device) if self._buffer is None else self._buffer
            views = self._views[tape] = tape.views(whole.view(torch.uint8))
        return views

    def leave(self) -> None:
        """The pass has launched all that it does with the buffers."""
        if self._buffer is not None:
            self._left = current_moment(self._buffer.device)


class Shelf:
    """The slabs of one rank and device, as many as there were passes at once.

    A pass takes one from the shelf and puts it back when it ends, so no two ever share one, of
    whatever threads or layers they are. A pass that fails does not put its slab back.
    """

    def __init__(self) -> None:
        self.slabs: list[Slab] = []

    def take(self) -> Slab:
        try:
            return self.slabs.pop()
        except IndexError:
            return Slab()
