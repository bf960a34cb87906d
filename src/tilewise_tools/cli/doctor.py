"""tilewise doctor: what can run here, and why the rest cannot."""

from rich.console import Console
from rich.table import Table

from tilewise_tools.cli.options import AsJson
from tilewise_tools.cli.output import print_json
from tilewise_tools.doctor import examine


def doctor(as_json: AsJson = False) -> None:
    """List versions, devices, kernels, transports and extras, with reasons for what is out."""
    findings = examine()
    if as_json:
        print_json([finding._asdict() for finding in findings])
        return
    table = Table("part", "name", "here", "detail")
    previous_part = ""
    for part, name, is_here, detail in findings:
        if previous_part and part != previous_part:
            table.add_section()
        table.add_row(
            part if part != previous_part else "",
            name,
            "[green]yes[/]" if is_here else "[yellow]no[/]",
            detail.replace("[", r"\["),
        )
        previous_part = part
    Console().print(table)
