"""Refusals of wires under which the promise of a canonical reduction could not hold."""

from __future__ import annotations

from tilewise.arguments import dtype_name
from tilewise.plan.payload import accumulator
from tilewise.wires.wire import Plain, Wires


def check_exact_wires(wires: Wires, dtype: str) -> None:
    """Raise ValueError if anything of a canonical call may arrive as another number than was sent.

    Args:
        wires: as they are asked for.
    """
    exact = Plain(), Plain(dtype_name(accumulator(dtype))), Plain("float64")
    refusals = (
        (
            wires.latent is not None,
            "latents, whose keys and values would be computed by calls of any shape; pass k and v",
        ),
        (
            any(
                x not in (Plain(), Plain(dtype_name(dtype)))
                for x in (wires.forward, wires.backward)
            ),
            f"wires that round operands ({wires}); leave out wire",
        ),
        (
            wires.partials not in exact,
            f"a wire that rounds partial results ({wires.partials}): they travel whole, as "
            "integers; leave out wire_dtype",
        ),
    )
    for refused, why in refusals:
        if refused:
            raise ValueError(f"reduction='canonical' does not take {why}, or take 'fast'")
