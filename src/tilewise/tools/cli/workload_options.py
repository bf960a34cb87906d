"""Options of commands that plan and simulate: what is computed, and on what machine."""

from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import typer

from tilewise.expressions import MASKS, STRATEGIES, read_mask, read_plan
from tilewise.layouts.default import default_layout
from tilewise.plan.ir import Plan
from tilewise.planning.candidate_file import load_candidate
from tilewise.simulation.machine import Machine
from tilewise.tools.cli.quantities import read_count, read_heads
from tilewise.workload import LAYOUTS, Workload

PLAN_FILE = ".json"
PlanText = Annotated[
    str,
    typer.Argument(
        help=f'As in "mesh(16, q_tile=4)". Known: {", ".join(STRATEGIES)}; or a file that tilewise '
        "plan wrote."
    ),
]
NumTokens = Annotated[
    str, typer.Option(help="Of the whole sequence: 4096, 128K or 1M (in powers of 1024).")
]
Heads = Annotated[str, typer.Option(help="Query:KV heads, as in 32:8.")]
HeadDim = Annotated[int, typer.Option(min=1, help="Numbers per head.")]
MaskText = Annotated[
    str, typer.Option(help=f"As in 'causal & window(4095, 0)'. Known: {', '.join(MASKS)}, & and |.")
]
MachineName = Annotated[str, typer.Option(help="A preset, or the path of a TOML file.")]
LayoutName = Annotated[
    str | None,
    typer.Option(
        help=f"{', '.join(dict(LAYOUTS))}; unless given, the one that gives every rank the same "
        "work under the mask."
    ),
]
Dtype = Annotated[str, typer.Option(help="Of q, k and v.")]
WireDtype = Annotated[
    str | None, typer.Option(help="Of out, dq, dk and dv under way; that of q unless given.")
]
Save = Annotated[
    str | None,
    typer.Option(help="replay or gathered: what backward does; the best unless given."),
]


class Asked(NamedTuple):
    """What the options of both commands say about the workload."""

    num_tokens: str
    heads: str
    head_dim: int
    mask: str
    layout: str | None
    dtype: str
    wire_dtype: str | None
    save: str | None

    def workload(self, world_size: int) -> Workload:
        """The workload on a number of ranks.

        Raises:
            ValueError: if an option cannot be read.
        """
        num_tokens = read_count("--num-tokens", self.num_tokens)
        num_heads, num_kv_heads = read_heads(self.heads)
        mask = read_mask(self.mask)
        mask.check_tokens(num_tokens)
        layout = self.layout or default_layout(mask, num_tokens, world_size)
        if self.save not in (None, "replay", "gathered"):
            raise ValueError(f"--save ({self.save!r}) must be replay or gathered")
        return Workload(
            num_tokens=num_tokens,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            wire_dtype=self.wire_dtype,
            mask=mask,
            layout=layout,
            save=self.save,
        )


def asked(options: Any) -> Asked:
    """The workload's part of a command's options."""
    return Asked(*(cast(Any, getattr(options, name)) for name in Asked._fields))


def read_plans(text: str, world_size: int | None) -> tuple[Plan, Plan | None]:
    """A strategy's plan; or both passes' plans of a file that tilewise plan wrote.

    Raises:
        ValueError: if it is neither, or for other ranks.
    """
    if Path(text).suffix != PLAN_FILE:
        return read_plan(text, world_size), None
    try:
        found = load_candidate(text)
    except OSError as error:
        raise ValueError(f"{text} cannot be read: {error.strerror}") from None
    if world_size not in (None, found.plan.world_size):
        raise ValueError(
            f"{text} is for {found.plan.world_size} ranks, but --world-size is {world_size}"
        )
    return found.plan, found.backward_plan


def read_machine_option(name: str) -> Machine:
    """A preset, or the machine of a file.

    Raises:
        ValueError: if it is neither.
    """
    if name in Machine.presets():
        return Machine.preset(name)
    if Path(name).is_file():
        return Machine.load(name)
    raise ValueError(
        f"--machine ({name!r}) is neither a preset nor a file; presets are "
        f"{', '.join(Machine.presets())}"
    )
