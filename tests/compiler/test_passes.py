"""Passes of the compiler: each leaves a code that keeps to its memory, and changes no result."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch
from support.codes import LAYOUTS, MASKS, TOKENS, WORLD, all_plans, settings_of
from support.latents import draw_layer
from support.teams import results

import tilewise as tw
from tilewise.compiler import codegen
from tilewise.compiler.passes import PASSES
from tilewise_verify.code_check import check_code

MANDATORY = ("tiles", "latents", "wires", "keep")
"""Passes without which there is no code; all others make a better one."""
OPTIMISING = tuple(name for name in PASSES if name not in MANDATORY)


def without_passes(monkeypatch: pytest.MonkeyPatch, *left_out: str) -> None:
    chosen = {name: improve for name, improve in PASSES.items() if name not in left_out}
    monkeypatch.setattr(codegen, "PASSES", MappingProxyType(chosen))


@pytest.mark.parametrize("count", range(len(OPTIMISING)))
def test_after_each_pass_a_code_keeps_to_its_memory(count: int, monkeypatch: pytest.MonkeyPatch):
    """The optimising passes up to one, and those without which there is no code.

    That of all passes is looked at by test_codegen.
    """
    without_passes(monkeypatch, *OPTIMISING[count:])
    for number, plan in [*enumerate(all_plans())][count :: len(OPTIMISING)]:
        settings = settings_of(plan)
        setting, rank = settings[number * 23 % len(settings)], number % WORLD
        work = setting.workload()
        passes, volume = work.resolve(plan), tw.volume(plan, work)
        for backward in (False, True):
            code = setting.code(passes, rank, backward=backward)
            check_code(code, setting.departs)
            assert code.bytes_sent == setting.batch * volume[backward][rank], (plan, setting)


CASES = (
    (lambda: tw.ring(4), "causal", "replay"),
    (lambda: tw.ring(4, moves="q"), "documents", "gathered"),
    (lambda: tw.mesh(4, q_tile=2), "documents", "replay"),
    (lambda: tw.all_gather(4), "documents", "gathered"),
    (lambda: tw.attention2d(2, 2), "by head", "replay"),
    (lambda: tw.ulysses(4), "causal", "gathered"),
    (lambda: tw.ulysses(4), "full", "replay"),
    (lambda: tw.ulysses(2, inner=tw.ring(2)), "full", "gathered"),
    (lambda: tw.needed(MASKS["documents"], LAYOUTS["documents"]), "documents", "replay"),
)
"""A function that makes the plan anew, as a plan keeps its codes; a mask; what is saved."""


@pytest.mark.parametrize("number", range(len(CASES)))
def test_optimising_passes_change_no_result(number: int, monkeypatch: pytest.MonkeyPatch):
    """All left out, and one of them: the same numbers, by another code."""
    new_plan, mask, save = CASES[number]
    generator = torch.Generator().manual_seed(number)
    shapes = ((8, 16), (2, 16), (2, 16), (8, 16))
    whole = [torch.randn(TOKENS, *x, generator=generator, dtype=torch.float64) for x in shapes]
    given = LAYOUTS[mask], MASKS[mask], whole
    want = results(new_plan(), *given, save=save)
    for left_out in (OPTIMISING, OPTIMISING[number % len(OPTIMISING) :][:1]):
        with monkeypatch.context() as patch:
            without_passes(patch, *left_out)
            got = results(new_plan(), *given, save=save)
        for tensor, ours, theirs in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-12), (tensor, left_out)


def test_optimising_passes_change_no_result_of_latents(monkeypatch: pytest.MonkeyPatch):
    layer, mask, layout = draw_layer(TOKENS), MASKS["documents"], LAYOUTS["documents"]
    want, _ = layer.split(tw.mesh(WORLD, q_tile=2), layout, mask)
    without_passes(monkeypatch, *OPTIMISING)
    got, _ = layer.split(tw.mesh(WORLD, q_tile=2), layout, mask)
    for tensor, ours, theirs in zip(want._fields, got, want, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12), tensor


def test_optimising_passes_save_copies_and_memory(monkeypatch: pytest.MonkeyPatch):
    """Each of these plans moves less memory with them, and takes no more."""

    def costs() -> list[tuple[int, int]]:
        work = tw.Workload(TOKENS, 8, 4, 16, mask=tw.Causal(), layout=LAYOUTS["causal"])
        codes = [
            plan.code(work, 1, backward)
            for plan in (tw.ring(WORLD), tw.mesh(WORLD, q_tile=2), tw.all_gather(WORLD))
            for backward in (False, True)
        ]
        return [(code.traffic_bytes, code.num_bytes) for code in codes]

    best = costs()
    without_passes(monkeypatch, *OPTIMISING)
    for (traffic, memory), (more, room) in zip(best, costs(), strict=True):
        assert traffic < more and memory <= room
