"""Workspaces: the memory that passes take one after the other, and the tensors bound to it."""

from collections.abc import Callable, Hashable
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tilewise.transport.streams import Moment, current_moment, follow

Numbered: TypeAlias = dict[int, Any]
"""The tensors of a code by number, and what teams exchange of them."""
Bind: TypeAlias = Callable[[Tensor], Numbered]
"""Makes those that lie in a workspace's bytes."""


class Workspace:
    """Memory that one pass at a time uses, and the tensors that codes have in it."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._bound: WeakKeyDictionary[Hashable, Numbered] = WeakKeyDictionary()
        self._left: Moment | None = None

    def enter(self, code: Hashable, num_bytes: int, device: torch.device, bind: Bind) -> Numbered:
        """The tensors of a code, for a pass that begins now on the current stream.

        Args:
            code: what the tensors are bound for; they are kept as long as it lives.
        """
        buffer = self._buffer
        if buffer is not None and self._left is not None:
            follow(self._left, buffer)
        if buffer is None or buffer.numel() < num_bytes:
            buffer = self._grown(num_bytes, device)
        bound = self._bound.get(code)
        if bound is None:
            with torch.inference_mode(False):  # else later passes outside of it could not write
                bound = self._bound[code] = bind(buffer)
        return bound

    @torch.inference_mode(False)
    def _grown(self, num_bytes: int, device: torch.device) -> Tensor:
        self._bound.clear()
        self._buffer = None  # before the larger one is made
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._buffer

    def leave(self) -> None:
        """The pass has launched all that it does with the memory."""
        if self._buffer is not None:
            self._left = current_moment(self._buffer.device)


class WorkspacePool:
    """The workspaces of one rank and device, as many as there were passes at once.

    A pass takes one from the pool and puts it back when it ends, so no two ever share one, of
    whatever threads or layers they are. A pass that fails does not put its workspace back.
    """

    def __init__(self) -> None:
        self.workspaces: list[Workspace] = []

    def take(self) -> Workspace:
        try:
            return self.workspaces.pop()
        except IndexError:
            return Workspace()

    def give_back(self, workspace: Workspace) -> None:
        self.workspaces.append(workspace)
