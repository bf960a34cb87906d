"""NEFTune's noise on embeddings of a split call is the noise of the whole batch.

transformers adds to the embeddings [rows, columns, hidden] of a batch uniform noise of the size
alpha / sqrt(columns * hidden), from torch's generator. In split calls a rank embeds its own tokens
alone. Ours draws the noise of the whole batch on every rank, from the generator of the first, and
adds the part of the rank's tokens: these are the numbers of the unsplit run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor, nn

from tilewise.integrations.seeds import share_random_state
from tilewise.integrations.transformers.forward import split_call_of_thread
from tilewise.integrations.transformers.saved import not_compiled


def noise_of_batch(hook: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the hook of an embedding that stands for transformers' neftune_post_forward_hook.

    Args:
        hook: transformers' own. It serves unsplit calls, and draws the noise of split ones.
    """

    @wraps(hook)
    @not_compiled
    def add_noise(module: nn.Module, inputs: Any, embeddings: Tensor) -> Tensor:
        call = split_call_of_thread()
        if call is None or not module.training:
            return hook(module, inputs, embeddings)
        share_random_state(call.split.group)
        zeros = embeddings.new_zeros(()).expand(*call.rows.shape, embeddings.shape[-1])
        return embeddings + call.own_rows(hook(module, inputs, zeros))

    return add_noise
