"""The public path of tilewise.integrations.transformers.accelerate, the same module."""

import sys

from tilewise.integrations.transformers import accelerate as _accelerate
from tilewise.integrations.transformers.accelerate import *  # noqa: F403 - for type checkers

sys.modules[__name__] = _accelerate
