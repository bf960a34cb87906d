"""tilewise plan: the fastest ways to run a workload on a cluster, and why."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from tilewise.planning.advisor import nearest_settings
from tilewise.planning.candidate import Candidate
from tilewise.planning.reasons import TIE
from tilewise.planning.search import candidate_of, search
from tilewise.simulation.network import LINKS
from tilewise.workload import PRESETS, Workload
from tilewise_tools.cli.options import (
    OPTIONS,
    SHOWN_USUAL,
    AsJson,
    WorkOptions,
    command_of,
    option,
    read_bytes,
    read_machine_option,
    read_plans,
    workload_of,
)
from tilewise_tools.cli.output import (
    as_bytes,
    as_seconds,
    check_writable,
    print_json,
    refusing_bad_input,
    working,
    write_output,
)
from tilewise_tools.naming import naming
from tilewise_tools.report.words import count, quantity

SETTING = ("library", "options", "plan", "save", "seconds")
NARROW, ROOMY = 72, 100  # columns of a terminal under which some columns have no room


class PlanOptions(NamedTuple):
    """Options of `tilewise plan`."""

    world_size: Annotated[int, option("Ranks.", min=1)]
    preset: Annotated[
        str | None, option(f"Of tokens, heads, mask and layout: {', '.join(PRESETS)}.")
    ] = None
    memory: Annotated[str | None, option("Per rank, as in 20GiB; the machine's unless given.")] = (
        None
    )
    top: Annotated[int, option("Rows of the table.", min=1)] = 10
    strategy: Annotated[
        list[str] | None,
        option("A plan that is to be in the table, as in 'ulysses(64)'; may be repeated."),
    ] = None
    output: Annotated[
        Path | None, option("Write the best plan to this file.", "--output", "-o")
    ] = None
    as_json: AsJson = False


def plan(options: PlanOptions, about: WorkOptions) -> None:
    """Rank the ways to run attention on a cluster by simulated time, and say why the best wins."""
    with refusing_bad_input({**OPTIONS, "preset": "--preset"}):
        check_writable("--output", options.output, (options, about))
        machine = read_machine_option(about.machine)
        memory = None if options.memory is None else read_bytes("--memory", options.memory)
        preset = options.preset and Workload.preset(options.preset, options.world_size)
        work = workload_of(about, options.world_size, preset or None)
        with naming("--strategy"):
            asked_plans = [
                read_plans(text, options.world_size, about)[0] for text in options.strategy or ()
            ]
        task = f"searching plans for {options.world_size} ranks"
        with working(task) as progress:
            candidates = search(
                work,
                machine,
                world_size=options.world_size,
                memory_bytes=memory,
                progress=lambda part: progress(f"{task}: {part}"),
            )
            best, candidates_shown = candidates[0], candidates[: options.top]
            for asked_plan in asked_plans:
                progress(f"{task}: {asked_plan.name}")
                layout = asked_plan.made_for[1] if asked_plan.made_for else best.layout
                laid_out = replace(work, layout=layout)
                candidates_shown.append(candidate_of(asked_plan, laid_out, machine))
            candidates_shown.sort(key=lambda candidate: _place(candidate, best))
            for number, candidate in enumerate(candidates_shown, 1):
                progress(f"{task}: memory of plan {number} of {len(candidates_shown)}")
                _ = candidate.peak_bytes  # counted when it is first read
    if options.output is not None:
        write_output(options.output, best.to_json())
    if options.as_json:
        print_json(_as_json(best, candidates_shown))
    else:
        _print(Console(), best, candidates_shown, options.output)


plan_command = command_of(plan, PlanOptions, WorkOptions, usual=SHOWN_USUAL)


def _place(candidate: Candidate, best: Candidate) -> tuple[bool, float]:
    """Sort key in the table: by time, but what ties with the best comes after it."""
    is_after = candidate is not best and TIE * candidate.seconds >= best.seconds
    return is_after, candidate.seconds


def _as_json(best: Candidate, candidates_shown: list[Candidate]) -> dict[str, Any]:
    distances, sent_bytes = best.distances, best.sent_bytes
    return {
        "candidates": [
            {
                "rank": number,
                **candidate.row._asdict(),
                "reason": candidate.reason,
            }
            for number, candidate in enumerate(candidates_shown, 1)
        ],
        "reason": best.reason,
        "wire": str(best.wire),
        "least_compute_seconds": distances.compute_seconds,
        "least_bytes": distances.least_bytes,
        "seconds_over_least": best.seconds / distances.compute_seconds,
        "bytes_over_least": sent_bytes / distances.least_bytes if distances.least_bytes else None,
        "elsewhere": [
            {name: getattr(setting, name) for name in SETTING} for setting in nearest_settings(best)
        ],
    }


def _print(
    console: Console, best: Candidate, candidates_shown: list[Candidate], output: Path | None
) -> None:
    work = best.work

    def plain(text: str, **how: Any) -> None:
        console.print(text, highlight=False, markup=False, **how)

    console.print(
        f"[bold]{best.world_size} ranks of {best.machine.name}[/]: "
        f"{count(work.num_tokens)} tokens, "
        f"{work.num_heads}:{work.num_kv_heads} heads of {work.shown_widths}, {work.dtype}, "
        f"{work.mask!r}, {best.layout.name}"
        + (f", wire {best.wire}" if work.wire else "")
        + ("" if work.strategies is None else f", {work.reduction}"),
        highlight=False,
    )
    console.print(_table(candidates_shown, console.width))
    plain(
        "Only plans that were simulated are in the table, of each strategy the best one. "
        "--strategy adds another."
    )
    if any(candidate.sampled or candidate.memory_sampled for candidate in candidates_shown):
        plain("~ is of a sample of the ranks; figures of the first plan are of all.")
    plain(best.reason)
    plain(_distance(best))
    plain(f"forward   {best.plan.name}", soft_wrap=True)
    plain(f"backward  {best.backward_plan.name}", soft_wrap=True)
    for setting in nearest_settings(best):
        plain(
            f"{setting.library}: {setting.options}\n  does nearest, {setting.plan} with "
            f"save={setting.save}: {as_seconds(setting.seconds)}, "
            f"{100 * (setting.seconds / best.seconds - 1):+.1f} %",
            soft_wrap=True,
        )
    if output is not None:
        plain(f"written to {output}: tilewise.planning.load_candidate reads it")


def _table(candidates_shown: list[Candidate], width: int) -> Table:
    """Time and memory; where there is room also waiting and bytes over each link, then the rest."""
    is_wide, is_roomy = width >= NARROW, width >= ROOMY
    links = [
        x
        for x in LINKS
        if is_wide and any(x in candidate.bytes_by_link for candidate in candidates_shown)
    ]
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("#", justify="right")
    table.add_column("strategy", overflow="fold")
    parts = ["waiting"] * is_wide + ["copies"] * is_roomy
    for column in ("time", *parts, *(f"sent\n{link}" for link in links), "memory"):
        table.add_column(column, justify="right", no_wrap=True)
    if is_roomy:
        table.add_column("save", no_wrap=True)
    for number, candidate in enumerate(candidates_shown, 1):
        sent_texts = (as_bytes(candidate.bytes_by_link.get(link, 0)) for link in links)
        table.add_row(
            *(
                str(number),
                candidate.strategy,
                f"{'~' * candidate.sampled}{as_seconds(candidate.seconds)}",
            ),
            *[quantity(candidate.exposed_seconds, "s")] * is_wide,
            *[quantity(candidate.overhead_seconds, "s")] * is_roomy,
            *sent_texts,
            f"{'~' * candidate.memory_sampled}{as_bytes(candidate.peak_bytes)}",
            *[candidate.save] * is_roomy,
            style="green" if number == 1 else None,
        )
    return table


def _distance(best: Candidate) -> str:
    distances, sent_bytes = best.distances, best.sent_bytes
    text = (
        f"Kernels alone, at their best and equally shared, take "
        f"{as_seconds(distances.compute_seconds)}, "
        f"{100 * distances.compute_seconds / best.seconds:.1f} % of it."
    )
    if not distances.least_bytes:
        return text
    hidden = 1 - best.exposed_seconds / best.seconds
    ratio = quantity(sent_bytes / distances.least_bytes)
    return (
        f"{text} Its busiest rank sends {as_bytes(sent_bytes)}, {ratio} times the lower bound of "
        f"equal shares, {as_bytes(distances.least_bytes)}: {100 * hidden:.1f} % of its time no "
        "rank waits for a message."
    )
