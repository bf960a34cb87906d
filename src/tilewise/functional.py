"""tw.attention: one call for every strategy, mask and layout."""

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from tilewise.arguments import (
    DtypeName,
    Reduction,
    Save,
    Validate,
    explains_other_names,
    is_dense,
    is_word,
)
from tilewise.execution.autograd import attend
from tilewise.execution.call import (
    Call,
    autocast_dtype,
    known_of,
    lowered,
    without_autocast,
)
from tilewise.execution.entry_masks import attend_by_entry
from tilewise.execution.operator import attend_compiled
from tilewise.execution.sinks import kind_of, with_sink
from tilewise.indexed.chosen import Chosen
from tilewise.kernels.bias import Alibi, expanded
from tilewise.kernels.protocol import Kernel
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Mask
from tilewise.plan.ir import Plan
from tilewise.transport.resolve import Group
from tilewise.wires.wire import AnyWire


# The overloads say what is returned; help() and a test know the options by name.
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    *,
    plan: Plan,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[False] = False,
    **options: Any,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    *,
    plan: Plan,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = False,
    **options: Any,
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    *,
    plan: Plan,
    return_lse: bool = False,
    return_max_logit: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, ...]: ...
@explains_other_names
def attention(  # noqa: PLR0913  # pyright: ignore[reportInconsistentOverload]
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    *,
    plan: Plan,
    layout: Layout | None = None,
    mask: Mask | Chosen | Sequence[Mask] | None = None,
    group: Group = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    backward_plan: Plan | None = None,
    kv_layout: Layout | None = None,
    wire_dtype: torch.dtype | DtypeName | None = None,
    wire: AnyWire | None = None,
    save: Save | None = None,
    prune: bool = True,
    reduction: Reduction = "fast",
    q_positions: Sequence[int] | Tensor | None = None,
    validate: Validate = "first",
    kernel: Kernel | str | None = None,
    sink: Tensor | None = None,
    bias: Tensor | Alibi | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    return_max_logit: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Exact softmax attention over a sequence split across the ranks of a group.

    out = softmax(softmax_scale q k^T + bias + mask) v over all tokens; every rank passes its own
    rows and gets its own rows of out. Gradients of q, k, v are exact; lse has one too. Every rank
    of the group calls it with the same arguments but the tensors' values.

    Args:
        q: [num_tokens, num_heads, head_dim] or [batch, num_tokens, num_heads, head_dim], this
            rank's rows under layout; with a plan of replicated queries (tree) the same few on all.
            Under torch.autocast q, k and v are cast as SDPA casts its operands, and out has
            autocast's dtype.
        k, v: as q with num_kv_heads, a divisor of num_heads; v, and out, of any head_dim. With
            wire=tw.wire.Latent(...) the latents [(batch,) num_tokens, width], and None.
        plan: from a strategy; of the backward pass too, unless backward_plan is given. Or what
            `BatchStep.prepare` made, which knows layout and mask: they may then be left out.
        layout: which tokens each rank owns; of k and v too, unless kv_layout is given. Of `joint`
            layouts every rank holds some tokens: their rows of out are complete on all, and
            gradients of their q, k and v are shares.
        mask: acts on global positions. A list of masks: one for each batch entry, in code that
            torch.compile does not compile; entries with the same mask share a call. `tw.Chosen`: a
            list of keys for each query; no plan has a part in it (docs/indexed.md).
        group: a ProcessGroup, a loopback group, a Transport, or None: the default group.
        softmax_scale: above 0; default 1 / sqrt(head_dim).
        return_lse: also return lse.
        wire_dtype: of travelling out, dq, dk, dv; default q's dtype. Merging is fp32 or wider.
            Short for wire=tw.wire.Plain(wire_dtype).
        wire: how what travels is encoded: one of tw.wire, or a tw.wire.Wires of several.
        save: "replay" operands' transfers in backward, or keep them "gathered"; default: replay,
            but gathered for ulysses alone, where it takes no more memory. Code that torch.compile
            compiles always replays.
        prune: leave out what the mask makes needless.
        reduction: "canonical": every result and gradient has the same bits for any world size,
            plan, layout, wire and save, and for a document whatever lies beside it, at a cost that
            docs/numerics.md says. "fast": as close, but the last bits depend on these.
        q_positions: of replicated queries; default the last of the sequence.
        validate: "first": ranks compare each kind of call (plan, mask, layout, shapes, ...) of a
            group once, and find out by waiting that they are in different calls; "always": each
            call before each pass, to find a fault; "never": none, but those of wires that round.
        kernel: what computes the tiles: a name from `tilewise doctor`, or any object that has the
            Kernel protocol; default: the device's first choice. Where no input requires a gradient
            it needs no backward pass. Ranks may differ. In code that torch.compile compiles a name.
        sink: [num_heads], q's dtype or fp32, the same on every rank (compared where the kind of
            call is, but not in compiled code): a logit a head that takes part
            in the softmax and has no value. [n, num_heads]: n of them a head; [batch, n,
            num_heads]: of each batch entry its own. Its gradient is this rank's share, to be summed
            over ranks as any replicated parameter's (complete on every rank under tree).
        bias: added to the scaled (and capped) scores before the mask. A tensor [num_heads,
            num_tokens, num_kv_tokens] of the whole sequence, heads or queries 1 where they share
            it, with a dimension before these where each batch entry has its own, the same on every
            rank (its kind is compared, values are not), of any floating-point dtype but fp64 beside
            narrower q; or `tw.alibi(slopes)`, -slope |i - j|. -inf hides a pair as a mask does.
            Each tile takes its own rows and columns; nothing of it travels. The gradient of a
            tensor is this rank's share, also under tree: the sum over ranks is the gradient. A
            tensor is not taken in code that torch.compile compiles; tw.alibi is.
        softcap: scores become softcap * tanh(score / softcap) before bias and mask.
        dropout_p: in [0, 1), the share of weights that are dropped; the others grow by 1 / (1 -
            dropout_p). lse is that without dropout.
        dropout_seed: from 0 on, the same on every rank; needed on several. The pairs that it drops
            are the same for any ranks, plan and layout, and in backward; pass another at every
            layer and step. None on one rank: drawn from torch's generator.
        return_max_logit: also return the largest score of every head, of this rank's queries.
    Returns:
        out as q, as wide as v; with return_lse (out, lse), lse [(batch,) num_tokens, num_heads],
        natural log, fp32 (fp64 for fp64); with return_max_logit [num_heads], fp32, scaled, capped
        and with the bias, without sink, -inf where nothing is seen, and without a gradient. Rows
        that no key reaches: out 0, lse -inf (sink, if there is one), gradients of q, k, v 0.
    Raises:
        ValueError: the same on every rank, before any tensor is sent, if one rank's input is wrong
            the ranks disagree, or the kernel asked for cannot serve (none other takes its place).
    """
    compiled, seed = torch.compiler.is_compiling(), dropout_seed
    masks = mask if isinstance(mask, list | tuple) else None
    if compiled:
        _check_masks_when_compiled(masks)
        save, seed = _save_when_compiled(save), None  # the seed changes, it is no constant
        _check_kernel_when_compiled(kernel)
        _check_seed_when_compiled(dropout_p, dropout_seed)
    known_mask: Any = mask
    if layout is None or mask is None:
        layout, known_mask = known_of(plan, layout, known_mask)
    bias = _with_all_heads(bias, q, layout, kv_layout)
    region = autocast_dtype(q)
    if region is not None:
        q, k, v = lowered(q, region), lowered(k, region), lowered(v, region)
        sink = None if sink is None else _sink_under_autocast(sink)
    call = Call(
        plan=plan,
        backward_plan=backward_plan,
        mask=known_mask,
        layout=layout,  # pyright: ignore[reportArgumentType] - None is refused with other kinds
        kv_layout=kv_layout,
        q_positions=q_positions,
        softmax_scale=softmax_scale,
        softcap=softcap,
        dropout_p=dropout_p,
        dropout_seed=seed,
        sink=None if sink is None else kind_of(sink),
        bias=bias if bias is None or isinstance(bias, Alibi) else kind_of(bias),
        wire_dtype=wire_dtype,
        wire=wire,
        save=save,
        prune=prune,
        reduction=reduction,
        return_lse=return_lse,
        return_max_logit=return_max_logit,
        group=group,
        validate=validate,
        kernel=kernel,
        autocast=region,
        needs_grad=torch.is_grad_enabled()
        and any(getattr(x, "requires_grad", False) for x in (q, k, v, bias)),
    )
    if isinstance(mask, Chosen):
        from tilewise.indexed.attention import attend_to_chosen  # most calls have a mask

        if compiled:
            raise ValueError(
                "mask=tw.Chosen(...) is not taken in code that torch.compile compiles; wrap the "
                "function that calls attention in torch.compiler.disable"
            )
        with without_autocast(q, region):
            out, lse = attend_to_chosen(q, k, v, mask, call, sink)
        return (out, lse) if return_lse else out
    owned, both = None, (layout, kv_layout)
    if not compiled and [x for x in both if isinstance(x, Layout) and len(x.replicated)]:
        from tilewise.tokens.joint import owned_call  # of other layouts there is none

        call, owned = owned_call(q, k, v, call)
        q, k, v = (q, k, v) if owned is None else owned[:3]
    with without_autocast(q, region):
        values = None if bias is None or isinstance(bias, Alibi) else bias
        by_entry = isinstance(values, Tensor) and values.ndim == 4 and not compiled
        if masks is not None or by_entry:
            out, lse, largest = attend_by_entry(q, k, v, call, masks, sink, values)
        elif compiled:
            out, lse, largest = attend_compiled(q, k, v, call, dropout_seed, values)
        else:
            out, lse, largest = attend(q, k, v, call, sink, values)
        if sink is not None and not is_word(reduction, "canonical"):
            out, lse = with_sink(out, lse, sink)
        if owned is not None:
            out = owned.completed(out)
            lse = owned.completed(lse) if return_lse else lse
    extras = [lse] * return_lse + largest
    return (out, *extras) if extras else out


def _with_all_heads(
    bias: Tensor | Alibi | None, q: Tensor, layout: Layout | None, kv_layout: Layout | None
) -> Tensor | Alibi | None:
    """Return a dense bias with all heads and queries; other values as they are."""
    keys = layout if kv_layout is None else kv_layout
    if not isinstance(bias, Tensor) or not isinstance(q, Tensor) or q.ndim < 3:
        return bias
    if not is_dense(bias):  # which is refused with other kinds
        return bias
    if not isinstance(layout, Layout) or not isinstance(keys, Layout):
        return bias
    return expanded(bias, (q.shape[-2], layout.num_tokens, keys.num_tokens))


def _sink_under_autocast(sink: Tensor) -> Tensor:
    """Return a sink of half precision as fp32, which holds the same numbers.

    Autocast may compute in the other half precision, which does not.
    """
    halves = torch.float16, torch.bfloat16
    return sink.float() if isinstance(sink, Tensor) and sink.dtype in halves else sink


def _check_masks_when_compiled(masks: object) -> None:
    """Refuse a mask for each batch entry in compiled code: entries are grouped by their masks'
    values.
    """
    if masks is not None:
        raise ValueError(
            "mask (a list) must be one mask in compiled code; wrap the function that calls "
            "attention in torch.compiler.disable"
        )


def _check_kernel_when_compiled(kernel: Kernel | str | None) -> None:
    """Refuse a kernel object in compiled code: a compiler compares constants by value."""
    if not isinstance(kernel, str | None):
        raise ValueError(
            f"kernel ({type(kernel).__name__}) must be a name in compiled code, such as "
            "'reference'; call attention with this one outside of torch.compile"
        )


def _check_seed_when_compiled(dropout_p: float, dropout_seed: int | None) -> None:
    """Refuse dropout without a seed in compiled code: backward would draw another seed."""
    if dropout_p and dropout_seed is None:
        raise ValueError(f"dropout_p ({dropout_p}) needs a dropout_seed in compiled code")


def _save_when_compiled(save: Save | None) -> Save:
    """Return "replay", and refuse "gathered", in compiled code.

    A compiler must know the shapes of what is kept, and cannot look into a call for them.
    """
    if save == "gathered":
        raise ValueError("save ('gathered') must be 'replay' in compiled code, or be left out")
    return save or "replay"
