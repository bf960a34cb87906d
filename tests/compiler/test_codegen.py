"""Codes of every strategy: they keep to their memory, and say what their program does."""

from __future__ import annotations

import pickle

import pytest
import torch
from support.codes import HEADS, LAYOUTS, MASKS, TOKENS, WORLD, Setting, all_plans, settings_of

import tilewise as tw
from tilewise.compiler import code as codes
from tilewise.compiler.code import Code
from tilewise.compiler.code_check import check_code
from tilewise.compiler.codegen import pass_code
from tilewise.compiler.lowering import lower
from tilewise.compiler.program import operations
from tilewise.plan.ir import Role, Side

NUMBER = [*range(len(all_plans()))]
FEW = 3  # settings of a plan on every day


def few(number: int, plan: tw.Plan) -> list[Setting]:
    """Others for each plan, so that together they are all."""
    settings = settings_of(plan)
    step = len(settings) // FEW + 1
    return [settings[(number * 7 + i * step) % len(settings)] for i in range(FEW)]


def keeps_to_its_memory(plan: tw.Plan, setting: Setting) -> None:
    sent: list[tuple[int, int]] = []
    for code in setting.codes(plan):
        check_code(code, setting.departs)
        sent.append((code.backward, code.bytes_sent))
        assert sum(line.num_ops for line in code.lines) == len(code.ops)
    told = tw.volume(plan, setting.workload())
    for backward, counted in enumerate(told):
        ours = [number for of, number in sent if of == backward]
        assert ours == [setting.batch * number for number in counted], (setting, backward)


@pytest.mark.parametrize("number", NUMBER)
def test_codes_keep_to_their_memory_and_send_what_volume_says(number):
    plan = all_plans()[number]
    for setting in few(number, plan):
        keeps_to_its_memory(plan, setting)


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBER)
def test_codes_of_every_setting_keep_to_their_memory(number):
    plan = all_plans()[number]
    for setting in settings_of(plan):
        keeps_to_its_memory(plan, setting)


@pytest.mark.parametrize("number", NUMBER)
def test_a_listing_is_the_operations_that_the_simulator_prices(number):
    plan = all_plans()[number]
    work = Setting("documents" if plan.made_for else "causal").workload()
    for backward, own in enumerate(work.resolve(plan)):
        rank = backward * (WORLD - 1)
        formats = {(side, role) for side in Side for role in Role}
        carries = frozenset(part for part in formats if own.payload.fields(*part))
        program = lower(own.pruned, rank, carries=carries)
        alone = own.groups.groups > 1
        listed = [str(one) for one in operations(program, own.payload, packs_alone=alone)]
        code = pass_code(work.resolve(plan), rank, backward=backward == 1)
        assert str(code).splitlines() == [*code.labels] == listed
        lines = [line for line in code.listing() if not line.startswith("    ")]
        assert lines == listed


def one_code() -> Code:
    work = tw.Workload(TOKENS, *HEADS, mask=tw.Causal(), layout=LAYOUTS["causal"])
    return pass_code(work.resolve(tw.mesh(WORLD, q_tile=2)), 1, backward=False)


def test_a_code_pickles_and_compares_equal():
    code = one_code()
    again = pickle.loads(pickle.dumps(code))
    assert again == code == one_code() and isinstance(again, Code)
    assert str(again) == str(code) and again.bytes_sent == code.bytes_sent


def test_a_code_of_another_format_is_refused_by_name(monkeypatch):
    stored = pickle.dumps(one_code())
    monkeypatch.setattr(codes, "CODE_FORMAT", 7)
    with pytest.raises(
        ValueError, match=r"pickled in format 2, .* reads format 7; prepare it anew"
    ):
        pickle.loads(stored)


def test_there_is_no_code_of_a_rank_that_is_none():
    work = Setting().workload()
    with pytest.raises(ValueError, match=r"rank \(4\) must be from 0 to 3"):
        pass_code(work.resolve(tw.ring(WORLD)), WORLD, backward=False)


def test_what_a_forward_pass_keeps_is_what_the_backward_pass_finds():
    passes = Setting(save="gathered").workload().resolve(tw.all_gather(WORLD))
    for rank in range(WORLD):
        forward, backward = (
            Setting(save="gathered").code(passes, rank, backward=b) for b in (False, True)
        )
        saved = [x.num_bytes for x in backward.buffers if x.home is codes.Home.SAVED]
        assert saved == [forward.buffers[x.buffer].num_bytes for x in forward.kept] != []
        assert sum(saved) == forward.kept_bytes and not backward.kept


def test_masks_tell_codes_apart():
    plan = tw.ring(WORLD)
    texts = {
        str(Setting(mask).code(Setting(mask).workload().resolve(plan), 2, backward=False))
        for mask in MASKS
    }
    assert len(texts) > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_code_takes_what_its_buffers_add_up_to(dtype):
    code = pass_code(tw.Workload(64, 4, 2, 8, dtype=dtype).resolve(tw.ring(4)), 0, backward=True)
    places = [
        (at, at + one.num_bytes)
        for at, one in zip(code.offsets, code.buffers, strict=True)
        if one.home is codes.Home.WORKSPACE
    ]
    assert code.num_bytes == -(-max(stop for _, stop in places) // 256) * 256
