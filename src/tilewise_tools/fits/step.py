"""One training step of a model on fake tensors, and what it holds after each operation."""

import gc
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tilewise.arguments import dtype_name
from tilewise.integrations.transformers.masks import read_mask
from tilewise.kernels.protocol import is_loadable
from tilewise.masks.base import Mask
from tilewise_tools.fits.attention import Call, OurPasses
from tilewise_tools.fits.ledger import AttentionPass, Kind, Ledger
from tilewise_tools.fits.model import checkpointed, decoder_layers, fake_model, refusing_values
from tilewise_tools.fits.setting import Setting

LEAST_OFFLOADED = 1024  # bytes; smaller tensors stay


class Facts(NamedTuple):
    """Facts of a model that formulas use.

    Attributes:
        num_parameters: all of them; tied ones count once.
        largest_layer, root: numbers of parameters of the largest layer, and of what is in none.
        largest_parameter: numbers of the largest parameter.
    """

    num_parameters: int
    num_layers: int
    largest_layer: int
    root: int
    largest_parameter: int
    vocab_size: int


class Step(NamedTuple):
    """A step of one length.

    Attributes:
        held: [operations, kinds], live bytes after each operation, our own passes' among them.
        num_rows: of the sequence on the rank that has most.
        forward_rows: number of operations of the forward pass.
        offloaded_bytes: on the host, at most.
    """

    num_tokens: int
    num_rows: int
    held: np.ndarray
    forward_rows: int
    facts: Facts
    passes: OurPasses
    offloaded_bytes: int


def run_step(config: Any, setting: Setting, num_tokens: int) -> Step:
    """Run one step of a model without numbers: forward, the loss, backward.

    Args:
        config: as read_config returns it.
        num_tokens: of the whole sequence; at least one for each rank.
    Raises:
        ValueError: if the model's code does not run so.
    """
    passes = OurPasses(setting, num_tokens)
    num_rows = max(setting.layout(num_tokens).sizes)
    stand_in = _StandIn(passes, num_tokens)
    mode, model = fake_model(config, setting.dtype, stand_in.attention, stand_in.mask)
    layers = decoder_layers(model)
    if setting.checkpointing:
        if not model.supports_gradient_checkpointing:
            raise ValueError(f"{type(model).__name__} has no gradient checkpointing")
        checkpointed(model)
    with mode, torch.device("cpu"):
        words = _inputs(num_rows)
    ledger = Ledger([*model.parameters(), *model.buffers(), *words.values()])
    stand_in.ledger = ledger
    for layer in layers:
        _follow(layer, ledger)
    if setting.shards:
        _shard(model, layers, setting, ledger)
    else:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p: ledger.move(p.grad, Kind.GRADIENTS)
            )
    offload = _Offload({id(x) for x in model.parameters()})
    gc.collect()  # what it frees later is not the step's
    with refusing_values(config), mode, ledger:
        if "activations" in setting.offload:
            with torch.autograd.graph.saved_tensors_hooks(offload.pack, offload.unpack):
                loss = model(**words, use_cache=False).loss
        else:
            loss = model(**words, use_cache=False).loss
        forward_rows = len(ledger.rows)
        stand_in.is_forward, ledger.kind = False, Kind.BACKWARD
        loss.backward()
    held = np.array(ledger.rows, dtype=np.int64)
    if passes.calls:
        for row, (call, backward) in ledger.passes.items():
            held[row, Kind.ATTENTION] += passes.code(call, backward).made_bytes
        held[:, Kind.ATTENTION] += passes.kept_bytes()
    return Step(
        num_tokens, num_rows, held, forward_rows, _facts(model, layers), passes, offload.num_bytes
    )


def _inputs(num_rows: int) -> dict[str, Tensor]:
    """Return what hf.shard hands a model, beside cu_seqlens."""
    names = "input_ids", "position_ids", "labels", "shift_labels"
    words = {name: torch.zeros(1, num_rows, dtype=torch.int64) for name in names}
    return words | {"num_items_in_batch": torch.ones((), dtype=torch.int64)}


def _facts(model: Any, layers: nn.ModuleList) -> Facts:
    own = [sum(x.numel() for x in layer.parameters()) for layer in layers]
    total = sum(x.numel() for x in model.parameters())
    largest = max(x.numel() for x in model.parameters())
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return Facts(total, len(layers), max(own), total - sum(own), largest, vocabulary)


def _follow(layer: nn.Module, ledger: Ledger) -> None:
    """Have what a layer makes in forward counted as the layers'."""

    def enter(*_: Any) -> None:
        if ledger.kind is Kind.HEAD:
            ledger.kind = Kind.LAYERS

    def leave(*_: Any) -> None:
        if ledger.kind is Kind.LAYERS:
            ledger.kind = Kind.HEAD

    layer.register_forward_pre_hook(enter)
    layer.register_forward_hook(leave)


def _shard(model: nn.Module, layers: nn.ModuleList, setting: Setting, ledger: Ledger) -> None:
    """Reduce gradients to shards as FSDP does: those of a layer when all are there, all others at
    the end."""
    owners: dict[Tensor, int] = {
        x: number for number, layer in enumerate(layers) for x in layer.parameters()
    }
    waiting = Counter(owners.get(x, -1) for x in model.parameters() if x.requires_grad)
    there: dict[int, list[Tensor]] = {}
    on_host = "parameters" in setting.offload

    def reduce(parameter: Tensor) -> None:
        group = owners.get(parameter, -1)
        there.setdefault(group, []).append(parameter)
        assert parameter.grad is not None
        ledger.move(parameter.grad, Kind.GRADIENTS)
        if len(there[group]) < waiting[group]:
            return
        ledger.rows.append(ledger.rows[-1])  # all of them are whole here
        numbers = sum(x.numel() for x in there.pop(group))
        for x in owners if group >= 0 else model.parameters():
            if owners.get(x, -1) == group:
                x.grad = None
        if not on_host:
            ledger.add(Kind.GRADIENTS, -(-numbers * setting.shard_bytes // setting.dp))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)


class _Offload:
    """Hooks of autograd that put what it keeps on the host, but parameters and small tensors."""

    def __init__(self, parameters: set[int]):
        self._parameters, self.num_bytes = parameters, 0

    def pack(self, x: Tensor) -> Any:
        base = x if x._base is None else x._base
        if id(x) in self._parameters or id(base) in self._parameters:
            return x
        if x.numel() * x.itemsize < LEAST_OFFLOADED:
            return x
        self.num_bytes += x.numel() * x.itemsize
        return x.shape, x.dtype

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        shape, dtype = packed
        return torch.empty(shape, dtype=dtype)


class _LayerMask(NamedTuple):
    """A mask on its way between transformers' two interfaces."""

    value: Mask


class _StandIn:
    """Attention without its numbers: it holds what ours holds, and notes its passes."""

    ledger: Ledger

    def __init__(self, passes: OurPasses, num_tokens: int):
        self.passes, self._num_tokens, self.is_forward = passes, num_tokens, True

    def mask(self, *, mask_function: Any, **_: Any) -> _LayerMask:
        return _LayerMask(read_mask(mask_function, (0, self._num_tokens)))

    def attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **words: Any
    ) -> tuple[Tensor, None]:
        if not isinstance(mask, _LayerMask):
            raise ValueError(f"{type(module).__name__} makes a mask of its own, which is not run")
        reason = self._refusal(words)
        if reason is not None:
            raise ValueError(f"{type(module).__name__}: {reason}")
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        call = Call(q.shape[2], k.shape[2], q.shape[3], v.shape[3], dtype_name(q.dtype), mask.value)
        self.passes.prepare([call])
        return _Attention.apply(self, call, q, k, v), None  # pyright: ignore[reportReturnType]

    def _refusal(self, words: Mapping[str, Any]) -> str | None:
        """Return why the memory of a layer's attention is not counted; None: it is."""
        if words.get("s_aux") is not None:
            return "its attention has sinks, which are not counted"
        dtype = self.passes.setting.dtype
        dense = [name for name in ("softcap", "dropout") if words.get(name)]
        if self.passes.setting.machine.device == "cpu" and dense:
            return (
                f"{dense[0]} ({words[dense[0]]}) runs on the CPU's reference kernel, which holds "
                "every score and is not counted; name a machine with GPUs"
            )
        if self.passes.setting.machine.device == "cuda" and dtype == "float64":
            return "float64 runs on the reference kernel, which holds every score"
        return None

    def note(self, call: Call, backward: bool, read: tuple[Tensor, ...]) -> None:
        """Note a pass, for which tensors that kernels cannot read are copied."""
        copied = sum(
            x.numel() * x.itemsize
            for x in read
            if not is_loadable(x, int(x.storage_offset()) * x.itemsize)
        )
        self.ledger.note(AttentionPass(call, backward), copied)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, stand_in: _StandIn, call: Call, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        out = q.new_empty((*q.shape[:-1], call.v_head_dim))
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        lse = q.new_empty(q.shape[:-1], dtype=wide)
        num_bytes = stand_in.passes.code(call, backward=False).kept_bytes
        kept = [q.new_empty(num_bytes, dtype=torch.uint8)] if num_bytes else []
        if stand_in.is_forward:
            for x in (q, k, v, out, lse, *kept):
                stand_in.ledger.move(x, Kind.ATTENTION)
        stand_in.note(call, False, (q, k, v))
        ctx.save_for_backward(q, k, v, out, lse, *kept)
        ctx.asked = stand_in, call
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:  # pyright: ignore
        stand_in, call = ctx.asked
        q, k, v, _, _, *_ = saved = ctx.saved_tensors
        grads = [x.new_empty(x.shape) for x in (q, k, v)]
        stand_in.note(call, True, (*saved[:4], dout))
        return None, None, *grads
