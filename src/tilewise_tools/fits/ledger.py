"""A ledger of tensors: the bytes that code holds after each operation, by what they are for.

A storage counts from the operation that makes it until the last tensor on it is gone, as torch's
allocators see it. Views count nothing. Memory that a kernel takes and returns inside one operation
is not seen.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Kind(IntEnum):
    """The purpose of a tensor."""

    LAYERS = 0  # made by a decoder layer in forward
    ATTENTION = 1  # q, k, v, out and lse, and what attention keeps
    HEAD = 2  # made in forward outside of the layers: embeddings, logits, the loss
    BACKWARD = 3  # made in backward, layers that run again among them
    GRADIENTS = 4  # of parameters


class AttentionPass(NamedTuple):
    """A pass of attention: of which call, and whether it is backward."""

    call: Any
    backward: bool


class Ledger(TorchDispatchMode):
    """Count the bytes of tensors that are made while it is active.

    Attributes:
        kind: of tensors that are made now.
        rows: after each operation, the live bytes of each kind.
        passes: by the number of a row, the pass of attention that runs there.
    """

    def __init__(self, ignored: Iterable[Tensor]):
        """Args: ignored: tensors whose storages are counted elsewhere, such as parameters."""
        super().__init__()
        self.kind = Kind.HEAD
        self.rows: list[tuple[int, ...]] = []
        self.passes: dict[int, AttentionPass] = {}
        self._live = [0] * len(Kind)
        self._entries: dict[int, tuple[Kind, int]] = {}
        self._ignored = {x.untyped_storage()._cdata for x in ignored}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for x in tree_iter(results):
            if isinstance(x, Tensor):
                self._enter(x)
        self.rows.append(tuple(self._live))
        return results

    @contextmanager
    def making(self, kind: Kind) -> Iterator[None]:
        """Context in which new tensors count as of this kind."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    def move(self, x: Tensor, kind: Kind) -> None:
        """Say that a tensor's storage is of another kind."""
        key = x.untyped_storage()._cdata
        if key in self._entries:
            before, num_bytes = self._entries[key]
            self._entries[key] = kind, num_bytes
            self._add(before, -num_bytes)
            self._add(kind, num_bytes)

    def add(self, kind: Kind, num_bytes: int) -> None:
        """Count bytes that stay, of no tensor."""
        self._add(kind, num_bytes)
        self.rows.append(tuple(self._live))

    def note(self, attention: AttentionPass, extra_bytes: int) -> None:
        """Note that a pass of attention runs here, and takes extra bytes of its own."""
        self.passes[len(self.rows)] = attention
        self._add(Kind.ATTENTION, extra_bytes)
        self.rows.append(tuple(self._live))
        self._add(Kind.ATTENTION, -extra_bytes)

    def _add(self, kind: Kind, num_bytes: int) -> None:
        self._live[kind] += num_bytes

    def _enter(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._entries or key in self._ignored:
            return
        self._entries[key] = self.kind, storage.nbytes()
        self._add(self.kind, storage.nbytes())
        weakref.finalize(storage, self._leave, key).atexit = False

    def _leave(self, key: int) -> None:
        kind, num_bytes = self._entries.pop(key)
        self._add(kind, -num_bytes)
