"""The passes of the compiler: each takes a draft of a rank's pass and makes it better.

`naive` writes the draft, `place` makes a code of it. What lies between is a list; an operation that
a pass writes or takes out is one that runs, prints, is priced and counted.
"""

from collections.abc import Callable
from types import MappingProxyType

from tilewise.compiler.draft import Draft
from tilewise.compiler.facts import Facts
from tilewise.compiler.passes.adopt import adopt
from tilewise.compiler.passes.combine import combine
from tilewise.compiler.passes.exchanges import exchanges
from tilewise.compiler.passes.in_place import in_place
from tilewise.compiler.passes.keep import keep
from tilewise.compiler.passes.latents import latents
from tilewise.compiler.passes.naive import naive
from tilewise.compiler.passes.place import place
from tilewise.compiler.passes.side_by_side import side_by_side
from tilewise.compiler.passes.tiles import tiles
from tilewise.compiler.passes.wires import wires

PASSES: MappingProxyType[str, Callable[[Draft, Facts], None]] = MappingProxyType(
    {
        "exchanges": exchanges,
        "side_by_side": side_by_side,
        "in_place": in_place,
        "keep": keep,
        "tiles": tiles,
        "latents": latents,
        "combine": combine,
        "adopt": adopt,
        "wires": wires,
    }
)
"""Between `naive` and `place`, in order."""

__all__ = ["PASSES", "latents", "naive", "place"]
