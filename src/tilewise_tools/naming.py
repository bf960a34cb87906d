"""Refusals in one line that name the option, or the field of a benchmark's case."""

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Never


class Parser(argparse.ArgumentParser):
    """A parser of scripts that refuses bad options in one line, with code 2, as commands do."""

    def error(self, message: str) -> Never:
        """End with what is wrong, and where the options that would do are listed."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; see {self.prog} -h\n")


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Name an option in the message of a ValueError, unless the message names it.

        with naming("--plan"):
            raise ValueError("ring(3) is for 3 ranks")  # --plan: ring(3) is for 3 ranks

    Args:
        option: as in "--backward-plan"; or the name of a field, which the command renames.
    """
    try:
        yield
    except ValueError as error:
        field = option.strip("-").replace("-", "_")
        said = re.sub(rf"^{field}(?=[ :])", option, str(error))
        before = r"(?<![-\w])" if option.startswith("-") else "^"  # a field is also a word
        is_named = re.search(rf"{before}{option}(?![-\w.])", said)
        raise ValueError(said if is_named else f"{option}: {said}") from error
