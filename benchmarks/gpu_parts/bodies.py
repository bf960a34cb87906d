"""What the benchmark's processes run: the part of a question, by name, and its row or its error."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import torch

from benchmarks.gpu_parts import correctness, executor, first, kernels, scaling, variants
from benchmarks.gpu_parts.case import Row
from benchmarks.gpu_parts.session import Session, about
from tilewise.kernels.registry import PROVIDERS, kernel_named
from tilewise_tools.doctor import examine


def environment(session: Session, options: Row) -> Row:
    """Where this is, what doctor says of it, and the providers of both passes."""
    width = 16 if session.tiny else 128
    able = [
        name
        for name in PROVIDERS
        if kernel_named(name).supports(session.device.type, torch.bfloat16, width) is None
    ]
    doctor = {one.name: one.detail for one in examine() if one.part == "kernel"}
    return {**about(session.device), "able": able, "doctor": doctor}


PARTS: Mapping[str, Callable[[Session, Row], Row]] = MappingProxyType(
    {
        "environment": environment,
        "ahead": kernels.ahead,
        "ahead flex": kernels.ahead_flex,
        "correctness": correctness.run,
        "executor": executor.run,
        "kernels": kernels.run,
        "graphs": executor.graphs,
        "scaling": scaling.run,
        "bandwidth": first.bandwidth,
        "short calls": first.short_calls,
        "whole tiles": first.whole_tiles,
        "sends": first.sends,
        "variants": variants.run,
    }
)


def answer(question: Row) -> tuple[Row, bool]:
    """A case's figures or what went wrong, and whether the device still works."""
    if question["device"] == "cuda" and not torch.cuda.is_available():
        return {"error": f"no CUDA device here (torch {torch.__version__})"}, False
    device = torch.device("cuda:0" if question["device"] == "cuda" else "cpu")
    try:
        session = _session(device, question["tiny"])
        torch.manual_seed(0)
        before = session.warm_up_seconds
        row = PARTS[question["part"]](session, question["options"])
        row["warm_up_seconds"] = round(session.warm_up_seconds - before, 2)
    except Exception as error:  # one case's failure leaves the others
        traceback.print_exc()
        row = {"error": _told(error)}
    return row, _works(device)


@lru_cache(maxsize=1)
def _session(device: torch.device, tiny: bool) -> Session:
    if device.type == "cuda":
        torch.set_num_threads(1)  # processes side by side would take each other's cores
    return Session(device, tiny)


def _told(error: Exception) -> str:
    """Kind, first line and place."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "tilewise" in f.filename or "benchmarks" in f.filename]
    place = f" ({Path(ours[-1].filename).name}:{ours[-1].lineno})" if ours else ""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300] + place


def _works(device: torch.device) -> bool:
    """After an illegal access no call of this process succeeds any more."""
    gc.collect()  # what the case held
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return bool(torch.ones(1, device=device).item() == 1.0)
    except RuntimeError:
        traceback.print_exc()
        return False
    finally:
        print(time.strftime("%H:%M:%S"), "done", file=sys.stderr, flush=True)
