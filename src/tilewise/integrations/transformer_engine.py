"""The public path of tilewise.integrations.slots.transformer_engine, the same module."""

import sys

from tilewise.integrations.slots import transformer_engine as _transformer_engine
from tilewise.integrations.slots.transformer_engine import *  # noqa: F403 - for type checkers

sys.modules[__name__] = _transformer_engine
