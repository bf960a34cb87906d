"""The public path of tilewise.integrations.slots.automodel, the same module."""

import sys

from tilewise.integrations.slots import automodel as _automodel
from tilewise.integrations.slots.automodel import *  # noqa: F403 - for type checkers

sys.modules[__name__] = _automodel
