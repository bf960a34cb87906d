"""Refusals in one line that name the option, or the field of a benchmark's case."""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Never

from tilewise.arguments import require_range

_COUNT = re.compile(r"(\d+)([kKmM]?)$")
MOST_TOKENS = 1 << 27  # the work of each is kept, by some layouts
MOST_NAMES = 20  # that a refusal lists


def read_count(what: str, text: str) -> int:
    """A number of tokens: 4096, 128K or 1M, in powers of 1024; at most MOST_TOKENS."""
    match = _COUNT.match(text.strip())
    if not match or not int(match[1]):
        raise ValueError(f"{what} ({text!r}) must be a number such as 4096, 128K or 1M (1048576)")
    count = int(match[1]) << {"": 0, "k": 10, "m": 20}[match[2].lower()]
    require_range(what, count, 1, MOST_TOKENS)
    return count


def in_one_line(error: Exception, names: Mapping[str, str]) -> str:
    """Return the message of an error with options in place of the library's names.

    A name is replaced where it begins the message or its value follows in parentheses. That an
    argument may also be None says nothing of an option, and is left out.
    """
    said = " ".join(str(error).split()) or type(error).__name__
    for name, option in names.items():
        said = re.sub(rf"^{name}(?=[ :])|(?<![-\w]){name}(?= \(|=')", option, said)
    return re.sub(r"(?<=') or None\b", "", said)


class Parser(argparse.ArgumentParser):
    """A parser of scripts that refuses bad options in one line, with code 2, as commands do."""

    def error(self, message: str) -> Never:
        """End with what is wrong, and where the options that would do are listed."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; see {self.prog} -h\n")


def whole_number(text: str) -> int:
    """Type of a script's option that counts: 1 or more, as in 4096, 128K or 1M."""
    try:
        return read_count("the value", text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def whole_numbers(text: str) -> list[int]:
    """Type of a script's option that lists counts, as in 8,64,256."""
    return [whole_number(part) for part in text.split(",")]


def some_of(names: Iterable[str], comma: str = ",") -> Callable[[str], list[str]]:
    """Return the type of a script's option that lists some of these names."""
    known = list(names)

    def read(text: str) -> list[str]:
        chosen = text.split(comma)
        if unknown := [name for name in chosen if name not in known]:
            there = comma.join(known) if len(known) < MOST_NAMES else f"{known[0]} to {known[-1]}"
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {there}")
        return chosen

    return read


def new_file(text: str) -> Path:
    """Type of a script's option that names a file to write: its folder must be there."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        what = f"{path} is a folder" if path.is_dir() else f"{path.parent} is no folder"
        raise argparse.ArgumentTypeError(f"{what}; name a file in a folder that is there")
    return path


def require_png(option: str, path: Path) -> None:
    """Raise ValueError unless a picture's name ends in .png."""
    if path.suffix.lower() != ".png":
        raise ValueError(f"{option} ({str(path)!r}) must be a name that ends in .png")


def run_script(main: Callable[[], object], **names: str) -> Never:
    """Run a script and end the process; bad input is one line, and code 2.

        run_script(main, world_size="--ranks")

    Args:
        main: it returns the exit code; anything but a number is 0.
        names: the script's options by the library's names, as for in_one_line.
    """
    try:
        code = main()
    except (ValueError, OSError) as error:
        Parser(prog=Path(sys.argv[0]).name).error(in_one_line(_of_input(error), names))
    sys.exit(code if isinstance(code, int) else 0)


def _of_input(error: ValueError | OSError) -> ValueError:
    """Return the error that refuses an input; one about no file is of the machine, and raised."""
    if isinstance(error, ValueError):
        return error
    if error.filename is None:
        raise error
    return ValueError(f"{error.filename}: {error.strerror}")


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Name an option in the message of a ValueError, unless the message names it.

    A file that cannot be read or written is such an error too.

        with naming("--plan"):
            raise ValueError("ring(3) is for 3 ranks")  # --plan: ring(3) is for 3 ranks

    Args:
        option: as in "--backward-plan"; or the name of a field, which the command renames.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        field = option.strip("-").replace("-", "_")
        said = re.sub(rf"^{field}(?=[ :])", option, str(_of_input(error)))
        before = r"(?<![-\w])" if option.startswith("-") else "^"  # a field is also a word
        is_named = re.search(rf"{before}{option}(?![-\w.])", said)
        raise ValueError(said if is_named else f"{option}: {said}") from error
