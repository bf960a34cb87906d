"""The path that tilewise_verify had until it became a package of its own; it works until 1.0."""

from typing import TYPE_CHECKING

from tilewise.moved import moved

if TYPE_CHECKING:
    from tilewise_verify import *  # noqa: F403

moved(__name__, "tilewise_verify")
