"""Kernel calls on latents: their keys and values are made before, their gradients pulled back."""

from __future__ import annotations

from tilewise.compiler.code import Home
from tilewise.compiler.draft import Draft, View
from tilewise.compiler.facts import Facts
from tilewise.compiler.ops import Attend, Expand, ExpandKey, Pull
from tilewise.compiler.passes.tiles import results_aside
from tilewise.plan.ir import Side
from tilewise.plan.payload import Field


def latents(draft: Draft, facts: Facts) -> None:
    """Write what makes keys and values of latents around the kernel calls that read these.

    It runs only where latents travel in place of keys and values.
    """
    payload = facts.payload
    widths = ("k", payload.head_dim), ("v", payload.v_head_dim)
    old, draft.ops = draft.ops, []
    for op in old:
        if not isinstance(op, Attend):
            draft.ops.append(op)
            continue
        places = op.places
        assert places is not None, "calls on latents know their places"
        latent = next(x for x in op.operands if draft.fields_of(x)[0].name == "latent")
        rows, heads = draft.num_rows(latent), places.kv_heads[1] - places.kv_heads[0]
        fields = tuple(Field(name, width, payload.dtype) for name, width in widths)
        keys = draft.apart("keys of latents", rows, fields, heads, Home.MADE)
        key = ExpandKey(places.k_positions, places.kv_heads)
        label = op.label.replace("compute", "expand")
        draft.ops.append(Expand(label, latent, keys, places, key, payload.backward))
        operands = tuple(keys if x is latent else x for x in op.operands)
        written, pulls = op.written, list[Pull[View]]()
        if payload.results(Side.KV):
            *others, dlatents = written
            fields = tuple(Field(f"d{x.name}", x.width, facts.accumulator) for x in fields)
            gradients = results_aside(draft, facts, rows, fields, heads)
            written = *others, gradients
            fields = facts.result_fields(Side.KV)
            made = draft.buffers[dlatents.buffer]._replace(home=Home.MADE, fields=fields)
            draft.buffers[dlatents.buffer] = made
            pulls.append(Pull(op.label.replace("compute", "pull"), gradients, dlatents))
        kernel_places = places if facts.kernel_places else None
        draft.ops.append(op._replace(operands=operands, written=written, places=kernel_places))
        draft.ops += pulls
