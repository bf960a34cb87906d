"""A call without tensors: the codes of both passes, made ahead for one rank."""

from collections.abc import Iterator

import torch

from tilewise.arguments import whole_number
from tilewise.compiler.codegen import pass_code
from tilewise.compiler.facts import DEFAULT_TRAITS, CallTraits, CodeTraits, kernel_traits
from tilewise.compiler.rank_plan import PassKind, PreparedCode, RankPlan
from tilewise.compiler.resolved import ResolvedPass
from tilewise.kernels.protocol import Kernel, call_style
from tilewise.kernels.registry import given_kernel, kernel_for
from tilewise.plan.ir import NO_TRAITS
from tilewise.transport.nodes import local_world_size, node_size_of
from tilewise.transport.process_group import GLOO_TRAITS

Passes = tuple[ResolvedPass, ResolvedPass]


def prepare(
    passes: Passes, rank: int, batch: str = "", kernel: Kernel | str | None = None
) -> RankPlan:
    """All that one rank needs to run a call, as a value that pickles.

    Args:
        passes: of a call with one plan.
        batch: words for the batch, on which ranks are to agree.
        kernel: for which tiles are cut; None: the first choices of the devices that torch knows.
    Raises:
        ValueError: if there is no such rank, or no such kernel.
    """
    whole, pruned = passes[0].plan, passes[0].pruned
    whole_number("rank", rank, 0, whole.world_size - 1)
    mask, layouts = passes[0].mask, passes[0].layouts
    made_for = whole.made_for or (mask, layouts[0])
    traits = NO_TRAITS._replace(made_for=made_for, proven=True, exchanges=pruned.traits.exchanges)
    codes = tuple(_codes(passes, rank, kernel))
    # The ranks' agreement asks for these.
    _ = made_for[1].is_partition, made_for[1].fingerprint
    return RankPlan(
        rank,
        batch,
        whole.fingerprint,
        pruned.rank_steps(rank),
        codes,
        name=whole.name,
        world_size=whole.world_size,
        num_head_groups=whole.num_head_groups,
        owners=whole.owners,
        cuts=whole.cuts,
        default_save=whole.default_save,
        waiting_results=whole.waiting_results,
        traits=traits,
    )


def _codes(passes: Passes, rank: int, kernel: Kernel | str | None) -> Iterator[PreparedCode]:
    for traits in dict.fromkeys(_traits(passes, kernel)):
        for backward in (False, True):
            payload, groups = passes[backward].payload, passes[backward].groups
            call = CallTraits(keep=passes[1].payload.saved and not backward)
            code = pass_code(passes, rank, backward=backward, call=call, traits=traits)
            yield PreparedCode(PassKind(backward, payload, groups, call), traits, code)


def _traits(passes: Passes, kernel: Kernel | str | None) -> Iterator[CodeTraits]:
    """The transports, and how kernels want tiles cut, that a call may meet."""
    payload, n = passes[0].payload, passes[0].plan.world_size
    width = max(payload.head_dim, payload.v_head_dim)
    devices = ["cpu", *(["cuda"] if torch.version.cuda is not None else [])]
    for device in devices:
        found = kernel_for(device, getattr(torch, payload.dtype), width)
        found = found if kernel is None else given_kernel(kernel)
        cut = call_style(found)
        if device == "cpu":
            yield GLOO_TRAITS._replace(cut=cut)
            yield DEFAULT_TRAITS._replace(cut=cut)
        else:
            node_size = node_size_of(range(n), local_world_size())
            cut, waiting = kernel_traits(device, cut)
            yield DEFAULT_TRAITS._replace(node_size=node_size, cut=cut, waiting_results=waiting)
