"""ring-flash-attn 0.1.8's public functions, run by tilewise: `functions` says what they take.

    from tilewise.compat.ring_flash_attn import zigzag_ring_flash_attn_func

Code that is not one's own finds them under their old name, too:

    from tilewise.compat import ring_flash_attn
    ring_flash_attn.install()               # before anything imports ring_flash_attn
"""

import sys

from tilewise.integrations.slots.ring_flash_attn import adapters as adapters
from tilewise.integrations.slots.ring_flash_attn import functions as functions
from tilewise.integrations.slots.ring_flash_attn import utils as utils
from tilewise.integrations.slots.ring_flash_attn.adapters import (
    substitute_hf_flash_attn,
    update_ring_flash_attn_params,
)
from tilewise.integrations.slots.ring_flash_attn.functions import (
    llama3_flash_attn_prepare_cu_seqlens,
    llama3_flash_attn_varlen_func,
    llama3_flash_attn_varlen_kvpacked_func,
    llama3_flash_attn_varlen_qkvpacked_func,
    ring_flash_attn_func,
    ring_flash_attn_kvpacked_func,
    ring_flash_attn_qkvpacked_func,
    ring_flash_attn_varlen_func,
    ring_flash_attn_varlen_kvpacked_func,
    ring_flash_attn_varlen_qkvpacked_func,
    stripe_flash_attn_func,
    stripe_flash_attn_kvpacked_func,
    stripe_flash_attn_qkvpacked_func,
    zigzag_ring_flash_attn_func,
    zigzag_ring_flash_attn_kvpacked_func,
    zigzag_ring_flash_attn_qkvpacked_func,
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "install",
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func",
    "ring_flash_attn_func",
    "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func",
    "ring_flash_attn_varlen_func",
    "ring_flash_attn_varlen_kvpacked_func",
    "ring_flash_attn_varlen_qkvpacked_func",
    "stripe_flash_attn_func",
    "stripe_flash_attn_kvpacked_func",
    "stripe_flash_attn_qkvpacked_func",
    "substitute_hf_flash_attn",
    "update_ring_flash_attn_params",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_kvpacked_func",
    "zigzag_ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
]

FILES = (
    "ring_flash_attn",
    "ring_flash_attn_varlen",
    "zigzag_ring_flash_attn",
    "zigzag_ring_flash_attn_varlen",
    "stripe_flash_attn",
    "llama3_flash_attn_varlen",
)
"""Modules of ring-flash-attn that hold its functions."""


def install() -> None:
    """Let `import ring_flash_attn` and its modules mean this package, in this process.

    Raises:
        ValueError: if the library itself has been imported already.
    """
    name, own = "ring_flash_attn", sys.modules[__name__]
    if sys.modules.get(name, own) is not own:
        raise ValueError(
            "ring_flash_attn itself has been imported already, and modules hold its functions; "
            "call tilewise.compat.ring_flash_attn.install() first in the program"
        )
    modules = dict.fromkeys(FILES, functions) | {"utils": utils, "triton_utils": utils}
    for file, module in modules.items():
        sys.modules[f"{name}.{file}"] = module
        setattr(own, file, module)  # for `import ring_flash_attn.FILE as x`
    sys.modules[name] = own
    sys.modules[f"{name}.adapters"] = adapters
    sys.modules[f"{name}.adapters.hf_adapter"] = adapters.hf_adapter
