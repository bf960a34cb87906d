"""Messages that name the option, or the field of a benchmark's case, that they are about."""

import re
from collections.abc import Iterator
from contextlib import contextmanager


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
