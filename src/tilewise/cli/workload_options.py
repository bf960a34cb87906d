"""Options of commands that plan and simulate: what is computed, and on what machine."""

from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import typer

from tilewise.choice import default_layout
from tilewise.expression import MASKS, read_mask
from tilewise.machine import Machine
from tilewise.planning.quantities import read_count, read_heads
from tilewise.workload import LAYOUTS, Workload

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
