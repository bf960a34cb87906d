"""The package flash-attn-4, by rectangles and by lists of blocks, on a stub of its functions."""

import functools
import importlib

import numpy as np
import pytest
import torch
from support.flash_attn_4 import VERSION, install
from support.kernel_cases import CALLS, HEADS, SCALE, agrees, call_of, dense, draw

import tilewise as tw
from tilewise.kernels import flash_attn_4
from tilewise.kernels.call_masks import block_cells, call_mask, row_intervals
from tilewise.kernels.flash_attn_4 import FlashAttn4, FlashAttn4Lists
from tilewise.masks.base import Causal, Document, Window
from tilewise.masks.patterns import block_sparse, global_sliding_window
from tilewise.tiles.calls import KernelCall, Kind
from tilewise.tiles.cover import tile_calls

HALF = torch.bfloat16
DOCUMENTS = Document([0, 150, 260, 264, 420, 700])


def tile(mask, queries, keys) -> KernelCall:
    """The one call of a tile of these positions."""
    queries, keys = (np.concatenate([np.arange(*part) for part in x]) for x in (queries, keys))
    (call,) = tile_calls(queries, keys, mask, whole_tile=True)
    assert len(call.as_slices) > 1
    return call


WHOLE = [(0, 420)]
TILES = {
    "causal window": tile(Causal() & Window(140, 0), WHOLE, WHOLE),
    "window of others": tile(Window(90, 30), [(200, 600)], [(0, 500)]),
    "documents": tile(DOCUMENTS & Causal(), WHOLE, WHOLE),
    "zigzag of one rank with another's": tile(
        DOCUMENTS & Causal(), [(130, 330), (500, 600)], [(0, 140), (400, 560)]
    ),
    "striped": tile(DOCUMENTS & Causal(), [(1, 700, 3)], [(0, 700, 3)]),
    "two intervals a row": tile(global_sliding_window(500, 60), [(100, 500)], [(0, 500)]),
    "three intervals a row": tile(
        block_sparse(np.arange(5)[:, None] % 2 == np.arange(5) % 2, 128), WHOLE, [(0, 640)]
    ),
    "rows and keys alone": tile(DOCUMENTS, [(0, 430)], [(200, 300)]),
    "full and empty blocks": tile(
        Document([0, 150, 700, 760, 1000]) & Causal(), [(150, 900)], [(0, 720)]
    ),
    "bands": CALLS["bands"],
    "holes": CALLS["holes"],
}


@pytest.mark.parametrize("v_head_dim", [None, 8, 40])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("call", [*CALLS.values(), call_of(3, 5, Kind.CAUSAL)])
def test_it_takes_windows_widths_and_delta_as_its_contract_says(
    call, heads, v_head_dim, monkeypatch
):
    install(monkeypatch)
    agrees(FlashAttn4(), call, heads, HALF, 1e-2, v_head_dim=v_head_dim)


@pytest.mark.parametrize("major", [9, 10])
@pytest.mark.parametrize("name", TILES)
def test_one_call_by_lists_is_dense_attention(name, major, monkeypatch):
    install(monkeypatch, major)
    kernel, heads = FlashAttn4Lists(), (2, 2) if name.startswith("full") else (4, 2)
    agrees(kernel, TILES[name], heads, torch.float32, 5e-6)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize(
    ("major", "head_dim", "v_head_dim"),
    [
        (9, 64, 64),
        (9, 19, 40),
        (9, 64, 192),
        (9, 192, 128),
        (9, 192, 192),
        (9, 256, 256),
        (10, 128, 64),
        (10, 192, 40),
    ],
)
def test_lists_have_the_blocks_that_each_width_asks_for(
    heads, major, head_dim, v_head_dim, monkeypatch
):
    package, call = install(monkeypatch, major), TILES["causal window"]
    kernel = FlashAttn4Lists()
    agrees(kernel, call, heads, HALF, 2e-2, head_dim=head_dim, v_head_dim=v_head_dim)
    assert 0 < package.cells < 4 * 512 * 512  # four passes, each over a part of all blocks


@pytest.mark.parametrize("block", [(128, 128), (128, 96), (128, 64), (256, 128), (256, 256)])
@pytest.mark.parametrize("call", TILES.values(), ids=TILES)
def test_lists_name_blocks_with_work_and_full_ones_apart(call, block, monkeypatch):
    install(monkeypatch)
    lists, tensors = flash_attn_4._block_lists(call, block, torch.device("cpu"))
    rows, keys = block
    allowed = torch.nn.functional.pad(
        call_mask(call), (0, -call.num_k % keys, 0, -call.num_q % rows)
    )
    cells = allowed.unflatten(1, (-1, keys)).unflatten(0, (-1, rows)).sum((1, 3))
    for side, wanted in ((lists.by_rows, cells), (lists.by_keys, cells.T)):
        assert side.block_size == block
        for kind, chosen in (
            ("mask", (wanted > 0) & (wanted < rows * keys)),
            ("full", wanted == rows * keys),
        ):
            count, index = (getattr(side, f"{kind}_block_{x}")[0, 0] for x in ("cnt", "idx"))
            named = [x[:n].tolist() for x, n in zip(index, count.tolist(), strict=True)]
            assert named == [x.nonzero()[:, 0].tolist() for x in chosen]
    assert lists.table.shape[2] % rows == 0 and len(lists.table) in (1, 2, 4)
    assert len(tensors) == 9


def test_ranks_of_a_zigzag_ring_take_lists_through_the_executor(monkeypatch):
    package = install(monkeypatch)

    class OnCpu(FlashAttn4Lists):
        device, dtypes = None, (torch.float32,)

    num_tokens, world, mask = 600, 2, Causal() & Document([0, 100, 450, 600])
    layout = tw.zigzag(num_tokens, world)
    q, dout = torch.randn(2, num_tokens, 4, 16, generator=torch.Generator().manual_seed(0))
    k, v = torch.randn(2, num_tokens, 2, 16, generator=torch.Generator().manual_seed(1))

    def on_rank(rank, group):
        own = [layout.shard(x, rank, dim=0).requires_grad_() for x in (q, k, v)]
        call = {"plan": tw.ring(world), "layout": layout, "mask": mask, "group": group}
        out = tw.attention(*own, **call, kernel=OnCpu())
        out.backward(layout.shard(dout, rank, dim=0))
        return [out.detach(), *(x.grad for x in own)]

    found = [layout.unshard(x, dim=0) for x in zip(*tw.loopback(world, on_rank), strict=True)]
    assert package.cells > 0
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    call = {"plan": tw.ring(1), "layout": tw.contiguous(num_tokens, 1), "mask": mask}
    out = tw.attention(*wide, **call, kernel="reference")
    out.backward(dout.double())
    for x, true in zip(found, [out.detach(), *(x.grad for x in wide)], strict=True):
        assert float((x - true).abs().max()) < 5e-6 * max(1.0, float(true.abs().max()))


def test_it_is_told_to_be_deterministic_and_lists_cannot_be(monkeypatch):
    package, told = install(monkeypatch), []
    computes = package.backward

    def backward(*tensors, deterministic=False, **options):
        told.append(deterministic)
        return computes(*tensors, **options)

    package.backward = backward
    case = draw(CALLS["full"], (2, 2), HALF)
    answer = dense(case, CALLS["full"])
    for wanted in (False, True):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda w=wanted: w)
        statistics = answer.lse.float(), answer.delta.float()
        FlashAttn4().backward(*case[:4], *statistics, CALLS["full"], SCALE)
        reason = FlashAttn4Lists().supports("cuda", HALF, 128)
        assert (reason is not None) == wanted
    assert told == [False, True]
    assert reason == (
        f"flash-attn-4 ({VERSION}) has no deterministic backward by lists of blocks, which torch "
        "is told to take; 'flash_attn_4' has one"
    )
    assert FlashAttn4Lists().supports("cuda", HALF, 128, backward=False) is None


@pytest.mark.parametrize("kernel", [FlashAttn4(), FlashAttn4Lists()], ids=lambda x: x.name)
def test_it_says_where_it_runs(kernel, monkeypatch):
    asked = "cuda", HALF, 128
    monkeypatch.setattr(flash_attn_4, "_version", lambda: None)
    assert kernel.supports(*asked) == "flash-attn-4 is not installed"
    for version, new in (
        ("4.0.0b9", False),
        ("4.0.0b30", False),
        (VERSION, True),
        ("4.0.0", True),
        ("4.1.0b2", True),
    ):
        install(monkeypatch, version=version)
        reason = (
            f"flash-attn-4 ({version}) must be 4.0.0b36 or later, whose results and sizes of "
            "blocks are known: pip install --pre --upgrade flash-attn-4"
        )
        assert kernel.supports(*asked) == (None if new else reason)
    for major, head_dim, reason in (
        (9, 256, None),
        (10, 128, None),
        (10, 192, None),
        (10, 256, "head_dim (256) is over 128 and not 192"),
        (12, 128, "it runs on compute capability 9 and 10, not on 12"),
    ):
        install(monkeypatch, major)
        said = kernel.supports("cuda", HALF, head_dim)
        assert (said is None) == (reason is None) and (reason or "") in (said or "")
    install(monkeypatch, 10)
    agrees(kernel, CALLS["full"], (4, 2), HALF, 1e-2, head_dim=192, v_head_dim=64)
    for call in (CALLS["full"], TILES["documents"]):
        with pytest.raises(ValueError, match=r"v_head_dim \(192\) must be at most 128"):
            agrees(kernel, call, (4, 2), HALF, 1e-2, head_dim=192)


def first_use(backward: bool) -> None:
    call = TILES["documents"]
    case = draw(call, (4, 2), HALF)
    answer = dense(case, call)
    if backward:
        statistics = answer.lse.float(), answer.delta.float()
        FlashAttn4Lists().backward(*case[:4], *statistics, call, SCALE)
    else:
        FlashAttn4Lists().forward(*case[:3], call, SCALE)


@pytest.mark.parametrize(
    ("backward", "wrong", "said"),
    [
        (False, lambda made: (made[0], made[1] + 1, *made[2:]), "forward .* lse is off by"),
        (True, lambda made: (made[0], 2 * made[1], made[2]), "backward .* dk is off by"),
    ],
)
def test_a_device_that_computes_something_else_is_found_before_the_first_call(
    backward, wrong, said, monkeypatch
):
    package, calls = install(monkeypatch), []
    monkeypatch.setattr(FlashAttn4Lists, "device", "cpu")
    name = "backward" if backward else "forward"
    computes = getattr(package, name)

    def broken(*tensors, **options):
        calls.append(tensors[0].shape)
        return wrong(computes(*tensors, **options))

    setattr(package, name, broken)
    begins, ends = rf"flash-attn-4 \({VERSION}\) failed its trial", "take kernel='flash_attn_4' or"
    with pytest.raises(ValueError, match=f"{begins} .*{said}.* {ends} 'triton', or install"):
        first_use(backward)
    assert {shape[1] for shape in calls} == {len(flash_attn_4.TRIAL[1])}


def test_a_later_version_with_other_blocks_is_named(monkeypatch):
    install(monkeypatch, version="4.2.0", keys=160)
    monkeypatch.setattr(FlashAttn4Lists, "device", "cpu")
    with pytest.raises(ValueError) as caught:
        first_use(backward=False)
    said = str(caught.value)
    assert said.startswith("flash-attn-4 (4.2.0) failed its trial on this cpu device: ")
    assert "Block sparsity requires sparse_block_size[1]=128" in said
    assert said.endswith("or install flash-attn-4==4.0.0b36")


def test_a_kind_of_call_is_tried_once(monkeypatch):
    package, seen = install(monkeypatch), []
    monkeypatch.setattr(FlashAttn4Lists, "device", "cpu")

    computes = package.forward

    def forward(*tensors, **options):
        seen.append(tensors[0].shape[1])
        return computes(*tensors, **options)

    package.forward = forward
    first_use(backward=False)
    first_use(backward=False)
    rows = len(flash_attn_4.TRIAL[1])
    assert seen == [rows, rows, TILES["documents"].num_q, TILES["documents"].num_q]


def test_a_row_of_too_many_intervals_is_refused_by_name(monkeypatch):
    install(monkeypatch)
    mask = block_sparse(np.arange(80)[None] % 2 == np.zeros((80, 1)), 4)
    call = tile(mask, [(0, 100)], [(0, 320)])
    with pytest.raises(ValueError, match="sees 40 intervals of keys; flash_attn_4_lists takes at"):
        agrees(FlashAttn4Lists(), call, (2, 2), HALF, 1e-2)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # of the package's own needs
@pytest.mark.parametrize(("head_dim", "heads"), [(128, (4, 2)), (64, (2, 2)), (192, (4, 2))])
def test_the_package_itself_compiles_both_passes_for_hopper(head_dim, heads, monkeypatch):
    """Where it is installed, without a GPU: its functions see tensors of shapes alone."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._pytree import tree_map

    for name, value in (("ARCH", "sm_90"), ("NUM_SMS", "132")):
        monkeypatch.setenv(f"FLASH_ATTENTION_{name}", value)
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    pytest.importorskip("cutlass.cute")
    interface = importlib.import_module("flash_attn.cute.interface")
    monkeypatch.setattr(flash_attn_4, "_major", lambda: 9)
    flash_attn_4._rule.cache_clear()

    def compiled(function):
        @functools.wraps(function)
        def run(*args, **options):
            with FakeTensorMode():
                args, options = tree_map(on_a_gpu, (args, options))
                shapes = [x.shape for x in function(*args, **options) if x is not None]
            return [torch.zeros(shape) for shape in shapes]

        return run

    def on_a_gpu(x):
        if not isinstance(x, torch.Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")

    for name in ("_flash_attn_fwd", "_flash_attn_bwd"):
        monkeypatch.setattr(interface, name, compiled(getattr(interface, name)))
    call = TILES["two intervals a row"]
    case = draw(call, heads, HALF, head_dim=head_dim, v_head_dim=128 if head_dim == 192 else None)
    kernel = FlashAttn4Lists(trial=False)
    out, lse = kernel.forward(*case[:3], call, SCALE)
    assert out.shape == case.dout.shape and lse.shape == case.q.shape[:3]
    grads = kernel.backward(*case[:4], lse, lse, call, SCALE)
    assert [x.shape for x in grads] == [x.shape for x in case[:3]]


@pytest.mark.parametrize(("major", "widths"), [(9, (64, 64)), (9, (192, 128)), (10, (192, 40))])
def test_the_trial_is_of_the_widths_that_are_asked_for(major, widths, monkeypatch):
    package = install(monkeypatch, major)
    monkeypatch.setattr(FlashAttn4Lists, "device", "cpu")
    flash_attn_4._prove(torch.device("cpu"), HALF, widths, True)
    assert package.cells > 0


@pytest.mark.parametrize("block", [(128, 128), (128, 64), (256, 128), (256, 256)])
def test_the_trial_has_blocks_of_every_kind(block):
    mask, queries, keys = flash_attn_4.TRIAL
    (call,) = tile_calls(np.array(queries), np.array(keys), mask, whole_tile=True)
    cells = block_cells(row_intervals(call).numpy(), call.num_k, block)
    assert len(call.as_slices) > 1
    assert (cells == 0).all(1).any() and (cells == 0).all(0).any()
    assert ((cells > 0) & (cells < block[0] * block[1])).any()
    assert (cells == block[0] * block[1]).any() or block == (256, 256)
