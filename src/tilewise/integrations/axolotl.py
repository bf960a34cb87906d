"""axolotl's context parallelism on tilewise, by one line of its YAML.

plugins: [tilewise.integrations.axolotl.TilewisePlugin]
context_parallel_size: 4
flash_attention: true
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tilewise.integrations.slots import ring_flash_attn


def _base_plugin() -> Any:
    """axolotl's class of plugins; without axolotl, object."""
    try:
        return import_module("axolotl.integrations.base").BasePlugin
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "axolotl":
            raise
        return object


class TilewisePlugin(_base_plugin()):
    """A BasePlugin of axolotl: the ring_flash_attn that axolotl imports is tilewise's.

    axolotl loads it by its dotted name and registers it before the configuration is validated, so
    ring-flash-attn need not be installed. See docs/integrations/ring_flash_attn.md for what these
    functions take; flash-attn is still asked for by axolotl itself.
    """

    def register(self, cfg: Any) -> None:
        """Let `import ring_flash_attn` mean tilewise's functions in this process.

        Args:
            cfg: axolotl's configuration, which is not read.
        Raises:
            ValueError: if ring_flash_attn itself has been imported already.
        """
        ring_flash_attn.install()
