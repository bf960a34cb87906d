"""ring-flash-attn's adapters of other libraries' models."""

from tilewise.integrations.slots.ring_flash_attn.adapters import hf_adapter as hf_adapter
from tilewise.integrations.slots.ring_flash_attn.adapters.hf_adapter import (
    substitute_hf_flash_attn,
    update_ring_flash_attn_params,
)

__all__ = ["substitute_hf_flash_attn", "update_ring_flash_attn_params"]
