"""Two codes of one rank as one code: the second runs after the first, in the same workspace."""

from __future__ import annotations

from typing import Any

from tilewise.compiler.code import Buffer, Code, Home, Post, Ref, TensorSpec, Wait
from tilewise.compiler.placement import Departures, placed
from tilewise.tiles.calls import KernelCall


def joined(departs: Departures, first: Code, second: Code) -> Code:
    """The code that does what the first does, and then what the second does.

    Tensors of the call that both read are the same ones. Buffers are placed anew, since what the
    first sends may be under way while the second runs.

    Args:
        departs: the rule of the transport for which both were made.
    """
    tensors, buffers = [*first.tensors], [*first.buffers]
    by_name = {
        (first.buffers[spec.buffer].name, spec.shape): number
        for number, spec in enumerate(first.tensors)
        if first.buffers[spec.buffer].home is Home.GIVEN
    }
    numbers: dict[int, int] = {}
    places: dict[int, int] = {}
    for number, spec in enumerate(second.tensors):
        buffer = second.buffers[spec.buffer]
        shared = by_name.get((buffer.name, spec.shape)) if buffer.home is Home.GIVEN else None
        if shared is None:
            shared = len(tensors)
            tensors.append(_moved(spec, buffer, buffers, places))
        numbers[number] = shared
    moved = _Renumbered(numbers, *_next_numbers(first))
    ops = (*first.ops, *map(moved.of, second.ops))
    offsets, num_bytes = placed(tensors, buffers, ops, departs)
    return first._replace(
        tensors=tuple(tensors),
        buffers=tuple(buffers),
        ops=ops,
        lines=first.lines + second.lines,
        offsets=offsets,
        num_bytes=num_bytes,
        contiguous=tuple(dict.fromkeys(first.contiguous + second.contiguous)),
        kept=first.kept + second.kept,
    )


def _moved(
    spec: TensorSpec, buffer: Buffer, buffers: list[Buffer], places: dict[int, int]
) -> TensorSpec:
    """A tensor of the second code, in a buffer that is added to those of the first."""
    if spec.buffer not in places:
        places[spec.buffer] = len(buffers)
        buffers.append(buffer)
    return spec._replace(buffer=places[spec.buffer])


def _next_numbers(code: Code) -> tuple[int, int]:
    """The first handle and the first number of an arrival that a code does not use."""
    posts = [op for op in code.ops if isinstance(op, Post)]
    handles = [op.handle for op in posts]
    arrivals = [number for op in posts for number in op.arrivals]
    return max(handles, default=-1) + 1, max(arrivals, default=-1) + 1


class _Renumbered:
    """Ops of the second code with the numbers that they have in the joined one."""

    def __init__(self, numbers: dict[int, int], handle: int, arrival: int):
        self._numbers, self._handle, self._arrival = numbers, handle, arrival

    def of(self, x: Any) -> Any:
        """A value with all tensors, handles and arrivals in it renumbered."""
        if isinstance(x, Ref):
            return x._replace(tensor=self._numbers[x.tensor])
        if isinstance(x, Post | Wait):
            arrivals = tuple(number + self._arrival for number in x.arrivals)
            return self._fields(x)._replace(handle=x.handle + self._handle, arrivals=arrivals)
        if isinstance(x, tuple) and not isinstance(x, KernelCall):
            return self._fields(x)
        return x

    def _fields(self, x: Any) -> Any:
        parts = map(self.of, x)
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
