"""The command line: one file per command, all printing done here."""

from importlib.metadata import version
from typing import Annotated

import typer

from tilewise.cli.bench_command import bench_app
from tilewise.cli.calibrate_command import calibrate
from tilewise.cli.demo_command import demo
from tilewise.cli.doctor_command import doctor
from tilewise.cli.lab_command import lab_app
from tilewise.cli.mask_command import mask_command
from tilewise.cli.masks_command import masks_command
from tilewise.cli.plan_command import plan_command
from tilewise.cli.report_command import report
from tilewise.cli.show_command import show
from tilewise.cli.simulate_command import simulate_command

app = typer.Typer(no_args_is_help=True, pretty_exceptions_show_locals=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("tilewise"))
        raise typer.Exit


@app.callback()
def tilewise(
    _: Annotated[
        bool,
        typer.Option("--version", help="Print it.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Exact attention over sequences split across many devices."""


for command in (
    demo,
    show,
    plan_command,
    simulate_command,
    mask_command,
    masks_command,
    doctor,
    report,
    calibrate,
):
    app.command()(command)
app.add_typer(bench_app, name="bench")
app.add_typer(lab_app, name="lab")
