"""The command line, for `tilewise`, `python -m tilewise` and `torchrun -m tilewise`."""


def main() -> None:
    """Run the command line, which needs the extra cli."""
    try:
        from tilewise_tools.cli import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        raise SystemExit(
            f"the command line needs {error.name}: pip install 'tilewise[cli]'"
        ) from error
    app()


if __name__ == "__main__":
    main()
