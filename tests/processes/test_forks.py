"""A process that was forked has no groups of its parent, and a ContextParallel does not pickle."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from typing import Any

import pytest
import torch

import tilewise as tw
from processes.launcher import run_processes


def call(queue: Any, cp: tw.ContextParallel) -> None:
    mine = cp.shard(torch.arange(8.0), 0)  # what a data loader's worker does
    try:
        cp.gather(mine)
        queue.put("taken")
    except ValueError as error:
        queue.put(str(error))


def forks(rank: int) -> list[str]:
    cp = tw.ContextParallel(num_tokens=8)
    cp.gather(cp.shard(torch.arange(8.0), 0))
    context = multiprocessing.get_context("fork")
    multiprocessing.current_process()._config["daemon"] = False  # pyright: ignore
    queue = context.Queue()
    child = context.Process(target=call, args=(queue, cp))
    child.start()
    told = [queue.get(timeout=60)]
    child.join()
    try:
        pickle.dumps(cp)
    except TypeError as error:
        told.append(str(error))
    copied = copy.copy(cp)
    same = torch.equal(copied.gather(copied.shard(torch.arange(8.0), 0)), torch.arange(8.0))
    return [*told, "right" if same else "wrong"]  # the parent goes on


def test_calls_in_a_forked_process_and_pickles_are_refused_by_name():
    for forked, pickled, after in run_processes(2, forks):
        assert "forked from one that had joined its group" in forked and "cp.layout" in forked
        assert "cannot be pickled" in pickled and "Pass cp.layout and cp.rank" in pickled
        assert after == "right"


def test_alone_it_is_refused_as_well():
    with pytest.raises(TypeError, match="cannot be pickled: its group belongs to this process"):
        pickle.dumps(tw.ContextParallel(num_tokens=8))


@pytest.mark.parametrize(
    "plan",
    [tw.ring(2), tw.all_gather(2), tw.ulysses(2), tw.mesh(2, q_tile=2), tw.tree(2)],
    ids=repr,
)
def test_a_batch_of_no_entries_has_results_and_gradients(plan: tw.Plan):
    for shapes in run_processes(2, no_entries, plan):
        assert shapes == [(0, 4, 2, 8)] * 4


def no_entries(_: int, plan: tw.Plan) -> list[tuple[int, ...]]:
    q, k, v = (torch.zeros(0, 4, 2, 8, requires_grad=True) for _ in range(3))
    cp = tw.ContextParallel(num_tokens=8, mask=tw.Causal(), strategy=plan)
    out = cp.attention(q, k, v)
    out.sum().backward()
    return [tuple(x.shape) for x in (out, q.grad, k.grad, v.grad) if x is not None]
