"""Layers of transformers that carry a state along the sequence, or convolve it, run split.

Such layers are found by the functions that they call (causal_conv1d_fn, the scans), by name, among
the globals of their module. While a layer runs in a split call, these names stand for functions
that work for this thread's layer over its ContextParallel, and for any other layer as before; when
it ends they are what they were. A layer learns its documents from the mask that it is handed in
place of a padding mask, so it also does when a checkpoint runs it again.
"""

from __future__ import annotations

import inspect
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial, wraps
from importlib.metadata import version
from types import CodeType, MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import tilewise as tw
from tilewise.integrations.transformers import state_rules
from tilewise.integrations.transformers.attention import LayerMask, refuse, refused_rows
from tilewise.integrations.transformers.masks import PADDED, documents_of
from tilewise.integrations.transformers.saved import NotSaved, not_compiled
from tilewise.transport.agreement import settled

MAKES_MASK = "create_recurrent_attention_mask"
ANY_MASK = re.compile(r"create_\w+_mask$")
CACHES = ("past_key_values", "cache", "cache_params")  # names of a model's cache
RECURRENCE, LIGHTNING = "_rnn_scan", "get_slope_rate"


class SplitTokens(NamedTuple):
    """The split of a layer's tokens: over which ranks, and boundaries of their documents."""

    cp: tw.ContextParallel
    cu_seqlens: tuple[int, ...]


class _State(threading.local):
    """State of the thread that calls models.

    Attributes:
        model: the mask of the split call of a model in progress, and its configuration.
        layer: the split of the layer in progress.
        open: what ends with each hooked module in progress, the innermost last.
        kernels: what stands for functions of layers while these are only measured, by name.
        torch_code: whether layers call transformers' torch code where a kernel is installed.
    """

    def __init__(self) -> None:
        self.model: tuple[LayerMask, Any] | None = None
        self.layer: SplitTokens | None = None
        self.open: list[ExitStack] = []
        self.kernels: Mapping[str, Callable[..., Any]] = {}
        self.torch_code = False


_state = _State()


def _convolution(
    cp: tw.ContextParallel,
    cu_seqlens: tuple[int, ...],
    _: Any,
    /,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    from transformers.activations import ACT2FN

    activations = ACT2FN.__getitem__
    return state_rules.convolution(cp, cu_seqlens, x, weight, bias, activation, activations)


def _declined(*_: Any) -> None:
    """Stand for a fused kernel of convolution, scan and projections; None lets the layer do
    without.
    """


def _refused(name: str) -> Callable[..., Any]:
    def refuse_step(cp: tw.ContextParallel, *_: Any) -> None:
        refuse(cp, f"{name} runs one token from a cache; a split model runs without one")

    return refuse_step


FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "causal_conv1d_fn": _convolution,
        "torch_chunk_gated_delta_rule": state_rules.delta_rule,
        "chunk_kimi_delta_attention": state_rules.delta_rule,
        "mamba2_chunk_scan": state_rules.state_space,
        "mamba_selective_scan": state_rules.selective_scan,
        "mamba2_split_conv1d_scan_combined": _declined,
        "mamba_inner_fn": _declined,
        **{
            name: _refused(name)
            for name in (
                "causal_conv1d_update",
                "torch_recurrent_gated_delta_rule",
                "recurrent_kimi_delta_attention",
                "mamba2_selective_state_update",
                "mamba_selective_state_update",
            )
        },
    }
)


def has_state_functions(config: Any) -> bool:
    """Return whether layers of the model of a configuration call functions that can be split."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    model: Any = MODEL_MAPPING.get(type(config), None)
    if not isinstance(model, type):
        return False
    found = vars(sys.modules[model.__module__])
    return any(
        name in FUNCTIONS or hasattr(x, RECURRENCE) or hasattr(x, LIGHTNING)
        for name, x in found.items()
    )


def is_stateless(base: Any) -> bool:
    """Return whether a model of a family whose layers can carry a state has no such layer."""
    text = base.config.get_text_config(decoder=True)
    return has_state_functions(text) and not state_layers(base)


class StateLayers(NotSaved):
    """The layers of one model that carry a state.

    Attributes:
        config: of the text model; it holds the name of the attention in use.
        mask_modules: names of the modules that make a padding mask for such layers.
        hands_mask: whether layers are handed the model's attention_mask as it is.
        split_by: the ContextParallel of hf.parallelize, and the name that it has there; None: the
            caller says of each call whether it is split.
    """

    def __init__(self, config: Any, mask_modules: tuple[str, ...], *, hands_mask: bool) -> None:
        self.config, self.mask_modules, self.hands_mask = config, mask_modules, hands_mask
        self.split_by: tuple[tw.ContextParallel, str] | None = None

    @property
    def splits_all(self) -> tw.ContextParallel | None:
        """The ContextParallel over which every call runs, until the model is made whole again."""
        if self.split_by is None or self.config._attn_implementation != self.split_by[1]:
            return None
        return self.split_by[0]


def wire(base: Any) -> StateLayers | None:
    """Find the layers of a model that carry a state, and hook them; None if it has none."""
    wired = getattr(base, "_tilewise_states", None)
    if wired is not None:
        return wired
    layers = state_layers(base)
    if not layers:
        return None
    # FSDP2 gives a module a class made at run time.
    modules = {
        next(of.__module__ for of in type(x).__mro__ if "torch.distributed" not in of.__module__)
        for x in base.modules()
    }
    masks = {(name, x) for name in modules for x in vars(sys.modules[name]) if ANY_MASK.match(x)}
    makes = sorted(name for name, x in masks if x == MAKES_MASK)
    called_by_mask = [x for x in layers if _called(type(x))]  # by such a mask alone
    if called_by_mask and masks and not makes:
        raise ValueError(
            f"{type(called_by_mask[0]).__name__} carries a state along the sequence, but "
            f"transformers {version('transformers')} makes no mask for such layers "
            f"({MAKES_MASK}), which tells them of documents; install transformers 5.23 or newer"
        )
    text = base.config.get_text_config(decoder=True)
    states = StateLayers(text, tuple(makes), hands_mask=not masks)
    for layer in layers:
        if not hasattr(layer, "_tilewise_states"):  # a pickled model has the hooks
            layer.register_forward_pre_hook(_before_layer, with_kwargs=True)
            layer.register_forward_hook(_after, always_call=True)
        layer._tilewise_states = states
    base._tilewise_states = states
    return states


def state_layers(base: nn.Module) -> list[Any]:
    """The layers of a model that carry a state along the sequence, or convolve it."""
    return [x for x in base.modules() if _called(type(x)) or _has_parts(x)]


@contextmanager
def kernels_replaced(kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Split layers of this thread call others in place of their kernels, by name."""
    before, _state.kernels = _state.kernels, kernels
    try:
        yield
    finally:
        _state.kernels = before


@contextmanager
def without_kernels(model: nn.Module) -> Iterator[None]:
    """A model's layers with a state call transformers' torch code in this thread, where kernels are
    installed too: those take no tensors of the CPU.
    """
    before, _state.torch_code = _state.torch_code, True
    try:
        with ExitStack() as stack:
            for layer in state_layers(model):
                for module, names in _called(type(layer)):
                    stack.enter_context(_REPLACED.names(module, names))
            yield
    finally:
        _state.torch_code = before


def split_all_calls(model: Any, base: Any, cp: tw.ContextParallel, name: str) -> None:
    """Make each call of a model run its layers with a state over cp, as its attention.

    Args:
        model: base, or what PEFT made of it.
    """
    states = wire(base)
    if states is None:
        return
    states.split_by = cp, name
    for called in {id(x): x for x in (model, base)}.values():
        if "_tilewise_hooked_states" not in vars(called):  # PEFT's models have base's attributes
            called.register_forward_pre_hook(_before_model, with_kwargs=True, prepend=True)
            called.register_forward_hook(_after, always_call=True)
            called._tilewise_hooked_states = True
        called._tilewise_states = states


def documents_of_call(config: Any) -> tuple[int, ...] | None:
    """cu_seqlens of the call in progress, in this thread, of the model of a configuration.

    None: there is none whose layers that carry a state are split.
    """
    model = _state.model
    return model[0].cu_seqlens if model is not None and model[1] is config else None


class _TokensMask(LayerMask):
    """A padding mask for layers that carry a state: no token is padding; it has the documents."""

    def bool(self) -> Tensor:
        return torch.tensor(True)  # no token of a split call is padding


@contextmanager
def split_call(
    states: StateLayers, cp: tw.ContextParallel, cu_seqlens: tuple[int, ...]
) -> Iterator[LayerMask]:
    """A split call of a model: layers get its documents, by its padding mask."""
    mask, outer = _TokensMask(cp, tw.Causal(), packs=True), _state.model
    mask.cu_seqlens = cu_seqlens
    _state.model = mask, states.config
    try:
        with ExitStack() as stack:
            for name in states.mask_modules:
                stack.enter_context(_REPLACED.names(vars(sys.modules[name]), (MAKES_MASK,)))
            yield mask
    finally:
        _state.model = outer


@cache
def _called(layer_class: type[nn.Module]) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    """Return the splittable functions that a layer calls: the globals that hold them, and their
    names.
    """
    read = names_read(layer_class)
    found = getattr(inspect.unwrap(layer_class.forward), "__globals__", {})
    names = tuple(x for x in FUNCTIONS if x in read and x in found)
    return [(found, names)] if names else []


def names_read(layer_class: type[nn.Module]) -> set[str]:
    """Names that the forward of a class of layers reads."""
    code = getattr(inspect.unwrap(layer_class.forward), "__code__", None)
    return set() if code is None else _names(code)


def _names(code: CodeType) -> set[str]:
    """Names that a function reads, and those within it."""
    inner = (x for x in code.co_consts if isinstance(x, CodeType))
    return set(code.co_names).union(*map(_names, inner))


class _Replaced:
    """Replaces functions of modules by ours for as long as some thread needs it, and counts the
    users.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: Counter[tuple[int, str]] = Counter()

    @contextmanager
    def names(self, module: dict[str, Any], names: tuple[str, ...]) -> Iterator[None]:
        """Replace functions of a module; they are what they were when the last user ends."""
        with self._lock:
            for name in names:
                self._users[id(module), name] += 1
                if self._users[id(module), name] == 1:
                    module[name] = _ours(name, module[name])
        try:
            yield
        finally:
            with self._lock:
                for name in names:
                    self._users[id(module), name] -= 1
                    if not self._users[id(module), name]:
                        del self._users[id(module), name]
                        module[name] = module[name].__wrapped__


_REPLACED = _Replaced()


def _ours(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    parameters = inspect.signature(FUNCTIONS.get(name, function)).parameters.values()
    keywords = {x.name for x in parameters if x.kind is not x.POSITIONAL_ONLY}

    @wraps(function)
    def run(*args: Any, **given: Any) -> Any:
        if name == MAKES_MASK and _state.model is not None:
            return _state.model[0]
        if name == MAKES_MASK:
            return function(*args, **given)
        # what chooses between a kernel and torch code, in transformers, wraps the latter
        called = inspect.unwrap(function) if _state.torch_code else function
        if _state.layer is not None:
            kernel = _state.kernels.get(name, called)
            taken = {key: x for key, x in given.items() if key in keywords}
            return FUNCTIONS[name](*_state.layer, kernel, *args, **taken)
        return called(*args, **given)

    return run


@not_compiled
def _before_layer(layer: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    masks = [x for x in (*args, *given.values()) if isinstance(x, LayerMask)]
    masks = [x for x in masks if x.cu_seqlens is not None]
    stack, outer = ExitStack(), _state.layer
    _state.open.append(stack)
    if not masks:
        states: StateLayers | None = layer._tilewise_states
        if states is None:
            return None
        cp = states.splits_all
        if _state.model is not None and _state.model[1] is states.config:
            cp = _state.model[0].cp
        if cp is not None:
            refuse(
                cp,
                f"{type(layer).__name__} carries a state along the sequence, and was not told of "
                "the documents: call the model itself, not a part of it",
            )
        return None
    stack.callback(setattr, _state, "layer", outer)
    assert masks[0].cu_seqlens is not None
    _state.layer = SplitTokens(masks[0].cp, masks[0].cu_seqlens)
    for module, names in _called(type(layer)):
        stack.enter_context(_REPLACED.names(module, names))
    _replace_parts(layer, _state.layer, stack)
    named = {name: _without_cache(x) for name, x in given.items()}
    return tuple(map(_without_cache, args)), named | dict.fromkeys(
        given.keys() & {"use_cache"}, False
    )


def _without_cache(x: Any) -> Any:
    """An argument of a split layer: no mask of ours, and no cache, which holds whole states."""
    from transformers.cache_utils import Cache

    return None if isinstance(x, LayerMask | Cache) else x


def _has_parts(layer: nn.Module) -> bool:
    """Return whether a layer carries a state in methods of its parts, or in its own code: RG-LRU,
    lightning attention.
    """
    return hasattr(layer, LIGHTNING) or any(hasattr(part, RECURRENCE) for part in layer.children())


def _replace_parts(layer: Any, split: SplitTokens, stack: ExitStack) -> None:
    """Replace methods of a layer's parts until the layer ends."""

    def replace(part: Any, name: str, own: Callable[..., Any]) -> None:
        before = vars(part).get(name)  # accelerate's offloading sets forward
        setattr(part, name, own)
        if before is None:
            stack.callback(delattr, part, name)
        else:
            stack.callback(setattr, part, name, before)

    if hasattr(layer, LIGHTNING):
        projected = list[Tensor]()
        replace(layer.qkv_proj, "forward", _kept(layer.qkv_proj.forward, projected))
        replace(
            layer.norm, "forward", partial(_lightning, split, layer, layer.norm.forward, projected)
        )
    elif _has_parts(layer):
        for part in layer.children():
            if hasattr(part, RECURRENCE):
                replace(part, RECURRENCE, partial(_recurrence, split, getattr(part, RECURRENCE)))
            elif isinstance(part, nn.Conv1d):
                replace(part, "forward", partial(_convolution_of, split, part))


def _kept(forward: Callable[[Tensor], Tensor], results: list[Tensor]) -> Callable[..., Tensor]:
    def run(x: Tensor) -> Tensor:
        results.append(forward(x))
        return results[-1]

    return run


def _lightning(
    split: SplitTokens,
    layer: Any,
    norm: Callable[[Tensor], Tensor],
    projected: list[Tensor],
    out: Tensor,
) -> Tensor:
    """Return MiniMax's attention over the split sequence, through the norm that follows it.

    It takes the place of the result of this rank's rows alone.

    Args:
        projected: what the layer projected to q, k and v.
        out: [batch, rows, heads * head_dim].
    """
    heads, head_dim = layer.num_attention_heads, layer.head_dim
    qkv = layer.act_fn(projected.pop()).unflatten(-1, (heads, 3 * head_dim)).split(head_dim, -1)
    q, k, v = qkv
    out, slopes = out.unflatten(-1, (heads, head_dim)), layer.slope_rate.flatten()
    return norm(state_rules.lightning(*split, out, q, k, v, slopes).flatten(2))


def _convolution_of(split: SplitTokens, part: nn.Conv1d, x: Tensor) -> Tensor:
    """A causal convolution by a module, of which the layer keeps the first columns."""
    (width,) = part.kernel_size
    plain = part.groups == part.in_channels == part.out_channels, part.stride, part.dilation
    if plain != (True, (1,), (1,)) or part.padding != (width - 1,):
        refuse(split.cp, f"{part} must be a causal convolution of each channel alone")
    return _convolution(*split, None, x, part.weight.squeeze(1), part.bias)


def _recurrence(
    split: SplitTokens,
    scan: Callable[..., Any],
    hidden_states: Tensor,
    recurrent_gate: Tensor,
    reset: Tensor,
    recurrent_states: Tensor | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """RG-LRU's _rnn_scan; it reads documents from position_ids too, which must be the same ones."""

    def check() -> None:
        for rows, is_first in state_rules.local_pieces(*split):
            if is_first and not bool(reset[:, rows.start].all()):
                raise ValueError(
                    "position_ids must start at 0 in every document: call the model with what "
                    "hf.shard returns"
                )

    settled(tw.transport.transport_for(split.cp.group), check)

    def piece(x: Tensor, gate: Tensor, reset: Tensor) -> tuple[Tensor, Tensor]:
        zeros = x.new_zeros((len(x), x.shape[2]), dtype=torch.float32)
        return scan(x, gate, reset, zeros, **given)

    return state_rules.recurrence(*split, piece, hidden_states, recurrent_gate, reset), None


@not_compiled
def _after(*_: Any) -> None:
    if _state.open:
        _state.open.pop().close()


@not_compiled
def _before_model(model: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    states: StateLayers | None = model._tilewise_states
    stack = ExitStack()
    _state.open.append(stack)
    cp = None if states is None else states.splits_all
    if states is None or cp is None or documents_of_call(states.config) is not None:
        return None
    names = [*inspect.signature(type(model).forward).parameters][1:]
    named = dict(zip(names, args, strict=False)) | given
    mask = stack.enter_context(split_call(states, cp, _documents(cp, named)))
    return ((), named | {"attention_mask": mask}) if states.hands_mask else None


def _documents(cp: tw.ContextParallel, given: Mapping[str, Any]) -> tuple[int, ...]:
    """cu_seqlens of a call, settled by all ranks.

    Raises:
        ValueError: the same on every rank, for a call that cannot be split.
    """
    tokens, caches = given.get("input_ids"), (given.get(name) for name in CACHES)
    cache = next((x for x in caches if x is not None), None)
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    attention_mask = given.get("attention_mask")
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        refuse(cp, "pass input_ids [batch, rows], or inputs_embeds")
    seen = _cached_tokens(cache)
    error = refused_rows(cp, tokens.shape[1], tokens.shape[1] + seen, seen)
    if error is None and isinstance(attention_mask, Tensor) and not bool(attention_mask.all()):
        error = PADDED
    if error is None and isinstance(cp.mask, tw.Slices):
        error = (
            f"cp.mask is {cp.mask!r}, by which a token may have several next ones, but a state has "
            "one; use a mask with documents"
        )
    if error:
        refuse(cp, error)
    whole = LayerMask(cp, tw.Causal(), packs=True).whole(len(tokens), given)
    if isinstance(whole, list):
        row = next(row for row, mask in enumerate(whole) if mask != whole[0])
        refuse(
            cp,
            f"rows 0 and {row} of the batch have different documents, but layers that carry a "
            "state take one list for all; put them into one row, as ShardingCollator does",
        )
    return documents_of(whole) or (0, cp.layout.num_tokens)


def _cached_tokens(cache: Any) -> int:
    """Tokens that a cache holds; 1 for any number, if it has no layer of attention."""
    if cache is None:
        return 0
    try:
        return int(cache.get_seq_length())
    except ValueError:
        return int(cache.has_previous_state())
