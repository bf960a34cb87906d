"""Memory of one device that the other ranks of a node write to: torch's symmetric memory.

Only this file calls torch.distributed._symmetric_memory, which is private in torch; it uses what
2.11 and 2.13 share. Streams write and wait for signals by themselves, without a kernel.
"""

from __future__ import annotations

from bisect import insort
from importlib.util import find_spec
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor

WORDS = 2
"""Signals that a rank has for each other one: see `Signal`."""
_ALIGNMENT = 512
_WRAP = 2**32  # of a signal's value; waiting compares cyclically


class SymmetricMemory:
    """As much memory of every rank, on its device, as the others write to; made by all together.

    Args:
        num_bytes: of each rank, the same on all.

    Attributes:
        own: this rank's, flat bytes.

    Raises:
        RuntimeError: by torch, if a device cannot map another's memory.
    """

    @torch.inference_mode(False)  # else later passes outside of it could not write
    def __init__(self, group: dist.ProcessGroup, num_bytes: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self._rank, size = group.rank(), group.size()
        self._device = torch.device("cuda", torch.cuda.current_device())
        words, num_bytes = WORDS * size, -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        whole = symmetric.empty([num_bytes + 4 * words], dtype=torch.uint8, device=self._device)
        whole.zero_()
        torch.cuda.synchronize(self._device)
        handle = symmetric.rendezvous(whole, group)  # all ranks' words are 0 from here on
        self._handle = handle  # keeps the peers' memory mapped
        self.own = whole[:num_bytes]
        self._words = whole[num_bytes:].view(torch.uint32)
        buffers = [handle.get_buffer(peer, whole.shape, torch.uint8) for peer in range(size)]
        self._peers = [x[:num_bytes] for x in buffers]
        self._peer_words = [x[num_bytes:].view(torch.uint32) for x in buffers]

    def of(self, peer: int) -> Tensor:
        """A peer's memory: flat bytes, for this device's streams to write."""
        return self._peers[peer]

    def write_signal(self, peer: int, word: int, value: int) -> None:
        """The current stream sets a peer's word for this rank, after all that it did before."""
        from torch._C._distributed_c10d import _SymmetricMemory

        words, at = self._peer_words[peer], self._rank * WORDS + word
        _SymmetricMemory.stream_write_value32(words, at, value % _WRAP)

    def wait_signal(self, peer: int, word: int, value: int) -> None:
        """The current stream waits until this rank's word for a peer is at least a value."""
        driver = _driver()
        stream = torch.cuda.current_stream(self._device).cuda_stream
        address = self._words.data_ptr() + 4 * (peer * WORDS + word)
        at_least = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        (status,) = driver.cuStreamWaitValue32(stream, address, value % _WRAP, at_least)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"cuStreamWaitValue32 for a signal of rank {peer}: {status}")

    def synchronize(self) -> None:
        """The host waits for all streams of this device."""
        torch.cuda.synchronize(self._device)


def lacking() -> str | None:
    """Why symmetric memory cannot be had in this process; None: it may be."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if find_spec("torch.distributed._symmetric_memory") is None:
        return "this torch has no torch.distributed._symmetric_memory"
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return "cuda.bindings is not installed, by which streams wait: pip install cuda-bindings"
    return None


def _driver() -> Any:
    from cuda.bindings import driver  # pyright: ignore[reportMissingImports]

    return driver


class SymmetricHeap:
    """Hands out pieces of a rank's own symmetric memory, at the lowest place that is free."""

    def __init__(self, memory: SymmetricMemory) -> None:
        self._memory, self.num_bytes = memory, memory.own.numel()
        self._taken: list[tuple[int, int]] = []  # (start, stop), ascending
        self._returned: list[tuple[int, int]] = []

    @property
    def num_free(self) -> int:
        return self.num_bytes - sum(stop - start for start, stop in self._taken)

    def take(self, num_bytes: int, spare: int = 0) -> Tensor | None:
        """A piece, which comes back when this tensor, not its storage, is gone; None: it is full.

        Before a place is used again the host waits for the device.

        Args:
            spare: bytes that are to stay free.
        """
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        start = self._lowest(size, spare)
        if start is None and self._returned:
            self._memory.synchronize()
            while self._returned:
                self._taken.remove(self._returned.pop())
            start = self._lowest(size, spare)
        if start is None:
            return None
        insort(self._taken, (start, start + size))
        piece = self._memory.own[start : start + num_bytes]
        finalize(piece, self._returned.append, (start, start + size)).atexit = False
        return piece

    def _lowest(self, size: int, spare: int) -> int | None:
        start = 0
        if self.num_free < size + spare:
            return None
        for first, stop in [*self._taken, (self.num_bytes, self.num_bytes)]:
            if first - start >= size:
                return start
            start = stop
        return None

    def place(self, x: Tensor) -> int | None:
        """The first byte of a tensor that lies in this memory."""
        start = x.data_ptr() - self._memory.own.data_ptr()
        return start if 0 <= start <= self.num_bytes - x.nbytes else None
