"""The public path of tilewise.integrations.slots.ring_flash_attn, the same package."""

from typing import TYPE_CHECKING

from tilewise.moved import moved

if TYPE_CHECKING:
    from tilewise.integrations.slots.ring_flash_attn import *  # noqa: F403

moved(__name__, "tilewise.integrations.slots.ring_flash_attn")
