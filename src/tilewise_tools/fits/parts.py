"""The parts of a step's memory, each by a formula whose numbers stand beside it.

    parameters    N b / dp                   N of them, b bytes of each at rest
    gathered      (root + k layer) c         by FSDP, c bytes to compute with; k: GATHERED
    optimizer     s N b / dp                 s numbers of each: STATES
    gradients     N b / dp                   of what backward has come to
    layers        L rows x bytes of a row    what autograd keeps of L layers
    attention     L rows x bytes of a row    q, k, v, out, lse, and the workspace of our passes
    head          rows x bytes of a row      embeddings, logits and the loss
    backward      rows x bytes of a row      what backward makes for itself at that moment

The first four follow from the configuration. The bytes of a row are counted on the model's own code
(`step.py`); docs/fits.md derives them by hand for a model like Llama.
"""

from typing import NamedTuple

import numpy as np

from tilewise_tools.fits.ledger import Kind
from tilewise_tools.fits.setting import STATES, Setting
from tilewise_tools.fits.step import Facts, Step

GATHERED = (2, 3)
"""Layers that FSDP2 holds whole beside what belongs to no layer: in forward the one that runs and
the output of its all-gather, in backward also the input of its gradients' reduce-scatter."""

TEMPORARIES = 2
"""Tensors as large as a parameter that torch.optim.AdamW's loop makes for it."""

CONSTANTS = ("parameters", "gathered", "optimizer")
NAMES = (*CONSTANTS, *(kind.name.lower() for kind in Kind))
MOMENTS = ("forward", "backward", "optimizer")


class Part(NamedTuple):
    """A line of the table."""

    name: str
    formula: str
    num_bytes: int


class Peak(NamedTuple):
    """The moment at which a step holds most.

    Attributes:
        moment: one of MOMENTS.
    """

    num_bytes: int
    moment: str
    parts: tuple[Part, ...]


def moments(step: Step, setting: Setting) -> np.ndarray:
    """Return the bytes of each part, [moments, NAMES]: after every operation, then as the optimizer
    steps."""
    facts, rows = step.facts, len(step.held)
    found = np.zeros((rows + 1, len(NAMES)), dtype=np.int64)
    on_host = "parameters" in setting.offload
    at_rest = -(-facts.num_parameters * setting.shard_bytes // setting.dp)
    if not on_host:
        found[:, 0] = at_rest
    if setting.shards:
        for phase, part in enumerate((slice(step.forward_rows), slice(step.forward_rows, rows))):
            found[part, 1] = _gathered(facts, phase) * setting.number_bytes
    if not on_host and "optimizer" not in setting.offload:
        found[:, 2] = STATES[setting.optimizer] * at_rest
    found[:rows, len(CONSTANTS) :] = step.held
    optimizer = found[-1, len(CONSTANTS) :]
    optimizer[Kind.ATTENTION] = step.passes.kept_bytes()
    if not on_host:
        optimizer[Kind.GRADIENTS] = at_rest
        if setting.optimizer == "adamw" and "optimizer" not in setting.offload:
            largest = -(-facts.largest_parameter * setting.shard_bytes // setting.dp)
            optimizer[Kind.BACKWARD] = TEMPORARIES * largest
    return found


def _gathered(facts: Facts, phase: int) -> int:
    return facts.root + min(GATHERED[phase], facts.num_layers + 1) * facts.largest_layer


def peak_of(step: Step, setting: Setting) -> Peak:
    """Return the moment at which a step holds most, and what it holds then."""
    by_moment = moments(step, setting)
    place = int(by_moment.sum(1).argmax())
    is_last = place == len(step.held)
    moment = MOMENTS[2 if is_last else place >= step.forward_rows]
    parts = tuple(
        Part(name, formula, int(num_bytes))
        for (name, formula), num_bytes in zip(
            _formulas(step, setting, moment, by_moment[place]), by_moment[place], strict=True
        )
        if num_bytes
    )
    return Peak(sum(part.num_bytes for part in parts), moment, parts)


def _formulas(step: Step, setting: Setting, moment: str, held: np.ndarray) -> list[tuple[str, str]]:
    facts, sharded = step.facts, f" / {setting.dp}" if setting.dp > 1 else ""
    at_rest = f"{facts.num_parameters:,} x {setting.shard_bytes} B{sharded}"
    count = min(GATHERED[moment == "backward"], facts.num_layers + 1)
    by_name = dict(zip(NAMES, map(int, held), strict=True))
    rows, layers = f"{step.num_rows:,} rows", f"{facts.num_layers} layers"

    def each(name: str, divisor: int = 1, fixed: int = 0) -> str:
        num_bytes = (by_name[name] - fixed) / (step.num_rows * divisor)
        return f"{num_bytes:,.1f} B".replace(".0 B", " B")

    passes = step.passes
    ours = passes.kept_bytes()
    work = f" + {ours:,} B of {', '.join(passes.plan_names)}" if ours else ""
    gathered = f"({facts.root:,} + {count} x {facts.largest_layer:,}) x {setting.number_bytes} B"
    formulas = {
        "parameters": at_rest,
        "gathered": gathered,
        "optimizer": f"{STATES[setting.optimizer]} x {at_rest}",
        "layers": f"{layers} x {rows} x {each('layers', facts.num_layers)}",
        "attention": f"{layers} x {rows} x {each('attention', facts.num_layers, ours)}{work}",
        "head": f"{rows} x {each('head')}, {facts.vocab_size:,} words",
        "backward": f"{rows} x {each('backward')}",
        "gradients": f"{at_rest}, of what backward has come to",
    }
    if moment == "optimizer":
        largest = f"{facts.largest_parameter:,} x {setting.shard_bytes} B{sharded}"
        formulas |= {"backward": f"{TEMPORARIES} x {largest}", "gradients": at_rest}
        formulas["attention"] = work.removeprefix(" + ")
    return [(name, formulas[name]) for name in NAMES]
