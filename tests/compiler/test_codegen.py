"""Codes of every strategy: they keep to their memory, and do what their program says."""

from __future__ import annotations

import pickle
from itertools import groupby

import pytest
import torch
from support.codes import HEADS, LAYOUTS, MASKS, TOKENS, WORLD, Setting, all_plans, settings_of

import tilewise as tw
from tilewise.compiler import code as codes
from tilewise.compiler.code import Code
from tilewise.compiler.codegen import pass_code
from tilewise.compiler.lowering import lower
from tilewise.compiler.ops import Attend, Post, Wait
from tilewise.compiler.placement import Departures, buffer_spans
from tilewise.plan.ir import Role, Side
from tilewise_verify.code_check import check_code

NUMBER = [*range(len(all_plans()))]
FEW = 3  # settings of a plan on every day
VERBS = {"collect", "delta", "fill", "gather", "join", "merge", "pack", "unpack"}
"""The first words of what a code of plain wires does beside messages and kernel calls."""


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
        assert len(code.labels) == len(code.ops) and all(code.labels)
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
def test_a_listing_is_the_operations_of_the_program(number):
    """Each launch and wait once, in order; a tile once for each kernel call; others between."""
    plan = all_plans()[number]
    work = Setting("documents" if plan.made_for else "causal").workload()
    for backward, own in enumerate(work.resolve(plan)):
        rank = backward * (WORLD - 1)
        formats = {(side, role) for side in Side for role in Role}
        carries = frozenset(part for part in formats if own.payload.fields(*part))
        code = pass_code(work.resolve(plan), rank, backward=backward == 1)
        assert str(code).splitlines() == [*code.labels] == [op.label for op in code.ops]
        lines = [line for line in code.listing() if not line.startswith("    ")]
        assert lines == [*code.labels] and len([*code.listing()]) == 2 * len(lines)
        told = [op.label for op in code.ops if isinstance(op, Post | Wait | Attend)]
        calls = [label for label, _ in groupby(told)]  # of a tile
        assert calls == [*lower(own.pruned, rank, carries=carries).labels()]
        between = {op.label.split()[0] for op in code.ops} - {"launch", "wait", "compute"}
        assert between <= VERBS, between


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
        ValueError, match=r"pickled in format 5, .* reads format 7; prepare it anew"
    ):
        pickle.loads(stored)


def test_a_ring_has_memory_for_two_received_shards_at_most():
    """A shard's buffer is given back when it has been read and sent for the last time."""
    world, layout = 8, tw.contiguous(8 * 16, 8)
    work = tw.Workload(8 * 16, *HEADS, mask=tw.Full(), layout=layout)
    code = pass_code(work.resolve(tw.ring(world)), 3, backward=False)
    spans = buffer_spans(code.tensors, code.buffers, code.ops, Departures(1, True))
    posts = [op for op in code.ops if isinstance(op, Post)]
    received = [refs for op in posts for (refs,) in op.arriving]
    lives = [spans[code.tensors[ref.tensor].buffer] for ref in received]
    assert len(lives) == world - 1 and all(len(life) == 1 for life in lives)
    held = [
        sum(life.begin <= moment <= life.end for (life,) in lives)
        for moment in range(len(code.ops))
    ]
    assert max(held) == 2 and held[-1] == 0


@pytest.mark.parametrize(("dtype", "wide"), [("float64", 8), ("bfloat16", 4)])
def test_the_traffic_of_a_ring_is_that_counted_by_hand(dtype: str, wide: int):
    """8 rows on each of two ranks, of 4 heads of 8 and of 2 KV heads of 8.

    Partials are wide: kernels make results in the dtype of their operands, which are then read
    again, converted and written. What is added to is read before.
    """
    work = tw.Workload(16, 4, 2, 8, dtype, mask=tw.Full(), layout=tw.contiguous(16, 2))
    forward, backward = (tw.ring(2).code(work, 0, of) for of in (False, True))
    narrow = 8 if dtype == "float64" else 2
    out, kv, lse = 8 * 4 * 8, 2 * 8 * 2 * 8, 8 * 4 * wide  # numbers, numbers, bytes
    made, total = out * narrow + lse, out * wide + lse
    first = made if made == total else 2 * made + total
    added = 2 * made + 2 * total
    pack = 2 * kv * narrow
    assert forward.traffic_bytes == pack + first + added + total + made  # the last is the copy out
    dq, dkv = (out * narrow, out * wide), (kv * narrow, kv * wide)
    written = [m if m == t else 2 * m + t for m, t in (dq, dkv)]
    calls = written[0] + 2 * written[1] + 2 * sum(dq)  # dq is added to by the second
    sent, merged = sum(dkv), dkv[0] + 2 * dkv[1]
    assert backward.traffic_bytes == pack + calls + sent + merged + sum(dq) + sum(dkv)
    assert forward.num_calls == backward.num_calls == 2
    assert forward.bytes_sent == kv * narrow and backward.bytes_sent == 2 * kv * narrow


def test_each_kernel_call_of_a_tile_counts():
    """A mask of two patterns by head makes two of the one tile of all_gather, and of a ring's."""
    for mask, calls in ((tw.Full(), 1), (MASKS["by head"], 2)):
        work = tw.Workload(TOKENS, 8, 2, 16, mask=mask, layout=LAYOUTS["by head"])
        for plan, tiles in ((tw.all_gather(WORLD), 1), (tw.ring(WORLD), WORLD)):
            for backward in (False, True):
                assert plan.code(work, 1, backward).num_calls == calls * tiles, (plan, mask)


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
