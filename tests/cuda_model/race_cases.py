"""What is run on a played device: every strategy, both passes, over loopback or a played NCCL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from cuda_model.played_cuda import PlayedDevice, PlayedStream
from cuda_model.played_nccl import PlayedGroup, PlayedNccl
from cuda_model.watched import Watch, WatchedKernel
from torch import Tensor

import tilewise as tw
from tilewise.execution import forward_backward
from tilewise.execution import run as running
from tilewise.transport import process_group
from tilewise.transport.loopback import LoopbackGroup
from tilewise.transport.process_group import DistTransport

TOKENS, HEADS, WIDTH = 24, (4, 2), 4
MASKS = {
    "full": tw.Full(),
    "causal": tw.Causal(),
    "documents": tw.Document([0, 3, 15, 20, TOKENS]) & tw.Causal(),
    "by head": tw.PerHead([tw.Causal(), tw.Full()]),
}
PLANS = {
    "ring": tw.ring(4),
    "ring q": tw.ring(3, moves="q"),
    "all gather": tw.all_gather(4),
    "double ring": tw.double_ring(2, 2),
    "balanced ring": tw.balanced_ring(4),
    "attention2d": tw.attention2d(2, 2),
    "mesh": tw.mesh(4, q_tile=2),
    "mesh gather": tw.mesh(4, q_tile=2, schedule="gather"),
    "mesh eager": tw.mesh(4, q_tile=2, schedule="eager"),
    "ulysses": tw.ulysses(2, inner=tw.ring(2)),
}
NODES = {"ring": 2, "double ring": 2, "mesh": 2, "all gather": 2, "ulysses": 2}
ONE_WAY = tw.ring(4), tw.Causal(), tw.contiguous  # the first rank only sends, the last receives


class Case(NamedTuple):
    """What is run on each rank."""

    plan: tw.Plan
    mask: tw.Mask
    make_layout: Callable[[int, int], tw.Layout] = tw.zigzag
    passes: int = 3
    options: Mapping[str, Any] = {}

    @property
    def layout(self) -> tw.Layout:
        return self.make_layout(TOKENS, self.plan.world_size)


RESULTS = "wait", "write", "adopt"


def keep_results(monkeypatch: Any, how: str) -> None:
    """Let what kernels return wait until it is combined, as on a GPU; or be written to partial
    results, as Triton's are there; or become partial results, as on a CPU.
    """
    monkeypatch.setattr(running, "ADOPTING_DEVICES", ("cpu",) if how == "adopt" else ())
    waiting = 2 if how == "wait" else 0
    monkeypatch.setattr(forward_backward, "kernel_traits", lambda _, cut: (cut, waiting))


def over_nccl(monkeypatch: Any, device: PlayedDevice, node_size: int | None, **options: Any) -> Any:
    """rank's end of loopback -> a DistTransport whose groups are played."""
    worlds: dict[int, PlayedNccl] = {}

    def group_of(rank: int, group: LoopbackGroup, name: str) -> PlayedGroup:
        scheduler = group._world.scheduler
        nccl = worlds.setdefault(id(scheduler), PlayedNccl(device, scheduler, **options))
        return PlayedGroup(nccl, name, rank, group.world_size)

    def transport(rank: int, group: LoopbackGroup) -> DistTransport:
        lane1 = group_of(rank, group, "lane1")
        monkeypatch.setattr(process_group, "lane_group", lambda own, i: lane1 if i else own)
        made: Any = group_of(rank, group, "lane0")
        end: Any = DistTransport(made, node_size=node_size)
        end.gather_records = group.gather_records  # of the hosts alone
        return end

    monkeypatch.setattr(process_group, "agreed_node_size", lambda _, lane, size: size)
    monkeypatch.setattr(process_group.dist, "get_backend_config", lambda _: "cuda:nccl")
    monkeypatch.setattr(process_group.dist, "get_process_group_ranks", lambda _: [])
    monkeypatch.setattr(DistTransport, "_backend", lambda *_: "nccl")
    # Records go over sockets, of which nothing is played: the ranks of a test agree.
    monkeypatch.setattr(DistTransport, "gather_records", lambda self, x: [x] * self.world_size)
    return transport


def run(
    case: Case,
    device: PlayedDevice,
    transport: Any = None,
    kernel: WatchedKernel | None = None,
) -> list[list[Tensor]]:
    """Several passes of every rank; the last one's results.

    The caller makes the tensors, and changes them when loopback has returned.
    """
    kernel = kernel or WatchedKernel(tw.kernel("cpu"), device)
    case = case._replace(options={"kernel": kernel, **case.options})
    with Watch(device):
        tensors = [drawn(case, rank) for rank in range(case.plan.world_size)]

        def on_rank(rank: int, group: LoopbackGroup) -> list[Tensor]:
            with Watch(device):
                end = transport(rank, group) if transport else group
                return passes(case, device, tensors[rank], end)

        results = tw.loopback(case.plan.world_size, on_rank)
        for ends in (*tensors, *results):
            for x in ends:
                x.mul_(1.0)
    device.kept.append(results)  # memory of the ranks' streams, which nobody uses any more
    return results


def drawn(case: Case, rank: int) -> list[Tensor]:
    """q, k, v, dout of a rank."""
    generator = torch.Generator().manual_seed(rank)
    heads = HEADS[0], HEADS[1], HEADS[1], HEADS[0]
    rows = case.layout.size(rank)
    return [torch.randn(rows, n, WIDTH, generator=generator) for n in heads]


def passes(case: Case, device: PlayedDevice, tensors: list[Tensor], group: Any) -> list[Tensor]:
    """Forward and backward through autograd, in turn on two streams unknown to each other.

    After each, as an optimizer would, its stream changes all that was read. The first is forward
    alone, so that a workspace grows later, on another stream than it was made on.
    """
    here, other = device.current, PlayedStream(device)
    other.wait_stream(here)
    with device.entered(other):
        copies = [x.clone() for x in tensors]
    here.wait_stream(other)
    results: list[Tensor] = []
    for number in range(case.passes):
        with device.entered(other if number % 2 else here):
            *operands, dout = copies if number % 2 else tensors
            operands = [x.detach().requires_grad_() for x in operands]
            out = tw.attention(
                *operands,
                plan=case.plan,
                layout=case.layout,
                mask=case.mask,
                group=group,
                validate="never",
                **case.options,
            )
            grads = torch.autograd.grad(out, operands, dout) if number else ()
            for x in (*operands, dout):
                x.detach().mul_(1.0)
            results = [x.detach().mul_(1.0) for x in (out, *grads)]
    here.wait_stream(other)
    return results


def case_of(plan: str) -> Case:
    return Case(*ONE_WAY) if plan == "one way" else Case(PLANS[plan], tw.Causal())
