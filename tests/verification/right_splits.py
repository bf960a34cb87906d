"""Right splits at random: models, masks, strategies, layouts, dtypes, worlds, ways of reducing."""

from __future__ import annotations

import random
from functools import partial
from typing import Any, NamedTuple

import torch
from conformance.table import STRATEGIES
from verification.zoo import Model, Settings, made, share

import tilewise as tw

KINDS = "separate", "fused", "grouped", "mla", "mha"
DTYPES = torch.float64, torch.float32, torch.bfloat16
LAYOUTS = tw.contiguous, tw.zigzag, tw.striped


class RightSplit(NamedTuple):
    model: Model
    inputs: dict[str, torch.Tensor]
    split: Any
    world_size: int
    text: str


def right_split(seed: int) -> RightSplit:
    choose = random.Random(seed)
    n, num_tokens = choose.choice((2, 3, 4, 5)), choose.randint(24, 56)
    kind, dtype, layout = choose.choice(KINDS), choose.choice(DTYPES), choose.choice(LAYOUTS)
    edges = sorted(choose.sample(range(1, num_tokens), choose.randint(1, 3)))
    settings = Settings(
        window=choose.choice((None, None, 3, 9)),
        documents=(0, *edges, num_tokens) if choose.random() < 0.4 else (),
        sink=kind != "mha" and choose.random() < 0.3,
        softcap=choose.choice((None, None, 2.0, 20.0)) if kind != "mha" else None,
        learned=kind == "mha" or choose.random() < 0.3,
        kind=kind,
        dtype=dtype,
    )
    plans = [p for s in STRATEGIES for p in s.plans(n) if not p.replicated_queries]
    plans = [p for p in plans if p.num_head_groups in (1, 2, 4)]  # what 4 heads can be split in
    plain = not settings.sink and not settings.softcap
    faults = ["", "reduced", *(["right merge"] if plain else [])]
    options = {"layout": layout, "given": choose.random() < 0.5, "fault": choose.choice(faults)}
    if choose.random() < 0.6:
        options |= {"strategy": choose.choice(plans)}
    model, inputs = made(settings, choose.choice((1, 1, 2)), num_tokens)
    plan = options.get("strategy")
    text = f"{settings}, {num_tokens} tokens, {n} ranks, {layout.__name__}, {plan and plan.name}"
    return RightSplit(model, inputs, partial(share, **options), n, f"{text}, {options['fault']}")
