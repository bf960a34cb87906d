"""The command line: one file per command, all printing done here."""

import typer

from tilewise.cli.demo_command import demo
from tilewise.cli.doctor_command import doctor
from tilewise.cli.mask_command import mask_command
from tilewise.cli.masks_command import masks_command
from tilewise.cli.show_command import show

app = typer.Typer(
    help="Exact attention over sequences split across many devices.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
for command in (demo, show, mask_command, masks_command, doctor):
    app.command()(command)
