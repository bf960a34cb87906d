"""Needed rows by nodes: still exact, and over the links between nodes once."""

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise.plan.ir import Role


def between_nodes(plan: tw.Plan, size: int) -> dict[int, list[tuple[int, int]]]:
    """Operands that cross to another node: shard -> (node, rows) of every transfer."""
    found: dict[int, list[tuple[int, int]]] = {}
    for step in plan.steps:
        for item, src, dst, _ in step.transfers:
            if item.role is Role.OPERAND and src // size != dst // size:
                found.setdefault(item.shard, []).append((dst // size, src))
    return found


@pytest.mark.parametrize("node_size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(6))
def test_a_shard_crosses_to_a_node_once_and_the_plan_is_exact(seed, node_size):
    rng = np.random.default_rng(seed)
    n, num_tokens = int(rng.integers(5, 12)), int(rng.integers(60, 200))
    cu = np.unique([0, *rng.integers(1, num_tokens, 4), num_tokens]).tolist()
    mask = (tw.masks.causal_document(cu), tw.Causal(), tw.Window(30, 20))[seed % 3]
    layout = (tw.balanced(mask, num_tokens, n), tw.zigzag(num_tokens, n))[seed % 2]
    plan = tw.needed(mask, layout, node_size)
    tw.check(plan, mask, layout)
    for shard, transfers in between_nodes(plan, node_size).items():
        assert [src for _, src in transfers] == [shard] * len(transfers)
        nodes = [node for node, _ in transfers]
        assert len(set(nodes)) == len(nodes)


def test_a_node_of_all_ranks_changes_nothing():
    layout = tw.zigzag(64, 4)
    plain = tw.needed(tw.Causal(), layout)
    for size in (None, 4, 9):
        plan = tw.needed(tw.Causal(), layout, size)
        assert plan == plain
        assert plan.fingerprint == plain.fingerprint
    with pytest.raises(ValueError, match=r"node_size \(0\)"):
        tw.needed(tw.Causal(), layout, 0)


@pytest.mark.parametrize(("n", "node_size"), [(5, 2), (6, 3)])
def test_attention_and_gradients_by_nodes_are_those_of_dense_attention(n, node_size):
    torch.manual_seed(n)
    mask = tw.Causal() & tw.Document([0, 3, 40, 59, 90])
    layout = tw.balanced(mask, 90, n, chunk=4)
    plan = tw.needed(mask, layout, node_size)
    whole = [torch.randn(90, heads, 8, dtype=torch.float64) for heads in (4, 2, 2, 4)]
    wanted = [x.clone().requires_grad_() for x in whole[:3]]
    allowed = torch.from_numpy(mask.dense(np.arange(90), np.arange(90)))
    q, k, v = (x.transpose(0, 1)[None] for x in wanted)
    dense = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=allowed, enable_gqa=True
    )[0].transpose(0, 1)
    (dense * whole[3]).sum().backward()

    def run(rank, group):
        *inputs, weights = (layout.shard(x, rank).requires_grad_() for x in whole)
        out = tw.attention(*inputs, plan=plan, layout=layout, mask=mask, group=group)
        (out * weights).sum().backward()
        return [out.detach(), *(x.grad for x in inputs)]

    found = zip(*tw.loopback(n, run), strict=True)
    for parts, want in zip(found, (dense.detach(), *(x.grad for x in wanted)), strict=True):
        torch.testing.assert_close(layout.unshard(parts), want, rtol=1e-12, atol=1e-12)


def test_fewer_bytes_between_nodes_and_as_many_in_all():
    mask = tw.masks.causal_document([0, 6000, 6400, 16384])
    layout = tw.balanced(mask, 16384, 16)
    work = tw.Workload(16384, 32, 8, 128, mask=mask, layout=layout)
    machine = tw.Machine.preset("h100x8")
    plain, by_node = (tw.needed(mask, layout, size) for size in (None, 8))
    a, b = (tw.simulate(plan, work, machine).total_bytes_by_link for plan in (plain, by_node))
    assert sum(b.values()) <= 1.03 * sum(a.values())
    assert 3 * b["between"] <= a["between"]
    layouts = {plan: tw.simulate(plan, work, machine).seconds for plan in (plain, by_node)}
    assert layouts[by_node] < layouts[plain]


@pytest.mark.parametrize("make", [tw.needed, tw.tiled])
def test_a_plan_for_one_mask_has_no_place_within_another(make):
    """Under another mask it would leave out pairs: nothing would show that it was made for one."""
    inner = make(tw.Causal(), tw.contiguous(64, 2))
    with pytest.raises(ValueError, match=r"ulysses needs an inner plan .* for any mask"):
        tw.ulysses(2, inner=inner)
    with pytest.raises(ValueError, match=r"hierarchical needs an inner plan .* for any mask"):
        tw.hierarchical(tw.ring(2), inner)
