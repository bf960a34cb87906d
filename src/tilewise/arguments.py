"""Arguments of public calls: words that they take, and values of a wrong kind, refused alike.

`checks_arguments` compares arguments with a function's annotations, `check_fields` fields of a
dataclass; `explains_other_names` knows what other libraries call an option. What a number may be
beside a number (at least 1, a divisor) is the function's to say.
"""

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import lru_cache, wraps
from inspect import Parameter, signature
from itertools import islice
from numbers import Real
from operator import index, length_hint
from types import MappingProxyType, NoneType, UnionType
from typing import (
    Any,
    Literal,
    ParamSpec,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
P = ParamSpec("P")

Save: TypeAlias = Literal["replay", "gathered"]
Validate: TypeAlias = Literal["always", "first", "never"]
DtypeName: TypeAlias = Literal["float64", "float32", "bfloat16", "float16"]
LayoutName: TypeAlias = Literal["contiguous", "zigzag", "striped"]
Reduction: TypeAlias = Literal["fast", "canonical"]
Moves: TypeAlias = Literal["kv", "q"]
Schedule: TypeAlias = Literal["greedy", "eager", "kv_first", "gather", "paper"]


class _Sizes(dict[str, int]):
    def __missing__(self, name: str) -> int:
        return of_kind("dtype", name, DtypeName)  # which refuses it


ITEM_BYTES = _Sizes({"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}).__getitem__
_MOVED_BYTES = _Sizes(
    {"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8}
    | {name: ITEM_BYTES(name) for name in get_args(DtypeName)}
)
MOVED_DTYPES = tuple(_MOVED_BYTES)
"""Names of dtypes whose rows can travel."""


def item_bytes(dtype: str) -> int:
    """Bytes of a number; also of whole ones: tokens, labels and the like, and integers of sums."""
    return _MOVED_BYTES[dtype]


MOST_RANKS = 1 << 17
"""More than any cluster has: a plan of a mistyped number of ranks would take minutes to make."""

MOST_NUMBER = (1 << 63) - 1
"""Positions, and whatever else is counted, are numbers of 64 bits."""

MOST_TOKENS = 1 << 32
"""Of one sequence, where every token or document of it is drawn or counted: 16 times the longest
that anybody has trained on would take minutes."""

MOST_ENTRIES, MOST_UNCOUNTED, MOST_TENSORS, MOST_IN_ARRAY = 1 << 22, 1 << 20, 1 << 17, 1 << 24
"""Of what becomes a list and is none yet, such as a range; of a generator, which does not say how
many there are; of a tensor, whose entries are tensors; of an array or tensor that becomes an array,
since it may be one number that is seen many times."""

# What makes one, by the name of the kind.
EXAMPLES: Mapping[str, str] = MappingProxyType(
    {
        "Plan": "tw.ring(4)",
        "Mask": "tw.Causal()",
        "Layout": "tw.zigzag(num_tokens, world_size)",
        "Machine": 'tw.Machine.preset("h100x8")',
        "Workload": "tw.Workload(num_tokens=..., ...)",
        "ContextParallel": "tw.ContextParallel(group, num_tokens=...)",
    }
)

_DOCUMENTS = "mask=tw.Causal() & tw.Document(cu_seqlens), with boundaries of the whole sequence"
OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        # torch.nn.functional.scaled_dot_product_attention
        "is_causal": "mask=tw.Causal()",
        "attn_mask": "mask=, such as tw.Causal() & tw.Window(127, 0)",
        "scale": "softmax_scale=",
        "enable_gqa": "no option: k and v may have fewer heads than q",
        # flash-attn, ring-flash-attn, TransformerEngine, flex_attention
        "causal": "mask=tw.Causal()",
        "attention_mask": "mask=, such as tw.Causal() & tw.Document(cu_seqlens)",
        "window_size": "mask=tw.Causal() & tw.Window(left, 0)",
        "sliding_window": "mask=tw.Causal() & tw.Window(width - 1, 0)",
        "cu_seqlens": _DOCUMENTS,
        "cu_seqlens_q": _DOCUMENTS,
        "cu_seqlens_k": _DOCUMENTS,
        "cu_seqlens_kv": _DOCUMENTS,
        "max_seqlen": "no option: the mask says how long documents are",
        "max_seqlen_q": "no option: the mask says how long documents are",
        "max_seqlen_k": "no option: the mask says how long documents are",
        "block_mask": "mask=, such as tw.Causal() & tw.Document(cu_seqlens)",
        "attn_bias": "bias=",
        "core_attention_bias": "bias=",
        "position_bias": "bias=",
        "alibi_slopes": "bias=tw.alibi(slopes)",
        "dropout": "dropout_p=",
        "logits_soft_cap": "softcap=",
        "s_aux": "sink=",
        "sinks": "sink=",
        "process_group": "group=",
        "cp_group": "group=",
        "return_attn_probs": "return_lse=True; probabilities are never in one place",
    }
)
"""The other library's name, and ours as an error message says it."""


def dtype_name(dtype: object) -> DtypeName:
    """Return the name of a torch dtype ("bfloat16"); a text is returned unchecked."""
    return cast(DtypeName, str(dtype).removeprefix("torch."))


def shown(value: object) -> str:
    """The value as an error says it: itself if it is short, else its kind."""
    is_short = isinstance(value, str | bytes | int | float | NoneType)
    return f"{value!r:.60}" if is_short else type(value).__name__


def brief(value: object) -> str:
    """Return the beginning of a value's repr, at most 60 characters; long lists are not written
    out.
    """
    shortened = reprlib.Repr()
    shortened.maxother = shortened.maxstring = 60
    return f"{shortened.repr(value):.60}"


def require_type(kind: type[T], name: str, value: object, example: str | None = None) -> T:
    """Return value if it is of this kind.

    Args:
        example: what makes one; by default that of EXAMPLES.
    Raises:
        ValueError: "mask ('causal') must be a Mask, such as tw.Causal()".
    """
    if not isinstance(value, kind):
        example = example or EXAMPLES.get(kind.__name__)
        such = f", such as {example}" if example else ""
        raise ValueError(f"{name} ({shown(value)}) must be a {kind.__name__}{such}")
    return value


def is_dense(x: Any) -> bool:
    """Return whether a tensor has numbers side by side: it is neither sparse nor nested."""
    return not x.is_nested and str(x.layout) == "torch.strided"


def require_dense(name: str, x: Any) -> None:
    """Refuse a tensor that is nested or sparse.

    Raises:
        ValueError: "x is torch.sparse_coo, but must be dense; pass x.to_dense()".
    """
    if x.is_nested:
        raise ValueError(
            f"{name} is nested; pass all its rows as one tensor, {name}.values(), and the borders "
            "of documents, which a mask tw.Document(cu_seqlens) or cu_seqlens= takes"
        )
    if not is_dense(x):
        raise ValueError(f"{name} is {x.layout}, but must be dense; pass {name}.to_dense()")


def is_word(value: object, word: str) -> bool:
    """Return whether a value is this text. An array would be compared entry by entry."""
    return isinstance(value, str) and value == word


def require_known(what: str, value: object, known: Iterable[str]) -> None:
    """Raise ValueError unless a value is one of the known names.

    Raises:
        ValueError: "kernel 'cudnm' is not known; take one of cudnn, flex".
    """
    names = [*known]
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"{what} {brief(value)} is not known; take one of {', '.join(names)}")


def require_range(what: str, value: float, least: float = 1, most: float | None = None) -> None:
    """Refuse a number that is out of range.

    Raises:
        ValueError: "hosts (0) must be at least 1", or "must be from 1 to 250".
    """
    if not least <= real_number(what, value) <= (math.inf if most is None else most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{what} ({value!r:.40}) must be {bounds}")


def whole_number(name: str, value: Any, least: int | None = 1, most: int | None = None) -> int:
    """The value as an int; True and False are none.

    Args:
        least, most: None: any number of 64 bits.
    Raises:
        ValueError: "rows (1.5) must be a whole number, at least 1", or as require_range.
    """
    number = _as_index(value)
    if number is None:
        bound = "" if least is None else f", at least {least}"
        raise ValueError(f"{name} ({shown(value)}) must be a whole number{bound}")
    if least is not None and number < least:
        bounds = f"at least {least}"
    elif not -MOST_NUMBER <= number <= MOST_NUMBER:
        bounds = "a number of 64 bits"
    elif most is not None and number > most:
        bounds = f"at most {most}" if least is None else f"from {least} to {most}"
    else:
        return number
    raise ValueError(f"{name} ({number!r:.40}) must be {bounds}")


def _as_index(value: Any) -> int | None:
    """Return a value as an int, or None if it is no whole number (an array of several is none)."""
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    try:
        return index(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def real_number(name: str, value: Any) -> float:
    """The value as a float; True and False, texts and tensors are none.

    Raises:
        ValueError: "softcap ('30') must be a number, as tensor.item() gives it".
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} ({shown(value)}) must be a number, as tensor.item() gives it")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > cast(Real, 0.0) else -math.inf


def positive_number(name: str, value: Any, hint: str = "") -> float:
    """The value as a float above 0.

    Args:
        hint: what to do instead, or what the number is; it ends the error.
    Raises:
        ValueError: "softcap (0.0) must be finite and above 0; leave it out for none", or as
            real_number.
    """
    number = real_number(name, value)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} ({value!r:.40}) must be finite and above 0{hint}")
    return number


def listed(name: str, values: Any, what: str) -> list[Any]:
    """Return the list of an iterable's entries; a text is no iterable.

    Raises:
        ValueError: "blocks (8) must be a list of (start, end)", or as counted.
    """
    if not _is_iterable(values):
        raise ValueError(f"{name} ({shown(values)}) must be a list of {what}")
    return counted(name, values)


def counted(name: str, values: Iterable[Any]) -> list[Any]:
    """Return the entries of an iterable, which are counted before they become a list.

    Raises:
        ValueError: "replicated (range) has more than 8388608 entries; ...".
    """
    if isinstance(values, list | tuple):
        return list(values)
    try:
        most = MOST_TENSORS if hasattr(values, "index_select") else MOST_ENTRIES
        check_count(name, values, len(values), most)  # pyright: ignore[reportArgumentType]
    except OverflowError:
        check_count(name, values, MOST_ENTRIES + 1)
    except (TypeError, RuntimeError):  # it has no length
        entries = list(islice(values, MOST_UNCOUNTED + 1))
        check_count(name, values, len(entries), MOST_UNCOUNTED)
        return entries
    return list(values)


def check_count(name: str, values: object, count: int, most: int = MOST_ENTRIES) -> None:
    """Refuse more entries than a list of Python's numbers should have.

    Raises:
        ValueError: as counted.
    """
    if count > most:
        raise ValueError(
            f"{name} ({shown(values)}) has more than {most} entries; that many would take memory "
            "and seconds before they are looked at"
        )


def entries(name: str, values: Iterable[Any]) -> Iterable[Any]:
    """Return what a loop over an iterable of numbers goes over: of a tensor Python's numbers.

    Raises:
        ValueError: if it is a tensor of other values, as whole_numbers.
    """
    is_tensor = hasattr(values, "index_select")
    return whole_numbers(name, values).tolist() if is_tensor else values


def whole_numbers(name: str, values: Any) -> NDArray[np.int64]:
    """Return the entries of a list, array or tensor (on any device) of whole numbers, int64 [n].

    Raises:
        ValueError: "positions ([0.5]) must be a list of whole numbers".
    """
    try:
        array = as_array(name, values)
        if array.ndim == 1 and (array.dtype.kind in "iuf" or not array.size):
            with np.errstate(invalid="ignore"):
                numbers = array.astype(np.int64)
            if bool((numbers == array).all()):
                return numbers
    except (TypeError, OverflowError):
        pass
    raise ValueError(f"{name} ({brief(values)}) must be a list of whole numbers") from None


def as_array(name: str, values: Any, dims: int = 1, most: int = MOST_IN_ARRAY) -> NDArray[Any]:
    """Return numpy's array of a list, array or tensor on any device. Its numbers are counted first.

    Args:
        dims: how deep lists may be nested.
        most: entries that an array or tensor may have.
    Raises:
        TypeError: if it is no array.
        ValueError: as counted.
    """
    if not hasattr(values, "__array__") and _is_iterable(values):
        values = _nested(name, values, dims)
    try:
        shape = getattr(values, "shape", ())
    except RuntimeError as error:  # of a nested tensor
        raise TypeError(str(error)) from None
    check_count(name, values, math.prod(x for x in shape if type(x) is int), most)
    try:
        return np.asarray(values.cpu() if hasattr(values, "cpu") else values)
    except ValueError:
        raise TypeError("its rows must all have the same length") from None
    except RuntimeError as error:  # a tensor without numbers
        raise TypeError(str(error)) from None


def _nested(name: str, values: Iterable[Any], dims: int) -> list[Any]:
    """Return the entries of an iterable as a list; entries that are iterables become lists, too.

    Args:
        dims: how deep lists may be nested; TypeError if they are deeper.
    """
    entries = counted(name, values)
    kinds = {kind for kind in set(map(type, entries)) - {str, bytes} if hasattr(kind, "__iter__")}
    if not kinds:
        return entries
    is_list = [type(x) in kinds and getattr(x, "ndim", 1) > 0 for x in entries]
    if dims == 1 and any(is_list):
        raise TypeError(f"{name} has lists in lists")
    inner = [x for x, nested in zip(entries, is_list, strict=True) if nested]
    check_count(name, values, sum(min(length_hint(x), MOST_IN_ARRAY) for x in inner))
    lists = iter([_nested(name, x, dims - 1) for x in inner])
    return [next(lists) if nested else x for x, nested in zip(entries, is_list, strict=True)]


def _is_iterable(value: Any) -> bool:
    """Return whether a value has entries. None of them is made: those of a tensor are tensors."""
    if isinstance(value, str | bytes | Mapping) or getattr(value, "is_nested", False):
        return False
    if hasattr(value, "ndim"):
        return value.ndim > 0
    try:
        iter(value)
    except TypeError:
        return False
    return True


def checks_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Refuse arguments that are of another kind than the function's annotations say.

    Whole numbers arrive as int, whatever they were (numpy's, too), and numbers as they are.

    Raises:
        ValueError: "moves ('k') must be 'kv' or 'q'", from the function that it returns.
    """
    names = [
        name
        for name, parameter in signature(function).parameters.items()
        if parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ]

    kinds: dict[str, Any] = {}  # read at the first call: annotations may name what comes later

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not kinds:
            kinds.update(get_type_hints(function))
        # more than there are names for are the function's to refuse
        first = [of_kind(n, x, kinds.get(n, Any)) for n, x in zip(names, args, strict=False)]
        named = {name: of_kind(name, x, kinds.get(name, Any)) for name, x in kwargs.items()}
        return function(*first, *args[len(first) :], **named)  # pyright: ignore[reportCallIssue]

    return call


def explains_other_names(function: Callable[P, T]) -> Callable[P, T]:
    """Make calls with another library's name for an option end in a TypeError that names ours."""

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        for name in options:
            if name in OTHER_NAMES:
                raise TypeError(
                    f"{function.__name__} has no option {name!r}; what it is called here: "
                    f"{OTHER_NAMES[name]}"
                )
        return function(*args, **options)

    return call


def check_fields(value: Any) -> None:
    """Refuse fields of a frozen dataclass that are of another kind than their annotations say.

    Raises:
        ValueError: as `checks_arguments`.
    """
    kinds = _kinds(type(value))
    for field in fields(value):
        given = getattr(value, field.name)
        object.__setattr__(value, field.name, of_kind(field.name, given, kinds[field.name]))


@lru_cache(maxsize=1024)
def _kinds(annotated: Any) -> dict[str, Any]:
    return get_type_hints(annotated)


def of_kind(name: str, value: Any, kind: Any) -> Any:
    """The value, as one of this kind; a tuple with all its parts.

    Raises:
        ValueError: if it is of another.
    """
    kinds = _alternatives(kind)
    for one in kinds:
        fitting, result = _fitted(value, one)
        if one is int and fitting:
            return whole_number(name, result, None)
        if fitting and get_origin(one) is tuple:
            return _parts(name, result, get_args(one))
        if fitting:
            return result
    *others, last = dict.fromkeys(_described(one) for one in kinds)
    text = f"{', '.join(others)} or {last}" if others else last
    raise ValueError(f"{name} ({shown(value)}) must be {text}")


def _parts(name: str, values: Iterable[Any], inner: tuple[Any, ...]) -> tuple[Any, ...]:
    """The parts of a tuple, each as one of its kind."""
    values = tuple(counted(name, values))
    kinds = inner[:1] * len(values) if inner[-1] is ... else inner
    if len(kinds) != len(values):
        raise ValueError(f"{name} ({brief(values)}) must be {len(kinds)} values")
    pairs = enumerate(zip(values, kinds, strict=True))
    return tuple(of_kind(f"{name}[{i}]", value, kind) for i, (value, kind) in pairs)


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _fitted(value: Any, kind: Any) -> tuple[bool, Any]:
    """Return whether a value is of a kind (not a union), and the value converted to that kind."""
    if kind is int:
        number = _as_index(value)
        return number is not None, number
    if kind is float:
        return _fitted_number(value)
    if kind is Any or kind is object:
        return True, value
    if kind is bool:
        return isinstance(value, bool), value
    origin = get_origin(kind)
    if origin is Literal:
        return isinstance(value, str) and value in get_args(kind), value
    if origin is Callable:
        return callable(value), value
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping), value
    if origin is tuple:
        return _is_iterable(value), value
    if origin is not None:  # a list or other iterable, which may be read once
        return _is_iterable(value), value
    if isinstance(kind, type):
        is_protocol = getattr(kind, "_is_protocol", False)
        return is_protocol or isinstance(value, kind), value
    return True, value  # of a TypeVar


def _fitted_number(value: Any) -> tuple[bool, Any]:
    if isinstance(value, bool) or not isinstance(value, Real) or value != value:
        return False, value
    number = real_number("", value)
    is_plain = type(value) in (int, float) and math.isfinite(number)
    return True, value if is_plain else number


def _described(kind: Any) -> str:
    """A kind as errors say it."""
    words = {int: "a whole number", bool: "True or False", str: "a text", NoneType: "None"}
    if kind in words:
        return words[kind]
    if kind is float:
        return "a number, as tensor.item() gives it"
    origin = get_origin(kind)
    if origin is Literal:
        *others, last = map(repr, get_args(kind))
        return f"{', '.join(others)} or {last}" if others else last
    if origin is None:
        example = EXAMPLES.get(kind.__name__)
        return f"a {kind.__name__}" + (f", such as {example}" if example else "")
    if issubclass(origin, Mapping):
        return "a dict"
    return "a list" if issubclass(origin, Iterable) else "a function"
