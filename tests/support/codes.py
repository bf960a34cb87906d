"""Calls whose codes are looked at: strategies, masks, wires, batches and transports, crossed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from conformance.table import plans
from support.latents import Layer, Sizes

import tilewise as tw
from tilewise.compiler.code import Code
from tilewise.compiler.codegen import pass_code
from tilewise.compiler.facts import DEFAULT_TRAITS, CallTraits, CodeTraits
from tilewise.compiler.placement import Departures
from tilewise.compiler.resolved import ResolvedPass
from tilewise.tiles.call_rows import CallStyle
from tilewise.transport.process_group import GLOO_TRAITS

WORLD, TOKENS = 4, 61
HEADS = 8, 4, 16
SIZES = Sizes(*HEADS, v_head_dim=16, width=16)
MASKS = {
    "full": tw.Full(),
    "causal": tw.Causal(),
    "documents": tw.Document([0, 3, 30, 41, TOKENS]) & tw.Causal(),
    "by head": tw.PerHead([tw.Causal(), tw.Full()]),
}
LAYOUTS = {
    "full": tw.contiguous(TOKENS, WORLD),
    "causal": tw.zigzag(TOKENS, WORLD),
    "documents": tw.contiguous(TOKENS, WORLD),
    "by head": tw.striped(TOKENS, WORLD),
}
EIGHT = tw.wire.Float8(16)
LATENT = tw.wire.Latent(
    Layer.expand, num_kv_heads=HEADS[1], head_dim=HEADS[2], v_head_dim=HEADS[2], width=SIZES.width
)
WIRES: dict[str, Any] = {
    "plain": None,
    "narrow": tw.wire.Wires(EIGHT, tw.wire.Plain("float16"), partials=EIGHT),
    "latent": tw.wire.Wires(latent=LATENT),
}
TRAITS = {
    "as NCCL": DEFAULT_TRAITS,
    "as gloo": GLOO_TRAITS,
    "two nodes": DEFAULT_TRAITS._replace(node_size=2),
    "results wait": DEFAULT_TRAITS._replace(waiting_results=2),
    "lists": DEFAULT_TRAITS._replace(cut=CallStyle(whole_tile=True, lists=True), waiting_results=2),
    "sends unknown": CodeTraits(sends_in_flight=None, cut=CallStyle(False, True)),
}


class Setting(NamedTuple):
    """One of the many ways in which a plan can be called."""

    mask: str = "causal"
    wires: str = "plain"
    save: str = "replay"
    traits: str = "as NCCL"
    batch: int = 1

    @property
    def departs(self) -> Departures:
        traits = TRAITS[self.traits]
        return Departures(traits.sends_in_flight, not traits.receives_ahead)

    def workload(self, **more: Any) -> tw.Workload:
        given = {"mask": MASKS[self.mask], "layout": LAYOUTS[self.mask], "save": self.save}
        return tw.Workload(TOKENS, *HEADS, **{**given, "wire": WIRES[self.wires], **more})

    def code(self, passes: tuple[ResolvedPass, ResolvedPass], rank: int, *, backward: bool) -> Code:
        keep = passes[1].payload.saved and not backward
        call = CallTraits(batch=self.batch, keep=keep)
        return pass_code(passes, rank, backward=backward, call=call, traits=TRAITS[self.traits])

    def codes(self, plan: tw.Plan) -> Iterator[Code]:
        """Of every rank and pass."""
        passes = self.workload().resolve(plan)
        for rank, backward in product(range(plan.world_size), (False, True)):
            yield self.code(passes, rank, backward=backward)


SETTINGS = [
    Setting(*one)
    for one in product(MASKS, WIRES, ("replay", "gathered"), TRAITS, (1, 2))
    if one[:2] != ("by head", "latent")
]


@cache
def all_plans() -> tuple[tw.Plan, ...]:
    mask, layout = MASKS["documents"], LAYOUTS["documents"]
    return (*plans(WORLD), tw.needed(mask, layout), tw.tiled(mask, layout))


def settings_of(plan: tw.Plan) -> list[Setting]:
    """All that a plan can be called with."""
    if plan.made_for is None:
        return SETTINGS
    return [setting for setting in SETTINGS if setting.mask == "documents"]
