"""Options that several commands share: workloads, machines, sizes."""

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import asdict, dataclass, replace
from os.path import isdir, isfile
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Self

import typer

from tilewise import masks
from tilewise.arguments import require_known, require_range
from tilewise.expressions import (
    MASKS,
    NO_WIRE,
    STRATEGIES,
    WIRE,
    read_heads,
    read_plan,
    read_wire,
)
from tilewise.layouts.balanced import default_layout
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Mask
from tilewise.plan.ir import Plan
from tilewise.planning.candidate import Candidate, load_plan
from tilewise.simulation.machine import Machine
from tilewise.strategies.catalog import MASK_AWARE
from tilewise.strategies.tiled import tiled_layout
from tilewise.workload import Workload
from tilewise_tools.mask_report.figures import LAYOUTS
from tilewise_tools.mask_report.named import mask_of
from tilewise_tools.naming import naming, read_count
from tilewise_tools.outside import is_outside, plan_of, require_no_file

MOST_BYTES = 1 << 60
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B?$")


def read_bytes(what: str, text: str) -> int:
    """A number of bytes: 20GiB, 80GB or 1000000."""
    match = _BYTES.match(text.strip())
    if not match:
        raise ValueError(f"{what} ({text!r}) must be a number of bytes such as 20GiB or 80GB")
    base = 1024 if match[3] else 1000
    count = float(match[1]) * base ** " KMGT".index(match[2].upper() or " ")
    require_range(what, count, 1, MOST_BYTES)
    return int(count)


def command_of(
    run: Callable[..., None],
    *options: Callable[..., Any],
    without: Collection[str] = (),
    usual: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[..., None]:
    """Return a command that makes values of its options and runs with them.

    Args:
        run: its name and docstring are the command's.
        options: NamedTuples or dataclasses, annotated as a command's arguments are, in a file
            without postponed annotations.
        without: options that the command does not have.
        usual: what --help shows as the default of options that are None where they are not given.
    """
    signatures = [inspect.signature(one) for one in options]

    def command(**words: Any) -> None:
        parts = (words.keys() & signature.parameters for signature in signatures)
        run(*(one(**{n: words[n] for n in part}) for one, part in zip(options, parts, strict=True)))

    every = {name: p for signature in signatures for name, p in signature.parameters.items()}
    hints = {name: p.annotation for name, p in every.items() if name not in without}
    for name, value in usual.items():
        option_info = copy(hints[name].__metadata__[0])
        option_info.show_default = str(value)
        hints[name] = Annotated[hints[name].__origin__, option_info]
    option_parameters = [every[name].replace(annotation=hint) for name, hint in hints.items()]
    command.__name__, command.__doc__ = run.__name__.removeprefix("_"), run.__doc__
    command.__signature__ = inspect.Signature(option_parameters)  # pyright: ignore[reportFunctionMemberAccess]
    command.__annotations__ = hints
    return command


def option(text: str, *names: str, **words: Any) -> Any:
    """An option of a command: what --help says of it, and its names if the field's does not do."""
    return typer.Option(*names, help=text, **words)


AsJson = Annotated[bool, option("Print JSON instead.", "--json")]
PLAN_FILE = ".json"
PlanText = Annotated[
    str,
    typer.Argument(
        help=f'As in "mesh(16, q_tile=4)". Known: {", ".join(STRATEGIES)}; needed and tiled, which '
        "see the mask; or a file of plan.to_json() or tilewise plan; or FILE.py:name, a plan or a "
        "function of the number of ranks."
    ),
]
WorldSize = Annotated[int | None, option("Ranks, where only a name is given.", min=1)]
TOKENS = "Of the whole sequence: 4096, 128K or 1M (in powers of 1024)."


@dataclass(frozen=True)
class CaseOptions:
    """The attention problem of a command; None is a plan file's, or usual for the command."""

    num_tokens: Annotated[str | None, option(TOKENS)] = None
    heads: Annotated[str | None, option("Query:KV heads, as in 32:8.")] = None
    head_dim: Annotated[int | None, option("Numbers per head of q and k.", min=1)] = None
    mask: Annotated[
        str | None,
        option(
            f"As in 'causal & window(4095, 0)'. Known: {', '.join(MASKS)}, & and |; or a "
            "pattern, drawn with seed 0: "
            f"{', '.join(name for name in masks.ALL_NAMES if name not in MASKS)}; or "
            "FILE.py:name, a mask or a function of num_tokens."
        ),
    ] = None
    layout: Annotated[str | None, option(f"{', '.join(LAYOUTS)} or tiled.")] = None
    dtype: Annotated[str | None, option("Of q, k and v.")] = None

    def filled(self, usual: Mapping[str, Any]) -> Self:
        """Return these options with usual values in place of those that are None."""
        return replace(self, **{k: v for k, v in usual.items() if getattr(self, k) is None})


@dataclass(frozen=True)
class WorkOptions(CaseOptions):
    """A workload and a machine; what is None is a plan file's, or the usual."""

    v_head_dim: Annotated[int | None, option("Numbers per head of v and out.", min=1)] = None
    machine: Annotated[str | None, option("A preset, or the path of a TOML file.")] = None
    wire_dtype: Annotated[str | None, option("Of out, dq, dk and dv under way.")] = None
    wire: Annotated[str | None, option(WIRE)] = None
    save: Annotated[str | None, option("replay or gathered: what backward does.")] = None
    reduction: Annotated[str | None, option("fast, or canonical: the same bits at any split.")] = (
        None
    )


OPTIONS: Mapping[str, str] = MappingProxyType(
    {name: f"--{name.replace('_', '-')}" for name in WorkOptions.__dataclass_fields__}
    | {"num_heads": "--heads: num_heads", "num_kv_heads": "--heads: num_kv_heads"}
    | {"memory_bytes": "--memory"}
)
"""The options of a workload by the names that the library's messages begin with."""
MACHINE = "h100x8"
USUAL: Mapping[str, Any] = MappingProxyType({"heads": "32:8", "head_dim": 128, "mask": "causal"})
SHOWN_USUAL: Mapping[str, Any] = MappingProxyType(
    {
        **USUAL,
        "layout": "the one that gives every rank the same work under the mask",
        "dtype": "bfloat16",
        "v_head_dim": "as --head-dim",
        "machine": MACHINE,
        "wire_dtype": "that of q",
        "save": "the best",
        "reduction": "fast",
    }
)
"""What --help says of options that may be left out where a workload and a machine are asked for."""


def workload_of(
    options: WorkOptions,
    world_size: int,
    planned: Workload | None = None,
    made_for: tuple[Mask, Layout] | None = None,
) -> Workload:
    """The workload that the options describe.

    Args:
        planned: of a plan file: what the options leave open is as there.
        made_for: of a plan that sees the mask: its layout is the workload's.
    """
    words: dict[str, Any] = {k: v for k, v in asdict(options).items() if v is not None}
    words = words if planned else dict(USUAL) | words
    words.pop("machine", None)
    if "heads" in words:
        words["num_heads"], words["num_kv_heads"] = read_heads(words.pop("heads"))
    if words.keys() & {"wire", "wire_dtype"}:  # either takes the place of a file's
        with naming("--wire"):
            wire = read_wire(words.get("wire", NO_WIRE))
        words = {"wire_dtype": None, **words, "wire": wire}
    num_tokens = _num_tokens(options, planned)
    if "mask" in words:
        mask = read_mask_option(words["mask"], num_tokens)
    else:
        assert planned is not None
        mask = planned.mask
    words |= {"num_tokens": num_tokens, "mask": mask}
    if made_for:
        words["layout"] = made_for[1]
    elif "layout" in words:
        words["layout"] = layout_of(words["layout"], mask, num_tokens, world_size)
    elif planned is None or (planned.mask, planned.num_tokens) != (mask, num_tokens):
        words["layout"] = default_layout(mask, num_tokens, world_size)
    return replace(planned, **words) if planned else Workload(**words)


def _num_tokens(options: WorkOptions, planned: Workload | None = None) -> int:
    if options.num_tokens is not None:
        return read_count("--num-tokens", options.num_tokens)
    if planned is None:
        raise ValueError("--num-tokens is missing; give the length of the sequence, as in 128K")
    return planned.num_tokens


def read_mask_option(text: str, num_tokens: int) -> Mask:
    """The mask that --mask names."""
    with naming("--mask"):
        return mask_of(text, num_tokens)


def layout_of(name: str, mask: Mask, num_tokens: int, n: int) -> Layout:
    """One of LAYOUTS, or the layout of tiled."""
    if name == "tiled":
        return tiled_layout(mask, num_tokens, n)
    if name not in LAYOUTS:
        raise ValueError(f"--layout ({name!r}) must be one of {', '.join(LAYOUTS)}, tiled")
    return LAYOUTS[name](mask, num_tokens, n)


def read_plans(
    text: str,
    world_size: int | None,
    about: WorkOptions | None = None,
    ranks_option: str = "--world-size",
) -> tuple[Plan, Candidate | None]:
    """A strategy's plan, one's own too; or a file's, with its candidate of tilewise plan if any.

    Args:
        about: what a strategy that sees the mask is made for; None: the command knows no mask.
        ranks_option: the option that says how many ranks there are, for messages.
    """
    aware = next((entry for entry in MASK_AWARE if entry.name == text), None)
    if aware:
        if about is None:
            raise ValueError(
                f"{text} sees the mask, which this command does not know; take ring({world_size}), "
                "or a file of tilewise plan"
            )
        if world_size is None:
            raise ValueError(f"{text} needs --world-size, --num-tokens and --mask")
        num_tokens, heads = _num_tokens(about), read_heads(about.heads or USUAL["heads"])
        mask = read_mask_option(about.mask or USUAL["mask"], num_tokens)
        kv_bytes = 2 * heads[1] / heads[0]
        layout = (
            layout_of(about.layout, mask, num_tokens, world_size)
            if about.layout
            else aware.layout(mask, num_tokens, world_size, kv_bytes)
        )
        return aware.plan(mask, layout, kv_bytes), None
    if is_outside(text):
        return plan_of(text, world_size, ranks_option), None
    if isdir(text):
        raise ValueError(f"{text} is a folder; name a plan's file in it")
    if text.isidentifier():
        require_known("strategy", text, (*STRATEGIES, *(entry.name for entry in MASK_AWARE)))
    if Path(text).suffix != PLAN_FILE:
        require_no_file(text, "a plan, or a function of the number of ranks")
        return read_plan(text, world_size, ranks_option), None
    loaded = load_plan(text)
    plan, candidate = (loaded, None) if isinstance(loaded, Plan) else (loaded.plan, loaded)
    if world_size not in (None, plan.world_size):
        raise ValueError(
            f"{text} is for {plan.world_size} ranks, but {ranks_option} is {world_size}"
        )
    return plan, candidate


def read_machine_option(name: str | None) -> Machine:
    """A preset, or the machine of a file; None: the usual preset."""
    if name is None or name in Machine.presets():
        return Machine.preset(name or MACHINE)
    if isfile(name):
        with naming("--machine"):
            return Machine.load(name)
    what = "is a folder" if isdir(name) else "is neither a preset nor a file"
    raise ValueError(
        f"--machine ({name!r}) {what}; name a machine's file, or a preset: "
        f"{', '.join(Machine.presets())}"
    )
