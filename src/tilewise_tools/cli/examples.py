"""Examples that --help shows below the options of a command."""

from collections.abc import Mapping
from types import MappingProxyType

EXAMPLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "demo": (
            "tilewise demo --world-size 6 --num-tokens 2K",
            "tilewise demo --world-size 2 --json",
        ),
        "show": (
            "tilewise show 'mesh(16, q_tile=4)'",
            "tilewise show 'ring(4)' --mask 'causal & window(63, 0)' --num-tokens 1K",
            "tilewise show my_strategy.py:my_ring --world-size 4",
        ),
        "plan": (
            "tilewise plan --world-size 64 --num-tokens 1M --machine h100x8 -o plan.json",
            "tilewise plan --world-size 64 --num-tokens 1M --strategy 'ring(64)'",
        ),
        "advise": (
            "tilewise advise --for megatron --model config.json --num-tokens 256K",
            "tilewise advise --for accelerate --model config.json --num-tokens 64K --world-size 32",
        ),
        "fits": (
            "tilewise fits --model config.json --machine h100x8 --cp 8 --dp 8 --checkpointing",
            "tilewise fits --model config.json --num-tokens 128K --cp 8 --dp 64",
        ),
        "simulate": (
            "tilewise simulate 'mesh(64, q_tile=8)' --num-tokens 256K --heads 32:32",
            "tilewise simulate 'ring(16)' --num-tokens 64K --trace trace.json",
        ),
        "mask": (
            "tilewise mask 'causal & window(4095, 0)' --num-tokens 64K --world-size 8",
            "tilewise mask causal_document --num-tokens 8K --layout tiled --png mask.png",
        ),
        "parity": (
            "tilewise parity my_split.py:split --html parity.html",
            "tilewise parity my_split.py:split --world-size 2 --backend loopback",
        ),
        "explain": (
            "tilewise explain run",
            "tilewise explain run --machine h100x8 --trace trace.json -o run.html",
        ),
        "doctor": ("tilewise doctor", "tilewise doctor --json"),
        "report": (
            "tilewise report plan.json -o report.html",
            "tilewise report plan.json --num-tokens 2M --machine a100x8 -o longer.html",
            "tilewise report results.jsonl --csv rows.csv",
        ),
        "calibrate": (
            "tilewise calibrate -o machine.toml",
            "tilewise calibrate --world-size 8 --node-size 4 -o machine.toml",
        ),
        "bench kernels": (
            "tilewise bench kernels --quick --mask causal --num-tokens 4K",
            "tilewise bench kernels --cases cases.toml -o kernels.jsonl",
        ),
        "bench strategies": (
            "tilewise bench strategies --world-size 4 --tokens-per-rank 1K --mask causal",
            "torchrun --nproc-per-node 4 -m tilewise bench strategies --strategy ring",
        ),
        "bench network": (
            "tilewise bench network --hosts 8 --mbit 50 --tokens-per-rank 1K --mask causal",
            "tilewise bench network --limited --hosts 4 --strategy ring --mask full",
        ),
        "lab run": (
            "tilewise lab run --hosts 8 --strategy 'ring(8)' --strategy 'ulysses(8)'",
            "tilewise lab run --hosts 4 --num-tokens 4K --mask causal --backward",
        ),
        "lab calibrate": (
            "tilewise lab calibrate --hosts 4 --mbit 100 -o lab.toml",
            "tilewise lab calibrate --hosts 2 --ranks-per-host 4",
        ),
        "lab clean": ("tilewise lab clean", "tilewise lab clean --json"),
    }
)
"""By command, with its group."""


def epilog(command: str) -> str:
    """The text below a command's options; lines stay lines."""
    return "\n\n".join(["Examples:", *EXAMPLES[command]])
