"""NeMo Automodel's context parallelism by tilewise: the sharder of its batches, and its attention.

    model = automodel.parallelize(model, device_mesh)       # then train as before

Automodel asks a model for its ContextParallelSharder, cuts every batch by it, and computes the loss
of this rank's tokens. Its names of attention backends are a closed list, so that models of
transformers get theirs as attn_implementation="tilewise". Recipes, data and loss stay Automodel's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

import tilewise as tw
from tilewise.arguments import checks_arguments
from tilewise.integrations.data import IGNORED
from tilewise.integrations.transformers.check import (
    attach,
    base_model,
    check_model,
    refuse_new_adapters,
    registered,
)
from tilewise.integrations.transformers.states import has_state_functions, is_stateless
from tilewise.plan.kept import RecentValues
from tilewise.transport.agreement import settled

NAME = "tilewise"
TOKEN_COLUMNS = ("input_ids", "inputs_embeds", "labels", "position_ids", "padding_mask")
"""Tensors of a batch that are cut along the sequence, their second dimension."""
THEIR_HOOK = "attach_context_parallel_hooks"

Model = TypeVar("Model", bound=nn.Module)


@checks_arguments
def parallelize(
    model: Model, device_mesh: Any, *, strategy: Literal["auto"] | tw.Plan = "auto"
) -> Model:
    """Make a model's batches and its attention run over the mesh's "cp", and return the model.

    It gives the model the method `prepare_model_inputs_for_cp`, by which Automodel finds the
    sharder, and takes away the hooks that make its attention torch's. On one rank it changes
    nothing.

    Args:
        model: of transformers, or one that PEFT made of it, causal; FSDP2 may have wrapped it.
        device_mesh: Automodel's, with a dimension "cp".
    Raises:
        ValueError: if the model cannot be split, or one of its layers sees later tokens, which
            would be padding.
    """
    if "cp" not in (device_mesh.mesh_dim_names or ()):
        raise ValueError(
            f"device_mesh has the dimensions {device_mesh.mesh_dim_names}; pass one with 'cp'"
        )
    cp_mesh = device_mesh["cp"]
    if cp_mesh.size() == 1:
        return model
    base = base_model(model)
    error = _refused(base)
    if error:
        raise ValueError(f"{type(base).__name__} cannot be split in Automodel: {error}")
    check_model(model, loss=False)
    _remove_their_hooks(model)
    lengths: RecentValues[int, tw.ContextParallel] = RecentValues(8)
    current: list[tw.ContextParallel] = []

    def of_length(num_tokens: int) -> tw.ContextParallel:
        group, layout = cp_mesh.get_group(), layout_of(cp_mesh, num_tokens)
        given = {"num_tokens": num_tokens, "mask": tw.Causal(), "layout": layout}
        return tw.ContextParallel(group, strategy=strategy, **given)

    def install(num_tokens: int) -> tw.ContextParallel:
        cp = lengths.get(num_tokens, lambda: of_length(num_tokens))
        if not current:
            attach(model, cp, NAME)
            refuse_new_adapters(model, cp.group)
        elif current[0] is not cp:
            registered(cp, NAME, proven=True, stateless=is_stateless(base))
        current[:] = [cp]
        return cp

    def prepare_model_inputs_for_cp(batch: dict[str, Any], *, num_chunks: int = 1) -> Any:
        return {"cp_sharder": sharder(install)}

    setattr(model, "prepare_model_inputs_for_cp", prepare_model_inputs_for_cp)  # noqa: B010
    return model


def layout_of(cp_mesh: Any, padded_seq_len: int) -> tw.Layout:
    """The layout of Automodel's batches: pieces r and 2n - 1 - r on rank r of n.

    Raises:
        ValueError: if ranks would have unequal parts, which its gathers cannot take.
    """
    pieces = 2 * cp_mesh.size()
    if padded_seq_len % pieces:
        raise ValueError(
            f"padded_seq_len ({padded_seq_len}) must be divisible by {pieces}, 2 x cp_size"
        )
    return tw.zigzag(padded_seq_len, cp_mesh.size())


def local_token_global_indices(
    cp_mesh: Any, padded_seq_len: int, device: torch.device | None = None
) -> Tensor:
    """Global position of each of this rank's tokens, as Automodel's sharders say it."""
    layout = layout_of(cp_mesh, padded_seq_len)
    return layout.positions(cp_mesh.get_local_rank()).to(device)


def sharder(install: Callable[[int], tw.ContextParallel]) -> Any:
    """Automodel's ContextParallelSharder of one batch.

    Args:
        install: makes the model's attention run over so many tokens.
    """
    from nemo_automodel.components.distributed.context_parallel.sharder import (  # pyright: ignore[reportMissingImports]
        ContextParallelSharder,
        ShardLayout,
    )

    def shard_batch(
        cp_mesh: Any,
        tp_mesh: Any,
        batch: dict[str, Any],
        *,
        loss_mask: Tensor | None = None,
        padding_token_id: int = 0,
    ) -> tuple[Any, dict[str, Any], Any]:
        pieces, transport = 2 * cp_mesh.size(), tw.transport.transport_for(cp_mesh.get_group())
        tokens = settled(transport, lambda: _checked(batch, loss_mask))
        padded = -(-tokens // pieces) * pieces
        cp = install(padded)
        for name in [name for name in TOKEN_COLUMNS if name in batch]:
            x = _padded(name, batch[name], padded - tokens, padding_token_id)
            batch[name] = cp.shard(x, dim=_token_dim(name, x)).contiguous()
        given = {"original_seq_len": tokens, "padded_seq_len": padded}
        return nullcontext, batch, ShardLayout(**given)

    return ContextParallelSharder(
        shard_batch=shard_batch, local_token_global_indices=local_token_global_indices
    )


def _checked(batch: dict[str, Any], loss_mask: Tensor | None) -> int:
    """The tokens of a batch's rows; its attention_mask is taken out, and positions are put in."""
    primary = [name for name in ("input_ids", "inputs_embeds") if name in batch]
    if len(primary) != 1:
        raise ValueError(f"the batch has {primary or 'neither input_ids nor inputs_embeds'}")
    rows, tokens = batch[primary[0]].shape[:2]
    if batch.get("qkv_format") == "thd":
        raise ValueError(
            "qkv_format 'thd' is of the TransformerEngine backend; leave it out, and pass "
            "position_ids that start at 0 in each document of a row"
        )
    if loss_mask is not None:
        raise ValueError("loss_mask is not supported; set the labels that it hides to -100")
    mask = batch.pop("attention_mask", None)
    if mask is not None and (mask.ndim != 2 or bool((mask.diff(dim=1) > 0).any())):
        raise ValueError(
            f"attention_mask {list(mask.shape)} must be [batch, tokens] and 0 at the end of rows "
            "alone; pad rows on the right, and tell documents by position_ids"
        )
    others = [
        name
        for name, x in batch.items()
        if name not in TOKEN_COLUMNS and isinstance(x, Tensor) and tokens in x.shape[1:2]
    ]
    if others:
        raise ValueError(
            f"{others[0]} of the batch has {tokens} columns as the tokens have, but it is not "
            f"known how it is cut; leave it out, or put it into {', '.join(TOKEN_COLUMNS)}"
        )
    if "position_ids" not in batch:
        at = torch.arange(tokens, device=batch[primary[0]].device)
        batch["position_ids"] = at.expand(rows, -1)
    return tokens


def _token_dim(name: str, x: Tensor) -> int:
    """The dimension of tokens: positions of three axes (M-RoPE) have another before the batch."""
    return 2 if name == "position_ids" and x.ndim == 3 else 1


def _padded(name: str, x: Tensor, count: int, padding_token_id: int) -> Tensor:
    """A column with so many tokens more, which no label is predicted from."""
    if count == 0:
        return x
    dim = _token_dim(name, x)
    shape = [*x.shape[:dim], count, *x.shape[dim + 1 :]]
    if name == "position_ids":  # they go on: a new start would be a document
        more = x.narrow(dim, x.shape[dim] - 1, 1) + torch.arange(1, count + 1, device=x.device)
    else:
        fills = {"labels": IGNORED, "input_ids": padding_token_id, "padding_mask": True}
        more = x.new_full(shape, fills.get(name, 0))
    return torch.cat([x, more], dim)


def _refused(model: Any) -> str | None:
    """Why a model that could be split elsewhere cannot be here."""
    if has_state_functions(model.config.get_text_config(decoder=True)):
        return "layers that carry a state along the sequence; use tilewise.integrations.hf"
    sees_later = [name for name, x in model.named_modules() if not getattr(x, "is_causal", True)]
    if sees_later:
        return f"{sees_later[0]} sees later tokens, among them the padding of Automodel's batches"
    return None


def _remove_their_hooks(model: nn.Module) -> None:
    """Take away the hooks by which Automodel replaces masks for torch's ring."""
    for module in model.modules():
        for key, hook in [*module._forward_pre_hooks.items()]:
            if getattr(hook, "__qualname__", "").startswith(THEIR_HOOK):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
