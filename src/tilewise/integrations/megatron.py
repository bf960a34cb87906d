"""The public path of tilewise.integrations.slots.megatron, the same module."""

import sys

from tilewise.integrations.slots import megatron as _megatron
from tilewise.integrations.slots.megatron import *  # noqa: F403 - for type checkers

sys.modules[__name__] = _megatron
