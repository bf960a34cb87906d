"""Options that several commands share: workloads, machines, sizes."""

import inspect
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from tilewise.expressions import MASKS, STRATEGIES, read_mask, read_plan
from tilewise.layouts.balanced import default_layout
from tilewise.plan.ir import Plan
from tilewise.planning.candidate import load_candidate
from tilewise.simulation.machine import Machine
from tilewise.workload import LAYOUTS, Workload

_COUNT = re.compile(r"(\d+)([kKmM]?)$")
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B?$")


def read_count(what: str, text: str) -> int:
    """A number of tokens: 4096, 128K or 1M, in powers of 1024.

    Raises:
        ValueError: naming what.
    """
    match = _COUNT.match(text.strip())
    if not match or not int(match[1]):
        raise ValueError(f"{what} ({text!r}) must be a number such as 4096, 128K or 1M (1048576)")
    return int(match[1]) << {"": 0, "k": 10, "m": 20}[match[2].lower()]


def read_heads(text: str) -> tuple[int, int]:
    """Query and KV heads: 32:8, or 32 for as many of both.

    Raises:
        ValueError: if it is neither.
    """
    parts = text.split(":")
    if len(parts) > 2 or not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(f"heads ({text!r}) must be query:KV heads such as 32:8, or 32")
    return int(parts[0]), int(parts[-1])


def read_bytes(what: str, text: str) -> int:
    """A number of bytes: 20GiB, 80GB or 1000000.

    Raises:
        ValueError: naming what.
    """
    match = _BYTES.match(text.strip())
    if not match:
        raise ValueError(f"{what} ({text!r}) must be a number of bytes such as 20GiB or 80GB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))


def command_of(
    options: Callable[..., Any], run: Callable[[Any], None], without: Collection[str] = ()
) -> Callable[..., None]:
    """A command that makes a value of its options and runs with it.

    Args:
        options: a NamedTuple, annotated as a command's arguments are, in a file without postponed
            annotations.
        run: its name and docstring are the command's.
        without: options that the command does not have.
    """

    def command(**words: Any) -> None:
        run(options(**words))

    signature = inspect.signature(options)
    kept = [p for name, p in signature.parameters.items() if name not in without]
    command.__name__, command.__doc__ = run.__name__, run.__doc__
    command.__signature__ = signature.replace(parameters=kept)  # pyright: ignore[reportFunctionMemberAccess]
    command.__annotations__ = get_type_hints(options, include_extras=True)
    return command


PLAN_FILE = ".json"
PlanText = Annotated[
    str,
    typer.Argument(
        help=f'As in "mesh(16, q_tile=4)". Known: {", ".join(STRATEGIES)}; or a file that tilewise '
        "plan wrote."
    ),
]
WorldSize = Annotated[int | None, typer.Option(min=1, help="Ranks, where only a name is given.")]
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


def workload_of(options: Any, world_size: int) -> Workload:
    """What the options of plan and of simulate say about the workload, on a number of ranks.

    Raises:
        ValueError: if one cannot be read.
    """
    num_tokens = read_count("--num-tokens", options.num_tokens)
    num_heads, num_kv_heads = read_heads(options.heads)
    mask = read_mask(options.mask)
    mask.check_tokens(num_tokens)
    if options.save not in (None, "replay", "gathered"):
        raise ValueError(f"--save ({options.save!r}) must be replay or gathered")
    return Workload(
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=options.head_dim,
        dtype=options.dtype,
        wire_dtype=options.wire_dtype,
        mask=mask,
        layout=options.layout or default_layout(mask, num_tokens, world_size),
        save=options.save,
    )


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
