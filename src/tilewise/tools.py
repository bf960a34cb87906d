"""The path that tilewise_tools had until it became a package of its own; it works until 1.0."""

from tilewise.moved import moved

moved(__name__, "tilewise_tools")
