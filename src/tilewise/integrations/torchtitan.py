"""The public path of tilewise.integrations.slots.torchtitan, the same module."""

import sys

from tilewise.integrations.slots import torchtitan as _torchtitan
from tilewise.integrations.slots.torchtitan import *  # noqa: F403 - for type checkers

sys.modules[__name__] = _torchtitan
