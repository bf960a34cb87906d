"""The command line: one file per command, all printing done here."""

from importlib.metadata import version
from typing import Annotated

import typer

from tilewise_tools.cli.advise import advise_command
from tilewise_tools.cli.bench import bench_app
from tilewise_tools.cli.calibrate import calibrate
from tilewise_tools.cli.demo import demo
from tilewise_tools.cli.doctor import doctor
from tilewise_tools.cli.examples import epilog
from tilewise_tools.cli.explain import explain
from tilewise_tools.cli.fits import fits_command
from tilewise_tools.cli.group import Commands, OneCommand
from tilewise_tools.cli.lab import lab_app
from tilewise_tools.cli.mask import mask_command
from tilewise_tools.cli.parity import parity
from tilewise_tools.cli.plan import plan_command
from tilewise_tools.cli.report import report_command
from tilewise_tools.cli.show import show_command
from tilewise_tools.cli.simulate import simulate_command

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(version("tilewise"))
        raise typer.Exit


@app.callback()
def tilewise(
    _: Annotated[
        bool, typer.Option("--version", help="Print it.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Exact attention over sequences split across many devices."""


for command in (
    demo,
    show_command,
    plan_command,
    advise_command,
    fits_command,
    simulate_command,
    mask_command,
    parity,
    explain,
    doctor,
    report_command,
    calibrate,
):
    app.command(cls=OneCommand, epilog=epilog(command.__name__))(command)
app.add_typer(bench_app, name="bench")
app.add_typer(lab_app, name="lab")
