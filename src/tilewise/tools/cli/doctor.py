"""tilewise doctor: what can run here, and why the rest cannot."""

from rich.console import Console
from rich.table import Table

from tilewise.tools.cli.options import AsJson
from tilewise.tools.cli.output import print_json
from tilewise.tools.doctor import examine


def doctor(as_json: AsJson = False) -> None:
    """List versions, devices, kernels, transports and extras, with reasons for what is out."""
    findings = examine()
    if as_json:
        print_json([finding._asdict() for finding in findings])
        return
    table = Table("part", "name", "here", "detail")
    before = ""
    for part, name, is_here, detail in findings:
        if before and part != before:
            table.add_section()
        table.add_row(
            part if part != before else "",
            name,
            "[green]yes[/]" if is_here else "[yellow]no[/]",
            detail.replace("[", r"\["),
        )
        before = part
    Console().print(table)
