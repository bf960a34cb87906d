"""The command line, for `python -m tilewise` and `torchrun -m tilewise`."""

from tilewise.tools.cli import app

if __name__ == "__main__":
    app()
