"""Order between streams of a device, by events alone: the host never waits."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeAlias

import torch
from torch import Tensor

Moment: TypeAlias = torch.cuda.Event
Stream: TypeAlias = torch.cuda.Stream

# Devices that do what they are given later, stream by stream; the others do it at once.
STREAMED = ("cuda",)


def current_moment(device: torch.device) -> Moment | None:
    """All that the current stream has been given so far; None for the CPU, which works at once."""
    if device.type not in STREAMED:
        return None
    moment = torch.cuda.Event()
    moment.record(torch.cuda.current_stream(device))
    return moment


def current_stream(device: torch.device) -> Stream | None:
    """Return the current stream of a device; None for the CPU."""
    return torch.cuda.current_stream(device) if device.type in STREAMED else None


def follow(moment: Moment | None, x: Tensor | None = None) -> None:
    """Let the current stream wait for a moment of another stream.

    Args:
        x: a tensor that the current stream will use, so that its memory is not given away before.
    """
    if moment is None:
        return
    moment.wait()
    if x is not None:
        x.record_stream(torch.cuda.current_stream(x.device))


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream's work goes into a CUDA graph instead of being done."""
    return device.type in STREAMED and torch.cuda.is_current_stream_capturing()


def new_stream(device: torch.device) -> Stream | None:
    """Return a new stream on a device; None for the CPU."""
    return torch.cuda.Stream(device) if device.type in STREAMED else None


def on_stream(stream: Stream | None) -> AbstractContextManager[object]:
    """Makes a stream the current one, for as long as the block lasts."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


@contextmanager
def forked() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Gives threads streams of their own, between what is launched before the block and after it.

        with forked() as fork:
            ...                 # in each thread: with fork(): ...

    Does nothing as long as nobody has used CUDA in this process.
    """
    if not torch.cuda.is_initialized():
        yield nullcontext
        return
    device = torch.device("cuda", torch.cuda.current_device())
    before, ends = current_moment(device), []

    @contextmanager
    def fork() -> Iterator[None]:
        with on_stream(new_stream(device)):
            follow(before)
            try:
                yield
            finally:
                ends.append(current_moment(device))

    try:
        yield fork
    finally:
        for end in ends:
            follow(end)
