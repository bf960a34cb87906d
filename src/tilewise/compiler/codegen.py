"""Code generation: one rank's pass of a resolved call becomes a code, by the compiler's passes.

    plan -> lowering -> program -> naive -> passes -> place -> code

Everything that a pass does to memory is decided here, once for calls of the same shapes: what is
packed and where it arrives, which rows a kernel call reads in place and which are gathered, where
it adds, what becomes a partial result without a copy.
"""

from collections.abc import Iterator

from tilewise.arguments import require_known, require_range
from tilewise.compiler.code import Code, listing
from tilewise.compiler.draft import AttendTile, Draft
from tilewise.compiler.facts import DEFAULT_TRAITS, CallTraits, CodeTraits, Facts
from tilewise.compiler.passes import PASSES, latents, naive, place
from tilewise.compiler.resolved import ResolvedPass
from tilewise.plan.builder import MOST_STEPS, gc_paused

Passes = tuple[ResolvedPass, ResolvedPass]


def pass_code(
    passes: Passes,
    rank: int,
    *,
    backward: bool,
    call: CallTraits = CallTraits(),  # noqa: B008 - a constant
    traits: CodeTraits = DEFAULT_TRAITS,
) -> Code:
    """The code of one rank's forward or backward pass.

    Args:
        passes: the resolved forward and backward pass of a call.
        rank: in 0..world_size - 1.
    Raises:
        ValueError: if there is no such rank.
    """
    with gc_paused():
        facts = pass_facts(passes, rank, backward=backward, call=call, traits=traits)
        draft = joined_draft(passes, rank, backward=backward, call=call, traits=traits)
        return place(draft, facts[0])


def pass_facts(
    passes: Passes, rank: int, *, backward: bool, call: CallTraits, traits: CodeTraits
) -> tuple[Facts, ...]:
    """The facts from which each part of a pass is compiled, with what its forward pass keeps."""
    require_range("rank", rank, 0, passes[0].plan.world_size - 1)
    found: list[Facts] = []
    for part in passes[backward].parts:
        forward = None
        if backward and part.payload.saved:
            keeping = Facts(
                passes[0], rank, call._replace(keep=True), traits.of_plan(passes[0].plan)
            )
            forward = pass_draft(keeping, after="keep")
        found.append(Facts(part, rank, call, traits.of_plan(part.plan), forward))
    return tuple(found)


def joined_draft(
    passes: Passes,
    rank: int,
    *,
    backward: bool,
    call: CallTraits,
    traits: CodeTraits,
    after: str | None = None,
) -> Draft:
    """The operations of a pass, its parts one after the other.

    Args:
        after: as of `pass_draft`.
    """
    facts = pass_facts(passes, rank, backward=backward, call=call, traits=traits)
    draft, *others = (pass_draft(part, after) for part in facts)
    for number, other in enumerate(others, 1):
        draft.append(other, number * MOST_STEPS)
    return draft


def pass_draft(facts: Facts, after: str | None = None) -> Draft:
    """The operations of a pass on buffers without a place.

    Args:
        after: stop after this pass: "naive", or one of PASSES; None: after all of them.
    """
    draft = naive(facts)
    for name, improve in PASSES.items() if after != "naive" else ():
        if facts.latent or improve is not latents:
            improve(draft, facts)
        if name == after:
            break
    return draft


def draft_listing(passes: Passes, rank: int, *, backward: bool, after: str) -> Iterator[str]:
    """Yield the operations of a pass after one of the compiler's passes, as `Code.listing` does.

    Args:
        after: "naive", or a name in PASSES.
    Raises:
        ValueError: if there is no such pass or rank.
    """
    require_known("pass", after, ("naive", *PASSES, "place"))
    call = CallTraits(keep=passes[1].payload.saved and not backward)
    if after == "place":
        yield from pass_code(passes, rank, backward=backward, call=call).listing()
        return
    traits = DEFAULT_TRAITS
    draft = joined_draft(passes, rank, backward=backward, call=call, traits=traits, after=after)
    for op in draft.ops:
        if isinstance(op, AttendTile):
            yield op.label
            views = (view for side in op.operands for held in side for view in held.views)
            targets = (view for side in op.partials for view in side)
            ends = (", ".join(map(draft.named, some)) for some in (views, targets))
            yield "    attend tile of {}; adds to {}".format(*ends)
        else:
            yield from listing([op], draft.named)
