"""CUDA tensors without CUDA: shapes, dtypes and devices alone, which torch's operators check.

Operators and their schemas are the installed torch's own. What a fake tensor cannot do is played:
streams are left out, and Triton kernels only look at what they are launched with.
"""

import inspect
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from tilewise.kernels import flex, torch_sdpa
from tilewise.kernels.triton import delta, merge
from tilewise.kernels.triton import kernel as triton_slices
from tilewise.transport import streams

aten = torch.ops.aten
# operators whose bindings ask for the device before anything else
BOUND = ("contiguous", "copy_", "index_add_", "index_copy_", "masked_fill_", "tril_")


class FakeCuda:
    """One world of fake tensors; every thread that uses them enters it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.launches: list[str] = []
        monkeypatch.setattr(streams, "STREAMED", ())
        monkeypatch.setattr(torch.cuda, "device_of", lambda x: nullcontext())
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        for module, name in ((merge, "_merge"), (merge, "_combine"), (delta, "_put")):
            monkeypatch.setattr(module, name, Launches(getattr(module, name), self.launches))
        kernels = [Launches(kernel, self.launches) for kernel in triton_slices._kernels()]
        monkeypatch.setattr(triton_slices, "_kernels", lambda: kernels)
        for module, name in ((torch_sdpa, "additive_mask"), (flex, "compiled_intervals")):
            monkeypatch.setattr(module, name, on_host(getattr(module, name)))

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            # launches and `loadable` ask where tensors lie
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            stack.enter_context(self._mode)
            if not torch.backends.cuda.is_built():
                stack.enter_context(PastBindings())
            yield

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")


class Launches:
    """A Triton kernel that checks the arguments it is given against its own parameters."""

    def __init__(self, kernel: Any, launches: list[str]):
        self._kernel, self._launches = kernel.fn, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(isinstance(n, int) and 0 < n < 2**31 for n in grid)

        def launch(*arguments: Any, **options: Any) -> None:
            names = inspect.signature(self._kernel).parameters
            named = {name: x for name, x in options.items() if name in names}
            inspect.signature(self._kernel).bind(*arguments, **named)
            given = chain(*(x if isinstance(x, tuple) else (x,) for x in arguments))
            tensors = [x for x in given if isinstance(x, Tensor)]
            assert {x.device.type for x in tensors} == {"cuda"}
            self._launches.append(self._kernel.__name__)

        return launch


def on_host(function: Any) -> Any:
    """What is made of a call on the host, where numbers are at hand."""

    def called(*arguments: Any) -> Any:
        with unset_fake_temporarily():
            return function(*arguments)

    return called


class PastBindings(TorchFunctionMode):
    """For a torch built without CUDA: operators, where Python's bindings ask for a device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        match getattr(func, "__name__", ""):
            case "__getitem__":
                return picked(*args)
            case "__setitem__":
                x, index, value = args
                place = picked(x, index)
                value = value if isinstance(value, Tensor) else torch.full_like(place, value)
                return aten.copy_.default(place, value)
            case "__invert__":
                return aten.bitwise_not.default(*args)
            case name if name in BOUND:
                return getattr(aten, name)(*args, **kwargs)
            case "to" if isinstance(args[1], (str, torch.device)):
                return aten._to_copy.default(args[0], device=torch.device(args[1]))
        return func(*args, **kwargs)


def picked(x: Tensor, index: Any) -> Tensor:
    """x[index], of the indices that the library uses."""
    index = index if isinstance(index, tuple) else (index,)
    if Ellipsis in index:
        at = index.index(Ellipsis)
        rest = x.ndim - sum(one is not None for one in index) + 1
        index = (*index[:at], *[slice(None)] * rest, *index[at + 1 :])
    dim = 0
    for one in index:
        match one:
            case None:
                x, dim = aten.unsqueeze.default(x, dim), dim + 1
            case int():
                x = aten.select.int(x, dim, one)
            case slice():
                x, dim = aten.slice.Tensor(x, dim, one.start, one.stop, one.step or 1), dim + 1
            case Tensor():
                x, dim = aten.index.Tensor(x, [*[None] * dim, one]), dim + 1
    return x
