"""tilewise fits: the longest sequence that a model can be trained on, and what takes the memory."""

from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from tilewise_tools.cli.options import (
    MACHINE,
    AsJson,
    command_of,
    option,
    read_bytes,
    read_count,
    read_machine_option,
    read_plans,
)
from tilewise_tools.cli.output import (
    as_bytes,
    print_json,
    refusing_bad_input,
    table_console,
    table_of,
    working,
)
from tilewise_tools.doctor import require
from tilewise_tools.fits.setting import DTYPES, OFFLOADED, STATES, Setting
from tilewise_tools.naming import naming

NAMES = MappingProxyType(
    {
        name: f"--{name.replace('_', '-')}"
        for name in ("cp", "dp", "offload", "optimizer", "dtype", "param_dtype")
    }
)
UNKNOWN_MEMORY = 1 << 50  # of a machine that does not say it


class FitsOptions(NamedTuple):
    """Options of `tilewise fits`."""

    model: Annotated[Path, option("The model's config.json, or the folder that has it.")]
    machine: Annotated[str, option("A preset, or the path of a TOML file.")] = MACHINE
    memory: Annotated[
        str | None, option("Of a device, as in 70GiB; the machine's unless given.")
    ] = None
    num_tokens: Annotated[
        str | None, option("A length to look at, as in 128K; the longest that fits unless given.")
    ] = None
    cp: Annotated[int, option("Ranks that share a sequence.", min=1)] = 1
    dp: Annotated[
        int, option("Ranks over which FSDP shards the parameters; 1: they are whole.", min=1)
    ] = 1
    strategy: Annotated[
        str | None, option("The plan of attention, as in 'ring(8)'; the planner's unless given.")
    ] = None
    dtype: Annotated[str, option(f"That forward computes with: {', '.join(DTYPES)}.")] = "bfloat16"
    param_dtype: Annotated[
        str | None, option("Of FSDP's shards and the optimizer's state; as --dtype unless given.")
    ] = None
    optimizer: Annotated[str, option(f"{', '.join(STATES)}.")] = "adamw"
    checkpointing: Annotated[bool, option("With transformers' gradient checkpointing.")] = False
    offload: Annotated[
        list[str] | None,
        option(f"To the host, some of {', '.join(OFFLOADED)}; may be repeated."),
    ] = None
    as_json: AsJson = False


def _fits(options: FitsOptions) -> None:
    """Find the longest sequence that fits, or what one takes: every part by its formula."""
    with refusing_bad_input(NAMES):
        require("transformers", "tilewise fits")
        # They import transformers' interfaces.
        from tilewise_tools.fits.longest import longest, memory_of
        from tilewise_tools.fits.model import read_config

        machine = read_machine_option(options.machine)
        if options.memory is not None:
            memory_bytes = read_bytes("--memory", options.memory)
        elif machine.memory_bytes < UNKNOWN_MEMORY:
            memory_bytes = machine.memory_bytes
        else:
            raise ValueError(f"{machine.name} does not say its memory; pass --memory, as in 16GiB")
        plan = None
        if options.strategy is not None:
            with naming("--strategy"):
                plan = read_plans(options.strategy, options.cp, ranks_option="--cp")[0]
        setting = Setting(
            machine,
            options.cp,
            options.dp,
            options.dtype,
            options.param_dtype,
            options.optimizer,
            options.checkpointing,
            tuple(options.offload or ()),
            plan,
        )
        with naming("--model"):
            config = read_config(options.model)
        asked = None
        if options.num_tokens is not None:
            asked = read_count("--num-tokens", options.num_tokens)
            if asked < options.cp:
                raise ValueError(
                    f"--num-tokens ({asked}) must be at least --cp ({options.cp}): a rank's rows"
                )
        task = f"a step of {config.model_type}"
        with working(task) as progress:
            if asked is None:
                fit = longest(
                    config, setting, memory_bytes, lambda n: progress(f"{task}: {n:,} tokens")
                )
            else:
                fit = memory_of(config, setting, asked)
    found = {
        "num_tokens": fit.num_tokens,
        "fits": fit.peak.num_bytes <= memory_bytes,
        "peak_bytes": fit.peak.num_bytes,
        "memory_bytes": memory_bytes,
        "moment": fit.peak.moment,
        "rows": fit.step.num_rows,
        "host_bytes": fit.step.offloaded_bytes,
        "plans": list(fit.step.passes.plan_names),
        "parts": [part._asdict() for part in fit.peak.parts],
    }
    if options.as_json:
        print_json(found)
    else:
        _print(found, options)


fits_command = command_of(_fits, FitsOptions)


def _print(found: dict[str, Any], options: FitsOptions) -> None:
    console = table_console()

    def plain(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    peak, memory = as_bytes(found["peak_bytes"]), as_bytes(found["memory_bytes"])
    where = f"cp {options.cp}, dp {options.dp}"
    if options.num_tokens is not None:
        verdict = "fits" if found["fits"] else "does not fit"
        plain(f"{found['num_tokens']:,} tokens ({where}): {verdict}, {peak} of {memory} a device")
    elif found["num_tokens"]:
        plain(f"{found['num_tokens']:,} tokens fit ({where}): {peak} of {memory} a device")
    else:
        plain(f"nothing fits ({where}): {found['rows']} tokens a rank take {peak} of {memory}")
    plain(f"The peak is in {found['moment']}, with {found['rows']:,} rows on a rank:")
    table = table_of("part", "bytes", no_wrap=True)
    table.add_column("formula", overflow="fold")
    for part in found["parts"]:
        table.add_row(part["name"], as_bytes(part["num_bytes"]), part["formula"])
    console.print(table)
    if found["host_bytes"]:
        plain(f"On the host at most {as_bytes(found['host_bytes'])} of activations.")
