"""The public path of tilewise.integrations.transformers.hf, the same module."""

import sys

from tilewise.integrations.transformers import hf as _hf
from tilewise.integrations.transformers.hf import *  # noqa: F403 - for type checkers

sys.modules[__name__] = _hf
