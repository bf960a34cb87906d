"""What stands in for the GPU benchmark's processes: cases that crash, hang, fail, or say 1."""

import os
import time
from typing import Any


def answer(question: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """A row and whether the process still works, as benchmarks/gpu_parts/bodies.py has it."""
    match question["options"].get("does"):
        case "crash":
            os.abort()
        case "exit":
            os._exit(3)
        case "hang":
            time.sleep(600)
        case "fail":
            return {"error": "RuntimeError: out of memory"}, True
        case "poison":
            return {"error": "RuntimeError: an illegal memory access"}, False
    return {"process": os.getpid(), "right": True}, True


def without_gpu(question: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    return {"error": "no CUDA device here"}, False
