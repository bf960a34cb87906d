"""What a rank needs for a step, made in a worker and pickled: the same attention, no planning."""

import copy
import os
import pickle
import re
import sys
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader

import tilewise as tw
from tilewise.batches.schedule import BatchStep, StepStream
from tilewise.compiler import code, facts
from tilewise.compiler.rank_plan import RankPlan
from tilewise.execution import forward_backward
from tilewise.integrations import hf
from tilewise.integrations.data import ShardingCollator
from tilewise.tiles.call_rows import TileCalls

LENGTHS = [30, 5, 12, 64, 7, 9, 41, 3, 18, 22, 50, 8]
WIDE = "float64"
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}


def scheduled(world_size: int = 4, tokens_per_rank: int = 32, **options) -> StepStream:
    sizes = {"world_size": world_size, "tokens_per_rank": tokens_per_rank}
    return tw.schedule(LENGTHS, **sizes, **HEADS, **options)


def first_step(world_size: int = 4, **options) -> BatchStep:
    return next(iter(scheduled(world_size, **options)))


def sent(prepared: RankPlan) -> RankPlan:
    """As another process gets it."""
    return pickle.loads(pickle.dumps(prepared))


def attended(step: BatchStep, plan_of, v_head_dim: int = 8, **options) -> list[list[torch.Tensor]]:
    """out, lse and gradients of every rank, of plans by rank."""
    torch.manual_seed(step.index)
    sizes = ((4, 8), (2, 8), (2, v_head_dim))
    whole = [torch.randn(step.num_tokens, *size, dtype=torch.float64) for size in sizes]

    def run(rank, group):
        inputs = [step.layout.shard(x, rank).requires_grad_() for x in whole]
        out, lse = tw.attention(*inputs, **plan_of(rank), group=group, return_lse=True, **options)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
        ((out * weights).sum() + lse.sum()).backward()
        return [out.detach(), lse.detach(), *(x.grad for x in inputs)]

    return tw.loopback(step.world_size, run)


@pytest.mark.parametrize(("world_size", "v_head_dim"), [(1, 8), (3, 8), (4, 12)])
def test_prepared_values_give_the_attention_of_plan_mask_and_layout(world_size, v_head_dim):
    for step in scheduled(world_size, 128 // world_size, v_head_dim=v_head_dim):
        whole = {"plan": step.plan, "mask": step.mask, "layout": step.layout}
        wanted = attended(step, lambda rank, whole=whole: whole, v_head_dim)
        plans = [sent(step.prepare(rank, dtype=WIDE)) for rank in range(world_size)]
        found = attended(step, lambda rank, plans=plans: {"plan": plans[rank]}, v_head_dim)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("kernel", [None, "reference"])
def test_nothing_is_planned_again_where_a_prepared_value_arrives(kernel, monkeypatch):
    step = first_step()
    plans = [sent(step.prepare(rank, kernel, WIDE)) for rank in range(4)]

    def refuse(*_, **__):
        raise AssertionError("planned in the main process")

    monkeypatch.setattr(forward_backward, "pass_code", refuse)
    monkeypatch.setattr(facts, "lower", refuse)
    monkeypatch.setattr(sys.modules["tilewise.compiler.passes.place"], "placed", refuse)
    monkeypatch.setattr(TileCalls, "calls", refuse)
    found = attended(step, lambda rank: {"plan": plans[rank]}, kernel=kernel)
    assert all(torch.isfinite(x).all() for rank in found for x in rank)


@pytest.mark.parametrize(
    ("sizes", "dtype", "words"),
    [
        ({"num_heads": 8}, WIDE, "8 heads, 2 KV heads of 8 .*called with .*4 heads"),
        ({"head_dim": 128}, WIDE, "2 KV heads of 128 .*called with .*2 KV heads of 8 "),
        ({}, None, "in bfloat16.*called with .* in float64"),
    ],
)
def test_calls_of_other_shapes_than_prepared_for_are_refused(sizes, dtype, words):
    step = next(iter(tw.schedule(LENGTHS, world_size=4, tokens_per_rank=32, **{**HEADS, **sizes})))
    plans = [sent(step.prepare(rank, dtype=dtype)) for rank in range(4)]
    for message in refusals(lambda rank: {"plan": plans[rank], "validate": "never"}):
        assert re.search(rf"was prepared \(.*\) for .*{words}.*; prepare the step", message), (
            message
        )


def test_a_call_that_saves_otherwise_than_prepared_for_is_told_so():
    step = first_step()
    (message,) = {
        *refusals(lambda rank: {"plan": step.prepare(rank, dtype=WIDE), "save": "gathered"})
    }
    assert "was prepared" in message and "called with" in message and "gathered" in message


def test_a_canonical_call_of_a_prepared_value_is_refused_by_name():
    step = first_step()
    with pytest.raises(ValueError, match="prepared for reduction='fast', not 'canonical'"):
        attended(step, lambda rank: {"plan": step.prepare(rank)}, reduction="canonical")


def test_a_prepared_value_of_another_format_is_refused(monkeypatch):
    stored = pickle.dumps(first_step().prepare(1))
    monkeypatch.setattr(code, "CODE_FORMAT", 7)
    with pytest.raises(ValueError, match=r"in format 5, .* reads format 7; prepare it anew"):
        pickle.loads(stored)


def test_context_parallel_takes_mask_layout_and_length_from_a_prepared_value():
    step = first_step()
    x = torch.arange(step.num_tokens)

    def run(rank, group):
        prepared = sent(step.prepare(rank, dtype=WIDE))
        cp = tw.ContextParallel(group, strategy=prepared)
        assert (cp.mask, cp.layout) == (step.mask, step.layout)
        q, k, v = (torch.randn(32, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
        by_strategy = cp.attention(q, k, v)
        plain = tw.ContextParallel(group, num_tokens=step.num_tokens, layout=step.layout)
        assert torch.equal(plain.attention(q, k, v, plan=prepared), by_strategy)
        return cp.unshard(cp.shard(x, 0), 0)

    assert all(torch.equal(found, x) for found in tw.loopback(4, run))


def refusals(arguments_of) -> list[str]:
    """What every rank's attention refuses."""

    def run(rank, group):
        given = arguments_of(rank)
        sizes = [(32, heads, 8) for heads in (4, 2, 2)]
        q, k, v = (torch.randn(x, dtype=torch.float64, requires_grad=True) for x in sizes)
        with pytest.raises(ValueError) as refused:
            tw.attention(q, k, v, group=group, **given)
        return str(refused.value)

    return tw.loopback(4, run)


def test_ranks_with_other_batches_are_named_on_every_rank():
    steps = list(scheduled())
    messages = refusals(lambda rank: {"plan": steps[rank == 2].prepare(rank)})
    assert len(set(messages)) == 1
    assert "ranks disagree on training step: rank 0 has step 0" in messages[0]
    assert "rank 2 has step 1" in messages[0]


def test_other_documents_of_equal_lengths_are_another_step():
    step = first_step()
    others = replace(step, documents=tuple(reversed(step.documents)))
    messages = refusals(lambda rank: {"plan": (others if rank == 1 else step).prepare(rank)})
    assert all("disagree on training step" in message for message in messages)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda step, rank: {"plan": step.prepare(0)}, "rank 1: .*prepared for rank 0 .*prepare.1"),
        (
            lambda step, rank: {"plan": step.prepare(rank, dtype=WIDE), "mask": tw.Causal()},
            "is a plan for .* not for Causal",
        ),
        (
            lambda step, rank: {
                "plan": step.prepare(rank, dtype=WIDE),
                "layout": tw.zigzag(128, 4),
            },
            "is a plan for .* not for .*zigzag",
        ),
        (lambda step, rank: {"plan": tw.ring(4), "mask": step.mask}, "layout .None. must be"),
        (lambda step, rank: {"plan": tw.ring(4), "layout": step.layout}, "mask .None. must be"),
    ],
)
def test_what_contradicts_a_prepared_value_is_refused_on_every_rank(arguments, message):
    step = first_step()
    messages = refusals(lambda rank: arguments(step, rank))
    assert len(set(messages)) == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(messages[0])


def test_a_prepared_value_knows_its_own_rank_alone():
    step = first_step()
    prepared = sent(step.prepare(1))
    assert prepared.rank_steps(1) == step.plan.rank_steps(1)
    with pytest.raises(ValueError, match="prepared for rank 1 alone"):
        tw.show(prepared)
    with pytest.raises(ValueError, match=r"rank \(4\) must be from 0 to 3"):
        step.prepare(4)


def prepared_in_worker(step: BatchStep) -> RankPlan:
    return step.prepare(1)


def test_workers_of_a_data_loader_prepare():
    loader = DataLoader(scheduled(), batch_size=None, num_workers=2, collate_fn=prepared_in_worker)
    for prepared, step in zip(loader, scheduled(), strict=True):
        assert prepared == step.prepare(1)
        assert prepared.made_for == (step.mask, step.layout)


def killed(step: BatchStep) -> int:
    if step.index == 1:
        os._exit(1)
    return step.index


def test_a_worker_that_dies_is_an_error():
    loader = DataLoader(scheduled(), batch_size=None, num_workers=1, collate_fn=killed)
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(loader)


def components(step: BatchStep) -> list[set[int]]:
    """Ranks that exchange with each other, directly or not."""
    groups = [{rank} for rank in range(step.world_size)]
    for rank in range(step.world_size):
        for part in step.plan.rank_steps(rank):
            for transfer in part.sends:
                one, two = (next(g for g in groups if r in g) for r in (transfer.src, transfer.dst))
                if one is not two:
                    groups.remove(two)
                    one |= two
    return groups


def test_ranks_that_share_no_document_do_not_wait_for_each_other():
    step = next(iter(tw.schedule([64, 64], world_size=4, tokens_per_rank=32, lookahead=2, **HEADS)))
    here, elsewhere = components(step)
    assert len(here) == len(elsewhere) == 2

    def run(rank, group):
        if rank in elsewhere:
            return 0  # never calls attention at all
        sizes = [(32, heads, 8) for heads in (4, 2, 2)]
        inputs = [torch.randn(x, dtype=torch.float64, requires_grad=True) for x in sizes]
        out = tw.attention(
            *inputs, plan=step.prepare(rank, dtype=WIDE), group=group, validate="never"
        )
        out.sum().backward()
        return len(inputs[0].grad)

    found = tw.loopback(4, run)
    assert [found[rank] for rank in here] == [32, 32]


def test_a_model_of_transformers_runs_what_was_prepared():
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).double()
    step = first_step(2, tokens_per_rank=64)
    documents = [{"input_ids": torch.randint(50, (LENGTHS[i],))} for i in step.documents]
    whole = ShardingCollator(tw.contiguous(step.num_tokens, 1), 0)(documents)
    wanted = model(**whole, use_cache=False).loss

    def run(rank, group):
        cp = tw.ContextParallel(group, strategy=sent(step.prepare(rank, dtype=WIDE)))
        mine = copy.deepcopy(model)
        mine.set_attn_implementation(hf.register(cp, f"prepared_{rank}"))
        return mine(**ShardingCollator(cp.layout, rank)(documents), use_cache=False).loss

    shares = tw.loopback(2, run)
    torch.testing.assert_close(sum(shares), wanted, rtol=1e-12, atol=0)
