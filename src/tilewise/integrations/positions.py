"""The public path of tilewise.integrations.data.positions, the same module."""

import sys

from tilewise.integrations.data import positions as _positions
from tilewise.integrations.data.positions import *  # noqa: F403 - for type checkers

sys.modules[__name__] = _positions
