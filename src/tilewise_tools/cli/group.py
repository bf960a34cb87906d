"""The command line as a group of commands: what it cannot read is one line, as all bad input."""

import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from tilewise_tools.cli.output import BAD_INPUT, print_error

UsageError: Any = typer.BadParameter.__mro__[1]
"""Raised where words cannot be read; typer exports only this subclass of it."""


def without_types_of_flags(parameters: list[Any]) -> list[Any]:
    """Leave out of --help that a flag, which takes no value, is a <bool>."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


class OneLine:
    """A command or a group that ends in one line, with code 2, where words cannot be read."""

    def main(self, *words: Any, standalone_mode: bool = True, **options: Any) -> Any:
        """Run the command that the words name, and end the process as it says."""
        run: Any = super()
        if not standalone_mode:
            return run.main(*words, standalone_mode=False, **options)
        try:
            code = run.main(*words, standalone_mode=False, **options)
        except UsageError as error:
            if type(error).__name__ != "NoArgsIsHelpError":  # the help has been shown
                print_error(f"tilewise: {_one_line(error)}")
            sys.exit(BAD_INPUT)
        except typer.Abort:
            sys.exit(1)
        sys.exit(code or 0)


class OneCommand(OneLine, TyperCommand):
    """A command whose --help names no type of flags, and that is named in every refusal."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words of the command; a refusal says of which command they are."""
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, with that of --help."""
        return without_types_of_flags(super().get_params(ctx))


class Commands(OneLine, TyperGroup):
    """A group of commands whose --help names no type of flags."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, with that of --help."""
        return without_types_of_flags(super().get_params(ctx))


def _one_line(error: Any) -> str:
    """Return an error of the command line in one line, with the command that lists its options."""
    text = " ".join(str(error.format_message()).split()).rstrip(".")
    path = getattr(error.ctx, "command_path", "tilewise").replace("python -m ", "")
    return f"{text}; see {path} -h"
