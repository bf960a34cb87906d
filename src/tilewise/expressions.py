"""Strategies, masks and wires as people write them on a command line, read without eval.

mesh(16, q_tile=4)      ulysses(2, inner=ring(4))      causal & window(1023, 0)      float8(64)
"""

import ast
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from tilewise.masks.base import Causal, Document, Full, Mask, Window
from tilewise.masks.patterns import causal_with_blocks, chunked_causal
from tilewise.plan.ir import Plan
from tilewise.strategies import catalog
from tilewise.wires import Float8, Latent, Plain, Wires
from tilewise.wires.wire import AnyWire

LARGEST = 1 << 20  # a plan's numbers multiplied: far above any use, far below any memory

STRATEGIES: Mapping[str, Callable[..., Plan]] = MappingProxyType(
    {strategy.name: strategy.make for strategy in catalog.STRATEGIES}
)
MASKS: Mapping[str, Callable[..., Mask]] = MappingProxyType(
    {
        **{"full": Full, "causal": Causal, "window": Window, "document": Document},
        **{"chunked_causal": chunked_causal, "causal_with_blocks": causal_with_blocks},
    }
)
WIRES: Mapping[str, type[AnyWire]] = MappingProxyType(
    {"float8": Float8, "plain": Plain, "latent": Latent, "wires": Wires}
)
NO_WIRE = "none"
WIRE = f"As in float8(64) or wires(backward=float8()): {', '.join(WIRES)}; or {NO_WIRE}."


def read_plan(text: str, world_size: int | None = None, ranks_option: str = "--world-size") -> Plan:
    """The plan of a strategy written as a call, or by its name alone.

    Args:
        text: "mesh(16, q_tile=4)"; or "ring" where world_size says for how many ranks.
        world_size: must be the plan's, if given.
        ranks_option: the option that says world_size, for messages.
    Raises:
        ValueError: in one line, saying what can be written.
    """
    node = _parsed(text, "ring(4)")
    if isinstance(node, ast.Name):
        node = ast.Call(node, [ast.Constant(_ranks_for(node.id, world_size))], [])
    plan = _value(node, text, STRATEGIES, "strategy")
    if not isinstance(plan, Plan):
        raise ValueError(f"{text!r} is not a strategy, such as ring(4) or mesh(16, q_tile=4)")
    if world_size not in (None, plan.world_size):
        raise ValueError(
            f"{text} is for {plan.world_size} ranks, but {ranks_option} is {world_size}"
        )
    return plan


def read_mask(text: str, also: Mapping[str, Callable[[], Mask]] = MappingProxyType({})) -> Mask:
    """The mask of an expression such as "causal & document([0, 5, 9]) | window(2, 2)".

    Args:
        also: masks that the caller knows besides, by names that stand without parentheses.
    Raises:
        ValueError: in one line, saying what can be written.
    """
    return _mask(_parsed(text, "causal & window(1023, 0)"), text, also)


def read_wire(text: str) -> AnyWire | None:
    """The wire of an expression such as "float8(64)" or "wires(backward=float8())"; "none": None.

    Raises:
        ValueError: in one line, saying what can be written.
    """
    node = _parsed(text, "float8(block=64)")
    if isinstance(node, ast.Name):
        if node.id == NO_WIRE:
            return None
        _known(node.id, WIRES, "wire", [NO_WIRE])
        node = ast.Call(node, [], [])
    wire = _value(node, text, WIRES, "wire")
    if not isinstance(wire, Float8 | Plain | Latent | Wires):
        raise ValueError(f"{text!r} is not a wire, such as float8 or plain('bfloat16')")
    return wire


def read_heads(text: str) -> tuple[int, int]:
    """Query and KV heads: 32:8, or 32 for as many of both.

    Raises:
        ValueError: if it is neither.
    """
    parts = text.split(":")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"heads ({text!r}) must be query:KV heads such as 32:8, or 32")
    return int(parts[0]), int(parts[-1])


def _ranks_for(name: str, world_size: int | None) -> int:
    """The one argument of a strategy written by its name alone."""
    parameters = inspect.signature(_known(name, STRATEGIES, "strategy")).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty]
    if len(needed) > 1:
        raise ValueError(f"{name!r} needs more than a number of ranks: {name}({', '.join(needed)})")
    if world_size is None:
        raise ValueError(f"{name!r} needs a number of ranks: write {name}(8), or --world-size 8")
    return world_size


def _mask(node: ast.expr, text: str, also: Mapping[str, Callable[[], Mask]]) -> Mask:
    match node:
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _mask(left, text, also) & _mask(right, text, also)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _mask(left, text, also) | _mask(right, text, also)
        case ast.Name(id=name) if name in also:
            return also[name]()
        case ast.Name(id=name):
            _known(name, MASKS, "mask", also)
            node = ast.Call(node, [], [])
    mask = _value(node, text, MASKS, "mask")
    if not isinstance(mask, Mask):
        raise ValueError(f"{text!r} is not a mask, such as causal or causal & window(1023, 0)")
    return mask


def _parsed(text: str, example: str) -> ast.expr:
    if len(text) > 10_000:
        raise ValueError(f"an expression of {len(text)} characters is over 10000")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{text!r} cannot be read; write it as in {example}") from None


def _known(
    name: str, known: Mapping[str, Callable[..., Any]], what: str, also: Iterable[str] = ()
) -> Callable[..., Any]:
    if name not in known:
        names = ", ".join(dict.fromkeys([*known, *also]))
        raise ValueError(f"{what} {name!r} is not known; take one of {names}")
    return known[name]


def _value(node: ast.expr, text: str, known: Mapping[str, Callable[..., Any]], what: str) -> Any:
    """A call of a known name, or a literal."""
    if not isinstance(node, ast.Call):
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, RecursionError):
            part = ast.unparse(node)
            place = "" if part == text.strip() else f" in {text!r}"
            raise ValueError(
                f"{part!r}{place} is neither a literal nor a {what} ({', '.join(known)})"
            ) from None
    make = _known(ast.unparse(node.func), known, what)
    if any(word.arg is None for word in node.keywords):
        raise ValueError(f"{text!r}: ** cannot be read; write the arguments")
    args = [_value(part, text, known, what) for part in node.args]
    words = {str(word.arg): _value(word.value, text, known, what) for word in node.keywords}
    return _call(ast.unparse(node), make, args, words)


def _call(text: str, make: Callable[..., Any], args: list[Any], words: dict[str, Any]) -> Any:
    given = (*args, *words.values())
    numbers = [x for x in given if type(x) is int and x > 0]
    inner = [x.world_size for x in given if isinstance(x, Plan)]
    if make in STRATEGIES.values() and math.prod([*numbers, *inner]) > LARGEST:
        raise ValueError(
            f"{make.__name__} of {numbers + inner} is too large: multiplied they must be at most "
            f"{LARGEST}"
        )
    signature = inspect.signature(make)
    try:
        if make not in WIRES.values() and any(isinstance(x, bool) for x in args):
            raise TypeError("True and False are not numbers")
        signature.bind(*args, **words)
        return make(*args, **words)
    except (TypeError, AttributeError) as error:
        name = make.__name__ if inspect.isfunction(make) else make.__name__.lower()
        names = ", ".join(str(p).replace("'", "") for p in signature.parameters.values())
        raise ValueError(f"{name}({names}): {error}") from None
    except ValueError as error:  # as the call says it: world_size=0, not world_size (0)
        said = re.sub(r"\b([a-z]\w*) \(([^()]*)\)", r"\1=\2", str(error))
        raise ValueError(f"{text}: {said}") from None
