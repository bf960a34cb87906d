"""tilewise advise: the best setting that another library can legally run, beside the best plan."""

from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from tilewise.planning.advisor import LIBRARIES, Advice, Setting, advise
from tilewise.planning.model_attention import read_model
from tilewise.simulation.machine import Machine
from tilewise_tools.cli.options import (
    MACHINE,
    TOKENS,
    AsJson,
    command_of,
    option,
    read_count,
    read_machine_option,
)
from tilewise_tools.cli.output import (
    as_seconds,
    print_json,
    refusing_bad_input,
    table_console,
    table_of,
    working,
)
from tilewise_tools.naming import naming
from tilewise_tools.report.words import count

NAMES = MappingProxyType({"library": "--for", "ranks": "--ranks", "world_size": "--world-size"})


class AdviseOptions(NamedTuple):
    """Options of `tilewise advise`."""

    library: Annotated[str, option(f"{', '.join(LIBRARIES)}.", "--for")]
    model: Annotated[Path, option("The model's config.json, as transformers writes it.")]
    num_tokens: Annotated[str, option(TOKENS)]
    machine: Annotated[str, option("A preset, or the path of a TOML file.")] = MACHINE
    world_size: Annotated[
        int | None, option("Devices in all; those of a node unless given.", min=2)
    ] = None
    ranks: Annotated[
        int | None,
        option("Devices that share one sequence; all unless given. Others take others.", min=2),
    ] = None
    as_json: AsJson = False


def _advise(options: AdviseOptions) -> None:
    """Find the best setting that a library can legally run, its cost, and what it loses."""
    with refusing_bad_input(NAMES):
        machine = read_machine_option(options.machine)
        num_tokens = read_count("--num-tokens", options.num_tokens)
        with naming("--model"):
            model = read_model(options.model)
        world_size = options.world_size or machine.node_size
        with working(f"simulating settings of {options.library} for {world_size} devices"):
            advice = advise(
                options.library, model, num_tokens, machine, world_size, ranks=options.ranks
            )
    if options.as_json:
        print_json(_as_json(advice))
    else:
        _print(advice, num_tokens, machine, world_size, model.num_layers)


advise_command = command_of(_advise, AdviseOptions)


def _as_json(advice: Advice) -> dict[str, Any]:
    return {
        "library": advice.library,
        "setting": advice.setting and _setting(advice.setting),
        "best": {
            **advice.best._asdict(),
            "plans": [item.plan.name for item in advice.candidates],
            "backward_plans": [item.backward_plan.name for item in advice.candidates],
        },
        "refused": advice.refused,
        "lost": advice.lost,
        "verdict": advice.verdict,
        "by_ranks": [_setting(item) for item in advice.by_ranks],
    }


def _setting(setting: Setting) -> dict[str, Any]:
    return {
        **setting._asdict(),
        "split": setting.split._asdict(),
        "cost": setting.cost._asdict(),
        "seconds_a_sequence": setting.seconds_a_sequence,
    }


def _print(
    advice: Advice, num_tokens: int, machine: Machine, world_size: int, num_layers: int
) -> None:
    console = table_console()

    def plain(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    plain(
        f"{advice.library}: {count(num_tokens)} tokens on {world_size} devices of {machine.name}, "
        f"{num_layers} attention layers, forward and backward, simulated"
    )
    setting = advice.setting
    if setting is not None:
        split = setting.split
        plain(f"\n  {setting.options}\n")
        plain(
            f"{setting.scheme}: {as_seconds(setting.seconds)} a sequence on {split.ranks} "
            f"devices, as {setting.plan}"
        )
    plain(f"best plan: {as_seconds(advice.best.seconds)}")
    for candidate in advice.candidates:
        same = candidate.plan.name == candidate.backward_plan.name
        backward = "" if same else f", backward {candidate.backward_plan.name}"
        plain(f"  {candidate.work.mask!r}: {candidate.plan.name}{backward}")
    for label, lines in (("lost", advice.lost), ("refused", advice.refused)):
        for line in lines:
            plain(f"{label}: {line}")
    plain(advice.verdict)
    if len(advice.by_ranks) > 1:
        plain("\nTime per sequence by context-parallel size, with all devices busy:")
        table = table_of("devices", "a sequence", "setting")
        for one in advice.by_ranks:
            table.add_row(str(one.split.ranks), as_seconds(one.seconds_a_sequence), one.scheme)
        console.print(table)
        plain("Where several do, take the fewest whose memory holds a sequence: they send least.")
